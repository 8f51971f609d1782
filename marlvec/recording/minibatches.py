"""`Minibatches`: iterates over all rows of a recording in random order, with one window of rows in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from marlvec.arguments import count_from
from marlvec.collect.batch import SampleBatch
from marlvec.collect.batch.arrow_columns import Arrays, TableForm
from marlvec.errors import ArgumentError
from marlvec.vector.seeding import check_seed

__all__ = ["Block", "Minibatches"]


class Block(NamedTuple):
    """A block of a file: rows that are read together."""

    shelf: int  # number of the file
    number: int  # of the block in the file
    rows: int


class Minibatches:
    """Iterates over minibatches of a recording; each ``iter()`` begins at the first epoch. See `RecordedRows`."""

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
            count_from(value, f"minibatches({name}={value!r})")
        self._form, self._blocks, self._read = form, list(blocks), read
        self._size, self._epochs, self._drop_last, self._window = size, epochs, drop_last, window
        self._sequence = np.random.SeedSequence(None if seed is None else check_seed(seed))
        self._rows = sum(block.rows for block in self._blocks)

    def __repr__(self) -> str:
        epochs = "endless epochs" if self._epochs is None else f"{self._epochs} epochs"
        return f"<Minibatches of {self._size} from {self._rows:,} rows, {epochs}>"

    def __len__(self) -> int:
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
            window.mix(rng.permutation(window.rows))
            stop = window.rows if not todo and not self._drop_last else window.rows - window.rows % self._size
            for start in range(0, stop, self._size):
                yield window.copy(start, min(stop, start + self._size))
            window.drop(stop if todo else window.rows)


class _Window:
    """Buffer in which up to ``capacity`` rows are mixed.

    All rows are put in their order at once, column by column: a column of numbers fits into a cache where a window of
    all columns does not, and minibatches are then stretches.
    """

    def __init__(self, form: TableForm, capacity: int) -> None:
        self._form = form
        self.rows = 0
        self._kinds = {
            name: (np.dtype(object if dtype[1] == "U" else dtype), tuple(shape))
            for name, (dtype, shape) in form.forms.items()
        }
        self._arrays = {name: np.empty((capacity, *shape), dtype) for name, (dtype, shape) in self._kinds.items()}
        self._spare = {kind: np.empty((capacity, *kind[1]), kind[0]) for kind in self._kinds.values()}

    def add(self, block: Arrays) -> None:
        """Add a block's rows."""
        rows = len(next(iter(block.values())))
        for name, array in block.items():
            self._arrays[name][self.rows : self.rows + rows] = array
        self.rows += rows

    def mix(self, order_B: NDArray[np.int64]) -> None:
        """Put all rows in an order, a permutation of their numbers."""
        for name, kind in self._kinds.items():
            array, spare = self._arrays[name], self._spare[kind]
            # The numbers are valid: "clip" saves take() a copy.
            np.take(array[: self.rows], order_B, axis=0, out=spare[: self.rows], mode="clip")
            self._arrays[name], self._spare[kind] = spare, array

    def copy(self, start: int, stop: int) -> SampleBatch:
        """Copy consecutive rows into a batch."""

        def array(name: str) -> NDArray[Any]:
            rows = self._arrays[name][start:stop]
            return rows.astype(str) if rows.dtype == object else rows.copy()

        return SampleBatch(self._form.build(array))

    def drop(self, stop: int) -> None:
        """Keep only the rows from ``stop`` on."""
        for array in self._arrays.values():
            array[: self.rows - stop] = array[stop : self.rows]
        self.rows -= stop
