"""`Trial`: a connector under test, how it is built, and its input."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from gymnasium.spaces import Box, Space

from marlvec.connectors._support.leafwise_obs import space_summary
from marlvec.connectors.connector import ActionConnector, AgentConnector, Connector
from marlvec.connectors.pipeline import Pipeline
from marlvec.connectors.rows import Rows
from marlvec.testing.connector_checks.player import BatchDriver, ConnectorDriver
from marlvec.testing.connector_checks.report import BatchReport, Report
from marlvec.testing.connector_checks.story import ColumnLike, Moment, SampledRows, transitions

__all__ = ["BatchTrial", "EpisodeTrial", "Trial", "has_leaves"]

_OBS = Box(-np.inf, np.inf, (3,), np.float32)  # the policy's observation, on the action side
_WARM = 1_000  # seed of the story that connectors learn from


class Trial(ABC):
    """A connector, which `build` makes, and moments to play to it."""

    both: ClassVar[tuple[bool, ...]]  # modes to check in: True is training, False eval
    length: ClassVar[int]  # of a story, in moments
    cut: ClassVar[int]  # moments before a connector is saved, copied or reset
    _driver: ClassVar[type[ConnectorDriver]] = ConnectorDriver

    def __init__(self, build: Callable[[], Connector], report: Report) -> None:
        self._build, self.report = build, report
        self._stories: dict[int, list[Moment]] = {}

    @abstractmethod
    def piece(self, made: Connector | None = None) -> Connector:
        """Return a new connector, or `made`, set up."""

    @abstractmethod
    def fresh_moments(self, *, seed: int = 0) -> list[Moment]:
        """Draw a story in arrays that no connector has been given."""

    def moments(self, *, seed: int = 0) -> list[Moment]:
        """Return a story; the same seed returns the same arrays."""
        if seed not in self._stories:
            self._stories[seed] = self.fresh_moments(seed=seed)
        return self._stories[seed]

    @property
    def before(self) -> list[Moment]:
        """The story's moments before the cut."""
        return self.moments()[: self.cut]

    @property
    def after(self) -> list[Moment]:
        """The story's moments after the cut."""
        return self.moments()[self.cut :]

    def driver(self, piece: Connector, *, training: bool = True) -> ConnectorDriver:
        """Put a connector into training or eval mode, and return its driver."""
        _ = piece.train() if training else piece.eval()
        return self._driver(self.report, piece)

    def player(self, *, training: bool | None = None) -> ConnectorDriver:
        """Return the driver of a new connector, in training mode by default."""
        return self.driver(self.piece(), training=training is not False)

    def load(self, piece: Connector, state: Any) -> None:
        """Load a state, unless it is empty: then the connector remembers nothing."""
        if state:
            with self.report.asking("load_state_dict()"):
                piece.load_state_dict(state)

    def go_on(self, player: ConnectorDriver, others: Sequence[ConnectorDriver], condition: str, hint: str = "") -> None:
        """Play the moments after the cut; raise if the results of another differ from the player's."""
        for k, moment in enumerate(self.after, self.cut):
            expected = player.see(moment)
            for other in others:
                self.report.compare(expected, other.see(moment), k, condition, hint)


class BatchTrial(Trial):
    """A learner connector, and finished batches for it."""

    both, length, cut = (True,), 3, 1
    _driver = BatchDriver

    def __init__(
        self,
        build: Callable[[], Connector],
        obs: Space[Any],
        action: Space[Any],
        columns: Mapping[str, ColumnLike],
        num_envs: int,
        num_agents: int,
        seed: int,
    ) -> None:
        super().__init__(build, BatchReport(build().name, f"batches with obs {space_summary(obs)}"))
        self._drawn, self._seed = (obs, action, columns, num_envs, num_agents), seed

    def piece(self, made: Connector | None = None) -> Connector:
        with self.report.asking("making one"):
            return self._build() if made is None else made

    def fresh_moments(self, *, seed: int = 0) -> list[Moment]:
        batches = [transitions(*self._drawn, self._seed + seed + k) for k in range(self.length)]
        return [Moment(rows, rows) for rows in batches]


class EpisodeTrial(Trial):
    """A connector of the agent or the action side on one space.

    `space` is of one observation at its input on the agent side, of one action at its output on the action side, where
    `action_space` is derived. `Refused`: the connector rejects this space.
    """

    both, length, cut = (True, False), 12, 6

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
        super().__init__(build, Report(build().name, space_summary(space)))
        self.space, self._action_space = space, action_space
        self.agents, self.num_envs = agents, num_envs
        self._columns, self._seed = columns, seed
        piece = self.piece()
        self.acts, self.across = isinstance(piece, ActionConnector), piece.across_agents
        self.outer = self.declared(piece, space)  # the space on the policy's side
        self.learnt: Any = {}  # from a separate story; empty if it learns nothing

    # --- new connectors

    def piece(self, made: Connector | None = None) -> Connector:
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
        """Return the space that a connector declares on the policy's side, for ``space`` on the other."""
        name = "policy_space()" if isinstance(piece, ActionConnector) else "output_space()"
        with self.report.asking(name, may_refuse=True):
            if isinstance(piece, ActionConnector):
                declared: Any = piece.policy_space(space)
            else:
                assert isinstance(piece, AgentConnector)  # no other side has spaces
                declared = piece.output_space(space)
        if not isinstance(declared, Space):
            self.report.broken(f"what {name} returns", "a space", type(declared).__name__)
        return declared

    def player(self, *, training: bool | None = None) -> ConnectorDriver:
        """Return the driver of a new connector, which has what was learnt, but no history.

        By default it is training if it learns nothing, else in eval, so that results depend on the rows alone.
        """
        piece = self.piece()
        if self.learns:
            self.load(piece, copy.deepcopy(self.learnt))
        return self.driver(piece, training=training if training is not None else not self.learns)

    # --- what is learnt

    def learn(self) -> None:
        """Learn from a story, to find out whether the connector learns."""
        player = self.player(training=True).watch(self.moments(seed=_WARM))
        self.learnt = copy.deepcopy(self.merged(player.piece))

    @property
    def learns(self) -> bool:
        """Whether the connector learns from data, according to its `merge_states`."""
        return has_leaves(self.learnt)

    @property
    def modes(self) -> tuple[bool, ...]:
        """Modes, training or not, in which results depend on the rows alone."""
        return (False,) if self.learns else (True, False)

    def merged(self, *pieces: Connector) -> Any:
        """Return what these connectors learnt together."""
        with self.report.asking("merge_states()"):
            merged = pieces[0].merge_states([piece.state_dict() for piece in pieces])
        if not isinstance(merged, Mapping):
            self.report.broken("what merge_states() returns", "a dict", type(merged).__name__)
        return merged

    def first_learnt(self, piece: Connector, merged: Any) -> Any:
        """Return the part of a merged state that does not depend on what earlier pieces learnt meanwhile."""
        if not isinstance(piece, Pipeline):
            return merged
        for name in piece.names:
            if has_leaves(merged[name]):
                return {name: self.first_learnt(piece[name], merged[name])}
        return {}

    # --- input

    def fresh_moments(self, *, seed: int = 0) -> list[Moment]:
        """Draw a story in arrays that no connector has been given; on the action side only rows with an action."""
        obs, action = (_OBS, self.outer) if self.acts else (self.space, self._action_space)
        mask = self.space if self.acts else self._action_space
        story = SampledRows(obs, action, mask, self._columns, self.num_envs, len(self.agents), self._seed + seed)
        moments = story.moments(self.length)
        return [_acted(moment) for moment in moments] if self.acts else moments

    def alone(self, rows: Rows) -> list[Any]:
        """Return the smallest parts of rows to call it with: one row, or one env with across_agents."""
        if not self.across:
            return [[i] for i in range(len(rows))]
        return [np.flatnonzero(rows.env_id == env) for env in dict.fromkeys(rows.env_id.tolist())]


def has_leaves(state: Any) -> bool:
    """Return whether nested dicts and lists contain anything."""
    if isinstance(state, Mapping):
        return any(has_leaves(item) for item in state.values())
    if isinstance(state, (list, tuple)):
        return any(has_leaves(item) for item in state)
    return state is not None


def _acted(moment: Moment) -> Moment:
    acting = moment.take(~moment.rows.last)
    answer = acting.answer
    return Moment(acting.rows.replace(**answer, actions_for_env=answer["actions"]), answer, moment.over)
