"""`Trial`: a connector under test, how it is built, and its input; and the drivers that feed it as a collector does."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, Self

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiDiscrete, Space
from numpy.typing import NDArray

from marlvec.connectors.connector import ActionConnector, AgentConnector, Connector, LearnerConnector, is_left_out
from marlvec.connectors.leafwise import space_summary
from marlvec.connectors.pipeline import Pipeline
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, ContractError, UnsupportedSpaceError
from marlvec.sampling import SpaceSampler
from marlvec.spaces import Leaf, SpaceTree, membership
from marlvec.spaces.action_masks import choice_sizes
from marlvec.spaces.equality import Difference, difference, short
from marlvec.trees import Tree, map_tree

_OBS = Box(-np.inf, np.inf, (3,), np.float32)  # the policy's observation, on the action side
_WARM = 1_000  # seed of the episodes that connectors learn from


class ConnectorDriver:
    """Calls a connector, which is set up, as a collector would."""

    def __init__(self, report: TrialReport, piece: Connector) -> None:
        self.report, self.piece = report, piece

    def see(self, step: TrialStep) -> Rows:
        """Play one step in one call; return the rows that came out."""
        return self.see_parts(step, [np.arange(len(step.rows))])[0]

    def watch(self, steps: Iterable[TrialStep]) -> Self:
        """Play steps, each in one call; return this driver."""
        for step in steps:
            self.see(step)
        return self

    def see_parts(self, step: TrialStep, parts: Sequence[Any]) -> list[Rows]:
        """Play one step in several calls, each with some of its rows."""
        shares = [step.take(np.asarray(part, np.int64)) for part in parts]
        outs = [self.call(share.rows) for share in shares]
        for out, share in zip(outs, shares, strict=True):
            self.show_answer(self.answered(out, share))
        if step.over:
            self.reset(list(step.over))
        return outs

    def call(self, rows: Rows) -> Rows:
        """Call the connector, which must return these rows."""
        out = self._call(rows)
        for name in _IDENTITY:
            if name not in out:
                self.report.broken("the columns that come out", f"{name!r} among them", str(list(out.keys())))
        kept = self._kept(rows, out)
        for name in _IDENTITY:
            if not np.array_equal(out[name], rows[name][kept]):
                self.report.broken(f"column {name!r}", "the rows in their order", "other values")
        if is_left_out(self.piece) and (differs := difference(rows, out)):
            hint = "is_identity is for one that returns all rows as they are: a pipeline does not call it"
            self.report.broken(str(differs), differs.expected, differs.got, hint)
        return out

    def answered(self, out: Rows, step: TrialStep) -> Rows:
        """Return the rows that came out, with the policy's answer; without last rows, on which no agent acts."""
        places = {key: i for i, key in enumerate(keys_of(step.rows))}
        came = np.array([places[key] for key in keys_of(out)], np.int64)
        acting = ~step.rows.last[came]
        return out.take(acting).replace(**step.answer.take(came[acting]))

    def show_answer(self, answered: Rows) -> None:
        """Pass the policy's answer to the connector; the action side does not receive it."""
        if len(answered) and not isinstance(self.piece, ActionConnector):
            with self.report.asking("on_policy_output()"):
                self.piece.on_policy_output(answered)

    def reset(self, env_ids: Any) -> None:
        """Reset the connector's memory of envs."""
        with self.report.asking(f"reset({env_ids})"):
            self.piece.reset(env_ids)

    def _call(self, rows: Rows) -> Rows:
        with self.report.asking("the call"):
            out = self.piece(rows)
        if not isinstance(out, Rows):
            self.report.broken("what the call returns", "Rows", type(out).__name__)
        return out

    def _kept(self, rows: Rows, out: Rows) -> Any:
        """Return the positions of the rows that came out."""
        if len(out) == len(rows):
            return np.arange(len(rows))
        subject = f"the number of rows that come out of {len(rows)}"
        if not self.piece.changes_length:
            self.report.broken(subject, str(len(rows)), str(len(out)), "one that removes rows sets changes_length")
        places = {key: i for i, key in enumerate(keys_of(rows))}
        if unknown := [key for key in keys_of(out) if key not in places]:
            self.report.broken("the rows that come out", "some of those that went in", f"(env, agent) {unknown[0]}")
        kept = np.array([places[key] for key in keys_of(out)], np.int64)
        if (np.diff(kept) <= 0).any():
            self.report.broken("the rows that come out", "their order kept, each once", f"those at {kept.tolist()}")
        if gone := np.setdiff1d(np.flatnonzero(rows.last), kept).tolist():
            key = keys_of(rows)[gone[0]]
            self.report.broken("the last row of an episode", "never removed", f"no row of (env, agent) {key}")
        if not isinstance(self.piece, Pipeline) and not hasattr(self.piece, "noop"):
            hint = 'set it to an action of the policy, to "repeat", or to None'
            self.report.broken("attribute noop of one that removes rows", "what those agents do", "none", hint)
        return kept


class Trial(ABC):
    """A connector, which `build` makes, and steps to play to it."""

    both: ClassVar[tuple[bool, ...]]  # modes to check in: True is training, False eval
    length: ClassVar[int]  # steps in the sampled episodes
    cut: ClassVar[int]  # steps before a connector is saved, copied or reset
    _driver: ClassVar[type[ConnectorDriver]] = ConnectorDriver

    def __init__(self, build: Callable[[], Connector], report: TrialReport) -> None:
        self._build, self.report = build, report
        self._sampled: dict[int, list[TrialStep]] = {}  # by seed

    @abstractmethod
    def piece(self, made: Connector | None = None) -> Connector:
        """Return a new connector, or `made`, set up."""

    @abstractmethod
    def fresh_steps(self, *, seed: int = 0) -> list[TrialStep]:
        """Sample episodes in arrays that no connector has been given."""

    def steps(self, *, seed: int = 0) -> list[TrialStep]:
        """Return sampled episodes; the same seed returns the same arrays."""
        if seed not in self._sampled:
            self._sampled[seed] = self.fresh_steps(seed=seed)
        return self._sampled[seed]

    @property
    def before(self) -> list[TrialStep]:
        """The steps before the cut."""
        return self.steps()[: self.cut]

    @property
    def after(self) -> list[TrialStep]:
        """The steps after the cut."""
        return self.steps()[self.cut :]

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
        """Play the steps after the cut; raise if the results of another differ from the player's."""
        for k, step in enumerate(self.after, self.cut):
            expected = player.see(step)
            for other in others:
                self.report.compare(expected, other.see(step), k, condition, hint)


class BatchDriver(ConnectorDriver):
    """Calls a learner connector with whole batches, which have no policy answer."""

    def call(self, rows: Rows) -> Rows:
        """Pass a batch to the connector, and call it; it must return these rows."""
        assert isinstance(self.piece, LearnerConnector)  # checked by the caller
        with self.report.asking("see_batch()"):
            self.piece.see_batch({"main": rows})
        out = self._call(rows)
        if self.piece.changes_length:
            return out
        if len(out) != len(rows):
            subject, hint = f"the number of rows that come out of {len(rows)}", "one that may do so sets changes_length"
            self.report.broken(subject, str(len(rows)), str(len(out)), hint)
        for name in (*_IDENTITY, "unroll_id"):
            if name not in out or not np.array_equal(out[name], rows[name]):
                self.report.broken(f"column {name!r}", "the rows in their order", "other values")
        return out

    def answered(self, out: Rows, step: TrialStep) -> Rows:
        return out.take(slice(0, 0))

    def show_answer(self, answered: Rows) -> None:
        pass


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

    def fresh_steps(self, *, seed: int = 0) -> list[TrialStep]:
        batches = [transitions(*self._drawn, self._seed + seed + k) for k in range(self.length)]
        return [TrialStep(rows, rows) for rows in batches]


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
        super().__init__(build, TrialReport(build().name, space_summary(space)))
        self.space, self._action_space = space, action_space
        self.agents, self.num_envs = agents, num_envs
        self._columns, self._seed = columns, seed
        piece = self.piece()
        self.acts, self.across = isinstance(piece, ActionConnector), piece.across_agents
        self.outer = self.declared(piece, space)  # the space on the policy's side
        self.learnt: Any = {}  # from separate episodes; empty if it learns nothing

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
        """Learn from sampled episodes, to find out whether the connector learns."""
        player = self.player(training=True).watch(self.steps(seed=_WARM))
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

    def fresh_steps(self, *, seed: int = 0) -> list[TrialStep]:
        """Sample episodes in arrays that no connector has been given; on the action side only rows with an action."""
        obs, action = (_OBS, self.outer) if self.acts else (self.space, self._action_space)
        mask = self.space if self.acts else self._action_space
        sampled = SampledRows(obs, action, mask, self._columns, self.num_envs, len(self.agents), self._seed + seed)
        steps = sampled.steps(self.length)
        return [_acted(step) for step in steps] if self.acts else steps

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


def _acted(step: TrialStep) -> TrialStep:
    acting = step.take(~step.rows.last)
    answer = acting.answer
    return TrialStep(acting.rows.replace(**answer, actions_for_env=answer["actions"]), answer, step.over)


ColumnLike = Space[Any] | Callable[[Rows], Tree]
"""A column: the space of one row's value, or a function from the rows to the whole column."""
_STATE = Box(-np.inf, np.inf, (5,), np.float32)
_NUMBER = Box(-np.inf, np.inf, (), np.float64)


@dataclass(frozen=True)
class TrialStep:
    """One call's rows, the policy's answer and the resets after it."""

    rows: Rows  # without the policy's answer
    answer: Rows  # one entry per row
    over: tuple[int, ...] = ()  # envs to reset afterwards: their episode ended or was lost

    def take(self, index: Any) -> TrialStep:
        """Return this step with some of its rows, and all of ``over``."""
        return TrialStep(self.rows.take(index), self.answer.take(index), self.over)

    def of_envs(self, env_ids: NDArray[Any] | tuple[int, ...]) -> TrialStep:
        """Return the rows and resets of these envs only."""
        chosen = self.take(np.isin(self.rows.env_id, env_ids))
        return TrialStep(chosen.rows, chosen.answer, tuple(env for env in self.over if env in env_ids))

    def beside(self, other: TrialStep) -> TrialStep:
        """Return this step's rows followed by those of other envs."""
        rows, answer = Rows.concat([self.rows, other.rows]), Rows.concat([self.answer, other.answer])
        return TrialStep(rows, answer, (*self.over, *other.over))


class SampledRows:
    """Draws steps, one after the other.

    In a step some envs have no rows, and others not every agent. An agent's episode may begin later than its env's,
    end earlier, and end without an action. Some episodes are lost midway. Episodes with different seeds share no
    ``eps_id``. `mask` is the space that ``action_mask`` is for; if it has no choices, there is no such column.
    """

    def __init__(
        self,
        obs: Space[Any],
        action: Space[Any],
        mask: Space[Any],
        columns: Mapping[str, ColumnLike],
        num_envs: int,
        num_agents: int,
        seed: int,
    ) -> None:
        self._obs, self._action, self._columns = SpaceTree(obs), SpaceTree(action), columns
        self._choices = mask if isinstance(mask, (Discrete, MultiDiscrete)) else None
        self._shape = num_envs, num_agents
        self._seed = seed
        self._moment = 0
        self._rng = np.random.default_rng([seed, 0])
        self._eps_id = np.arange(num_envs) + seed * 1_000 * num_envs
        self._turn = np.zeros(self._shape, np.int64)
        self._begun = np.zeros(self._shape, np.bool_)
        self._ended = np.zeros(self._shape, np.bool_)

    def steps(self, count: int) -> list[TrialStep]:
        """Return the next steps, in order."""
        return [self._next() for _ in range(count)]

    def _next(self) -> TrialStep:
        rng, (n, a) = self._rng, self._shape
        self._moment += 1
        # All agents are present in the first three steps, so that nothing depends on which came first.
        there = rng.random((n, a)) < 0.8 if self._moment > 3 else np.ones((n, a), np.bool_)
        there &= ((rng.random(n) < 0.8) | (self._moment <= 3))[:, None]
        there &= ~self._ended
        first = there & ~self._begun
        last = there & (rng.random((n, a)) < 0.12) & (self._moment > 2)
        lost = (rng.random(n) < 0.04) & (self._moment > 4)
        self._begun |= there
        self._ended |= last
        over = self._ended.all(axis=1) | lost
        step = self._draw(np.flatnonzero(there), first, last, tuple(np.flatnonzero(over).tolist()))
        self._turn[there & ~last] += 1
        self._turn[over], self._begun[over], self._ended[over] = 0, False, False
        self._eps_id[over] += n
        return step

    def _draw(self, where: NDArray[Any], first: Any, last: Any, over: tuple[int, ...]) -> TrialStep:
        (n, a), size = self._shape, self._shape[0] * self._shape[1]
        rng = np.random.default_rng([self._seed, self._moment])
        env_id, agent_index = np.divmod(np.arange(size), a)
        cut = rng.random(size) < 0.5
        ends, begins = last.reshape(-1), first.reshape(-1)
        columns: dict[str, Tree] = {
            "env_id": env_id,
            "agent_index": agent_index,
            "eps_id": self._eps_id[env_id],
            "t": self._turn.reshape(-1).copy(),
            "obs": sampled(self._obs, rng, size),
            "rewards": np.where(begins, 0.0, rng.normal(size=size)),
            "terminated": ends & ~cut,
            "truncated": ends & cut,
            "first": begins,
            "last": ends,
            "state": sampled(SpaceTree(_STATE), rng, n)[env_id],
        }
        if self._choices is not None:
            columns["action_mask"] = _mask(self._choices, rng, size) | ends[:, None]
        answer: dict[str, Tree] = {
            "actions": sampled(self._action, rng, size),
            "logp": rng.normal(size=size).astype(np.float32),
            "values": sampled(SpaceTree(_NUMBER), rng, size),
        }
        rows = Rows(columns).take(where)
        answers = Rows(answer).take(where)
        for name, like in self._columns.items():
            column = sampled(SpaceTree(like), rng, size) if isinstance(like, Space) else None
            # In order: a function sees the columns before its own.
            made = _made(name, like, rows) if column is None else Rows({name: column}).take(where)[name]
            rows, answers = rows.replace(**{name: made}), answers.replace(**{name: made})
        return TrialStep(rows, answers, over)


def sampled(tree: SpaceTree, rng: np.random.Generator, n: int) -> Tree:
    """Draw (n, …) members of a space; about a tenth of a bounded Box's numbers are bounds."""
    leaves = tree.flatten(SpaceSampler(tree).sample(rng, n))
    for i, leaf in enumerate(tree.leaves):
        space = leaf.space
        if isinstance(space, Box):
            at = rng.random(leaves[i].shape)
            leaves[i] = np.where((at < 0.05) & space.bounded_below, space.low, leaves[i])
            leaves[i] = np.where((at > 0.95) & space.bounded_above, space.high, leaves[i])
    return tree.unflatten(leaves)


def _made(name: str, like: Any, rows: Rows) -> Tree:
    if not callable(like):
        raise ArgumentError(f"column {name!r}: expected a space or a function of rows, got {type(like).__name__}")
    return map_tree(np.asarray, like(rows))


def _mask(space: Discrete | MultiDiscrete, rng: np.random.Generator, n: int) -> NDArray[np.bool_]:
    """Return a mask (n, k) of about half of the choices, at least one in each dimension."""
    parts = [(rng.random((n, k)) < 0.5) | (np.arange(k) == rng.integers(k, size=(n, 1))) for k in choice_sizes(space)]
    return np.concatenate(parts, axis=1)


_LENGTH = 20  # steps of the sampled episodes


def transitions(
    obs: Space[Any], action: Space[Any], columns: Mapping[str, ColumnLike], num_envs: int, num_agents: int, seed: int
) -> Rows:
    """Draw the rows of one policy's batch, fragment after fragment, each in time order.

    The columns are those of a `SampleBatch`; ``state`` and ``next_state``; ``logp`` and ``values`` of the policy; and
    the columns that learner connectors add: ``next_values``, ``target_logp``, ``advantages``. Long fragments are cut
    in two.
    """
    steps = SampledRows(obs, action, action, columns, num_envs, num_agents, seed).steps(_LENGTH)
    rows = Rows.concat([step.rows for step in steps])
    answer = Rows.concat([step.answer for step in steps])
    before, after, fragment = _steps(rows)
    now, then, given = rows.take(before), rows.take(after), answer.take(before)
    rng = np.random.default_rng([seed, _LENGTH])
    n = len(now)
    made: dict[str, Tree] = {
        **{
            name: column
            for name, column in now.items()
            if name not in ("rewards", "terminated", "truncated", "first", "last")
        },
        **given,
        "actions_for_env": given["actions"],
        "rewards": then["rewards"],
        "next_obs": then["obs"],
        "next_state": then["state"],
        "terminated": then["terminated"],
        "truncated": then["truncated"],
        "unroll_id": fragment,
        "policy_version": np.zeros(n, np.int64),
        "next_values": answer.take(after)["values"],
        "target_logp": given["logp"] + rng.normal(size=n).astype(np.float32) / 4,
        "advantages": rng.normal(size=n).astype(np.float32),
    }
    return Rows(made)


def _steps(rows: Rows) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return where each transition begins and ends, and its fragment number."""
    lanes = list(zip(rows.eps_id.tolist(), rows.agent_index.tolist(), strict=True))
    before, after, fragment, number = [], [], [], 0
    for lane in dict.fromkeys(lanes):
        at = [i for i, other in enumerate(lanes) if other == lane]
        cut = len(at) // 2 if len(at) > 6 else 0
        for k in range(len(at) - 1):
            before.append(at[k])
            after.append(at[k + 1])
            fragment.append(number + (k >= cut > 0))
        number += 2
    return np.array(before, np.int64), np.array(after, np.int64), np.array(fragment, np.int64)


_IDENTITY = ("env_id", "agent_index", "eps_id", "t")
"""Columns that identify a row."""


_ULPS = 64.0  # rounding of a sum taken in another order
_LEARNT = 1e-6  # rounding of learnt statistics


def summed(expected: NDArray[Any], got: NDArray[Any]) -> NDArray[np.bool_]:
    """Return (…,) bool, whether numbers differ by no more than the rounding of a sum in another order."""
    return _within(expected, got, _ULPS * float(np.finfo(expected.dtype).eps), 0.0)


def learnt(expected: NDArray[Any], got: NDArray[Any]) -> NDArray[np.bool_]:
    """Return (…,) bool, whether numbers differ by no more than the rounding of statistics learnt in another order."""
    return _within(expected, got, _LEARNT, 1.0)


def _within(expected: NDArray[Any], got: NDArray[Any], tolerance: float, least: float) -> NDArray[np.bool_]:
    scale = float(np.abs(expected[np.isfinite(expected)]).max(initial=least))
    close: NDArray[np.bool_] = np.isclose(got, expected, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
    return close


def outsider(space: Space[Any], tree: Any, n: int, *, exact: bool = True) -> Difference | None:
    """Return the first value of a column of n rows outside its space.

    `exact`: each leaf must have the space's dtype; else a lossless conversion is enough.
    """
    spaces = SpaceTree(space)
    try:
        values = spaces.flatten(tree)
    except ContractError as error:
        return Difference("", (), "the structure of the space", str(error))
    return next(
        (found for leaf, v in zip(spaces.leaves, values, strict=True) if (found := _in(leaf, v, n, exact))), None
    )


def _in(leaf: Leaf, value: Any, n: int, exact: bool) -> Difference | None:
    if not isinstance(value, np.ndarray):
        return Difference(leaf.path, (), "an array", f"{type(value).__name__} {short(value)}")
    if value.shape != (n, *leaf.shape):
        return Difference(leaf.path, (), f"shape {(n, *leaf.shape)}", str(value.shape))
    if value.dtype != leaf.dtype and (exact or not _fits(value, leaf.dtype)):
        return Difference(leaf.path, (), f"dtype {leaf.dtype}", str(value.dtype))
    members, everywhere = membership(leaf, in_buffer=False), np.ones((n, 1), np.bool_)
    if members is None or (good := members.rows(value[:, None], everywhere)).all():
        return None
    row = int(np.argmin(good))
    return Difference(leaf.path, (row,), *members.refuse(value[row, ...]))


def _fits(value: NDArray[Any], dtype: np.dtype[Any]) -> bool:
    return np.can_cast(value.dtype, dtype, "same_kind") and bool(
        (value.astype(dtype) == value).all() or dtype.kind == "f"
    )


Key = tuple[int, int]
"""(env, agent)"""


class Refused(Exception):
    """The connector rejects this space with the documented error, `error`."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class TrialReport:
    """Reports faults of one connector on one input, which `on` describes."""

    def __init__(self, connector: str, on: str) -> None:
        self.connector, self.on = connector, on
        self.check = "setup"

    def broken(self, subject: str, expected: str, got: str, hint: str = "") -> NoReturn:
        """Raise the `ContractError` of a fault."""
        what = f"{subject}: expected {expected}, got {got}" + (f"; {hint}" if hint else "")
        raise ContractError(f"{self.connector}, check {self.check!r}, on {self.on}: {what}")

    @contextmanager
    def asking(self, subject: str, *, may_refuse: bool = False) -> Iterator[None]:
        """Turn any error of the connector into a `ContractError` that names the call.

        `may_refuse`: it may reject the space here.
        """
        try:
            yield
        except Exception as error:
            if may_refuse and isinstance(error, (ArgumentError, UnsupportedSpaceError)):
                raise Refused(error) from error
            notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
            hint = "what it cannot take it refuses in output_space() or policy_space(); columns={name: space} adds some"
            try:
                self.broken(subject, "no error", f"{type(error).__name__}: {error}{notes}", hint)
            except ContractError as broken:
                raise broken from error

    def same(self, expected: Any, got: Any, subject: str, hint: str = "") -> None:
        """Raise if two values differ in any bit."""
        if differs := difference(expected, got):
            self.broken(f"{subject}, {differs}", differs.expected, differs.got, hint)

    def same_learnt(self, expected: Any, got: Any, subject: str, hint: str = "") -> None:
        """Raise if two merged states differ by more than a millionth, whatever their number types."""
        if differs := difference(expected, got, close=learnt, typed=False):
            self.broken(f"{subject}, {differs}", differs.expected, differs.got, hint)

    def compare(
        self, expected: Rows, got: Rows, step: int, condition: str, hint: str = "", *, near: bool = False
    ) -> None:
        """Raise if rows differ from the expected ones, which may be more, in any order.

        `condition` must make no difference, e.g. ``"in any order"``; `near`: floats may differ in their last digits.
        """
        places = {key: i for i, key in enumerate(keys_of(expected))}
        if more := [key for key in keys_of(got) if key not in places]:
            self.broken(f"step {step}, (env, agent) {more[0]}", f"no row {condition}", "one", hint)
        expected = expected.take(np.array([places[key] for key in keys_of(got)], np.int64))
        if differs := difference(expected, got, close=summed if near else None):
            where = place(differs, got)
            self.broken(f"step {step}, {where}", f"{differs.expected} {condition}", differs.got, hint)


class BatchReport(TrialReport):
    """A `TrialReport` of finished batches, whose rows are compared in order; a step is a batch."""

    def compare(
        self, expected: Rows, got: Rows, step: int, condition: str, hint: str = "", *, near: bool = False
    ) -> None:
        if differs := difference(expected, got, close=summed if near else None):
            row = f", row {differs.at[0]}" if differs.at else ""
            where = f"column {differs.path!r}{row}" if differs.path else "the columns"
            self.broken(f"batch {step}, {condition}, {where}", differs.expected, differs.got, hint)


def keys_of(rows: Rows) -> list[Key]:
    """Return (env, agent) of each row."""
    return list(zip(rows.env_id.tolist(), rows.agent_index.tolist(), strict=True))


def place(differs: Difference, rows: Rows) -> str:
    """Name the place of a difference between rows."""
    if not differs.path:
        return "the columns"
    if not differs.at:
        return f"column {differs.path!r}"
    env, agent = keys_of(rows)[differs.at[0]]
    inner = differs.at[1:]
    return f"column {differs.path!r} of env {env}, agent {agent}" + (f", index {inner}" if inner else "")
