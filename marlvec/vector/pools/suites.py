"""Shared by the adapters of suites: importing a suite, unknown ids, spaces from shapes."""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Space

from marlvec.errors import ArgumentError, UnknownEnvError
from marlvec.extras import import_extra

__all__ = ["array_space", "check_known", "import_suite", "made_or_built"]


def import_suite(module: str, what: str, extra: str) -> Any:
    """Import a suite that ``what`` needs, without its warnings; ``extra`` of marlvec installs it."""
    streams = sys.stdout, sys.stderr  # JaxMARL's import replaces both
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return import_extra(module, what, f"pip install 'marlvec[{extra}]'")
    finally:
        sys.stdout, sys.stderr = streams


def made_or_built(
    name: str, env: Any, kwargs: Mapping[str, Any], known: Iterable[str], make: Callable[..., Any]
) -> Any:
    """Return ``make(env, **kwargs)`` of an id, one of `known`, or a built env itself; ``name`` is ``"family/…"``.

    `UnknownEnvError`: no such id. `ArgumentError`: arguments beside a built env.
    """
    if isinstance(env, str):
        check_known(name.partition("/")[0], env, known)
        return make(env, **kwargs)
    if kwargs:
        raise ArgumentError(f"{name}: expected no arguments with a built env, got {sorted(kwargs)}; build it with them")
    return env


def check_known(family: str, name: str, known: Iterable[str], listed_by: str = "`marlvec envs`") -> None:
    """Raise `UnknownEnvError`, with similar names, unless a suite has an env of this name."""
    names = list(known)
    if name in names:
        return
    lowered = {one.lower(): one for one in names}
    near = [lowered[one] for one in difflib.get_close_matches(name.lower(), lowered, n=5, cutoff=0.5)]
    near += [one for one in names if name.lower() in one.lower() and one not in near][: 5 - len(near)]
    hint = f"Did you mean {' or '.join(repr(f'{family}/{one}') for one in near)}? " if near else ""
    raise UnknownEnvError(f"unknown env '{family}/{name}'. {hint}{listed_by} lists all")


def array_space(shape: tuple[int, ...], dtype: Any) -> Space[Any]:
    """Return the space of all arrays of this shape and dtype; of 0 and 1 in int8, for bools."""
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return Box(0, 1, shape, np.int8)
    if dtype.kind == "f":
        return Box(-np.inf, np.inf, shape, dtype.type)
    limits = np.iinfo(dtype)
    return Box(limits.min, limits.max, shape, dtype.type)
