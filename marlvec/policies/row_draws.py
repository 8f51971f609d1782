"""Random draws for rows, in the form of numpy's Generator methods."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from marlvec.connectors._support.row_random import RowRandom
from marlvec.connectors.rows import Rows

__all__ = ["RowDraws"]

AnyArray = NDArray[Any]


class RowDraws:
    """Draws for rows, of which each depends on its row alone: see `RowRandom`.

    Has the methods of `numpy.random.Generator` that `SpaceSampler` uses, for arrays whose first axis is the rows'.
    A number that belongs to no row, as spaces with a ``sample`` of their own are seeded with, is the first row's.

    Args:
        seed: Any int from 0 on.
        stream: What the numbers are for.
        rows: n rows.
    """

    def __init__(self, seed: int, stream: str, rows: Rows) -> None:
        self._seed, self._stream, self._rows = seed, stream, rows
        self._calls = 0

    def random(self, size: tuple[int, ...]) -> NDArray[np.float64]:
        """Uniform in [0, 1)."""
        return self._source().uniform(self._rows, int(np.prod(size[1:]))).reshape(size)

    def standard_normal(self, size: tuple[int, ...]) -> NDArray[np.float64]:
        """Of mean 0 and variance 1."""
        return self._source().normal(self._rows, int(np.prod(size[1:]))).reshape(size)

    def standard_exponential(self, size: tuple[int, ...]) -> NDArray[np.float64]:
        """Of scale 1."""
        drawn: NDArray[np.float64] = -np.log1p(-self.random(size))
        return drawn

    def integers(
        self,
        low: ArrayLike,
        high: ArrayLike | None = None,
        size: int | tuple[int, ...] | None = None,
        dtype: DTypeLike = np.int64,
        endpoint: bool = False,
    ) -> AnyArray:
        """From ``low`` to below ``high``, or from 0 to below ``low``."""
        begin, end = (np.asarray(0), np.asarray(low)) if high is None else (np.asarray(low), np.asarray(high))
        n = len(self._rows)
        shape = (n,) if size is None else (size,) if isinstance(size, int) else size
        # In floats, as the range of a 64-bit type has no width in it; the last bits of the widest are not drawn.
        width = end.astype(np.float64) - begin + (1.0 if endpoint else 0.0)
        drawn = np.floor(self.random(shape) * width) + begin
        if np.dtype(dtype).itemsize == 8:
            drawn = np.minimum(drawn, np.nextafter(end.astype(np.float64) + (1.0 if endpoint else 0.0), -np.inf))
        whole: AnyArray = drawn.astype(dtype)
        return whole[0] if size is None and end.ndim == 0 else whole

    def _source(self) -> RowRandom:
        self._calls += 1
        return RowRandom(self._seed, f"{self._stream}/{self._calls}")
