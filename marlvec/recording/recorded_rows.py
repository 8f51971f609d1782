"""`RecordedRows`: one policy's rows of a recording, read on demand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.arguments import count_from
from marlvec.collect.batch import SampleBatch
from marlvec.collect.batch.arrow_columns import TableForm
from marlvec.connectors.action.valid_actions import EXECUTED, EXECUTED_MISSING
from marlvec.errors import ArgumentError
from marlvec.recording.block_store import BlockStore, Column
from marlvec.recording.files.manifest import Manifest
from marlvec.recording.minibatches import Block, Minibatches
from marlvec.trees import Tree

__all__ = ["RecordedRows", "executed_column"]


class RecordedRows:
    """One policy's rows, in recorded order.

    Rows are read on demand, into new arrays. ``len(rows)`` is their number; ``rows.keys()`` names the columns, the
    same as of `SampleBatch`. Made by `load_dataset`.

    Batches may differ in their columns: with ``random_steps`` the first lack the policy's (``values``, ``logp``), and
    with ``append=True`` another policy may have others. If a file lacks such a column, its rows have NaN, 0, False or
    ``""``, and a bool column with the suffix ``_missing`` (``values_missing``) marks these rows. Columns without which
    a row is no decision (``obs``, ``actions``, ``eps_id``, …) are never filled: reading them raises.

    Attributes:
        policy_id: The policy.
    """

    def __init__(self, folder: Path, manifest: Manifest, policy_id: str, *, verify: bool) -> None:
        self.policy_id = policy_id
        self._store = BlockStore(folder, manifest, policy_id, verify=verify)
        self._n, self._form = self._store.rows, self._store.form

    def __len__(self) -> int:
        return self._n

    def __repr__(self) -> str:
        head = f"RecordedRows of policy {self.policy_id!r}: {self._n:,} rows in {len(self._store.files)} files"
        width = max(map(len, self._form.forms), default=0)
        lines = (f"  {name:<{width}}  {dtype:<4} {tuple(shape)}" for name, (dtype, shape) in self._form.forms.items())
        return "\n".join([head, *lines])

    def keys(self) -> list[str]:
        """Names of the columns, in order."""
        return [name for name, _ in self._form.columns]

    def __contains__(self, name: object) -> bool:
        return name in self.keys()

    @property
    def files(self) -> list[Path]:
        """Paths of the files, in the order of their rows: for polars, DuckDB or pandas."""
        return [path for path, _ in self._store.files]

    @property
    def size_bytes(self) -> int:
        """Bytes of the files."""
        return sum(file.size for _, file in self._store.files)

    # --- reading

    def column(self, name: str) -> Tree:
        """Return the column of this name, read from disk when indexed; for Dict and Tuple spaces a tree of columns.

        Returns:
            A `Column`, or a dict or tuple of these.

        Raises:
            KeyError: A column does not exist.
        """
        form = self._chosen([name])
        return form.build(lambda leaf: Column(self._store, leaf))[name]

    def read(self, start: int = 0, stop: int | None = None, columns: Sequence[str] | None = None) -> SampleBatch:
        """Read rows ``start`` to ``stop - 1``, as Python's slices count.

        Args:
            start: First row.
            stop: Row after the last; None for the end.
            columns: Names of columns; None for all.

        Returns:
            The rows.

        Raises:
            KeyError: A column does not exist.
            CheckpointError: A file is damaged; names it.
        """
        start, stop, _ = slice(start, stop).indices(self._n)
        form = self._chosen(columns)
        stop = max(start, stop)
        arrays = {name: self._store.read_range(name, start, stop) for name in form.forms}
        return SampleBatch(form.build(arrays.__getitem__))

    def take(self, rows: Sequence[int] | NDArray[np.integer[Any]], columns: Sequence[str] | None = None) -> SampleBatch:
        """Read some rows, in the given order.

        Args:
            rows: Numbers of rows, from 0.
            columns: Names of columns; None for all.

        Returns:
            The rows.

        Raises:
            IndexError: A row does not exist.
            KeyError: A column does not exist.
            CheckpointError: A file is damaged; names it.
        """
        form, where_B = self._chosen(columns), self._store.numbers(rows)
        arrays = self._store.gather(list(form.forms), where_B)
        return SampleBatch(form.build(arrays.__getitem__))

    def batches(self, size: int, columns: Sequence[str] | None = None) -> Iterator[SampleBatch]:
        """Yield all rows in order, ``size`` at a time.

        Args:
            size: Rows in each batch; the last batch may have fewer.
            columns: Names of columns; None for all.

        Returns:
            The batches.

        Raises:
            ArgumentError: ``size`` is not a positive integer.
            KeyError: A column does not exist.
        """
        count_from(size, f"batches(size={size!r})")
        self._chosen(columns)
        return (self.read(start, start + size, columns) for start in range(0, self._n, size))

    def minibatches(
        self,
        size: int,
        *,
        seed: int | None = None,
        epochs: int | None = 1,
        columns: Sequence[str] | None = None,
        drop_last: bool = False,
        window: int = 1 << 18,
    ) -> Minibatches:
        """Iterate over all rows in random order, ``size`` at a time.

        Blocks of some thousand rows are read in random order, from all files, until a ``window`` is full; its rows are
        mixed. So each row comes once an epoch, memory holds one window, and disk reads are long. If the window
        holds all rows, every order is equally likely. The same seed gives the same order.

            for rows in data["main"].minibatches(4096, seed=0, epochs=3, columns=["obs", "actions"]):
                loss = learn(rows.to_torch())

        Args:
            size: Rows in each minibatch; an epoch's last may have fewer.
            seed: Seeds the order; None: from the operating system.
            epochs: How often all rows come, in another order each time; None: endlessly.
            columns: Names of columns; None for all. Fewer are faster.
            drop_last: Drop each epoch's last minibatch if it has fewer rows.
            window: Number of rows that are mixed at a time.

        Returns:
            An iterator over `SampleBatch` with new arrays; its ``len()`` is the number of minibatches.

        Raises:
            ArgumentError: A number is not above 0, or the seed is not an integer from 0 to 2**64 - 1.
            KeyError: A column does not exist.
            CheckpointError: A file is damaged; names it.
        """
        form = self._chosen(columns)
        blocks = [
            Block(k, b, rows) for k, (_, file) in enumerate(self._store.files) for b, rows in enumerate(file.blocks)
        ]
        names = list(form.forms)
        return Minibatches(
            form,
            blocks,
            lambda block: self._store.block(block.shelf, block.number, names),
            size=size,
            seed=seed,
            epochs=epochs,
            drop_last=drop_last,
            window=window,
        )

    def to_numpy(self, columns: Sequence[str] | None = None) -> dict[str, Tree]:
        """Read whole columns into memory.

        Args:
            columns: Names of columns; None for all.

        Returns:
            Name to array (n, …), or to a tree of arrays.

        Raises:
            KeyError: A column does not exist.
            CheckpointError: A file is damaged; names it.
        """
        return dict(self.read(columns=columns).items())

    def to_torch(self, columns: Sequence[str] | None = None, device: Any = None) -> dict[str, Tree]:
        """Read whole columns into memory, as tensors (n, …) by name; see `SampleBatch.to_torch`.

        Args:
            columns: Names of columns; None for all.
            device: Device of the tensors; None for the CPU.

        Raises:
            MissingExtraError: torch is not installed.
            KeyError: A column does not exist.
            CheckpointError: A file is damaged; names it.
        """
        return self.read(columns=columns).to_torch(device)

    def close(self) -> None:
        """Close all files. A later read opens them again."""
        self._store.close()

    # --- inside

    def _chosen(self, columns: Sequence[str] | None) -> TableForm:
        """Return the form of the chosen columns."""
        if columns is None:
            return self._form
        if isinstance(columns, str):
            raise ArgumentError(f"columns={columns!r}: expected a list of names; write columns=[{columns!r}]")
        known = dict(self._form.columns)
        if missing := [name for name in columns if name not in known]:
            raise KeyError(f"no columns {missing}; policy {self.policy_id!r} has {list(known)}")
        used: list[str] = []
        chosen = TableForm([[name, known[name]] for name in dict.fromkeys(columns)], self._form.forms)
        chosen.build(used.append)
        return chosen._replace(forms={name: self._form.forms[name] for name in used})


def executed_column(rows: RecordedRows, where: str) -> str:
    """Return the column of executed actions, for off-policy learners; ArgumentError if rows lack their action."""
    if EXECUTED_MISSING in rows and (missing := int(np.count_nonzero(rows.column(EXECUTED_MISSING)))):
        raise ArgumentError(
            f"{where}: expected the executed action of each row, got {missing} rows of policy {rows.policy_id!r} that "
            f"are marked in {EXECUTED_MISSING!r}: record with noise and masks before connectors that convert actions"
        )
    return EXECUTED if EXECUTED in rows else "actions"
