"""Observations and rewards normalized by running statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Space
from numpy.typing import NDArray

from marlvec.connectors._support.agent_table import AgentTable
from marlvec.connectors._support.moments import RunningMoments, load_moments, merge_moments, save_moments
from marlvec.connectors.connector import AgentConnector, EnvIds, State
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, ContractError, UnsupportedSpaceError
from marlvec.spaces import SpaceTree
from marlvec.spaces.tree import map_space

__all__ = ["NormalizeObs", "NormalizeReward"]


class NormalizeObs(AgentConnector):
    """Subtracts the running mean and divides by the running standard deviation, entry by entry.

    Every Box leaf has statistics of its own, in float64; other leaves pass unchanged. In training, each row counts
    once: first into the statistics, then it is normalised with them. In eval they are frozen. As long as there are
    none, values pass as they are. A leaf comes out as float64 if it was that, else as float32.

    `merge_states` gives the statistics of the pooled data, however it was parted, to rounding: see `Moments`. What the
    copies had in common when they last loaded a merged state counts once.

    Args:
        per_agent: Whether each agent has statistics of its own.
        clip: Values are clipped to ``[-clip, clip]``; None for no clipping.
        epsilon: Added to the variance.
        update: False keeps the statistics frozen in training too.

    Raises:
        ArgumentError: ``clip`` or ``epsilon`` is not above 0.
    """

    def __init__(
        self, *, per_agent: bool = False, clip: float | None = 10.0, epsilon: float = 1e-8, update: bool = True
    ) -> None:
        if clip is not None and not clip > 0:
            raise ArgumentError(f"clip must be above 0, or None for no clipping; got {clip}")
        if not epsilon > 0:
            raise ArgumentError(f"epsilon must be above 0, got {epsilon}")
        self.per_agent = per_agent
        self.clip = clip
        self.epsilon = epsilon
        self.update = update
        self._limits = (np.array(-float(clip)), np.array(float(clip))) if clip is not None else None
        self._tree: SpaceTree | None = None
        self._boxes: tuple[int, ...] = ()
        self._moments: list[RunningMoments] = []
        self._scales: list[NDArray[np.float64] | None] = []
        self._dtypes: list[np.dtype[Any]] = []

    def __call__(self, rows: Rows) -> Rows:
        if self._tree is None:
            raise self._not_set_up()
        leaves = self._tree.flatten(rows["obs"])
        group = self._group(rows) if self.per_agent else None
        # An overflow while learning leaves a moment that is not finite, which is an error of its own.
        with np.errstate(over="ignore", invalid="ignore"):
            wide = [np.asarray(leaves[i], np.float64) for i in self._boxes]
            if self.training and self.update and len(rows):
                self._learn(wide, group)
            for k, i in enumerate(self._boxes):
                leaves[i] = self._normalize(k, wide[k], group).astype(self._dtypes[k])
        return rows.replace(obs=self._tree.unflatten(leaves))

    @property
    def counts(self) -> NDArray[np.float64]:
        """(1,), or (A,) with ``per_agent``: how many observations the statistics are of."""
        if self._tree is None:
            raise self._not_set_up()
        return self._moments[0].total.count.copy()

    def setup(self, space: Space[Any]) -> None:
        tree = SpaceTree(space)
        boxes = _boxes(tree)
        shapes = [tree.leaves[i].shape for i in boxes]
        if boxes != self._boxes or [moments.total.shape for moments in self._moments] != shapes:
            groups = len(self.agents) if self.per_agent else 1
            self._adopt([RunningMoments.empty(groups, shape) for shape in shapes])
        self._tree, self._boxes = tree, boxes
        self._dtypes = [_dtype(tree.leaves[i].space) for i in boxes]

    def output_space(self, space: Space[Any]) -> Space[Any]:
        _boxes(SpaceTree(space))
        limit = np.inf if self.clip is None else self.clip

        def normalized(leaf: Space[Any]) -> Space[Any]:
            return Box(-limit, limit, leaf.shape, _dtype(leaf).type) if isinstance(leaf, Box) else leaf

        return map_space(normalized, space)

    def state_dict(self) -> State:
        return {} if self._tree is None else save_moments(dict(zip(self._shapes(), self._moments, strict=True)))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._adopt(load_moments(state, self._shapes()))

    def merge_states(self, states: Sequence[Mapping[str, Any]]) -> State:
        """Join the statistics of copies that saw different data; of none, give this one's.

        Returns:
            A state for `load_state_dict`: counts, means and variances of all data together.

        Raises:
            ArgumentError: Two copies last loaded different merged states, so what they have in common is not known.
        """
        if not states:
            return self.state_dict()
        shapes = self._shapes()
        leaves = zip(*(load_moments(state, shapes) for state in states), strict=True)
        return save_moments({path: merge_moments(copies) for path, copies in zip(shapes, leaves, strict=True)})

    def hand_over(self) -> State:
        self._adopt([moments.handed_over() for moments in self._moments])
        return self.state_dict()

    def take_merged(self, state: Mapping[str, Any]) -> None:
        if state:
            merged = load_moments(state, self._shapes())
            self._adopt([own.with_merged(new) for own, new in zip(self._moments, merged, strict=True)])

    def _learn(self, wide: list[NDArray[np.float64]], group: NDArray[Any] | None) -> None:
        new = []
        for k, values in enumerate(wide):
            old = self._moments[k]
            new.append(old.learnt(values, group))
            if not new[-1].total.finite:
                assert self._tree is not None
                leaf = self._tree.leaves[self._boxes[k]]
                raise ContractError(f"{leaf} has a NaN, infinite or huge entry; the statistics were not touched")
        self._adopt(new)

    def _normalize(self, k: int, values: NDArray[np.float64], group: NDArray[Any] | None) -> NDArray[np.float64]:
        known = self._scales[k]
        if known is None:
            known = self._scales[k] = self._moments[k].total.scale(self.epsilon)
        mean, scale = self._moments[k].total.mean, known
        out: NDArray[np.float64] = values - (mean if group is None else mean[group])
        out *= scale if group is None else scale[group]
        if self._limits is not None:
            low, high = self._limits
            np.maximum(out, low, out=out)
            np.minimum(out, high, out=out)
        return out

    def _group(self, rows: Rows) -> NDArray[Any]:
        """Agent of each row, with room for it in the statistics."""
        group: NDArray[Any] = rows.agent_index
        if len(group) and (most := int(group.max()) + 1) > len(self._moments[0].own.count):
            self._adopt([moments.grown(most) for moments in self._moments])
        return group

    def _adopt(self, moments: list[RunningMoments]) -> None:
        self._moments = moments
        self._scales = [None] * len(moments)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Path and shape of every leaf that has statistics."""
        if self._tree is None:
            raise self._not_set_up()
        return {self._tree.leaves[i].path: self._tree.leaves[i].shape for i in self._boxes}


def _boxes(tree: SpaceTree) -> tuple[int, ...]:
    """Positions of the leaves that are Boxes."""
    boxes = tuple(i for i, leaf in enumerate(tree.leaves) if isinstance(leaf.space, Box))
    if not boxes:
        raise UnsupportedSpaceError(f"NormalizeObs found no Box in {tree.space}; put FlattenObs before it")
    return boxes


def _dtype(space: Space[Any]) -> np.dtype[Any]:
    return np.dtype(np.float64 if space.dtype == np.float64 else np.float32)


_SHAPES: dict[str, tuple[int, ...]] = {"": ()}


class NormalizeReward(AgentConnector):
    """Divides the ``rewards`` column by the running standard deviation of the discounted return.

    As gymnasium's wrapper of that name: every reward makes its agent's return ``gamma * return + reward``, which enters
    the statistics, and is then divided by ``sqrt(variance + epsilon)``. Its mean stays where it is, so that good stays
    good. Other than there, each (env, agent) has a return of its own that begins anew with its episode, and the
    statistics hold real returns only, where gymnasium's begin with a variance of 1.

    An episode's first rows have no reward yet: they pass unchanged and count for nothing. In eval the statistics are
    frozen. `merge_states` gives those of the pooled data, as in `NormalizeObs`; the returns of running episodes stay
    with the copy that runs them.

    Args:
        gamma: Discount of the return, from 0 to 1.
        epsilon: Added to the variance.
        clip: Rewards are then clipped to ``[-clip, clip]``; None for no clipping.
        per_agent: Whether each agent has statistics of its own.

    Raises:
        ArgumentError: ``gamma`` is not from 0 to 1, or ``epsilon`` or ``clip`` not above 0.
    """

    def __init__(
        self, gamma: float = 0.99, epsilon: float = 1e-8, clip: float | None = 10.0, per_agent: bool = False
    ) -> None:
        if not 0 <= gamma <= 1:
            raise ArgumentError(f"gamma must be from 0 to 1, got {gamma}")
        if not epsilon > 0:
            raise ArgumentError(f"epsilon must be above 0, got {epsilon}")
        if clip is not None and not clip > 0:
            raise ArgumentError(f"clip must be above 0, or None for no clipping; got {clip}")
        self.gamma = gamma
        self.epsilon = epsilon
        self.clip = clip
        self.per_agent = per_agent
        self._moments = RunningMoments.empty(0 if per_agent else 1, ())
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

    @property
    def counts(self) -> NDArray[np.float64]:
        """(1,), or (A,) with ``per_agent``: how many rewards the statistics are of."""
        return self._moments.total.count.copy()

    def reset(self, env_ids: EnvIds | None = None) -> None:
        self._returns.reset(env_ids)

    def state_dict(self) -> State:
        return {**save_moments({"": self._moments}), "returns": self._returns.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave, or what `merge_states` did, which leaves running returns alone."""
        (moments,) = load_moments(state, _SHAPES)
        if "returns" in state:
            self._returns.load_state_dict(state["returns"])
        self._moments = moments

    def merge_states(self, states: Sequence[Mapping[str, Any]]) -> State:
        """Join the statistics of copies that saw different data; of none, give this one's.

        Returns:
            A state for `load_state_dict`: counts, means and variances of all data together.

        Raises:
            ArgumentError: Two copies last loaded different merged states, so what they have in common is not known.
        """
        copies = [load_moments(state, _SHAPES)[0] for state in states]
        return save_moments({"": merge_moments(copies) if copies else self._moments})

    def hand_over(self) -> State:
        self._moments = self._moments.handed_over()
        return save_moments({"": self._moments})

    def take_merged(self, state: Mapping[str, Any]) -> None:
        if state:
            (merged,) = load_moments(state, _SHAPES)
            self._moments = self._moments.with_merged(merged)

    def _learn(self, returns: NDArray[np.float64], agent_index: NDArray[Any]) -> None:
        old = self._moments
        if self.per_agent:
            old = old.grown(int(agent_index.max()) + 1)
        new = old.learnt(returns, agent_index if self.per_agent else None)
        if not new.total.finite:
            raise ContractError("the return is too large for float64; nothing was learnt from these rows")
        self._moments = new

    def _scale(self, agent_index: NDArray[Any]) -> NDArray[np.float64]:
        """What to multiply the rewards of these agents with; 1 for an agent of which nothing is known."""
        scale = self._moments.total.scale(self.epsilon)
        if self.per_agent:
            scale = np.append(scale, 1.0)[np.minimum(agent_index, len(scale))]
        return scale
