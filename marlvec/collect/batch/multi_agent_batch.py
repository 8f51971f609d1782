"""`MultiAgentBatch`: the batches of all policies from one `collect`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from marlvec.collect.batch.converters import as_multi_agent
from marlvec.collect.batch.npz import read_npz, write_npz
from marlvec.collect.batch.parquet import read_parquets, write_parquets
from marlvec.collect.batch.sample_batch import SampleBatch, suffix_of
from marlvec.collect.episode import MultiAgentEpisode
from marlvec.collect.episode.cuts import check_size, moments
from marlvec.errors import ArgumentError, CheckpointError
from marlvec.serialization.atomic_file import FilePath

__all__ = ["MultiAgentBatch"]


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
