"""`SampleBatch`: the finished rows of one policy, and what learners do with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from marlvec.collect.batch.batch_columns import named_leaves, with_arrays
from marlvec.collect.batch.converters import as_jax, as_sample_batch, as_tensordict, as_tensors
from marlvec.collect.batch.npz import read_npz, write_npz
from marlvec.collect.batch.parquet import read_parquet, write_parquet
from marlvec.collect.episode.cuts import check_size, episodes, fragments, ids
from marlvec.connectors import PadSequences, Rows, UnpadSequences
from marlvec.connectors.rows import join_columns
from marlvec.errors import ArgumentError, CheckpointError
from marlvec.serialization.atomic_file import FilePath
from marlvec.trees import Tree
from marlvec.vector.seeding import check_seed

__all__ = ["SampleBatch", "suffix_of"]


class SampleBatch(Rows):
    """The finished rows of one policy: `Rows`, and what one does with a batch of them.

    Rows are ordered by env, agent and time: rows of equal ``unroll_id`` are neighbours and their ``t`` counts up by
    one. The columns, n rows:

    ====================  ==============  =======================================================================
    ``obs``               (n, …)          what the policy saw, behind the agent connectors; a tree for Dict and Tuple
    ``actions``           (n, …)          what the policy answered
    ``actions_executed``  (n, …)          the same behind exploration (`EpsilonGreedy`, noise), in the policy's space;
                                          only where action connectors explore. Off-policy learners take it
    ``actions_for_env``   (n, …)          what the env was given, behind the action connectors
    ``rewards``           (n,)            summed from this decision until the agent's next turn or its end; float64,
                                          behind the agent connectors. What an agent got before its first decision
                                          (a late joiner, a player who waits for its first turn) is in its first row
    ``next_obs``          (n, …)          what the agent saw at its next turn, or its final observation
    ``terminated``        (n,) bool       the agent's episode ended so, before its next turn
    ``truncated``         (n,) bool       likewise
    ``next_obs_missing``  (n,) bool       it ended without a final observation: ``next_obs`` repeats ``obs``, and
                                          what it would be worth is not known
    ``action_mask``       (n, k) bool     where the env gives one
    ``next_action_mask``  (n, k) bool     where there is ``action_mask``: that at ``next_obs``; all True at ends
    ``t``                 (n,) int64      number of this decision in the agent's episode, from 0
    ``env_t``             (n,) int64      env steps that the episode had made when it was taken: 0 at the reset
    ``next_env_t``        (n,) int64      likewise, when its outcome came: at the agent's next turn, or at its end
    ``eps_id``            (n,) int64      the episode; unique, ascending
    ``unroll_id``         (n,) int64      the stretch of one agent's episode in this batch; unique, ascending
    ``env_id``            (n,) int64
    ``agent_index``       (n,) int64
    ``policy_version``    (n,) int64      ``policy.version`` when it decided
    ``off_policy``        (n,) bool       the action is not the policy's: drawn at random, or the env's own; a column
                                          once there was such an action
    ====================  ==============  =======================================================================

    ``state``, ``next_state`` (n, …) where the envs were made with ``state=True``; and whatever the policy (``logp``, …)
    and the connectors added; a column ``x`` of an agent connector has ``next_x`` beside it, the agent's next row's.
    Learner connectors may make other rows of it, e.g. sequences (B, T, …).

    No method changes a batch. Those that choose rows move every column, columns of Python objects included.

    Args:
        columns: Column name to an array (n, …), or to a dict or tuple of those; or `Rows`, whose arrays are taken
            without a copy. Lists are made arrays.

    Raises:
        ArgumentError: There is no column, or their lengths differ; names the column.
    """

    __slots__ = ()

    def __init__(self, columns: Mapping[str, Tree] | Rows) -> None:
        super().__init__(with_arrays(dict(columns.items())))
        if not any(True for _ in named_leaves(self._columns)):
            raise ArgumentError("a SampleBatch needs at least one column")

    def __repr__(self) -> str:
        rows = list(named_leaves(self._columns))
        width = max(len(name) for name, _ in rows)
        lines = (f"  {name:<{width}}  {leaf.dtype!s:<8} {tuple(leaf.shape)}" for name, leaf in rows)
        return "\n".join([f"SampleBatch of {self._n} rows", *lines])

    @property
    def size_bytes(self) -> int:
        """Bytes in the columns' arrays; of Python objects, only the references."""
        return sum(leaf.nbytes for _, leaf in named_leaves(self._columns))

    def replace(self, **columns: Tree) -> SampleBatch:
        """Return a batch with these columns put in the place of, or after, the present ones.

        Returns:
            A new batch that shares the arrays of the other columns.

        Raises:
            ArgumentError: A column's length is not that of the rows; names the column.
        """
        return SampleBatch({**self._columns, **columns})

    def shuffle(self, seed: int | np.random.Generator | None = None) -> SampleBatch:
        """Copy all rows in random order.

        Args:
            seed: A seed, or a generator to draw from; None: from the operating system.

        Returns:
            A new batch of as many rows.

        Raises:
            ArgumentError: The seed is not an integer from 0 to 2**64 - 1.
        """
        return self.take(_generator(seed).permutation(self._n))

    def minibatches(
        self, size: int, seed: int | np.random.Generator | None = None, *, drop_last: bool = False
    ) -> Iterator[SampleBatch]:
        """Yield all rows once, in random order, ``size`` at a time. For rows in their order, see `timeslices`.

        Each is copied when it is asked for.

        Args:
            size: Rows in each, but for the last, which has what is left.
            seed: As for `shuffle`; for each pass over the batch another, or one generator for all of them.
            drop_last: Leave the last one out where it would be shorter.

        Raises:
            ArgumentError: ``size`` is no whole number above 0, or the seed is not an integer from 0 to 2**64 - 1.
        """
        size = check_size("size", size)
        order = _generator(seed).permutation(self._n)
        stop = self._n - self._n % size if drop_last else self._n
        return (self.take(order[start : start + size]) for start in range(0, stop, size))

    # --- cutting

    def timeslices(self, k: int) -> list[SampleBatch]:
        """Cut into stretches of ``k`` rows, as views; the last has what is left.

        They may begin and end within an episode, and hold parts of several: `right_zero_pad` makes sequences that do
        not.

        Returns:
            Batches of ``k`` rows each; the last may have fewer.

        Raises:
            ArgumentError: ``k`` is no whole number above 0.
        """
        k = check_size("k", k)
        return [self.slice(start, start + k) for start in range(0, self._n, k)]

    def split_by_fragment(self) -> list[SampleBatch]:
        """Cut into stretches of one agent's decisions in one episode, as views.

        A new one begins where ``unroll_id``, ``eps_id``, ``env_id`` or ``agent_index`` changes and where ``t`` does not
        ascend, so that neighbours stay two even where concatenated batches gave them one ``unroll_id``. Shuffled rows
        come in pieces.

        Returns:
            One batch per stretch, in the order of the rows.

        Raises:
            ArgumentError: There is no column ``unroll_id``.
        """
        return [self.slice(start, stop) for start, stop in fragments(self._columns, self._n)]

    def split_by_episode(self) -> list[SampleBatch]:
        """Make one batch of each episode's rows, those of all its agents, wherever they are; their order stays.

        Episodes come in the order in which they first appear. They are views where their rows are neighbours.

        Returns:
            One batch per episode.

        Raises:
            ArgumentError: There is no column ``eps_id``; or an ``eps_id`` is of more than one episode, as its rows are
                of several envs or hold one decision twice.
        """
        return [
            self.slice(int(where[0]), int(where[-1]) + 1)
            if where[-1] - where[0] == len(where) - 1
            else self.take(where)
            for where in episodes(self._columns)
        ]

    # --- sequences

    def right_zero_pad(self, max_len: int | None = None, state_column: str | None = "state_in") -> SampleBatch:
        """Make sequences (B, T, …), each of one fragment, filled up with zeros at their end, as `PadSequences` does.

        Args:
            max_len: T; a longer fragment makes several sequences. None for the longest fragment's length.
            state_column: Column of which each sequence keeps only the first, (B, …); None for none.

        Returns:
            The columns as (B, T, …), and ``seq_lens`` (B,), ``loss_mask`` (B, T).

        Raises:
            ArgumentError: ``max_len`` is no whole number above 0, or there is no column ``unroll_id``.
            ContractError: These are sequences already, or rows of equal ``unroll_id`` are not neighbours in order of
                time.
        """
        if max_len is None:
            unroll = ids(self._columns, "unroll_id", "padding")
            max_len = int(np.unique(unroll, return_counts=True)[1].max(initial=1))
        pad = PadSequences(check_size("max_len", max_len), state_column)
        return SampleBatch(pad(self))

    def unpad(self, state_column: str | None = "state_in") -> SampleBatch:
        """Make rows again of what `right_zero_pad` or `PadSequences` made, exactly.

        Args:
            state_column: As it was given there.

        Returns:
            A batch of n rows, columns (n, …).

        Raises:
            ContractError: These are no sequences, or a column is not (B, T, …).
        """
        return SampleBatch(UnpadSequences(state_column)(self))

    # --- joining

    @classmethod
    def concat(cls, batches: Sequence[SampleBatch]) -> SampleBatch:
        """Copy the rows of all batches into one, in order.

        Batches of one collector fit together. Those of several have ids in common, unless each collector was made with
        a ``stream`` of its own.

        Returns:
            A new batch; its arrays are copies.

        Raises:
            ArgumentError: There is no batch, or they differ in columns, or in a column's structure, dtype or shape per
                row; names the columns.
        """
        return SampleBatch(join_columns([batch._columns for batch in batches]))

    # --- other libraries, and files

    def to_torch(self, device: Any = None, *, pin_memory: bool = False) -> dict[str, Tree]:
        """Columns as torch tensors, trees as trees of them.

        On the CPU they share the arrays' memory: writing to one writes to the other. Copied are arrays that torch
        cannot share: read-only, reversed, unaligned, or of foreign byte order.

        Args:
            device: Where the tensors are to be; None for the CPU.
            pin_memory: Copy into page-locked memory first, from which a GPU fetches while this thread goes on.

        Returns:
            Name to tensor (n, …) of the column's dtype, or to a tree of tensors.

        Raises:
            MissingExtraError: torch is not installed.
            ArgumentError: Columns are of Python objects, texts or another dtype that torch lacks; names them. `drop`
                leaves them out. Or memory is to be pinned, and torch finds no GPU.
        """
        return as_tensors(self._columns, device, pin_memory=pin_memory)

    def to_jax(self, device: Any = None) -> dict[str, Tree]:
        """Columns as JAX arrays, trees as trees of them.

        On the CPU, columns of 64 KiB and more share their memory with the arrays: do not write to them any more. JAX
        copies what it cannot share: smaller, read-only or strided columns, and 64-bit numbers, which become 32-bit ones
        unless ``jax_enable_x64`` is set.

        Args:
            device: Where the arrays are to be, a ``jax.Device`` or sharding; None for the CPU.

        Returns:
            Name to array (n, …), or to a tree of arrays.

        Raises:
            MissingExtraError: jax is not installed.
            ArgumentError: Columns are of Python objects or texts; names them. `drop` leaves them out.
        """
        return as_jax(self._columns, device)

    def to_tensordict(self, device: Any = None) -> Any:
        """Columns as a ``tensordict.TensorDict`` of batch size (n,), of the tensors that `to_torch` gives.

        Dicts become nested ones; so do tuples, with the keys ``"0"``, ``"1"``, ….

        Args:
            device: As in `to_torch`.

        Raises:
            MissingExtraError: tensordict or torch is not installed.
            ArgumentError: As of `to_torch`; or two keys of one dict are the same as texts.
        """
        return as_tensordict(self._columns, self._n, device)

    def to_rllib(self) -> Any:
        """Columns as RLlib's ``SampleBatch``, not copied.

        ``next_obs`` is called ``new_obs`` there, ``terminated`` ``terminateds``, ``truncated`` ``truncateds``, ``logp``
        ``action_logp``, ``values`` ``vf_preds``; the other columns keep their names.

        Returns:
            A ``ray.rllib.policy.sample_batch.SampleBatch`` that shares the arrays.

        Raises:
            MissingExtraError: ray is not installed.
            ArgumentError: These are sequences, or a column already has the name that another gets.
        """
        return as_sample_batch(self._columns)

    def save(self, path: FilePath) -> None:
        """Write the batch to a file, by its suffix: ``.npz`` for numpy, or ``.parquet`` (extra ``parquet``).

        The file is there as a whole or not at all, and holds no pickle. Parquet has bools, ints, floats of up to 64
        bits and texts.

        Raises:
            ArgumentError: The suffix is neither.
            SerialisationError: Columns are of Python objects, or else of what the file cannot hold; names them.
            MissingExtraError: pyarrow is not installed.
            OSError: The file cannot be written; an old one is as it was.
        """
        if suffix_of(path) == ".npz":
            write_npz(path, "SampleBatch", {"": self._columns}, {})
        else:
            write_parquet(path, self._columns, self._n)

    @classmethod
    def load(cls, path: FilePath) -> SampleBatch:
        """Read a batch that `save` wrote, bit for bit.

        Returns:
            The batch, with equal columns and dtypes.

        Raises:
            ArgumentError: The suffix is neither ``.npz`` nor ``.parquet``.
            CheckpointError: There is no such file, it is damaged, or holds something else.
            MissingExtraError: pyarrow is not installed.
        """
        columns = read_npz(path, "SampleBatch")[0].get("") if suffix_of(path) == ".npz" else read_parquet(path)
        try:
            return cls(columns or {})
        except ArgumentError as error:
            raise CheckpointError(path, f"holds no sound batch: {error}") from error


def _generator(seed: int | np.random.Generator | None) -> np.random.Generator:
    if isinstance(seed, np.random.Generator):
        return seed
    return np.random.default_rng(None if seed is None else check_seed(seed))


def suffix_of(path: FilePath) -> str:
    """Return ``".npz"`` or ``".parquet"``.

    Raises:
        ArgumentError: The file name ends otherwise.
    """
    suffix = Path(path).suffix
    if suffix not in (".npz", ".parquet"):
        raise ArgumentError(f"expected a file name that ends in .npz or .parquet, got {str(path)!r}")
    return suffix
