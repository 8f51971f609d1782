"""`ActionPipeline`: the chain of connectors from a policy's answers to the env's actions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from gymnasium.spaces import Space

from marlvec.connectors.action.conversions import ReadOnlyActions, ToNumpy, UnsquashActions
from marlvec.connectors.action.valid_actions import EXECUTED, ClipActions, ExecutedActions
from marlvec.connectors.connector import ActionConnector
from marlvec.connectors.pipeline import Pipeline, Stage
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError
from marlvec.trees import Tree, tree_leaves

Undone = tuple[ActionConnector, ...] | None


class ActionPipeline(Pipeline[ActionConnector], ActionConnector):
    """A chain of action connectors: adds ``actions_for_env`` to rows with the policy's ``actions``.

    Starts from ``actions_for_env = actions`` if that column is absent. Bound to the space of one env action; the
    policy's space is computed from the last piece to the first.

    Args:
        pieces: Action connectors, first to last.
    """

    _side = ActionConnector
    _section = "action_connectors"
    _starts_last = True

    @classmethod
    def default(cls) -> Self:
        """Build the default chain: to numpy, unsquash to the bounds of bounded Boxes, clip, make read-only."""
        return cls([ToNumpy(), UnsquashActions(), ClipActions(), ReadOnlyActions()])

    def __call__(self, rows: Rows) -> Rows:
        if "actions_for_env" not in rows:
            rows = rows.replace(actions_for_env=rows["actions"])
        return super().__call__(rows)

    def _noted(self, stage: Stage[Any], before: Rows, after: Rows) -> Rows:
        """Write the change of a user's piece into ``actions_executed``, unless the piece has written it."""
        change: ExecutedActions | None = stage.change
        if change is None or after.get(EXECUTED) is not before.get(EXECUTED):
            return after
        actions = after["actions_for_env"]
        forms = [[np.shape(leaf) for _, leaf in tree_leaves(tree)] for tree in (before["actions_for_env"], actions)]
        if forms[0] != forms[1]:  # the next piece, or the collector, refuses them and says why
            return after
        return after.replace(**change.columns(before, actions))

    @property
    def only_converts(self) -> bool:
        return (self._program or self._compile()).only_converts and type(self).__call__ is ActionPipeline.__call__

    def bind(self, space: Space[Any], agents: Sequence[str] = (), action_space: Space[Any] | None = None) -> None:
        if action_space is not None and action_space != (own := self.policy_space(space)):
            raise ArgumentError(f"through {self.name} the policy acts in {own}, not in {action_space}; leave it out")
        super().bind(space, agents)

    @property
    def env_space(self) -> Space[Any]:
        """Space of one action after the last piece: the env's."""
        return self._bound_space()

    @property
    def policy_space_(self) -> Space[Any]:
        """Space of one action before the first piece: the policy's."""
        return self._spaces(self._bound_space())[-1]

    def policy_space(self, space: Space[Any]) -> Space[Any]:
        return self._spaces(space)[-1]

    def undo(self, actions: Tree) -> Tree:
        for stage in self._order:
            actions = stage.piece.undo(actions)
        return actions

    def setup(self, space: Space[Any]) -> None:
        if self._owner is None:
            self._link(space, ())
        super().setup(space)

    def _link(self, space: Space[Any], undone_by: Undone) -> Undone:
        """Give each piece what converts an action at its place into the policy's; return this for the place behind."""
        spaces = self._spaces(space)[::-1]
        for stage, before, after in zip(self._stages, spaces, spaces[1:], strict=False):
            piece, is_same = stage.piece, before == after
            piece.undone_by, stage.change = undone_by, None
            if isinstance(piece, ActionPipeline):
                undone_by = piece._link(after, undone_by)
                continue
            is_users = stage.is_checked and piece.is_choice and is_same
            if is_users:
                stage.change = ExecutedActions(after, self.action_space, undone_by)
            if is_same and piece.is_choice:
                continue
            knows = type(piece).undo is not ActionConnector.undo
            undone_by = (piece, *undone_by) if knows and undone_by is not None else None
        return undone_by

    def _refresh(self) -> None:
        if self._space is not None:
            self.action_space = self.policy_space(self._space)
        super()._refresh()

    def _past(self, piece: ActionConnector, space: Space[Any]) -> Space[Any]:
        return piece.policy_space(space)
