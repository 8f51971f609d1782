"""`Minibatches`: all rows of a recording in random order, a window of them in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from marlvec.arguments import whole_number
from marlvec.collect.batch import SampleBatch
from marlvec.collect.batch.arrow_columns import Arrays, TableForm
from marlvec.errors import ArgumentError
from marlvec.vector.seeding import check_seed

__all__ = ["Block", "Minibatches"]


class Block(NamedTuple):
    """Rows that are read together.

    Attributes:
        shelf: Number of the file.
        number: Of the block in the file.
        rows: How many.
    """

    shelf: int
    number: int
    rows: int


class Minibatches:
    """Iterates over minibatches of recorded rows; each ``iter()`` begins at the first epoch. See `RecordedRows`.

    Args:
        form: Form of the columns.
        blocks: All of them, in order.
        read: Returns a block's arrays.
        size, seed, epochs, drop_last, window: As `RecordedRows.minibatches`.

    Raises:
        ArgumentError: A number is not above 0, or the seed is not an integer from 0 to 2**64 - 1.
    """

    def __init__(
        self,
        form: TableForm,
        blocks: Sequence[Block],
        read: Callable[[Block], Arrays],
        *,
        size: int,
        seed: int | None,
        epochs: int | None,
        drop_last: bool,
        window: int,
    ) -> None:
        for name, value in (("size", size), ("epochs", 1 if epochs is None else epochs), ("window", window)):
            if (whole_number(value) or 0) < 1:
                raise ArgumentError(f"minibatches({name}={value!r}): expected a whole number of at least 1")
        self._form, self._blocks, self._read = form, list(blocks), read
        self._size, self._epochs, self._drop_last, self._window = size, epochs, drop_last, window
        self._sequence = np.random.SeedSequence(None if seed is None else check_seed(seed))
        self._rows = sum(block.rows for block in self._blocks)

    def __repr__(self) -> str:
        epochs = "endless epochs" if self._epochs is None else f"{self._epochs} epochs"
        return f"<Minibatches of {self._size} from {self._rows:,} rows, {epochs}>"

    def __len__(self) -> int:
        """How many there are.

        Raises:
            ArgumentError: They have no end.
        """
        if self._epochs is None:
            raise ArgumentError("len() of minibatches(epochs=None): they have no end")
        return self._epochs * (self._rows // self._size + (not self._drop_last and self._rows % self._size > 0))

    def __iter__(self) -> Iterator[SampleBatch]:
        epoch = 0
        while self._rows and (self._epochs is None or epoch < self._epochs):
            sequence = np.random.SeedSequence(self._sequence.entropy, spawn_key=(epoch,))
            yield from self._epoch(np.random.default_rng(sequence))
            epoch += 1

    def _epoch(self, rng: np.random.Generator) -> Iterator[SampleBatch]:
        todo = [self._blocks[k] for k in rng.permutation(len(self._blocks)).tolist()]
        carried: Arrays = {}
        while todo:
            rows, now = len(next(iter(carried.values()))) if carried else 0, list[Block]()
            while todo and (not now or rows + todo[-1].rows <= self._window):
                now.append(todo.pop())
                rows += now[-1].rows
            arrays = self._fill(carried, now, rows)
            order_B = rng.permutation(rows)
            stop = rows if not todo and not self._drop_last else rows - rows % self._size
            for start in range(0, stop, self._size):
                yield self._batch(arrays, order_B[start : start + self._size])
            left_B = order_B[stop:] if todo else order_B[:0]
            carried = {name: array[left_B] for name, array in arrays.items()}

    def _fill(self, carried: Arrays, blocks: Sequence[Block], rows: int) -> Arrays:
        """One window's arrays: rows that were left over, and those of some blocks."""
        pieces: dict[str, list[NDArray[Any]]] = {name: [array] for name, array in carried.items() if len(array)}
        for block in blocks:
            for name, array in self._read(block).items():
                pieces.setdefault(name, []).append(array)
        return {name: parts[0] if len(parts) == 1 else np.concatenate(parts) for name, parts in pieces.items()}

    def _batch(self, arrays: Arrays, rows_B: NDArray[np.int64]) -> SampleBatch:
        return SampleBatch(self._form.build(lambda name: arrays[name].take(rows_B, axis=0)))
