"""Connectors that normalize by running mean and variance, which merge across collectors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Space
from numpy.typing import NDArray

from marlvec.connectors.agent_tables import AgentTable
from marlvec.connectors.connector import AgentConnector, EnvIds, PositiveFloat, State, UnitFloat, from_setup
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, ContractError, UnsupportedSpaceError
from marlvec.serialization.saved import array_field
from marlvec.spaces import SpaceTree
from marlvec.spaces.tree import map_space


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


Floats = NDArray[np.float64]


class Moments:
    """Count, mean and sum of squared deviations of G groups of arrays. Never changed once made.

    Joining two gives the moments of the pooled data (Chan, Golub and LeVeque 1983), however the data was split: to some
    1e-15 of the standard deviation, even if the mean is 1e12 times that. For this the mean has twice the digits of a
    float64, as ``mean + rest`` (a double-double number, Dekker 1971), and deviations are taken from a value that is
    itself one of the data.
    """

    __slots__ = ("count", "m2", "mean", "rest")

    count: Floats  # (G,) number of values
    mean: Floats  # (G, *shape); 0 where there are no values
    rest: Floats  # (G, *shape) exact mean minus the float64 `mean`
    m2: Floats  # (G, *shape) sum of squared deviations from the mean

    def __init__(self, groups: int, shape: tuple[int, ...]) -> None:
        self.count = np.zeros(groups)
        self.mean = np.zeros((groups, *shape))
        self.rest = np.zeros((groups, *shape))
        self.m2 = np.zeros((groups, *shape))

    @classmethod
    def of(cls, values_n: Floats, group_n: NDArray[Any] | None, groups: int) -> Moments:
        """Return the moments of (n, *shape) values, n > 0; ``group_n`` (n,) holds their groups, None: one group."""
        if group_n is None:
            deviation = values_n - values_n[0]
            offset = np.add.reduce(deviation, 0) / len(values_n)
            deviation -= offset
            deviation *= deviation
            mean, rest = _sum(values_n[0], offset)
            count = np.array([float(len(values_n))])
            return cls._made(count, mean[None], rest[None], np.add.reduce(deviation, 0)[None])
        new = cls(groups, values_n.shape[1:])
        sizes = np.bincount(group_n, minlength=groups)
        here = np.flatnonzero(sizes)
        sizes = sizes[here]
        starts = np.cumsum(sizes) - sizes
        values_n = values_n[np.argsort(group_n, kind="stable")]
        anchor = values_n[starts]
        deviation = values_n - np.repeat(anchor, sizes, axis=0)
        offset = np.add.reduceat(deviation, starts, axis=0) / _column(sizes, anchor)
        deviation -= np.repeat(offset, sizes, axis=0)
        deviation *= deviation
        new.count[here] = sizes
        new.mean[here], new.rest[here] = _sum(anchor, offset)
        new.m2[here] = np.add.reduceat(deviation, starts, axis=0)
        return new

    @classmethod
    def _made(cls, count: Floats, mean: Floats, rest: Floats, m2: Floats) -> Moments:
        new = cls.__new__(cls)
        new.count, new.mean, new.rest, new.m2 = count, mean, rest, m2
        return new

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one value."""
        return self.mean.shape[1:]

    @property
    def finite(self) -> bool:
        """Whether no value was NaN or infinite and nothing overflowed."""
        if self.m2.size <= 16:  # a few numbers are quicker without numpy
            return all(map(math.isfinite, self.m2.ravel().tolist()))
        return bool(np.isfinite(self.m2).all())

    def extended(self, values_n: Floats) -> Moments:
        """Return the moments with (n, *shape) further values, n > 0; only for one group."""
        count, n = self.count.item(), len(values_n)
        if count < n:
            # As far from the mean as so many values may be, their squares would hide how far they are from each other.
            return self.joined(Moments.of(values_n, None, 1))
        total = count + n
        deviation = values_n - self.mean
        deviation -= self.rest
        summed = np.add.reduce(deviation, 0, keepdims=True)
        deviation *= deviation
        m2 = np.add.reduce(deviation, 0, keepdims=True)
        step = summed / total
        summed *= step
        m2 -= summed  # twice as much is left at least, as count is n at least
        m2 += self.m2
        high, error = _sum(self.mean, step)
        error += self.rest
        mean = high + error  # of the two, high is the larger (DWPlusFP, Joldes, Muller and Popescu 2017)
        high -= mean
        high += error
        return self._made(np.array([total]), mean, high, m2)

    def joined(self, other: Moments) -> Moments:
        """Return the moments of both data sets together."""
        more, less = self, other
        if (behind := self.count < other.count).any():
            # From the larger part the way to the joint mean is short, and so is what rounding takes of it.
            more, less = _either(behind, other, self), _either(behind, self, other)
        total = self.count + other.count
        share = _column(less.count / np.maximum(total, 1.0), self.mean)
        delta = (less.mean - more.mean) + (less.rest - more.rest)
        mean, error = _sum(more.mean, delta * share)
        mean, rest = _sum(mean, error + more.rest)
        delta *= delta
        delta *= _column(more.count, self.mean) * share
        delta += more.m2
        delta += less.m2
        return self._made(total, mean, rest, delta)

    def grown(self, groups: int) -> Moments:
        """Return a copy with room for ``groups`` groups, or itself if it has room."""
        if groups <= len(self.count):
            return self
        new = Moments(groups, self.shape)
        here = slice(len(self.count))
        new.count[here], new.mean[here], new.rest[here], new.m2[here] = self.count, self.mean, self.rest, self.m2
        return new

    def scale(self, epsilon: float) -> Floats:
        """(G, *shape) 1 / standard deviation; 1 where there are no values."""
        if len(self.count) == 1 and (n := self.count.item()):
            variance: Floats = self.m2 / n
            variance += epsilon
            return np.divide(1.0, np.sqrt(variance, out=variance), out=variance)
        count = _column(self.count, self.mean)
        return np.where(count > 0, 1.0 / np.sqrt(self.m2 / np.maximum(count, 1.0) + epsilon), 1.0)

    def same_as(self, other: Moments) -> bool:
        return all(np.array_equal(getattr(self, key), getattr(other, key)) for key in self.__slots__)

    def state_dict(self) -> dict[str, Floats]:
        return {key: getattr(self, key).copy() for key in ("count", "mean", "rest", "m2")}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], shape: tuple[int, ...]) -> Moments:
        """Rebuild the moments from a state, or raise ArgumentError if its numbers cannot come from data."""
        if state.keys() != set(cls.__slots__):
            raise ArgumentError(f"expected moments, {sorted(cls.__slots__)}, got {sorted(state)}")
        count = array_field(state, "count", np.float64, (None,), "moments")
        form = len(count), *shape
        new = cls._made(
            count, *(array_field(state, key, np.float64, form, "moments") for key in ("mean", "rest", "m2"))
        )
        finite = all(np.isfinite(getattr(new, key)).all() for key in cls.__slots__)
        if not (finite and (new.count >= 0).all() and (new.m2 >= 0).all()):
            raise ArgumentError("expected moments of data, got a negative, NaN or infinite one")
        return new


def _sum(a: Floats, b: Floats) -> tuple[Floats, Floats]:
    """Return the rounded sum and its rounding error: together exact (TwoSum, Knuth)."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _either(where: NDArray[np.bool_], one: Moments, two: Moments) -> Moments:
    """Return the groups of ``one`` where the (G,) mask is True, else of ``two``."""
    if where.all():
        return one
    wide = _column(where, one.mean)
    return Moments._made(
        np.where(where, one.count, two.count),
        np.where(wide, one.mean, two.mean),
        np.where(wide, one.rest, two.rest),
        np.where(wide, one.m2, two.m2),
    )


def _column(group_values: NDArray[Any], like: NDArray[Any]) -> NDArray[Any]:
    """Reshape (G,) so that it broadcasts against (G, *shape)."""
    return group_values.reshape(-1, *[1] * (like.ndim - 1))


_KEYS = ("moments", "own", "shared")
_HANDED = "handed"


class RunningMoments:
    """Moments that one copy of a connector has learnt. Immutable.

    Copies that load a merged state share it, and continue from it. Each copy's ``own`` data is kept separately, so that
    the next merge counts shared data once, without subtraction. Data that a copy has ``handed`` over for a merge is
    kept separately, too, until the merged state that contains it arrives; ``total`` is all data.
    """

    __slots__ = ("_base", "_scale", "handed", "own", "shared", "total")

    def __init__(self, own: Moments, shared: Moments, handed: Moments | None = None) -> None:
        self._set(own, shared, handed, shared if handed is None else shared.joined(handed))

    def _set(self, own: Moments, shared: Moments, handed: Moments | None, base: Moments) -> None:
        self.own, self.shared, self.handed, self._base = own, shared, handed, base
        self.total = base.joined(own) if any(base.count.tolist()) else own
        self._scale: tuple[float, Floats] | None = None

    def _with(self, own: Moments) -> RunningMoments:
        new = RunningMoments.__new__(RunningMoments)
        new._set(own, self.shared, self.handed, self._base)
        return new

    @classmethod
    def empty(cls, groups: int, shape: tuple[int, ...]) -> RunningMoments:
        return cls(Moments(groups, shape), Moments(groups, shape))

    def learnt(self, values_n: Floats, group_n: NDArray[Any] | None) -> RunningMoments:
        """Return the moments with (n, *shape) further values, n > 0; groups as in `Moments.of`."""
        if group_n is None:
            return self._with(self.own.extended(values_n))
        return self._with(self.own.joined(Moments.of(values_n, group_n, len(self.own.count))))

    def grown(self, groups: int) -> RunningMoments:
        """Return a copy with room for ``groups`` groups, or itself if it has room."""
        if groups <= len(self.own.count):
            return self
        handed = None if self.handed is None else self.handed.grown(groups)
        return RunningMoments(self.own.grown(groups), self.shared.grown(groups), handed)

    def scale(self, epsilon: float) -> Floats:
        """`Moments.scale` of all data, computed once."""
        if self._scale is None or self._scale[0] != epsilon:
            self._scale = epsilon, self.total.scale(epsilon)
        return self._scale[1]

    @property
    def unmerged(self) -> Moments:
        """Moments of all data outside the loaded merged state."""
        return self.own if self.handed is None else self.handed.joined(self.own)

    def handed_over(self) -> RunningMoments:
        """Return a copy whose own data counts as handed over."""
        return RunningMoments(Moments(len(self.own.count), self.own.shape), self.shared, self.unmerged)

    def with_merged(self, merged: RunningMoments) -> RunningMoments:
        """Return a copy with a merged state, which contains the handed-over data; own data is kept."""
        groups = max(len(self.own.count), len(merged.own.count))
        return RunningMoments(self.own.grown(groups), merged.grown(groups).total)


def merge_moments(copies: Sequence[RunningMoments]) -> RunningMoments:
    """Merge copies into moments that all can load: of all data, with shared data counted once.

    ArgumentError: two copies last loaded different merged states, or the moments are too large for float64.
    """
    groups = max(len(copy.own.count) for copy in copies)
    copies = [copy.grown(groups) for copy in copies]
    known = [copy.shared for copy in copies if copy.shared.count.any()]
    if any(not shared.same_as(known[0]) for shared in known):
        raise ArgumentError("the states go back to different merged states")
    total = known[0] if known else copies[0].shared
    with np.errstate(over="ignore", invalid="ignore"):
        for copy in copies:
            total = total.joined(copy.unmerged)
    if not total.finite:
        raise ArgumentError("the pooled statistics are too large for float64")
    return RunningMoments(Moments(groups, total.shape), total)


def save_moments(leaves: Mapping[str, RunningMoments]) -> dict[str, Any]:
    """Make a state of them that `load_moments` takes."""
    handed = {path: leaf.handed.state_dict() for path, leaf in leaves.items() if leaf.handed is not None}
    return {
        **({_HANDED: handed} if handed else {}),
        "moments": {path: leaf.total.state_dict() for path, leaf in leaves.items()},
        "own": {path: leaf.own.state_dict() for path, leaf in leaves.items()},
        "shared": {path: leaf.shared.state_dict() for path, leaf in leaves.items()},
    }


def load_moments(state: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, RunningMoments]:
    """Rebuild moments by path, or raise ArgumentError."""
    handed = state.get(_HANDED)
    for key in _KEYS if handed is None else (*_KEYS, _HANDED):
        if key not in state or state[key].keys() != shapes.keys():
            raise ArgumentError(f"expected {key} of the leaves {list(shapes)}, got {state}")
    leaves = {}
    for path, shape in shapes.items():
        _, own, shared = (Moments.from_state(state[key][path], shape) for key in _KEYS)
        if len(own.count) != len(shared.count):
            raise ArgumentError(f"expected as many shared groups as own groups, got {state}")
        out = None if handed is None else Moments.from_state(handed[path], shape)
        if out is not None and len(out.count) != len(own.count):
            raise ArgumentError(f"expected as many handed-over groups as own groups, got {state}")
        leaves[path] = RunningMoments(own, shared, out)
    return leaves
