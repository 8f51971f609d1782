"""How kernels are compiled: without the interpreter lock, kept on disk, and with every float operation as written."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

__all__ = ["kernel"]

_F = TypeVar("_F", bound=Callable[..., Any])


def kernel(function: _F) -> _F:
    """Compile a function on its first call, for numba's nopython mode.

    It runs without the interpreter lock. No fast math: operations stay in their order, and none are fused. Division by
    zero gives infinity or NaN, as numpy's does. What was compiled is kept on disk for the next process.
    """
    compiled: Any = numba.njit(nogil=True, cache=True, error_model="numpy")(function)
    # numba looks at the function's own file only to see whether what is on disk is still good. What a kernel calls is
    # compiled into it, from other files, so all of them together are the stamp.
    stamp = _sources()
    compiled._cache._cache_file._source_stamp = (*compiled._cache._cache_file._source_stamp, stamp)
    return cast("_F", compiled)


@cache
def _sources() -> str:
    """A digest of every file of this package."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
