"""`Minibatches`: iterates over all rows of a recording in random order, with one window of rows in memory."""

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
    """A block of a file: rows that are read together.

    Attributes:
        shelf: Number of the file.
        number: Number of the block in the file.
        rows: Number of rows.
    """

    shelf: int
    number: int
    rows: int


class Minibatches:
    """Iterates over minibatches of recorded rows; each ``iter()`` begins at the first epoch. See `RecordedRows`.

    Args:
        form: Form of the columns.
        blocks: All blocks, in order.
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
        """Number of minibatches.

        Raises:
            ArgumentError: ``epochs`` is None: the minibatches never end.
        """
        if self._epochs is None:
            raise ArgumentError("len() of minibatches(epochs=None): they have no end")
        return self._epochs * (self._rows // self._size + (not self._drop_last and self._rows % self._size > 0))

    def __iter__(self) -> Iterator[SampleBatch]:
        epoch = 0
        window = _Window(self._form, min(self._rows, self._capacity))
        while self._rows and (self._epochs is None or epoch < self._epochs):
            sequence = np.random.SeedSequence(self._sequence.entropy, spawn_key=(epoch,))
            yield from self._epoch(np.random.default_rng(sequence), window)
            epoch += 1

    @property
    def _capacity(self) -> int:
        """Most rows in a window: the rows that it mixes, and the rest of the window before."""
        return max(self._window, max(block.rows for block in self._blocks) + self._size)

    def _epoch(self, rng: np.random.Generator, window: _Window) -> Iterator[SampleBatch]:
        todo = [self._blocks[k] for k in rng.permutation(len(self._blocks)).tolist()]
        while todo:
            begun = False
            while todo and (not begun or window.rows + todo[-1].rows <= self._window):
                window.add(self._read(todo.pop()))
                begun = True
            order_B = rng.permutation(window.rows)
            stop = window.rows if not todo and not self._drop_last else window.rows - window.rows % self._size
            for start in range(0, stop, self._size):
                yield window.take(order_B[start : start + self._size])
            window.keep(order_B[stop:] if todo else order_B[:0])


class _Window:
    """Buffer in which rows are mixed.

    Args:
        form: Form of the columns.
        capacity: Rows at most.
    """

    def __init__(self, form: TableForm, capacity: int) -> None:
        self._form = form
        self.rows = 0
        self._arrays = {
            name: np.empty((capacity, *shape), object if dtype[1] == "U" else dtype)
            for name, (dtype, shape) in form.forms.items()
        }

    def add(self, block: Arrays) -> None:
        """Add a block's rows."""
        rows = len(next(iter(block.values())))
        for name, array in block.items():
            self._arrays[name][self.rows : self.rows + rows] = array
        self.rows += rows

    def take(self, rows_B: NDArray[np.int64]) -> SampleBatch:
        """Copy some rows into a batch."""

        def array(name: str) -> NDArray[Any]:
            taken = self._arrays[name].take(rows_B, axis=0)
            return taken.astype(str) if taken.dtype == object else taken

        return SampleBatch(self._form.build(array))

    def keep(self, rows_B: NDArray[np.int64]) -> None:
        """Keep only these rows."""
        for array in self._arrays.values():
            array[: len(rows_B)] = array[rows_B]
        self.rows = len(rows_B)
