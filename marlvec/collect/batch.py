"""`SampleBatch`: the finished rows of one policy, with methods for learners; `MultiAgentBatch`: those of all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.agent_episodes import MultiAgentEpisode, check_size, episodes, fragments, ids, moments
from marlvec.collect.batch_files import (
    as_jax,
    as_multi_agent,
    as_sample_batch,
    as_tensordict,
    as_tensors,
    count_characters,
    named_leaves,
    pad_rows,
    read_npz,
    read_parquet,
    read_parquets,
    with_arrays,
    write_npz,
    write_parquet,
    write_parquets,
)
from marlvec.connectors import PadSequences, Rows, UnpadSequences
from marlvec.connectors.rows import join_columns, merged
from marlvec.errors import ArgumentError, CheckpointError
from marlvec.serialization.atomic_file import FilePath
from marlvec.trees import Tree, ragged_dtype
from marlvec.vector.settings import check_seed


class SampleBatch(Rows):
    """The finished rows of one policy: `Rows` with methods to cut, shuffle, join, convert and save them.

    Rows are ordered by env, agent and time: rows of equal ``unroll_id`` are adjacent and their ``t`` increases by 1.
    The columns, n rows:

    ====================  ==============  =======================================================================
    ``obs``               (n, …)          the policy's observation, after the agent connectors; a tree for Dict and
                                          Tuple
    ``actions``           (n, …)          the policy's action
    ``actions_executed``  (n, …)          the action after exploration (`EpsilonGreedy`, noise), in the policy's space,
                                          for off-policy learners; only if action connectors explore
    ``actions_for_env``   (n, …)          the env's action, after the action connectors
    ``rewards``           (n,)            float64, sum from this decision until the agent's next turn or end, after the
                                          agent connectors. Rewards before an agent's first decision (late joiners,
                                          turn-based games) are in its first row
    ``next_obs``          (n, …)          the observation at the agent's next turn, or its final observation. Made when
                                          it is first read, as all ``next_…`` that follow from a column: until then a
                                          collected batch holds each observation once. Minibatches make their own
                                          rows of it. Read it before you write into ``obs``
    ``terminated``        (n,) bool       the agent was terminated before its next turn
    ``truncated``         (n,) bool       the agent was truncated before its next turn
    ``next_obs_missing``  (n,) bool       the agent ended without a final observation: ``next_obs`` repeats ``obs``;
                                          do not bootstrap from it
    ``action_mask``       (n, k) bool     if the env gives masks
    ``next_action_mask``  (n, k) bool     the mask at ``next_obs``; all True at ends
    ``t``                 (n,) int64      number of this decision in the agent's episode, from 0
    ``env_t``             (n,) int64      env steps of the episode before this decision: 0 at the reset
    ``next_env_t``        (n,) int64      env steps of the episode when the outcome came
    ``eps_id``            (n,) int64      the episode; unique, ascending
    ``unroll_id``         (n,) int64      the fragment: one agent's rows of an episode in this batch; unique, ascending
    ``env_id``            (n,) int64      the env
    ``agent_index``       (n,) int64      the agent
    ``policy_version``    (n,) int64      ``policy.version`` at the decision
    ``off_policy``        (n,) bool       the action is not the policy's: drawn at random, or the env's own; exists
                                          after the first such action
    ====================  ==============  =======================================================================

    Further columns: ``state``, ``next_state`` (n, …) if the envs were made with ``state=True``; columns of the policy
    (``logp``, …) and of connectors. A column ``x`` of an agent connector comes with ``next_x``, from the agent's next
    row. Learner connectors may change rows, e.g. into sequences (B, T, …).

    No method changes a batch. Methods that choose rows apply to every column, also of Python objects.

    Args:
        columns: Column name to an array (n, …), or to a dict or tuple of arrays; or `Rows`, whose arrays are not
            copied. Lists become arrays.

    Raises:
        ArgumentError: No column is given, or lengths differ; names the column.
    """

    __slots__ = ()

    def __init__(self, columns: Mapping[str, Tree] | Rows) -> None:
        super().__init__(with_arrays(columns._columns if isinstance(columns, Rows) else columns))
        if not self._n and not any(True for _ in named_leaves(self._columns)):
            raise ArgumentError("SampleBatch(): expected at least one column, got none")

    def __repr__(self) -> str:
        rows = list(named_leaves(self._columns))
        width = max(len(name) for name, _ in rows)
        lines = (f"  {name:<{width}}  {leaf.dtype!s:<8} {tuple(leaf.shape)}" for name, leaf in rows)
        return "\n".join([f"SampleBatch of {self._n} rows", *lines])

    @property
    def size_bytes(self) -> int:
        """Bytes in the columns' arrays; of texts, the characters, too; of other Python objects, only the references."""
        return sum(leaf.nbytes + count_characters(leaf) for _, leaf in named_leaves(self._columns))

    def replace(self, **columns: Tree) -> SampleBatch:
        """Return a batch in which these columns replace existing ones, or are added; it shares the other arrays.

        Raises:
            ArgumentError: A column's length is not that of the rows; names the column.
        """
        return SampleBatch(merged(self._columns, columns))

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
        """Yield all rows once, in random order, ``size`` at a time, as copies. For ordered rows see `timeslices`.

        Args:
            size: Rows in each minibatch; the last may be smaller.
            seed: As in `shuffle`; pass another seed for each epoch, or one generator for all.
            drop_last: Drop the last minibatch if it is smaller.

        Raises:
            ArgumentError: ``size`` is not a whole number above 0, or the seed is not an integer from 0 to 2**64 - 1.
        """
        size = check_size("size", size)
        order = _generator(seed).permutation(self._n)
        stop = self._n - self._n % size if drop_last else self._n
        return (self.take(order[start : start + size]) for start in range(0, stop, size))

    # --- cutting

    def timeslices(self, k: int) -> list[SampleBatch]:
        """Cut into chunks of ``k`` rows, as views; the last may be shorter.

        Chunks may begin and end within an episode, and span several; sequences of `right_zero_pad` do not.

        Returns:
            Batches of ``k`` rows.

        Raises:
            ArgumentError: ``k`` is not a whole number above 0.
        """
        k = check_size("k", k)
        return [self.slice(start, start + k) for start in range(0, self._n, k)]

    def split_by_fragment(self) -> list[SampleBatch]:
        """Cut into fragments (consecutive decisions of one agent in one episode), as views, in the order of the rows.

        A fragment begins where ``unroll_id``, ``eps_id``, ``env_id`` or ``agent_index`` changes and where ``t`` does
        not ascend, so concatenated batches with equal ``unroll_id`` are kept apart. Shuffled rows give short fragments.

        Returns:
            One batch per fragment.

        Raises:
            ArgumentError: The column ``unroll_id`` is missing.
        """
        return [self.slice(start, stop) for start, stop in fragments(self._columns, self._n)]

    def split_by_episode(self) -> list[SampleBatch]:
        """Return one batch per episode with the rows of all its agents, in order; episodes by first appearance.

        Returns:
            Batches; a batch is a view if its rows are adjacent.

        Raises:
            ArgumentError: The column ``eps_id`` is missing; or an ``eps_id`` belongs to several episodes: it has rows
                of several envs, or a decision twice.
        """
        return [
            self.slice(int(where[0]), int(where[-1]) + 1)
            if where[-1] - where[0] == len(where) - 1
            else self.take(where)
            for where in episodes(self._columns)
        ]

    # --- sequences

    def right_zero_pad(self, max_len: int | None = None, state_column: str | None = "state_in") -> SampleBatch:
        """Make sequences (B, T, …) of fragments, padded with zeros at the end, like `PadSequences`.

        Args:
            max_len: T; a longer fragment makes several sequences. None: the longest fragment's length.
            state_column: Column of which each sequence keeps only the first value, (B, …); None: no column.

        Returns:
            The columns as (B, T, …), and ``seq_lens`` (B,), ``loss_mask`` (B, T).

        Raises:
            ArgumentError: ``max_len`` is not a whole number above 0, or the column ``unroll_id`` is missing.
            ContractError: The batch has sequences already, or rows of equal ``unroll_id`` are not adjacent in order of
                time.
        """
        if max_len is None:
            unroll = ids(self._columns, "unroll_id", "padding")
            max_len = int(np.unique(unroll, return_counts=True)[1].max(initial=1))
        pad = PadSequences(check_size("max_len", max_len), state_column)
        return SampleBatch(pad(self))

    def unpad(self, state_column: str | None = "state_in") -> SampleBatch:
        """Turn sequences of `right_zero_pad` or `PadSequences` back into rows (n, …), exactly.

        Args:
            state_column: As given there.

        Returns:
            A batch of n rows.

        Raises:
            ContractError: The batch has no sequences, or a column is not (B, T, …).
        """
        return SampleBatch(UnpadSequences(state_column)(self))

    # --- joining

    @classmethod
    def concat(cls, batches: Sequence[SampleBatch]) -> SampleBatch:
        """Copy the rows of all batches into one, in order.

        Ids of one collector's batches are unique. Batches of several collectors share ids, unless each collector has
        its own ``stream``.

        Raises:
            ArgumentError: No batch is given, or batches differ in columns, or in a column's structure, dtype or shape
                per row; names the columns.
        """
        return SampleBatch(join_columns([batch._columns for batch in batches]))

    # --- other libraries, and files

    def right_pad(self, name: str, fill: Any = 0) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Make a rectangle of a column whose rows are 1-D arrays (`Policy.ragged`), such as tokens.

        Args:
            name: The column.
            fill: Value behind the end of a row.

        Returns:
            The numbers, (B, L) with L the longest row's length, and a mask (B, L), True where they are the rows'.

        Raises:
            KeyError: The column is unknown.
            ArgumentError: Its rows are no 1-D arrays of numbers of one dtype.
        """
        column = self[name]
        if len(self) and ragged_dtype(np.asarray(column, object) if isinstance(column, list) else column) is None:
            raise ArgumentError(f"right_pad({name!r}): expected a column of 1-D arrays, got {column.dtype}")
        return pad_rows(column, fill)

    def to_torch(
        self, device: Any = None, *, pin_memory: bool = False, ragged: Literal["pad", "nested"] | None = None
    ) -> dict[str, Tree]:
        """Convert columns to torch tensors (n, …) of the same dtypes.

        On the CPU, tensors share the arrays' memory: writing to one writes to the other. Arrays that torch cannot share
        (read-only, reversed, unaligned, or of foreign byte order) are copied.

        Args:
            device: Device of the tensors; None for the CPU.
            pin_memory: Copy to page-locked memory first, so that the transfer to a GPU runs in the background.
            ragged: Columns of 1-D arrays (`Policy.ragged`): ``"pad"`` gives (B, L) as `right_pad`, with a column
                ``name_mask``; ``"nested"`` a nested tensor of jagged layout; None refuses them.

        Returns:
            Name to tensor, or to a tree of tensors.

        Raises:
            MissingExtraError: torch is not installed.
            ArgumentError: torch lacks a column's dtype (Python objects, strings, …); names the columns: `drop` them. Or
                memory is to be pinned, and torch finds no GPU.
        """
        return as_tensors(self._columns, device, pin_memory=pin_memory, ragged=ragged)

    def to_jax(self, device: Any = None) -> dict[str, Tree]:
        """Convert columns to JAX arrays (n, …).

        On the CPU, columns of 64 KiB and more share their memory with the JAX arrays: do not write to them afterwards.
        JAX copies smaller, read-only or strided columns, and 64-bit numbers, which become 32-bit unless
        ``jax_enable_x64`` is set.

        Args:
            device: A ``jax.Device`` or sharding; None for the CPU.

        Returns:
            Name to array, or to a tree of arrays.

        Raises:
            MissingExtraError: jax is not installed.
            ArgumentError: Columns are of Python objects or strings; names them: `drop` them.
        """
        return as_jax(self._columns, device)

    def to_tensordict(self, device: Any = None) -> Any:
        """Convert to a ``tensordict.TensorDict`` of batch size (n,), with the tensors of `to_torch`.

        Dicts become nested TensorDicts; tuples, too, with the keys ``"0"``, ``"1"``, ….

        Args:
            device: As in `to_torch`.

        Raises:
            MissingExtraError: tensordict or torch is not installed.
            ArgumentError: As in `to_torch`; or two keys of a dict are equal as strings.
        """
        return as_tensordict(self._columns, self._n, device)

    def to_rllib(self) -> Any:
        """Convert to a ``ray.rllib.policy.sample_batch.SampleBatch`` that shares the arrays.

        RLlib's names: ``next_obs`` becomes ``new_obs``, ``terminated`` ``terminateds``, ``truncated`` ``truncateds``,
        ``logp`` ``action_logp``, ``values`` ``vf_preds``; other columns keep their names.

        Returns:
            The batch.

        Raises:
            MissingExtraError: ray is not installed.
            ArgumentError: The batch has sequences, or RLlib's name of a column exists already.
        """
        return as_sample_batch(self._columns)

    def save(self, path: FilePath) -> None:
        """Write the batch to a file, by its suffix: ``.npz`` for numpy, or ``.parquet`` (extra ``parquet``).

        The file is written atomically and contains no pickle. Parquet holds bools, ints, floats of up to 64 bits,
        strings, and 1-D arrays of numbers (`Policy.ragged`).

        Raises:
            ArgumentError: Another suffix.
            SerialisationError: The file cannot hold a column, e.g. of Python objects; names the columns.
            MissingExtraError: pyarrow is not installed.
            OSError: The file cannot be written; an old file is unchanged.
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
            CheckpointError: The file does not exist, is damaged, or holds something else.
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
    """Return ``".npz"`` or ``".parquet"``; refuse other file names."""
    suffix = Path(path).suffix
    if suffix not in (".npz", ".parquet"):
        raise ArgumentError(f"expected a file name that ends in .npz or .parquet, got {str(path)!r}")
    return suffix


class MultiAgentBatch(Mapping[str, SampleBatch]):
    """One `SampleBatch` per policy that has rows; the same type for one policy and for many.

    A policy without rows has no key, so that no learner gets an empty batch by accident.

    Args:
        batches: Policy id to its rows.
        env_steps: Env steps that this batch counts.
        known: Ids of all policies, for the message if one is missing.
        agent_steps: Decisions that it counts; None: its number of rows.

    Attributes:
        env_steps: Truncate mode: env steps made for this batch, without lost ones. Complete mode: sum of its episodes'
            lengths.
        agent_steps: Decisions with a known outcome: the number of all rows, unless a learner connector changed it.
    """

    def __init__(
        self,
        batches: Mapping[str, SampleBatch],
        *,
        env_steps: int,
        known: Sequence[str] = (),
        agent_steps: int | None = None,
    ) -> None:
        self._batches = dict(batches)
        self._known = tuple(known)
        self.env_steps = env_steps
        self.agent_steps = sum(map(len, self._batches.values())) if agent_steps is None else agent_steps

    @property
    def known(self) -> tuple[str, ...]:
        """Ids of all policies, with or without rows."""
        return self._known

    def __getitem__(self, policy_id: str) -> SampleBatch:
        try:
            return self._batches[policy_id]
        except KeyError:
            if policy_id in self._known:
                raise KeyError(f"policy {policy_id!r} has no rows in this batch; {list(self._batches)} have") from None
            raise KeyError(f"no policy {policy_id!r}; the policies are {list(self._known or self._batches)}") from None

    def __contains__(self, policy_id: object) -> bool:
        return policy_id in self._batches

    def __iter__(self) -> Iterator[str]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)

    def __repr__(self) -> str:
        head = f"MultiAgentBatch: {self.env_steps} env steps, {self.agent_steps} agent steps"
        table = [("policy", "rows", "size", "columns")]
        for name, batch in self.items():
            table.append((name, str(len(batch)), _readable(batch.size_bytes), ", ".join(batch.keys())))
        table += [(name, "0", "", "") for name in self._known if name not in self]
        first, second, third = (max(len(row[k]) for row in table) for k in (0, 1, 2))
        lines = (f"  {name:<{first}}  {n:>{second}}  {size:>{third}}  {rest}".rstrip() for name, n, size, rest in table)
        return "\n".join([head, *lines])

    @property
    def size_bytes(self) -> int:
        """Bytes in all policies' arrays; of Python objects, only the references."""
        return sum(batch.size_bytes for batch in self._batches.values())

    def map(self, function: Callable[[SampleBatch], SampleBatch]) -> MultiAgentBatch:
        """Apply a function to every policy's rows, e.g. ``batch.map(lambda rows: rows.drop("infos"))``.

        Returns:
            A batch of the results, without policies left without rows; the counts of steps stay.

        Raises:
            ArgumentError: The function did not return a `SampleBatch`.
        """
        found = {}
        for name, batch in self._batches.items():
            result = function(batch)
            if not isinstance(result, SampleBatch):
                raise ArgumentError(
                    f"map(): expected a function that returns a SampleBatch, got {type(result).__name__} for policy "
                    f"{name!r}; for anything else, loop over items()"
                )
            if len(result):
                found[name] = result
        return self._with(found, self.env_steps, self.agent_steps)

    def timeslices(self, k: int, by: str = "t") -> list[MultiAgentBatch]:
        """Cut all policies' rows into chunks of ``k`` moments; the last chunk may be shorter.

        A moment is all rows with one ``(eps_id, t)``, of all policies; moments ascend in this order. ``t`` counts an
        agent's decisions: if all agents act at once a moment is an env step, if they take turns it is a round.
        ``env_steps`` of a chunk is its number of moments.

        Args:
            k: Moments in each chunk.
            by: Column that numbers an episode's moments.

        Returns:
            Batches without keys of policies that have no rows in them.

        Raises:
            ArgumentError: ``k`` is not a whole number above 0, or a policy lacks a column.
        """
        k = check_size("k", k)
        return [
            self._with({name: self._batches[name].take(where) for name, where in rows.items()}, count)
            for count, rows in moments({name: dict(batch.items()) for name, batch in self._batches.items()}, k, by)
        ]

    def episodes(self, agents: Sequence[str] | None = None) -> list[MultiAgentEpisode]:
        """Return the batch's episodes (or parts of them), one per ``eps_id``, in their order.

        Args:
            agents: ``envs.agents``, to select agents by name.

        Raises:
            ArgumentError: As in `MultiAgentEpisode.of_rows`.
        """
        return MultiAgentEpisode.of_rows({name: dict(batch.items()) for name, batch in self.items()}, agents)

    @staticmethod
    def of_episodes(episodes: Sequence[MultiAgentEpisode], env_steps: int | None = None) -> MultiAgentBatch:
        """Copy episodes' rows into a batch, without lookbacks, ordered by env, agent and time like a collector's.

        Args:
            episodes: The episodes; at least one.
            env_steps: Env steps that the batch counts; None: the sum of the episodes' lengths.

        Returns:
            A new batch.

        Raises:
            ArgumentError: The episodes have no row; or rows of one policy have different columns.
        """
        found: dict[str, list[SampleBatch]] = {}
        for episode in episodes:
            for policy_id, columns in episode.rows().items():
                found.setdefault(policy_id, []).append(SampleBatch(columns))
        if not found:
            raise ArgumentError("of_episodes(): expected at least one episode that has rows, got none")
        batches = {}
        for policy_id, parts in found.items():
            batch = SampleBatch.concat(parts)
            order = np.lexsort([batch[name] for name in ("t", "eps_id", "agent_index", "env_id")])
            batches[policy_id] = batch.take(order)
        steps = sum(map(len, episodes)) if env_steps is None else env_steps
        return MultiAgentBatch(batches, env_steps=steps, known=tuple(batches))

    @staticmethod
    def concat(batches: Sequence[MultiAgentBatch]) -> MultiAgentBatch:
        """Copy the rows of all batches into one, policy by policy; not every batch needs every policy.

        Counts of steps are added. For batches of several collectors see `SampleBatch.concat`.

        Raises:
            ArgumentError: No batch is given, or two differ in a policy's columns, or in a column's structure, dtype or
                shape per row; names the policy and the columns.
        """
        if not batches:
            raise ArgumentError("concat(): expected at least one batch, got none")
        found = {}
        for name in dict.fromkeys(name for batch in batches for name in batch):
            try:
                found[name] = SampleBatch.concat([batch[name] for batch in batches if name in batch])
            except ArgumentError as error:
                raise ArgumentError(f"policy {name!r}, of the batches that have rows of it: {error}") from error
        return MultiAgentBatch(
            found,
            env_steps=sum(batch.env_steps for batch in batches),
            known=tuple(dict.fromkeys(name for batch in batches for name in batch._known)),
            agent_steps=sum(batch.agent_steps for batch in batches),
        )

    def to_rllib(self) -> Any:
        """Return all policies' rows as RLlib's ``MultiAgentBatch``, not copied; columns as in `SampleBatch.to_rllib`.

        Raises:
            MissingExtraError: ray is not installed.
            ArgumentError: As in `SampleBatch.to_rllib`.
        """
        return as_multi_agent({name: dict(batch.items()) for name, batch in self._batches.items()}, self.env_steps)

    def save(self, path: FilePath) -> None:
        """Write the batch to a file, by its suffix: ``.npz`` for numpy, or ``.parquet`` (extra ``parquet``).

        The file is written atomically and contains no pickle. A Parquet file is one table, policy after policy, with a
        column ``policy``; columns that a policy lacks are empty in its rows. If columns of one name differ in shape or
        dtype, the later policy's is called ``policy/column``.

        Raises:
            ArgumentError: Another suffix.
            SerialisationError: The file cannot hold a column, e.g. of Python objects; names the columns.
            MissingExtraError: pyarrow is not installed.
            OSError: The file cannot be written; an old file is unchanged.
        """
        facts = {"env_steps": int(self.env_steps), "agent_steps": int(self.agent_steps), "known": self._known}
        columns = {name: dict(batch.items()) for name, batch in self.items()}
        if suffix_of(path) == ".npz":
            write_npz(path, "MultiAgentBatch", columns, facts)
        else:
            write_parquets(path, columns, {name: len(batch) for name, batch in self.items()}, facts)

    @classmethod
    def load(cls, path: FilePath) -> MultiAgentBatch:
        """Read a batch that `save` wrote, bit for bit.

        Returns:
            The batch, with equal columns, dtypes and counts.

        Raises:
            ArgumentError: The suffix is neither ``.npz`` nor ``.parquet``.
            CheckpointError: The file does not exist, is damaged, or holds something else.
            MissingExtraError: pyarrow is not installed.
        """
        is_npz = suffix_of(path) == ".npz"
        columns, facts = read_npz(path, "MultiAgentBatch") if is_npz else read_parquets(path)
        try:
            return cls(
                {name: SampleBatch(own) for name, own in columns.items()},
                env_steps=facts["env_steps"],
                known=facts["known"],
                agent_steps=facts["agent_steps"],
            )
        except (ArgumentError, KeyError, TypeError) as error:
            raise CheckpointError(path, f"holds no sound batch: {error!r}") from error

    def _with(
        self, batches: Mapping[str, SampleBatch], env_steps: int, agent_steps: int | None = None
    ) -> MultiAgentBatch:
        return MultiAgentBatch(batches, env_steps=env_steps, known=self._known, agent_steps=agent_steps)


def _readable(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
