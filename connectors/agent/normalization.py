"""Observations and rewards normalized by running statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Space
from numpy.typing import NDArray

from marlvec.connectors._support.agent_table import AgentTable
from marlvec.connectors._support.moments import RunningMoments, load_moments, merge_moments, save_moments
from marlvec.connectors.connector import AgentConnector, EnvIds, State, from_setup
from marlvec.connectors.parameters import PositiveFloat, UnitFloat
from marlvec.connectors.rows import Rows
from marlvec.errors import ContractError, UnsupportedSpaceError
from marlvec.spaces import SpaceTree
from marlvec.spaces.tree import map_space

__all__ = ["NormalizeObs", "NormalizeReward"]


class LearnsMoments(AgentConnector):
    """Base of both normalizers: learns running moments by path; ``_shapes`` is ``{}`` while unknown."""

    _shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({})

    def __post_init__(self) -> None:
        super().__post_init__()
        self._moments: dict[str, RunningMoments] = {}

    @property
    def counts(self) -> NDArray[np.float64]:
        """Number of values in the statistics: (1,), or (A,) with ``per_agent``."""
        if not self._moments:
            raise self._not_set_up()
        return next(iter(self._moments.values())).total.count.copy()

    def state_dict(self) -> State:
        return self._learnt()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._moments = self._loaded(state)

    def merge_states(self, states: Sequence[Mapping[str, Any]]) -> State:
        """Merge counts, means and variances of copies that saw different data; without copies, return this connector's.

        Raises:
            ArgumentError: Two copies last loaded different merged states, so their shared data is unknown.
        """
        copies = [self._loaded(state) for state in states]
        if not copies:
            return self._learnt()
        return save_moments({path: merge_moments([copy[path] for copy in copies]) for path in self._shapes})

    def hand_over(self) -> State:
        self._moments = {path: moments.handed_over() for path, moments in self._moments.items()}
        return self._learnt()

    def take_merged(self, state: Mapping[str, Any]) -> None:
        if state:
            merged = self._loaded(state)
            self._moments = {path: own.with_merged(merged[path]) for path, own in self._moments.items()}

    def _learnt(self) -> State:
        return save_moments(self._moments) if self._shapes else {}

    def _loaded(self, state: Mapping[str, Any]) -> dict[str, RunningMoments]:
        if not self._shapes:
            raise self._not_set_up()
        return load_moments(state, self._shapes)


@dataclass(eq=False, repr=False)
class NormalizeObs(LearnsMoments):
    """Subtracts the running mean and divides by the running standard deviation, entry by entry.

    Every Box leaf has its own statistics, in float64; other leaves pass unchanged. In training each row first updates
    the statistics, then is normalised by them. In eval they are frozen, and a space with other shapes raises
    `UnsupportedSpaceError`; without statistics, values pass unchanged. A float64 leaf stays float64, others become
    float32.

    `merge_states` returns the statistics of the pooled data, however it was split, up to rounding: see `Moments`. Data
    that copies share through a merged state counts once.

    Args:
        per_agent: Whether each agent has its own statistics.
        clip: Values are clipped to ``[-clip, clip]``; None for no clipping.
        epsilon: Added to the variance.
        update: False keeps the statistics frozen in training too.

    Raises:
        ArgumentError: ``clip`` or ``epsilon`` is not above 0.
    """

    _: KW_ONLY
    per_agent: bool = False
    clip: PositiveFloat | None = 10.0
    epsilon: PositiveFloat = 1e-8
    update: bool = True

    _tree = from_setup(SpaceTree)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._limits = None if self.clip is None else (np.array(-float(self.clip)), np.array(float(self.clip)))

    def __call__(self, rows: Rows) -> Rows:
        tree = self._tree
        leaves = tree.flatten(rows["obs"])
        group = self._group(rows) if self.per_agent else None
        # An overflow while learning leaves a moment that is not finite, which is an error of its own.
        with np.errstate(over="ignore", invalid="ignore"):
            wide = [np.asarray(leaves[i], np.float64) for i in self._boxes]
            if self.training and self.update and len(rows):
                self._learn(wide, group)
            for k, (i, moments) in enumerate(zip(self._boxes, self._moments.values(), strict=True)):
                leaves[i] = self._normalize(moments, wide[k], group).astype(self._dtypes[k])
        return rows.replace(obs=tree.unflatten(leaves))

    def setup(self, space: Space[Any]) -> None:
        tree = SpaceTree(space)
        boxes, shapes = _boxes(tree), _box_shapes(tree)
        if list(shapes.items()) != list(self._shapes.items()):
            groups = len(self.agents) if self.per_agent else 1
            self._moments = {path: RunningMoments.empty(groups, shape) for path, shape in shapes.items()}
        self._shapes = shapes
        self._tree, self._boxes = tree, boxes
        self._dtypes = [_dtype(tree.leaves[i].space) for i in boxes]

    def output_space(self, space: Space[Any]) -> Space[Any]:
        shapes = _box_shapes(SpaceTree(space))
        if not (self.training and self.update) and self._shapes and shapes != self._shapes and self.counts.any():
            raise UnsupportedSpaceError(
                f"{self.name} has frozen statistics of the shapes {dict(self._shapes)}: expected a space with the same "
                f"shapes, got {shapes}; use the env that they were learned in, or train() to learn others"
            )
        limit = np.inf if self.clip is None else self.clip

        def normalized(leaf: Space[Any]) -> Space[Any]:
            return Box(-limit, limit, leaf.shape, _dtype(leaf).type) if isinstance(leaf, Box) else leaf

        return map_space(normalized, space)

    def _learn(self, wide: list[NDArray[np.float64]], group: NDArray[Any] | None) -> None:
        new = {}
        for (path, old), values in zip(self._moments.items(), wide, strict=True):
            moments = new[path] = old.learnt(values, group)
            if not moments.total.finite:
                leaf = next(leaf for leaf in self._tree.leaves if leaf.path == path)
                raise ContractError(f"{leaf} has a NaN, infinite or huge entry; the statistics were not touched")
        self._moments = new

    def _normalize(
        self, moments: RunningMoments, values: NDArray[np.float64], group: NDArray[Any] | None
    ) -> NDArray[np.float64]:
        mean, scale = moments.total.mean, moments.scale(self.epsilon)
        out: NDArray[np.float64] = values - (mean if group is None else mean[group])
        out *= scale if group is None else scale[group]
        if self._limits is not None:
            low, high = self._limits
            np.maximum(out, low, out=out)
            np.minimum(out, high, out=out)
        return out

    def _group(self, rows: Rows) -> NDArray[Any]:
        """Return the agent of each row, after making room in the statistics."""
        group: NDArray[Any] = rows.agent_index
        if len(group):
            most = int(group.max()) + 1
            if most > len(self.counts):
                self._moments = {path: moments.grown(most) for path, moments in self._moments.items()}
        return group


def _boxes(tree: SpaceTree) -> tuple[int, ...]:
    boxes = tuple(i for i, leaf in enumerate(tree.leaves) if isinstance(leaf.space, Box))
    if not boxes:
        raise UnsupportedSpaceError(f"NormalizeObs found no Box in {tree.space}; put FlattenObs before it")
    return boxes


def _box_shapes(tree: SpaceTree) -> dict[str, tuple[int, ...]]:
    return {tree.leaves[i].path: tree.leaves[i].shape for i in _boxes(tree)}


def _dtype(space: Space[Any]) -> np.dtype[Any]:
    return np.dtype(np.float64 if space.dtype == np.float64 else np.float32)


@dataclass(eq=False, repr=False)
class NormalizeReward(LearnsMoments):
    """Divides the ``rewards`` column by the running standard deviation of the discounted return.

    Like gymnasium's wrapper of that name: each reward updates its agent's return, ``gamma * return + reward``, which
    enters the statistics; the reward is then divided by ``sqrt(variance + epsilon)``. No mean is subtracted, so signs
    stay. Unlike gymnasium's, each (env, agent) has its own return, which restarts with the episode, and the statistics
    hold real returns only (gymnasium's begin with a variance of 1).

    An episode's first rows have no reward yet: they pass unchanged and are not counted. In eval the statistics are
    frozen. `merge_states` returns the statistics of the pooled data, as in `NormalizeObs`; returns of running episodes
    stay in their copy.

    Args:
        gamma: Discount of the return, from 0 to 1.
        epsilon: Added to the variance.
        clip: Rewards are then clipped to ``[-clip, clip]``; None for no clipping.
        per_agent: Whether each agent has its own statistics.

    Raises:
        ArgumentError: ``gamma`` is not from 0 to 1, or ``epsilon`` or ``clip`` not above 0.
    """

    gamma: UnitFloat = 0.99
    epsilon: PositiveFloat = 1e-8
    clip: PositiveFloat | None = 10.0
    per_agent: bool = False

    _shapes = MappingProxyType({"": ()})

    def __post_init__(self) -> None:
        super().__post_init__()
        self._moments = {"": RunningMoments.empty(0 if self.per_agent else 1, ())}
        self._returns = AgentTable((), np.float64)

    def __call__(self, rows: Rows) -> Rows:
        rewards = np.array(rows.rewards, np.float64)
        rewarded = np.flatnonzero(~rows.first) if "first" in rows else np.arange(len(rows))
        env_id, agent_index, amount = rows.env_id[rewarded], rows.agent_index[rewarded], rewards[rewarded]
        if not np.isfinite(amount).all():
            bad = rewarded[~np.isfinite(amount)][0]
            raise ContractError(
                f"reward {rewards[bad]} of env {rows.env_id[bad]}, agent {rows.agent_index[bad]}; "
                f"nothing was learnt from these rows"
            )
        with np.errstate(over="ignore", invalid="ignore"):  # an overflow leaves moments that are not finite
            returns = self._returns.get(env_id, agent_index) * self.gamma + amount
            if self.training and len(rewarded):
                self._learn(returns, agent_index)
        if len(rewarded) < len(rows):
            self._returns.set(rows.env_id, rows.agent_index, 0.0)
        self._returns.set(env_id, agent_index, returns)
        scaled = amount * self._scale(agent_index)
        rewards[rewarded] = scaled if self.clip is None else np.clip(scaled, -self.clip, self.clip)
        return rows.replace(rewards=rewards)

    def reset(self, env_ids: EnvIds | None = None) -> None:
        self._returns.reset(env_ids)

    def state_dict(self) -> State:
        return {**super().state_dict(), "returns": self._returns.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state from `state_dict`, or from `merge_states`, which leaves running returns unchanged."""
        moments = self._loaded(state)
        if "returns" in state:
            self._returns.load_state_dict(state["returns"])
        self._moments = moments

    def _learn(self, returns: NDArray[np.float64], agent_index: NDArray[Any]) -> None:
        old = self._moments[""]
        if self.per_agent:
            old = old.grown(int(agent_index.max()) + 1)
        new = old.learnt(returns, agent_index if self.per_agent else None)
        if not new.total.finite:
            raise ContractError("the return is too large for float64; nothing was learnt from these rows")
        self._moments = {"": new}

    def _scale(self, agent_index: NDArray[Any]) -> NDArray[np.float64]:
        """Return the factor of these agents' rewards; 1 for an agent without statistics."""
        scale = self._moments[""].scale(self.epsilon)
        if self.per_agent:
            scale = np.append(scale, 1.0)[np.minimum(agent_index, len(scale))]
        return scale
