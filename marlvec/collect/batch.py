"""What a collector returns: one struct of arrays per policy, one row per agent decision."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.connectors.trees import Tree, map_tree, tree_leaves
from marlvec.errors import ArgumentError

__all__ = ["MultiAgentBatch", "SampleBatch"]


class SampleBatch:
    """Rows of one policy: named columns of equal leading length.

    A column is read as ``batch.obs`` or ``batch["obs"]``. Rows are ordered by env, agent and time: rows of equal
    ``unroll_id`` stand together and their ``t`` counts up by one. The columns, n rows:

    ==================  ==============  =========================================================================
    ``obs``             (n, …)          what the policy saw, behind the agent connectors; a tree for Dict and Tuple
    ``actions``         (n, …)          what the policy answered
    ``actions_for_env`` (n, …)          what the env was given, behind the action connectors
    ``rewards``         (n,)            paid from this decision until the agent's next turn or its end; float64,
                                        behind the agent connectors
    ``next_obs``        (n, …)          what the agent saw at its next turn, or its final observation
    ``terminated``      (n,) bool       the agent's episode ended so, before its next turn
    ``truncated``       (n,) bool       likewise
    ``action_mask``     (n, k) bool     where the env gives one
    ``t``               (n,) int64      number of this decision in the agent's episode, from 0
    ``eps_id``          (n,) int64      the episode; unique, ascending
    ``unroll_id``       (n,) int64      the stretch of one agent's episode in this batch; unique, ascending
    ``env_id``          (n,) int64
    ``agent_index``     (n,) int64
    ``policy_version``  (n,) int64      ``policy.version`` when it decided
    ==================  ==============  =========================================================================

    ``state``, ``next_state`` (n, …) where the envs were made with ``state=True``; and whatever the policy (``logp``, …)
    and the connectors added. Learner connectors may make other rows of it, e.g. sequences (B, T, …).

    Args:
        columns: Column name to an array (n, …), or to a dict or tuple of those.

    Raises:
        ArgumentError: There is no column, or their lengths differ; names the column.
    """

    __slots__ = ("_columns", "_n")

    def __init__(self, columns: Mapping[str, Tree]) -> None:
        lengths = {f"{name}/{path}" if path else name: len(leaf) for name, path, leaf in _leaves(columns)}
        if not lengths:
            raise ArgumentError("a SampleBatch needs at least one column")
        self._n = next(iter(lengths.values()))
        for name, length in lengths.items():
            if length != self._n:
                raise ArgumentError(f"column {name!r} has {length} rows, the columns before it have {self._n}")
        self._columns = dict(columns)

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, name: str) -> Tree:
        if not isinstance(name, str):
            raise TypeError(
                f"a column is named by a string, got {type(name).__name__}; to choose rows, call slice() or take()"
            )
        try:
            return self._columns[name]
        except KeyError:
            raise KeyError(f"no column {name!r}; the columns are {list(self._columns)}") from None

    def __getattr__(self, name: str) -> Tree:
        # Called where normal lookup fails. A half-built instance (copy, unpickling) has no columns yet.
        if name != "_columns" and not name.startswith("__"):
            if name in self._columns:
                return self._columns[name]
            raise AttributeError(f"no column {name!r}; the columns are {list(self._columns)}")
        raise AttributeError(name)

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    __iter__ = None  # len() counts rows and [] names columns, so iterating could mean either

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._columns,)

    def keys(self) -> KeysView[str]:
        """Names of the columns."""
        return self._columns.keys()

    def items(self) -> ItemsView[str, Tree]:
        """Names and columns."""
        return self._columns.items()

    def slice(self, start: int, stop: int) -> SampleBatch:
        """Rows ``start`` to ``stop``, as views; bounds as in Python's slices."""
        return SampleBatch({name: map_tree(lambda leaf: leaf[start:stop], c) for name, c in self.items()})

    def take(self, index: NDArray[Any] | Sequence[int] | Sequence[bool]) -> SampleBatch:
        """Copy the chosen rows, in the order asked for.

        Args:
            index: (k,) ints, or a (n,) bool mask.

        Raises:
            ArgumentError: The index is neither, or the mask's length is not n.
            IndexError: A position is out of range.
        """
        where = np.asarray(index)
        if where.size == 0:
            where = where.astype(np.bool_ if where.shape == (self._n,) else np.int64)
        if where.ndim != 1 or where.dtype.kind not in "biu" or (where.dtype.kind == "b" and len(where) != self._n):
            raise ArgumentError(
                f"take() wants 1-D ints or a mask of {self._n} bools, got {where.dtype} of shape {where.shape}"
            )
        return SampleBatch({name: map_tree(lambda leaf: leaf[where], column) for name, column in self.items()})

    def __repr__(self) -> str:
        rows = [(f"{name}/{path}" if path else name, leaf) for name, path, leaf in _leaves(self._columns)]
        width = max(len(name) for name, _ in rows)
        lines = (f"  {name:<{width}}  {leaf.dtype!s:<8} {leaf.shape}" for name, leaf in rows)
        return "\n".join([f"SampleBatch of {self._n} rows", *lines])


class MultiAgentBatch(Mapping[str, SampleBatch]):
    """One `SampleBatch` per policy that has rows; the same type for one policy and for many.

    A policy without a row in this batch has no key, so that no learner is handed an empty one by accident.

    Args:
        batches: Policy id to its rows.
        env_steps: Env steps this batch stands for.
        known: Ids of all policies there are, for the message where one is missing.
        agent_steps: Decisions it stands for; None: as many as it has rows.

    Attributes:
        env_steps: Truncate mode: env steps made for this batch, those that were lost left out. Complete mode: length
            of its episodes, together.
        agent_steps: Decisions with a known outcome; the number of all policies' rows, unless a learner connector made
            fewer or more of them.
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
        table = [("policy", "rows", "columns")]
        table += [(name, str(len(batch)), ", ".join(batch.keys())) for name, batch in self.items()]
        first, second = (max(len(row[k]) for row in table) for k in (0, 1))
        return "\n".join([head, *(f"  {name:<{first}}  {n:>{second}}  {columns}" for name, n, columns in table)])


def _leaves(columns: Mapping[str, Tree]) -> Iterator[tuple[str, str, Any]]:
    for name, column in columns.items():
        for path, leaf in tree_leaves(column):
            yield name, path, leaf
