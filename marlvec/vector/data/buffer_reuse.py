"""`BufferReuse`: copies of large rows into memory of older copies that are not in use any more."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["BufferReuse"]

_LARGE = 1 << 16  # bytes; smaller pieces malloc gives out again by itself
_MAX_PER_SIZE = 4  # pieces of one size: a caller holds this step's and the last one's; two more may be in use inside
_MAX_BYTES = 1 << 28  # bytes in all that are remembered, in use or not

AnyArray = NDArray[Any]


class BufferReuse:
    """Makes copies of arrays, large ones in memory that was used before.

    Fresh memory comes from the system a page at a time, when it is first touched, and that costs several times what
    the copy does. So memory that was handed out is remembered here. A copy is its user's like any other array; once it
    and all that was made of it without a copy (views, tensors) are gone, no other object refers to the memory,
    and the next copy of that size may have it.

    Args:
        into: Copies the second array into the first.
    """

    def __init__(self, into: Callable[[AnyArray, AnyArray], object] = np.copyto) -> None:
        self._into = into
        self._known: dict[int, list[NDArray[np.uint8]]] = {}
        self._bytes = 0

    def __call__(self, array: AnyArray) -> AnyArray:
        """Return a copy that is the caller's own."""
        size = array.nbytes
        if size < _LARGE or array.dtype.hasobject or not _COUNTS:
            return array.copy()
        out = self._memory(size).view(array.dtype).reshape(array.shape)
        self._into(out, array)
        return out

    def copier_of(self, arrays: Iterable[AnyArray]) -> Callable[[AnyArray], AnyArray]:
        """What copies whole arrays of these sizes: this, or numpy's own where none of them is large."""
        return self if any(array.nbytes >= _LARGE for array in arrays) else np.ndarray.copy

    def forget(self) -> None:
        """Let go of all memory; what was handed out lives on."""
        self._known.clear()
        self._bytes = 0

    def _memory(self, size: int) -> NDArray[np.uint8]:
        known = self._known.setdefault(size, [])
        for k in range(len(known)):
            if _references(known, k) == _ALONE:
                return known[k]
        memory = np.empty(size, np.uint8)
        if len(known) == _MAX_PER_SIZE:  # all are in use: who keeps them all shall not keep us from those that come
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
"""What is counted where the list alone refers to an array."""

_COUNTS = getattr(sys, "_is_gil_enabled", lambda: True)()
"""Whether counts of references can be relied on, which they cannot where threads run without a common lock."""
