"""Compiles kernels: no interpreter lock, cached on disk, float operations exactly as written."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

__all__ = ["end_episode", "kernel"]

_F = TypeVar("_F", bound=Callable[..., Any])


def kernel(function: _F) -> _F:
    """Compile a function on its first call, in nopython mode, without the interpreter lock, cached on disk.

    No fast math: operations are neither reordered nor fused. Division by zero gives infinity or NaN, like numpy's.
    """
    jit: Any = partial(numba.njit, nogil=True, error_model="numpy")
    try:
        compiled: Any = jit(cache=True)(function)
    except RuntimeError:  # no cache for functions of a prompt or in a read-only folder
        return cast("_F", jit()(function))
    kept = getattr(compiled, "_cache", None)  # NUMBA_DISABLE_JIT returns the plain function
    if kept is not None:
        # To validate its cache, numba checks only the function's file. But a kernel contains compiled code of other
        # files, so the stamp covers them, too.
        file = kept._cache_file
        file._source_stamp = (*file._source_stamp, _sources())
    return cast("_F", compiled)


@cache
def _sources() -> str:
    """Return a digest of all marlvec code that a kernel may call: every file below this folder."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@kernel
def end_episode(i: Any, flags: Any, alive: Any, acting: Any, done: Any) -> None:
    """End env ``i``'s episode: set all agents' ``flags`` (terminated or truncated)."""
    for a in range(flags.shape[1]):
        flags[i, a] = True
        alive[i, a] = False
        acting[i, a] = False
    done[i] = True
