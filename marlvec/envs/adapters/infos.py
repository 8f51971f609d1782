"""Conversion of an env's info dicts to one `Info`, or to None if they are empty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np

from marlvec.envs.adapters.return_values import contract_error
from marlvec.envs.spec import COMMON, Info

__all__ = ["MAX_DEPTH", "by_agent", "common", "snapshot"]

MAX_DEPTH = 32
"""Maximum nesting of dicts in an info; guards against a dict that contains itself."""

# Values that an env may change later are copied; all others are passed on unchanged.
_MUTABLE = (np.ndarray, dict, list, tuple, set, bytearray)


def snapshot(info: Mapping[Any, Any], env: str) -> dict[str, Any]:
    """Copy one info dict so that the env may reuse it and the arrays in it.

    `ContractError`, with the key, if a value cannot be copied or contains itself, or two keys are equal as text (1,
    "1").
    """
    out: dict[str, Any] = {}
    for key, value in info.items():
        name = key if key.__class__ is str else str(key)
        if name in out:
            contract_error(env, "info", f"expected keys that differ as text, got {name!r} twice (as {key!r}, too)")
        if isinstance(value, dict) and _has_no_end(value):
            contract_error(
                env, "info", f"the value of {key!r} is a dict that contains itself, or more than {MAX_DEPTH} in a row"
            )
        if isinstance(value, np.ndarray) and value.dtype != object:
            value = value.copy()
        elif isinstance(value, _MUTABLE):
            try:
                value = deepcopy(value)
            except Exception as error:
                contract_error(env, "info", f"the value of {key!r} cannot be copied ({type(error).__name__}: {error})")
        out[name] = value
    return out


def _has_no_end(table: dict[Any, Any]) -> bool:
    """Return whether dicts are nested deeper than `MAX_DEPTH`. A dict that occurs twice on a level is visited once."""
    level = {id(table): table}
    for _ in range(MAX_DEPTH):
        level = {id(value): value for inner in level.values() for value in inner.values() if isinstance(value, dict)}
        if not level:
            return False
    return True


def common(info: Any, env: str) -> Info | None:
    """Convert the info dict of an env that has one for all agents; its entries go under `COMMON`."""
    if isinstance(info, Mapping):
        return {COMMON: snapshot(info, env)} if info else None
    if info is None:
        return None
    contract_error(env, "info", f"expected a dict, got {type(info).__name__}")


def by_agent(infos: Mapping[Any, Any], index: Mapping[Any, int], names: Sequence[str], env: str) -> Info | None:
    """Copy the infos of an env that has one info dict per agent; None if all are empty.

    `index`: agent to index; `names` in that order. Keys that are not agents (``"common"``, …) go under `COMMON`.
    """
    out: Info = {}
    for key, info in infos.items():
        a = index.get(key)
        if a is not None:
            if info is None or (isinstance(info, Mapping) and not info):
                continue
            if not isinstance(info, Mapping):
                contract_error(env, "info", f"info of agent {key!r}: expected a dict, got {type(info).__name__}")
            out[names[a]] = snapshot(info, env)
        elif key == COMMON and isinstance(info, Mapping):
            if info:
                out.setdefault(COMMON, {}).update(snapshot(info, env))
        elif not (info is None or (isinstance(info, Mapping) and not info)):
            out.setdefault(COMMON, {}).update(snapshot({key: info}, env))
    return out or None
