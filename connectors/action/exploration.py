"""Exploration: random actions, and noise on actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np
from gymnasium.spaces import Space
from numpy.typing import NDArray

from marlvec.connectors.action.valid_actions import BoxActions, Choices, ExecutedActions, FloatBoxes, is_given, row_name
from marlvec.connectors.agent_tables import AgentTable, Remembers, Tables, load_tables, save_tables
from marlvec.connectors.connector import ActionConnector, EnvIds, PositiveInt, Probability, State, from_setup
from marlvec.connectors.rows import RowRandom, Rows
from marlvec.errors import ArgumentError, UnsupportedSpaceError
from marlvec.spaces import SpaceTree


class _Counts(AgentTable):
    """Decisions of each (env, agent); envs beyond those of a loaded state begin at the agent's highest count there."""

    def __init__(self) -> None:
        super().__init__((), np.int64)
        self.start_A = np.zeros(0, np.int64)  # by agent

    def _grow(self, env_id: NDArray[Any], agent_index: NDArray[Any]) -> None:
        n = len(self.values)
        super()._grow(env_id, agent_index)
        if self.start_A.size:
            a = self.values.shape[1]
            self.values[n:] = np.append(self.start_A, np.full(a, self.start_A.max()))[:a]


@dataclass(eq=False, repr=False)
class Decaying(ActionConnector):
    """A connector with a number that changes linearly with an agent's decisions.

    Each (env, agent) counts its own decisions, over all its episodes: with a common count, an agent's actions would
    depend on the other rows of the batch. Counts are learnt state: they survive the end of an episode. Loaded into more
    envs, new envs begin at the highest saved count of the same agent.
    """

    final: float | None = field(default=None, kw_only=True)
    decay_steps: PositiveInt | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.final is None) != (self.decay_steps is None):
            raise ArgumentError(
                f"give final and decay_steps, or neither; got final={self.final}, decay_steps={self.decay_steps}"
            )
        self._count = _Counts()
        self._learnt: Tables = {} if self.decay_steps is None else {"count": self._count}

    def _count_decisions(self, rows: Rows) -> None:
        if self.decay_steps is not None:
            self._count.set(rows.env_id, rows.agent_index, self._count.get(rows.env_id, rows.agent_index) + 1)

    def _decayed(self, start: Any, rows: Rows) -> Any:
        """Return the current value: ``start`` without decay; else (n, 1), or (n, D) for a start of D numbers."""
        if self.decay_steps is None or self.final is None:
            return start
        done = np.minimum(self._count.get(rows.env_id, rows.agent_index) / self.decay_steps, 1)
        value: NDArray[np.float64] = start + (self.final - start) * done[:, None]
        return value

    def state_dict(self) -> State:
        return save_tables(self._learnt)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        load_tables(state, self._learnt, self.name)
        self._count.start_A = self._count.values.max(axis=0, initial=0)

    def reset(self, env_ids: EnvIds | None = None) -> None:
        """Keep the counts; envs that were not seen get theirs, so that a saved state has all envs."""
        envs = np.asarray(() if env_ids is None or self.decay_steps is None else env_ids, np.int64)
        if envs.size and envs.max() >= len(self._count.values):
            self._count.get(envs.max(keepdims=True), np.zeros(1, np.int64))

    def take_merged(self, state: Mapping[str, Any]) -> None:
        """Load merged counts where they are higher; keep the other counts."""
        if state:
            self.load_state_dict(self.merge_states([self.state_dict(), state]))

    def merge_states(self, states: Sequence[Mapping[str, Any]]) -> State:
        """Merge states: each agent's highest count; without states, return this connector's.

        Not their sums: counts that were merged and loaded once would be counted again by the next merge.
        """
        if self.decay_steps is None or not states:
            return self.state_dict()
        merged = AgentTable((), np.int64)
        for state in states:
            if state.keys() != {"count"}:
                raise ArgumentError(f"expected the state key 'count', got {list(state)}")
            count = np.asarray(state["count"]["values"])
            env_id, agent_index = (index.ravel() for index in np.indices(count.shape))
            merged.set(env_id, agent_index, np.maximum(merged.get(env_id, agent_index), count.ravel()))
        return {"count": merged.state_dict()}


@dataclass(eq=False, repr=False)
class EpsilonGreedy(Decaying):
    """Replaces an agent's action by a random one with probability ``epsilon``, while training.

    The batch gets a column ``actions_executed``: what the agent did, in the policy's space. Off-policy learners
    (Q-learning) take this column; ``actions`` stays what the policy chose. Actions that no policy chose
    (``off_policy``) pass unchanged.

    Draws uniformly from every Discrete and MultiDiscrete of the action; within ``action_mask`` if the whole action is
    one of these and rows have the column. Other leaves pass unchanged.

    With ``final`` and ``decay_steps`` the probability changes linearly from ``epsilon`` to ``final``. Each agent of
    each env counts its own decisions, so with 16 envs a decay over 16,000 steps in total is ``decay_steps=1000``. A
    new value of ``epsilon`` applies from the next call.

    Args:
        epsilon: Initial probability.
        final: Probability after the decay; None to stay at ``epsilon``.
        decay_steps: Decisions of an agent, while training, until then.
        seed: Equal seeds give equal draws.

    Raises:
        ArgumentError: A probability is not in [0, 1], or only one of ``final`` and ``decay_steps`` is given.
        UnsupportedSpaceError: In `bind`: the space has no Discrete or MultiDiscrete.
        ContractError: In a call: a mask does not fit the space, or allows nothing.
    """

    epsilon: Probability = 0.1
    _: KW_ONLY
    final: Probability | None = None
    seed: int = 0

    _tree = from_setup(SpaceTree)
    _executed = from_setup(ExecutedActions)
    _size = from_setup(int)  # draws per row

    def __post_init__(self) -> None:
        super().__post_init__()
        self._random = RowRandom(self.seed, "EpsilonGreedy")

    def __call__(self, rows: Rows) -> Rows:
        if not self.training:
            return self._executed.send(rows, rows.actions_for_env, chooses=True)
        drawn = self._random.uniform(rows, 1 + self._size)
        which = np.flatnonzero((drawn[:, :1] < self._decayed(self.epsilon, rows))[:, 0] & ~is_given(rows))
        self._count_decisions(rows)
        mask = self._mask(rows)
        leaves = self._tree.flatten(rows.actions_for_env)
        at = 1
        for i, choices in self._choices:
            end = at + len(choices.sizes)
            chosen = choices.pick(
                drawn[which, at:end], None if mask is None else mask[which], lambda j: row_name(rows, int(which[j]))
            )
            picked = choices.write(chosen)
            given = np.asarray(leaves[i])
            # Also if no row explores: else the dtype would depend on the rows in the
            # batch.
            leaves[i] = given.astype(np.result_type(given, picked))
            leaves[i][which] = picked
            at = end
        return self._executed.send(rows, self._tree.unflatten(leaves), chooses=True)

    def _mask(self, rows: Rows) -> NDArray[np.bool_] | None:
        """Return the rows' mask, if masks are of the whole action."""
        if not self._tree.is_leaf or "action_mask" not in rows:
            return None
        return self._choices[0][1].check(rows.action_mask)

    def setup(self, space: Space[Any]) -> None:
        self._tree, self._choices = SpaceTree(space), _choices(space)
        self._executed = ExecutedActions(space, self.action_space, self.undone_by)
        self._size = sum(len(choices.sizes) for _, choices in self._choices)

    def policy_space(self, space: Space[Any]) -> Space[Any]:
        if not _choices(space):
            raise UnsupportedSpaceError(
                f"EpsilonGreedy needs a Discrete or MultiDiscrete to choose from, got {space}; "
                f"put DiscretizeActions behind it, or use GaussianNoise"
            )
        return space


def _choices(space: Space[Any]) -> list[tuple[int, Choices]]:
    found = enumerate(Choices.of(leaf.space) for leaf in SpaceTree(space).leaves)
    return [(i, choices) for i, choices in found if choices is not None]


def _noisy(
    rows: Rows, boxes: FloatBoxes, noise_nD: NDArray[np.float64], executed: ExecutedActions, *, clip: bool
) -> Rows:
    given = is_given(rows)
    actions = boxes.add(rows.actions_for_env, noise_nD, clip=clip)
    if given.any():
        parts = zip(boxes.tree.flatten(actions), boxes.tree.flatten(rows.actions_for_env), strict=True)
        kept = []
        for noisy, before in parts:
            leaf = np.array(noisy)
            leaf[given] = np.asarray(before)[given]
            kept.append(leaf)
        actions = boxes.tree.unflatten(kept)
    return executed.send(rows, actions, chooses=True)


@dataclass(eq=False, repr=False)
class GaussianNoise(Decaying, BoxActions):
    """Adds independent normal noise to every element of every Box of floats, while training.

    Other leaves, and actions that no policy chose (``off_policy``), pass unchanged. Off-policy learners (DDPG, TD3)
    take the column ``actions_executed``, as with `EpsilonGreedy`, which also describes ``final`` and ``decay_steps``.
    ``std`` is in the units of the actions: before `UnsquashActions` they go from -1 to 1, whatever the env's bounds,
    and that is where this belongs.

    Args:
        std: Initial standard deviation: one number, or one per element of all Boxes, in order.
        final: Deviation after the decay; None to stay at ``std``.
        decay_steps: Decisions of an agent, while training, until then.
        clip: Whether to clip the noisy actions to the bounds of the Box.
        seed: Equal seeds give equal noise.

    Raises:
        ArgumentError: A deviation is not a number from 0 on, or only one of ``final`` and ``decay_steps`` is given.
        UnsupportedSpaceError: In `bind`: it has no Box of floats, or not as many elements as ``std``.
    """

    std: float | Sequence[float] = 0.1
    _: KW_ONLY
    clip: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("std", self.std), ("final", 0.0 if self.final is None else self.final)):
            number = np.asarray(value, np.float64)
            if number.ndim > 1 or not (np.isfinite(number) & (number >= 0)).all():
                raise ArgumentError(f"{name} must be a number from 0 on, got {value}")
        self._random = RowRandom(self.seed, "GaussianNoise")

    def __call__(self, rows: Rows) -> Rows:
        if not self.training:
            return self._executed.send(rows, rows.actions_for_env, chooses=True)
        std: NDArray[np.float64] = self._decayed(np.asarray(self.std, np.float64), rows)
        self._count_decisions(rows)
        noise = self._random.normal(rows, self._boxes.size) * std
        return _noisy(rows, self._boxes, noise, self._executed, clip=self.clip)

    def policy_space(self, space: Space[Any]) -> Space[Any]:
        boxes, given = FloatBoxes(space), np.shape(self.std)
        boxes.need("GaussianNoise")
        if given not in ((), (boxes.size,)):
            raise UnsupportedSpaceError(
                f"std has {given[0]} numbers for the {boxes.size} elements of the float Boxes in {space}"
            )
        return space


@dataclass(eq=False, repr=False)
class OrnsteinUhlenbeckNoise(Remembers, BoxActions):
    """Adds an Ornstein–Uhlenbeck process to every element of every Box of floats, while training.

    The batch gets a column ``actions_executed``, and ``off_policy`` actions pass unchanged, as with `GaussianNoise`.
    Each agent has a process of its own, which starts at 0 in each episode and takes one step before each decision:

        x += -theta * x * dt + sigma * sqrt(dt) * N(0, 1)

    This is the noise of Lillicrap et al., "Continuous control with deep reinforcement learning", 2015, whose theta and
    sigma are the defaults; with the ``dt`` of OpenAI's baselines. Other leaves pass unchanged. The noise is in the
    units of the actions: before `UnsquashActions` they go from -1 to 1, and that is where this belongs.

    Args:
        theta: Rate of return to 0.
        sigma: Scale of the random steps.
        dt: Time from one decision to the next.
        clip: Whether to clip the noisy actions to the bounds of the Box.
        seed: Equal seeds give equal noise.

    Raises:
        ArgumentError: ``theta`` or ``sigma`` is below 0, or ``dt`` not above it.
        UnsupportedSpaceError: In `bind`: it has no Box of floats.
    """

    theta: float = 0.15
    sigma: float = 0.2
    dt: float = 1e-2
    _: KW_ONLY
    clip: bool = True
    seed: int = 0

    _x = from_setup(AgentTable)

    def __post_init__(self) -> None:
        numbers = self.theta, self.sigma, self.dt
        if not (self.theta >= 0 and self.sigma >= 0 and self.dt > 0 and np.isfinite(numbers).all()):
            raise ArgumentError(
                "theta and sigma must be numbers from 0 on, dt above 0; got "
                f"theta={self.theta}, sigma={self.sigma}, dt={self.dt}"
            )
        self._random = RowRandom(self.seed, "OrnsteinUhlenbeckNoise")

    def __call__(self, rows: Rows) -> Rows:
        x = self._x.get(rows.env_id, rows.agent_index)
        if "first" in rows:
            x[rows.first] = 0
        if self.training:
            normal = self._random.normal(rows, self._boxes.size)
            x += -self.theta * self.dt * x + self.sigma * np.sqrt(self.dt) * normal
        # In evaluation too: the episodes that end there must not pass their noise on to the next ones.
        self._x.set(rows.env_id, rows.agent_index, x)
        if not self.training:
            return self._executed.send(rows, rows.actions_for_env, chooses=True)
        return _noisy(rows, self._boxes, x, self._executed, clip=self.clip)

    def setup(self, space: Space[Any]) -> None:
        super().setup(space)
        if not self._tables or self._x.shape != (self._boxes.size,):
            self._x = AgentTable((self._boxes.size,))
            self._tables = {"x": self._x}

    def policy_space(self, space: Space[Any]) -> Space[Any]:
        FloatBoxes(space).need("OrnsteinUhlenbeckNoise")
        return space
