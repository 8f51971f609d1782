"""How kernels are compiled: without the interpreter lock, kept on disk, and with every float operation as written."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache, partial
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
    jit: Any = partial(numba.njit, nogil=True, error_model="numpy")
    try:
        compiled: Any = jit(cache=True)(function)
    except RuntimeError:  # typed in at a prompt, or nowhere to write to: there is no file to keep it beside
        return cast("_F", jit()(function))
    kept = getattr(compiled, "_cache", None)  # NUMBA_DISABLE_JIT leaves the function as it is
    if kept is not None:
        # numba looks at the function's own file only to see whether what is on disk is still good. What a kernel
        # calls is compiled into it, from other files, so these are part of the stamp.
        file = kept._cache_file
        file._source_stamp = (*file._source_stamp, _sources())
    return cast("_F", compiled)


@cache
def _sources() -> str:
    """A digest of all that a kernel may call, as far as it is marlvec's: every file below this folder."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
