"""Rows taken out, so that the policy is not asked about them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium.spaces import Space
from numpy.typing import NDArray

from marlvec.connectors._support.agent_table import AgentTable, Remembers
from marlvec.connectors._support.history import cast_row_leaf
from marlvec.connectors.connector import AgentConnector
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, ContractError
from marlvec.spaces import SpaceTree
from marlvec.trees import Tree

__all__ = ["FilterRows", "RowFilter", "FrameSkip"]

BoolArray = NDArray[np.bool_]


class RowFilter(Remembers, AgentConnector):
    """Takes rows out; what later rows need of them is moved to the agent's next row that stays.

    The reward of rows that are gone is added to that of the agent's next row that stays. If an episode's first row is
    gone, the next one that stays has ``first`` set. That row has no action before it that a reward could be for, so its
    reward is 0, and the rewards until then are added to those of the row after it. Last rows always stay.

    A subclass says in `keep_rows` which rows stay. For an agent whose row is gone, the collector sends ``noop``.

    Args:
        noop: An action of the policy's action space; ``"repeat"`` for the agent's last one; None where it is not
            declared, which the collector refuses.

    Raises:
        ArgumentError: Where a space is first seen: ``noop`` is not in the action space.
    """

    changes_length = True

    def __init__(self, noop: Tree = None) -> None:
        self.noop = noop
        self._pending = AgentTable((), np.float64)
        self._first = AgentTable((), np.bool_)  # whether the episode's first row is among those that are gone
        self._tables = {"pending": self._pending, "first": self._first}

    @abstractmethod
    def keep_rows(self, rows: Rows) -> NDArray[Any]:
        """Say which rows stay: (n,) bool. Asked once about every row, last ones included, which stay anyway."""

    def __call__(self, rows: Rows) -> Rows:
        env_id, agent_index = rows.env_id, rows.agent_index
        first = rows.first if "first" in rows else np.zeros(len(rows), np.bool_)
        keep = self._checked(self.keep_rows(rows), len(rows))
        if "last" in rows:
            keep = keep | rows.last
        pending = np.where(first, 0.0, self._pending.get(env_id, agent_index))
        late = self._first.get(env_id, agent_index) & ~first  # nothing of its episode has been let through yet
        gone = ~keep
        columns: dict[str, Tree] = {}
        if "rewards" in rows:
            pending = pending + np.where(first, 0.0, rows.rewards)
            # A row that was first all along keeps its reward, whatever it says.
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
    """Takes out the rows that a function does not keep, e.g. of agents that sleep.

    The rewards meanwhile are added to the agent's next row that stays, and the next one becomes ``first`` where the
    episode's first row is gone (its own reward, and those before it, are then added to the row after it). Last rows
    always stay.

    Args:
        keep: Takes rows, returns (n,) bool: True for those that stay.
        noop: What the collector sends for agents whose rows are gone: an action of the policy's action space, or
            ``"repeat"`` for the agent's last one. None: it is not declared, and the collector raises.

    Raises:
        ArgumentError: ``keep`` is no function; or, where a space is first seen, ``noop`` is not in the action space.
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
    """Asks the policy at every k-th row of an agent; in between its last action is sent again.

    An episode's first row stays, then each k-th one after it; last rows always. Rewards add up to the next row that
    stays, as in `FilterRows`. Put `MaxObs` before it, and it sees the rows in between as well.

    Args:
        k: Of how many rows one stays, at least 1.

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
