"""Random draws per row, with the methods of numpy's Generator."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from marlvec.connectors._support.row_random import RowRandom
from marlvec.connectors.rows import Rows

__all__ = ["RowDraws"]

AnyArray = NDArray[Any]


class RowDraws:
    """Random draws for n rows; each depends on the seed, the stream's name and its row only: see `RowRandom`.

    Has the methods of `numpy.random.Generator` that `SpaceSampler` uses, for arrays whose first axis is the row axis. A
    number without a row, such as the seed of a space with its own ``sample``, is drawn for the first row.
    """

    def __init__(self, seed: int, stream: str, rows: Rows) -> None:
        self._seed, self._stream, self._rows = seed, stream, rows
        self._calls = 0

    def random(self, size: tuple[int, ...]) -> NDArray[np.float64]:
        """Draw uniformly from [0, 1)."""
        return self._source().uniform(self._rows, int(np.prod(size[1:]))).reshape(size)

    def standard_normal(self, size: tuple[int, ...]) -> NDArray[np.float64]:
        """Draw from a normal distribution with mean 0 and variance 1."""
        return self._source().normal(self._rows, int(np.prod(size[1:]))).reshape(size)

    def standard_exponential(self, size: tuple[int, ...]) -> NDArray[np.float64]:
        """Draw from an exponential distribution with scale 1."""
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
        """Draw integers from ``low`` to below ``high``, or from 0 to below ``low``."""
        begin, end = (np.asarray(0), np.asarray(low)) if high is None else (np.asarray(low), np.asarray(high))
        n = len(self._rows)
        shape = (n,) if size is None else (size,) if isinstance(size, int) else size
        # In floats, since a 64-bit range overflows its own type; the lowest bits of the widest range are not random.
        width = end.astype(np.float64) - begin + (1.0 if endpoint else 0.0)
        drawn = np.floor(self.random(shape) * width) + begin
        if np.dtype(dtype).itemsize == 8:
            drawn = np.minimum(drawn, np.nextafter(end.astype(np.float64) + (1.0 if endpoint else 0.0), -np.inf))
        numbers: AnyArray = drawn.astype(dtype)
        return numbers[0] if size is None and end.ndim == 0 else numbers

    def _source(self) -> RowRandom:
        self._calls += 1
        return RowRandom(self._seed, f"{self._stream}/{self._calls}")
