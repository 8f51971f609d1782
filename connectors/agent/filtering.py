"""Removes rows before the policy sees them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium.spaces import Space
from numpy.typing import NDArray

from marlvec.connectors.agent_tables import AgentTable, Remembers, cast_row_leaf
from marlvec.connectors.connector import AgentConnector
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, ContractError
from marlvec.spaces import SpaceTree
from marlvec.trees import Tree

BoolArray = NDArray[np.bool_]


class RowFilter(Remembers, AgentConnector):
    """Removes rows; their rewards move to the agent's next kept row.

    The rewards of removed rows are added to the reward of the agent's next kept row. If an episode's first row is
    removed, the next kept row has ``first`` set. No action precedes that row, so its reward is 0, and all rewards until
    then are added to the next kept row's. Last rows are always kept.

    Subclasses choose the kept rows in `keep_rows`. For an agent whose row is removed, the collector sends ``noop``.

    Args:
        noop: An action of the policy's action space, or ``"repeat"`` for the agent's last action; None: not declared,
            and the collector raises.

    Raises:
        ArgumentError: In `bind`: ``noop`` is not in the action space.
    """

    changes_length = True

    def __init__(self, noop: Tree = None) -> None:
        self.noop = noop
        self._pending = AgentTable((), np.float64)
        self._first = AgentTable((), np.bool_)  # whether the episode's first row was removed
        self._tables = {"pending": self._pending, "first": self._first}

    @abstractmethod
    def keep_rows(self, rows: Rows) -> NDArray[Any]:
        """Return the rows to keep, (n,) bool. Called once with every row; last rows are kept anyway."""

    def __call__(self, rows: Rows) -> Rows:
        env_id, agent_index = rows.env_id, rows.agent_index
        first = rows.first if "first" in rows else np.zeros(len(rows), np.bool_)
        keep = self._checked(self.keep_rows(rows), len(rows))
        if "last" in rows:
            keep = keep | rows.last
        pending = np.where(first, 0.0, self._pending.get(env_id, agent_index))
        late = self._first.get(env_id, agent_index) & ~first  # no row of its episode was kept yet
        gone = ~keep
        columns: dict[str, Tree] = {}
        if "rewards" in rows:
            pending = pending + np.where(first, 0.0, rows.rewards)
            # An original first row keeps its reward unchanged.
            columns["rewards"] = np.where(first, rows.rewards, np.where(late, 0.0, pending))
        if "first" in rows:
            columns["first"] = first | late
        self._pending.set(env_id, agent_index, np.where(gone | late, pending, 0.0))
        self._first.set(env_id, agent_index, gone & (first | late))
        return rows.replace(**columns).take(keep)

    def setup(self, space: Space[Any]) -> None:
        if self.noop is None or isinstance(self.noop, str) or self.action_space is None:
            return
        tree = SpaceTree(self.action_space)
        try:
            values = tree.flatten(self.noop)
        except ContractError as error:
            raise ArgumentError(f"{self.name}: noop is no action of {tree.space}: {error}") from None
        for value, leaf in zip(values, tree.leaves, strict=True):
            if not leaf.space.contains(value if leaf.is_object else cast_row_leaf(value, leaf.blank(), "noop")):
                raise ArgumentError(f"{self.name}: noop {value!r} is not in {leaf.space}")

    def _checked(self, keep: Any, n: int) -> BoolArray:
        array = np.asarray(keep)
        if array.shape != (n,) or array.dtype != np.bool_:
            raise ContractError(
                f"{self.name} must say of each row whether it stays, as bool of shape {(n,)}; got {array.dtype} of "
                f"shape {array.shape}"
            )
        return array


class FilterRows(RowFilter):
    """Removes the rows that a function does not keep, e.g. of sleeping agents.

    Rewards of removed rows, and ``first``, move to the agent's next kept row as in `RowFilter`.

    Args:
        keep: Function of rows that returns (n,) bool: True for rows to keep.
        noop: Action for agents whose rows are removed: an action of the policy's action space, or ``"repeat"`` for the
            agent's last action. None: not declared, and the collector raises.

    Raises:
        ArgumentError: ``keep`` is not a function; or, in `bind`, ``noop`` is not in the action space.
    """

    def __init__(self, keep: Callable[[Rows], NDArray[Any]], noop: Tree = None) -> None:
        if not callable(keep):
            raise ArgumentError(f"keep must be a function of rows, got {type(keep).__name__}")
        if isinstance(noop, str) and noop != "repeat":
            raise ArgumentError(f'noop must be an action or "repeat", got {noop!r}')
        super().__init__(noop)
        self.keep = keep

    def keep_rows(self, rows: Rows) -> NDArray[Any]:
        return self.keep(rows)


class FrameSkip(RowFilter):
    """Keeps every k-th row of an agent for the policy; in between its last action is sent again.

    It keeps an episode's first row, then each k-th row, and last rows. Rewards move as in `RowFilter`. A `MaxObs`
    before it also sees the rows in between.

    Args:
        k: Keep one of k rows, at least 1.

    Raises:
        ArgumentError: ``k`` is below 1.
    """

    def __init__(self, k: int) -> None:
        if k < 1:
            raise ArgumentError(f"k must be at least 1, got {k}")
        super().__init__("repeat")
        self.k = k
        self._count = AgentTable((), np.int64)
        self._tables = {**self._tables, "count": self._count}

    def keep_rows(self, rows: Rows) -> NDArray[Any]:
        count = self._count.get(rows.env_id, rows.agent_index)
        if "first" in rows:
            count = np.where(rows.first, 0, count)
        self._count.set(rows.env_id, rows.agent_index, count + 1)
        keep: NDArray[Any] = count % self.k == 0
        return keep
