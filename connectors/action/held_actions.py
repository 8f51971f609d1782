"""Repeats actions: for some steps, or with a probability (sticky actions)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium.spaces import Space
from numpy.typing import NDArray

from marlvec.connectors.action.valid_actions import EXECUTED, EXECUTED_MISSING, ExecutedActions
from marlvec.connectors.agent_tables import AgentTable, Remembers, fixed_size_tree
from marlvec.connectors.connector import ActionConnector, PositiveInt, Probability, from_setup
from marlvec.connectors.rows import RowRandom, Rows
from marlvec.errors import ContractError
from marlvec.spaces import Leaf, SpaceTree
from marlvec.trees import Tree


class HeldActions(Remembers, ActionConnector):
    """Holds the last action sent for each (env, agent); subclasses choose when to send it again.

    Never at the start of an episode, or after `reset`, when no action is held.
    """

    _tree = from_setup(SpaceTree)
    _held = from_setup(list[AgentTable])
    _executed_held: tuple[AgentTable, ...] = ()  # `EXECUTED` of each held action, where it is not the held action

    @abstractmethod
    def _holds(self, rows: Rows, age_n: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return the rows, (n,), that repeat the held action.

        ``age_n`` is the number of decisions since the policy chose the held action; 0 without one.
        """

    def __call__(self, rows: Rows) -> Rows:
        policy_actions = self._tree.flatten(rows.actions_for_env)
        env_id, agent_index = rows.env_id, rows.agent_index
        age = self._age.get(env_id, agent_index) + 1
        if "first" in rows:
            age[rows.first] = 0
        holds = self._holds(rows, age) & (age > 0)
        leaves = zip(policy_actions, self._tree.leaves, strict=True)
        given = [_fit(np.asarray(value), leaf) for value, leaf in leaves]
        sent = []
        for table, leaf_n in zip(self._held, given, strict=True):
            where = holds.reshape(-1, *[1] * (leaf_n.ndim - 1))
            sent.append(np.where(where, table.get(env_id, agent_index), leaf_n))
            table.set(env_id, agent_index, sent[-1])
        self._age.set(env_id, agent_index, np.where(holds, age, 0))
        actions = self._tree.unflatten(sent)
        if not self.is_choice:
            return rows.replace(actions_for_env=actions)
        if self._executed.is_plain:
            return self._executed.send(rows, actions, chooses=True)
        if not self._executed_held:  # without a pipeline, whose policy has a known space
            return rows.replace(actions_for_env=actions)
        return rows.replace(actions_for_env=actions, **self._hold_executed(rows, holds))

    def _hold_executed(self, rows: Rows, holds: NDArray[np.bool_]) -> dict[str, Tree]:
        """Return the columns of what agents do in the policy's space: of the held decision where it is held."""
        env_id, agent_index, sent = rows.env_id, rows.agent_index, []
        leaves = self._executed.tree.flatten(self._executed.before(rows))
        for table, value, leaf in zip(self._executed_held, leaves, self._executed.tree.leaves, strict=True):
            where = holds.reshape(-1, *[1] * len(leaf.shape))
            sent.append(np.where(where, table.get(env_id, agent_index), _fit(np.asarray(value), leaf)))
            table.set(env_id, agent_index, sent[-1])
        found = {EXECUTED: self._executed.tree.unflatten(sent)}
        if EXECUTED_MISSING in rows:
            missing = np.where(holds, self._missing.get(env_id, agent_index), rows[EXECUTED_MISSING])
            self._missing.set(env_id, agent_index, missing)
            found[EXECUTED_MISSING] = missing
        return found

    def setup(self, space: Space[Any]) -> None:
        self._tree = SpaceTree(space)
        self._executed = ExecutedActions(space, self.action_space, self.undone_by)
        slots = [(leaf.shape, leaf.dtype) for leaf in self._tree.leaves]
        if not self._tables or slots != [(table.shape, table.values.dtype) for table in self._held]:
            self._held = [AgentTable(shape, dtype) for shape, dtype in slots]
            self._age = AgentTable((), np.int64, fill=-1)
            self._executed_held = ()
        own = self._executed.tree.leaves if self._holds_executed() else []
        if [(leaf.shape, leaf.dtype) for leaf in own] != [(t.shape, t.values.dtype) for t in self._executed_held]:
            self._executed_held = tuple(AgentTable(leaf.shape, leaf.dtype) for leaf in own)
            self._missing = AgentTable((), np.bool_)
        tables: dict[str, AgentTable | Sequence[AgentTable]] = {"age": self._age, "actions": self._held}
        if self._executed_held:
            tables |= {"executed": self._executed_held, "missing": self._missing}
        self._tables = tables

    def _holds_executed(self) -> bool:
        """Return whether the column is held beside the actions, because it is in another space than they are."""
        known = self.is_choice and self._executed.is_known and not self._executed.is_plain
        return known and not any(leaf.is_object for leaf in self._executed.tree.leaves)

    def policy_space(self, space: Space[Any]) -> Space[Any]:
        fixed_size_tree(space, repr(self), "leave it out, or put it where the leaf is encoded")
        return space


def _fit(value_n: NDArray[Any], leaf: Leaf) -> NDArray[Any]:
    """Cast actions to the leaf's dtype: floats are rounded, ints must fit."""
    if value_n.dtype == leaf.dtype:
        return value_n
    with np.errstate(invalid="ignore", over="ignore"):
        fitted = value_n.astype(leaf.dtype)
    if leaf.dtype.kind != "f" and not np.array_equal(fitted, value_n):
        raise ContractError(
            f"actions of {leaf} are {value_n.dtype} and do not fit {leaf.dtype}, the dtype of {leaf.space}; "
            f"put ClipActions, or what rounds them, before the connector that sends them again"
        )
    return fitted


@dataclass(eq=False, repr=False)
class RepeatActions(HeldActions):
    """Sends the policy's action of every k-th decision k times; its actions in between are not sent.

    Counts each agent's decisions from the start of its episode. The policy answers every row, and the batch has every
    row, with the action that was sent in the column ``actions_executed`` (see `EpsilonGreedy`). To skip the policy's
    calls, too, use `FrameSkip` on the agent side.

    Args:
        k: Number of times that an action is sent, at least 1.

    Raises:
        ArgumentError: ``k`` is not a positive int.
        UnsupportedSpaceError: In `bind`: a leaf has no fixed size.
        ContractError: In a call: an action does not fit the dtype of a leaf of ints.
    """

    k: PositiveInt

    def _holds(self, rows: Rows, age_n: NDArray[np.int64]) -> NDArray[np.bool_]:
        return age_n < self.k


@dataclass(eq=False, repr=False)
class StickyActions(HeldActions):
    """Sends an agent's last sent action again with probability ``p``, whatever the policy chose.

    Never at the start of an episode. As it belongs to the env's dynamics, not to exploration, it also works in
    evaluation, and ``actions_executed`` (see `EpsilonGreedy`) stays the action before it: Machado et al., "Revisiting
    the Arcade Learning Environment", JAIR 2018. A repeated action may be forbidden by the new ``action_mask``: add
    `MaskInvalid` after it.

    Args:
        p: Probability.
        seed: Equal seeds give equal draws.

    Raises:
        ArgumentError: ``p`` is not in [0, 1].
        UnsupportedSpaceError: In `bind`: a leaf has no fixed size.
        ContractError: In a call: an action does not fit the dtype of a leaf of ints.
    """

    p: Probability = 0.25
    seed: int = field(default=0, kw_only=True)

    is_choice = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._random = RowRandom(self.seed, "StickyActions")

    def undo(self, actions: Tree) -> Tree:
        return actions  # what comes behind it and chooses another action chooses it for the agent

    def _holds(self, rows: Rows, age_n: NDArray[np.int64]) -> NDArray[np.bool_]:
        return self._random.uniform(rows)[:, 0] < self.p
