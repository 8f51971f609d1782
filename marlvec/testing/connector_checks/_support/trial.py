"""`Trial`: one connector on one space: how it is built, and with what rows it is fed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Space

from marlvec.connectors._support.leaf_spaces import space_summary
from marlvec.connectors.connector import ActionConnector, AgentConnector, Connector
from marlvec.connectors.pipeline import Pipeline
from marlvec.connectors.rows import Rows
from marlvec.testing.connector_checks._support.player import ConnectorDriver
from marlvec.testing.connector_checks._support.report import Report
from marlvec.testing.connector_checks._support.story import ColumnLike, Moment, SampledRows

__all__ = ["Trial", "has_leaves"]

_OBS = Box(-np.inf, np.inf, (3,), np.float32)  # what the policy saw, on the action side
_WARM = 1_000  # seed of the story that connectors learn from
_LENGTH = 12  # moments of a story


class Trial:
    """A connector on one space.

    Args:
        build: Makes a new connector.
        space: Agent side: of one observation at its input. Action side: of one action at its output.
        action_space: Of one action of the policy; the action side works it out.
        agents: Names of the agents.
        num_envs: How many envs there are.
        columns: Further columns of the rows, and of what the policy answers.
        seed: Of all that is drawn.

    Attributes:
        report: Where to say what is wrong.
        acts: Whether it stands on the action side.
        across: Whether all rows of an env must come in one call.
        outer: The space on the side of the policy.
        learnt: What one of them learnt from a story of its own; empty where it learns nothing.

    Raises:
        Refused: It does not take this space.
        ContractError: It cannot be made, set up or played at all.
    """

    def __init__(
        self,
        build: Callable[[], Connector],
        space: Space[Any],
        action_space: Space[Any],
        agents: tuple[str, ...],
        num_envs: int,
        columns: Mapping[str, ColumnLike],
        seed: int,
    ) -> None:
        self._build, self.space, self._action_space = build, space, action_space
        self.agents, self.num_envs = agents, num_envs
        self._columns, self._seed = columns, seed
        self._stories: dict[tuple[int, int], list[Moment]] = {}
        self.report = Report(build().name, space_summary(space))
        piece = self.piece()
        self.acts, self.across = isinstance(piece, ActionConnector), piece.across_agents
        self.outer = self.declared(piece, space)
        self.learnt: Any = {}

    # --- new ones

    def piece(self, made: Connector | None = None) -> Connector:
        """A new connector, or the one that was made, set up for the space."""
        with self.report.asking("making one"):
            piece = self._build() if made is None else made
        if isinstance(piece, Pipeline):
            with self.report.asking("bind()", may_refuse=True):
                if isinstance(piece, ActionConnector):
                    piece.bind(self.space, self.agents)
                else:
                    piece.bind(self.space, self.agents, self._action_space)
            return piece
        piece.agents = self.agents
        if not isinstance(piece, ActionConnector):
            piece.action_space = self._action_space
        outer = self.declared(piece, self.space)
        if isinstance(piece, ActionConnector):
            piece.action_space = outer
        with self.report.asking("setup()", may_refuse=True):
            piece.setup(self.space)
        return piece

    def declared(self, piece: Connector, space: Space[Any]) -> Space[Any]:
        """The space a piece declares to be on the side of the policy, for ``space`` on the other."""
        name = "policy_space()" if isinstance(piece, ActionConnector) else "output_space()"
        with self.report.asking(name, may_refuse=True):
            if isinstance(piece, ActionConnector):
                declared: Any = piece.policy_space(space)
            else:
                assert isinstance(piece, AgentConnector)  # there are no other sides that have spaces
                declared = piece.output_space(space)
        if not isinstance(declared, Space):
            self.report.broken(f"what {name} returns", "a space", type(declared).__name__)
        return declared

    def player(self, *, training: bool | None = None) -> ConnectorDriver:
        """A new connector to play with. It has learnt something, where it does, and has no history.

        Args:
            training: Its mode; None: training where it learns nothing, else eval, so that its answers depend on
                nothing but the rows.
        """
        player = ConnectorDriver(self.report, self.piece())
        if self.learns:
            self.load(player.piece, self.learnt)
        if training is None:
            training = not self.learns
        _ = player.piece.train() if training else player.piece.eval()
        return player

    def load(self, piece: Connector, state: Any) -> None:
        """Load a copy of a state; one without anything in it is of a piece that remembers nothing."""
        if not state:
            return
        with self.report.asking("load_state_dict()"):
            piece.load_state_dict(copy.deepcopy(state))

    # --- what is learnt

    def learn(self) -> None:
        """Find out whether the connector learns anything, and let one do so."""
        player = self.player(training=True)
        for moment in self.moments(seed=_WARM):
            player.see(moment)
        self.learnt = copy.deepcopy(self.merged(player.piece))

    @property
    def learns(self) -> bool:
        """Whether the connector learns anything from data, by what its `merge_states` says."""
        return has_leaves(self.learnt)

    @property
    def modes(self) -> tuple[bool, ...]:
        """The modes, training or not, in which its answers depend on nothing but the rows."""
        return (False,) if self.learns else (True, False)

    def merged(self, *pieces: Connector) -> Any:
        """What these have learnt together."""
        with self.report.asking("merge_states()"):
            merged = pieces[0].merge_states([piece.state_dict() for piece in pieces])
        if not isinstance(merged, Mapping):
            self.report.broken("what merge_states() returns", "a dict", type(merged).__name__)
        return merged

    def first_learnt(self, piece: Connector, merged: Any) -> Any:
        """The part of a merged state that does not depend on what the pieces before it have learnt meanwhile."""
        if not isinstance(piece, Pipeline):
            return merged
        for name in piece.names:
            if has_leaves(merged[name]):
                return {name: self.first_learnt(piece[name], merged[name])}
        return {}

    # --- what it is fed with

    def moments(self, count: int = _LENGTH, *, seed: int = 0) -> list[Moment]:
        """A story, the same one for the same seed; on the action side of rows on which an agent acts."""
        if (count, seed) not in self._stories:
            self._stories[count, seed] = self.fresh_moments(count, seed=seed)
        return self._stories[count, seed]

    def fresh_moments(self, count: int = _LENGTH, *, seed: int = 0) -> list[Moment]:
        """The same, in arrays that no connector has been given yet."""
        obs, action = (_OBS, self.outer) if self.acts else (self.space, self._action_space)
        mask = self.space if self.acts else self._action_space
        story = SampledRows(obs, action, mask, self._columns, self.num_envs, len(self.agents), self._seed + seed)
        moments = story.moments(count)
        return [_acted(moment) for moment in moments] if self.acts else moments

    def alone(self, rows: Rows) -> list[Any]:
        """The smallest parts of rows it may be called with: one row, or one env where it looks across agents."""
        if not self.across:
            return [[i] for i in range(len(rows))]
        return [np.flatnonzero(rows.env_id == env) for env in dict.fromkeys(rows.env_id.tolist())]


def has_leaves(state: Any) -> bool:
    """Whether there is anything in nested dicts and lists."""
    if isinstance(state, Mapping):
        return any(has_leaves(item) for item in state.values())
    if isinstance(state, (list, tuple)):
        return any(has_leaves(item) for item in state)
    return state is not None


def _acted(moment: Moment) -> Moment:
    acting = moment.take(~moment.rows.last)
    answer = acting.answer
    return Moment(acting.rows.replace(**answer, actions_for_env=answer["actions"]), answer, moment.over)
