"""`BatchMemory`: arrays for batches, large ones in memory of older batches that are not in use any more."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

__all__ = ["BatchMemory"]

AnyArray = NDArray[Any]
Pieces = dict[int, list[NDArray[np.uint8]]]

_LARGE = 1 << 16  # bytes; smaller pieces malloc gives out again by itself
_MOST = 1 << 28  # bytes of one batch that are remembered
_ALIGNMENT = 64  # bytes; JAX shares arrays that begin at a multiple of it, and copies others


class BatchMemory:
    """Makes arrays that batches keep.

    Fresh memory comes from the system a page at a time, when it is first touched, and that costs more than writing to
    it does. Once a batch and all that was made of it without a copy (views, tensors) are gone, nothing but this object
    refers to its memory, and the next batch may have it. Who writes ``batch = collector.collect(...)`` holds one batch
    while the next is made, so the memory of two is remembered, and what neither of two batches has needed is let go.
    """

    def __init__(self) -> None:
        self._older: Pieces = {}
        self._last: Pieces = {}
        self._now: Pieces = {}
        self._bytes = 0  # of those

    def begin(self) -> None:
        """Another batch is to be made."""
        self._older, self._last, self._now, self._bytes = self._last, self._now, {}, 0

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> AnyArray:
        """An array that may hold anything, and is the caller's own; a large one begins at a multiple of 64 bytes."""
        kind = np.dtype(dtype)
        size = kind.itemsize * math.prod(shape)
        if size < _LARGE or kind.hasobject or not _COUNTS or self._bytes + size > _MOST:
            return np.empty(shape, kind)
        memory = self._unused(size)
        self._now.setdefault(size, []).append(memory)
        self._bytes += size
        start = -memory.__array_interface__["data"][0] % _ALIGNMENT
        return memory[start : start + size].view(kind).reshape(shape)

    def _unused(self, size: int) -> NDArray[np.uint8]:
        """Memory of this size that is not in use any more, or new."""
        for pieces in (self._older.get(size, ()), self._last.get(size, ())):
            for k in range(len(pieces)):
                if _references(pieces, k) == _ALONE:
                    return pieces.pop(k)  # type: ignore[union-attr]  # there is none in an empty tuple
        return np.empty(size + _ALIGNMENT - 1, np.uint8)


def _references(pieces: Any, k: int) -> int:
    return sys.getrefcount(pieces[k])


_ALONE = _references([np.empty(0, np.uint8)], 0)
"""Reference count of an array that only a list holds."""

_COUNTS = getattr(sys, "_is_gil_enabled", lambda: True)()
"""Whether counts of references can be relied on, which they cannot where threads run without a common lock."""
