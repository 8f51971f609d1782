"""`BufferReuse`: copies large arrays into memory of earlier copies that are no longer in use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["BufferReuse"]

_LARGE = 1 << 16  # bytes; malloc itself reuses smaller blocks
_MAX_PER_SIZE = 4  # blocks of one size: a caller holds those of this step and the last; two more may be in use inside
_MAX_BYTES = 1 << 28  # bytes in all, in use or not

AnyArray = NDArray[Any]


class BufferReuse:
    """Copies arrays by ``into``; large ones into memory that was used before.

    The system provides fresh memory page by page, on first access, which takes several times as long as the copy. A
    copy belongs to the caller like any other array. Once the copy and all views and tensors on its memory are deleted,
    the next copy of that size may use the memory.
    """

    def __init__(self, into: Callable[[AnyArray, AnyArray], object] = np.copyto) -> None:
        self._into = into
        self._known: dict[int, list[NDArray[np.uint8]]] = {}
        self._bytes = 0

    def __call__(self, array: AnyArray) -> AnyArray:
        """Return a copy that belongs to the caller."""
        size = array.nbytes
        if size < _LARGE or array.dtype.hasobject or not _COUNTS:
            return array.copy()
        out = self._memory(size).view(array.dtype).reshape(array.shape)
        self._into(out, array)
        return out

    def copier_of(self, arrays: Iterable[AnyArray]) -> Callable[[AnyArray], AnyArray]:
        """Return the function that copies arrays of these sizes: this object, or numpy's copy if none is large."""
        return self if any(array.nbytes >= _LARGE for array in arrays) else np.ndarray.copy

    def forget(self) -> None:
        """Release all memory; copies that callers hold stay valid."""
        self._known.clear()
        self._bytes = 0

    def _memory(self, size: int) -> NDArray[np.uint8]:
        known = self._known.setdefault(size, [])
        for k in range(len(known)):
            if _references(known, k) == _ALONE:
                return known[k]
        memory = np.empty(size, np.uint8)
        if len(known) == _MAX_PER_SIZE:  # all are in use: forget one, so that later copies can still reuse memory
            del known[0]
        elif self._bytes + size > _MAX_BYTES:
            return memory
        else:
            self._bytes += size
        known.append(memory)
        return memory


def _references(known: list[NDArray[np.uint8]], k: int) -> int:
    return sys.getrefcount(known[k])


_ALONE = _references([np.empty(0, np.uint8)], 0)
"""Reference count of an array that only the list refers to."""

_COUNTS = getattr(sys, "_is_gil_enabled", lambda: True)()
"""Whether reference counts are reliable: not in free-threaded Python."""
