"""Changes values of observations: casts, clips, scales, one-hots, or maps them by a function."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiDiscrete, Space
from numpy.typing import DTypeLike, NDArray

from marlvec.connectors.connector import from_setup
from marlvec.connectors.leafwise import LeafPlan, LeafwiseObs, ObsFunction, OneHot, read_only, space_summary
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, ContractError, UnsupportedSpaceError
from marlvec.spaces import Leaf, SpaceTree
from marlvec.trees import Tree, map_tree


@dataclass(eq=False, repr=False)
class CastObs(LeafwiseObs):
    """Casts every Box leaf to a dtype; other leaves pass unchanged.

    Floats that become ints are rounded, halves to even. Nothing wraps around: a Box with bounds outside an int dtype's
    range raises, and a value outside its Box raises ContractError.

    Args:
        dtype: A float or int dtype.
        keys: Paths of the leaves; None: all Boxes.

    Raises:
        ArgumentError: ``dtype`` is neither a float nor an int dtype; or, in `bind`, a path is not in it.
        UnsupportedSpaceError: In `bind`: there is no Box, or its bounds do not fit an int dtype.

    Attributes:
        dtype: The dtype's name.
    """

    dtype: DTypeLike

    _kind = "Boxes"

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            wanted = np.dtype(self.dtype)
        except TypeError as error:
            raise ArgumentError(f"dtype must be one of numpy's, got {self.dtype!r}") from error
        if wanted.kind not in "fiu":
            raise ArgumentError(f"dtype must be of floats or ints, got {wanted}")
        self.dtype = wanted.name

    def _plan(self, leaf: Leaf) -> LeafPlan | None:
        space, dtype = leaf.space, np.dtype(self.dtype)
        if not isinstance(space, Box):
            return None
        low, high = space.low, space.high
        if dtype.kind in "iu":
            if leaf.dtype.kind == "f":
                low, high = np.rint(low), np.rint(high)
            if not _bounds_fit(low, high, dtype):
                raise UnsupportedSpaceError(
                    f"{self!r}: the bounds of {leaf}, {space_summary(space)}, do not fit {dtype}; put ClipObs or "
                    f"ScaleObs before it"
                )
        with np.errstate(over="ignore"):  # a bound beyond the largest float32 becomes infinite
            after = Box(low.astype(dtype), high.astype(dtype), leaf.shape, dtype.type)
        return LeafPlan(after, _Cast(leaf, dtype))


class _Cast:
    def __init__(self, leaf: Leaf, dtype: np.dtype[Any]) -> None:
        assert isinstance(leaf.space, Box)
        self.leaf = leaf
        self.low, self.high = leaf.space.low, leaf.space.high
        self.dtype = dtype
        self.may_wrap = dtype.kind in "iu" and not np.can_cast(leaf.dtype, dtype)

    def __call__(self, values_n: NDArray[Any]) -> NDArray[Any]:
        if values_n.dtype == self.dtype:
            return values_n
        if self.may_wrap:
            inside = (values_n >= self.low) & (values_n <= self.high)  # False for NaN
            if not inside.all():
                at = tuple(np.argwhere(~inside)[0])
                raise ContractError(
                    f"{self.leaf} has {values_n[at]} in row {at[0]}, outside of {space_summary(self.leaf.space)}: it "
                    f"cannot become {self.dtype}"
                )
            if values_n.dtype.kind == "f":
                values_n = np.rint(values_n)
        return values_n.astype(self.dtype)


def _bounds_fit(low: NDArray[Any], high: NDArray[Any], dtype: np.dtype[Any]) -> bool:
    if not low.size:
        return True
    limits = np.iinfo(dtype)
    least, most = low.min(), high.max()
    # Compared as Python ints: the largest int64 is not a float64.
    return bool(np.isfinite(least) and np.isfinite(most)) and limits.min <= int(least) and int(most) <= limits.max


@dataclass(eq=False, repr=False)
class ClipObs(LeafwiseObs):
    """Clips the values of every Box leaf, and its bounds with them; other leaves pass unchanged.

    A Box of ints is clipped to the ints between the limits. NaN stays NaN.

    Args:
        low: Smallest value; None for no limit.
        high: Largest value; None for no limit.
        keys: Paths of the leaves; None: all Boxes.

    Raises:
        ArgumentError: Neither limit is given, or ``low`` is above ``high``; or, in `bind`, a path is not
            in it.
        UnsupportedSpaceError: In `bind`: there is no Box, or no value of its dtype lies between the limits.
    """

    low: float | None = None
    high: float | None = None

    _kind = "Boxes"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low is None and self.high is None:
            raise ArgumentError("give low, high or both")
        if not (-math.inf if self.low is None else self.low) <= (math.inf if self.high is None else self.high):
            raise ArgumentError(f"low must not be above high, got {self.low} and {self.high}")

    def _plan(self, leaf: Leaf) -> LeafPlan | None:
        space = leaf.space
        if not isinstance(space, Box):
            return None
        low, high = self._limits(leaf)
        bottom, top = np.clip(space.low, low, high), np.clip(space.high, low, high)
        return LeafPlan(Box(bottom, top, leaf.shape, leaf.dtype.type), partial(np.clip, a_min=low, a_max=high))

    def _limits(self, leaf: Leaf) -> tuple[Any, Any]:
        """Return the limits as numbers of the leaf's dtype."""
        low = -math.inf if self.low is None else self.low
        high = math.inf if self.high is None else self.high
        if leaf.dtype.kind == "f":
            with np.errstate(over="ignore"):
                return leaf.dtype.type(low), leaf.dtype.type(high)
        least, most = (0, 1) if leaf.dtype.kind == "b" else (np.iinfo(leaf.dtype).min, np.iinfo(leaf.dtype).max)
        if low > most or high < least or (bottom := math.ceil(max(low, least))) > (top := math.floor(min(high, most))):
            raise UnsupportedSpaceError(f"{self!r}: no {leaf.dtype} of {leaf} lies between; put CastObs before it")
        return leaf.dtype.type(bottom), leaf.dtype.type(top)


class OneHotObs(LeafwiseObs):
    """Turns every Discrete and MultiDiscrete leaf into a float32 vector; the structure and other leaves stay.

    ``Discrete(n)`` becomes a one-hot ``(n,)``; the one-hots of a MultiDiscrete's entries are concatenated, as in
    `FlattenObs`.

    Args:
        keys: Paths of the leaves; None: all Discrete and MultiDiscrete leaves.

    Raises:
        ArgumentError: In `bind`: a path is not in it.
        UnsupportedSpaceError: In `bind`: there is no Discrete or MultiDiscrete.
    """

    _kind = "Discrete and MultiDiscrete leaves"

    def _plan(self, leaf: Leaf) -> LeafPlan | None:
        if not isinstance(leaf.space, (Discrete, MultiDiscrete)):
            return None
        one_hot = OneHot(leaf)
        return LeafPlan(Box(0, 1, (one_hot.width,), np.float32), partial(_floats, one_hot))


def _floats(one_hot: OneHot, values_n: NDArray[Any]) -> NDArray[Any]:
    return one_hot(values_n).astype(np.float32)


@dataclass(eq=False, repr=False)
class ScaleObs(LeafwiseObs):
    """Stretches every Box leaf from its bounds to ``[low, high]``, as float32.

    Each entry is scaled from its own bounds, exactly at both ends: an image of bytes becomes ``image / 255``. An entry
    with equal bounds becomes ``low``. Leaves that are not bounded at both ends pass unchanged.

    Args:
        low: New lower bound.
        high: New upper bound.
        keys: Paths of the leaves; None: all bounded Boxes.

    Raises:
        ArgumentError: ``low`` is not below ``high``, or one is not finite; or, in `bind`, a path is
            not in it.
        UnsupportedSpaceError: In `bind`: no Box has bounds at both ends.
    """

    low: float = 0.0
    high: float = 1.0

    _kind = "Boxes with bounds at both ends"
    _advice = "put ClipObs before it, which sets bounds, or use NormalizeObs in its place"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.low < self.high and np.isfinite([self.low, self.high]).all()):
            raise ArgumentError(f"low must be below high and both finite, got {self.low} and {self.high}")

    def _plan(self, leaf: Leaf) -> LeafPlan | None:
        if not isinstance(leaf.space, Box) or leaf.dtype.kind not in "fiu" or not leaf.space.is_bounded("both"):
            return None
        return LeafPlan(Box(self.low, self.high, leaf.shape, np.float32), _Scale(leaf.space, self.low, self.high))


class _Scale:
    def __init__(self, space: Box, low: float, high: float) -> None:
        self.low, self.high = np.float32(low), np.float32(high)
        self.to_unit = bool(self.low == 0 and self.high == 1)
        # Values that float32 holds exactly are computed in it.
        self.dtype = np.dtype(np.float32 if np.can_cast(space.low.dtype, np.float32) else np.float64)
        bottom, top = (_least(bound.astype(self.dtype)) for bound in (space.low, space.high))
        with np.errstate(over="ignore"):
            if not np.isfinite(top - bottom).all():  # the difference of the bounds overflows
                self.dtype = np.dtype(np.float64)
                bottom, top = bottom.astype(np.float64), top.astype(np.float64)
        self.shrink = 1.0
        with np.errstate(over="ignore"):
            if not np.isfinite(top - bottom).all():
                self.shrink, bottom, top = 0.5, bottom / 2, top / 2
        self.bottom = bottom
        self.span = np.where(top > bottom, top - bottom, 1).astype(self.dtype)

    def __call__(self, values_n: NDArray[Any]) -> NDArray[Any]:
        if self.shrink != 1.0:
            values_n = np.multiply(values_n, self.shrink, dtype=self.dtype)
        out: NDArray[Any] = np.subtract(values_n, self.bottom, dtype=self.dtype)
        out /= self.span
        if not self.to_unit:
            rest = 1 - out
            rest *= self.low
            out *= self.high
            out += rest  # from both ends, so that both are exact
            np.clip(out, self.low, self.high, out=out)  # rounding may leave a narrow range
        return out.astype(np.float32, copy=False)


def _least(bound: NDArray[Any]) -> NDArray[Any]:
    """Return one number if all bounds are equal: faster than an array."""
    return bound.ravel()[:1].reshape(()) if bound.size and (bound == bound.ravel()[0]).all() else bound


class MapObs(ObsFunction):
    """Replaces observations by ``function(obs)``, all rows in one call.

    Its arguments are read-only. For a function that needs other columns, use `agent_connector`; for a function of one
    row, `PerAgent`.

    Args:
        function: Maps observations, an array (n, …) or a tree of arrays, to observations of the same n rows.
        output_space: Space of one observation after the function, or a function of the space before; None if both
            are equal.

    Raises:
        ArgumentError: ``function`` cannot be called, or ``output_space`` has another form.
        ContractError: In a call: the function's result differs from the declared space in structure, shape or dtype.
    """

    def __call__(self, rows: Rows) -> Rows:
        return rows.replace(obs=self._declared.batch(self.function(read_only(rows.obs)), len(rows)))


class PerAgent(ObsFunction):
    """Replaces each observation by ``function(obs, agent)``, one row per call.

    Easy to write, but slow: one Python call per row. `MapObs` takes all rows at once. Arguments are read-only.

    Args:
        function: Maps one observation and the agent's name (or its ``agent_index``, if the pipeline was bound without
            names) to one observation.
        output_space: Space of one observation after the function, or a function of the space before; None if both
            are equal.

    Raises:
        ArgumentError: ``function`` cannot be called, or ``output_space`` has another form.
        ContractError: In a call: the function's result differs from the declared space in structure, shape or dtype;
            names the row.
    """

    _tree = from_setup(SpaceTree)

    def __call__(self, rows: Rows) -> Rows:
        obs = read_only(self._tree.unflatten(self._tree.flatten(rows.obs)))  # keys in the space's order
        agents = [self._agent(index) for index in rows.agent_index.tolist()]
        values = [self.function(_row(obs, i), agent) for i, agent in enumerate(agents)]
        return rows.replace(obs=self._declared.stack(values))

    def setup(self, space: Space[Any]) -> None:
        super().setup(space)
        self._tree = SpaceTree(space)

    def _agent(self, index: int) -> str | int:
        if not self.agents:
            return index
        if not 0 <= index < len(self.agents):
            raise ContractError(f"agent_index {index} in rows of {len(self.agents)} agents")
        return self.agents[index]


def _row(obs: Tree, i: int) -> Tree:
    return map_tree(lambda leaf: leaf[i], obs)
