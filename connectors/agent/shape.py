"""Observations of another shape or structure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Space, Tuple
from numpy.typing import NDArray

from marlvec.connectors.connector import AgentConnector, from_setup
from marlvec.connectors.leafwise import LeafPlan, LeafwiseObs, OneHot, check_keys, is_below
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, UnsupportedSpaceError
from marlvec.spaces import Leaf, SpaceTree
from marlvec.trees import Tree


class DropKeys(AgentConnector):
    """Removes parts of nested Dict observations; a Dict with one remaining key stays a Dict.

    Args:
        paths: Paths to remove, e.g. ``"camera/left"``, with all below. A Dict in a Tuple is addressed by its number:
            ``"0/left"``.

    Raises:
        ArgumentError: No path is given; or, in `bind`: a path does not exist or names an entry of a Tuple, or a Dict
            would be left empty.
        UnsupportedSpaceError: In `bind`: the space is neither a Dict nor a Tuple.
    """

    _tree = from_setup(SpaceTree)

    def __init__(self, *paths: str) -> None:
        if not paths:
            raise ArgumentError("name at least one path to drop")
        self.paths = paths

    def __call__(self, rows: Rows) -> Rows:
        self._tree.flatten(rows.obs)  # raises for observations of another structure
        return rows.replace(obs=drop_from_value(rows.obs, self.paths))

    def setup(self, space: Space[Any]) -> None:
        self.output_space(space)
        self._tree = SpaceTree(space)

    def output_space(self, space: Space[Any]) -> Space[Any]:
        return drop_from_space(space, self.paths, repr(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.paths))})"


def drop_from_space(space: Space[Any], paths: tuple[str, ...], who: str) -> Space[Any]:
    """Return a space without the keys at ``paths``; errors are those of `DropKeys`."""
    if not isinstance(space, (Dict, Tuple)):
        raise UnsupportedSpaceError(f"{who} needs a Dict to take keys out of, got {space}; put it further to the front")
    missing = set(paths)
    after = _drop(space, "", missing, paths, who)
    if missing:
        known = list(_keys(space, ""))
        raise ArgumentError(f"{who}: no key {sorted(missing)[0]!r} in the space; its keys are {known}")
    return after


def _drop(space: Space[Any], path: str, missing: set[str], paths: tuple[str, ...], who: str) -> Space[Any]:
    """Drop keys below ``path``; remove found paths from ``missing``."""
    if isinstance(space, Tuple):
        parts = []
        for i, sub in enumerate(space.spaces):
            if (at := _join(path, i)) in paths:
                raise ArgumentError(f"{who}: {at!r} is an entry of a Tuple, which has no keys to take out")
            parts.append(_drop(sub, at, missing, paths, who))
        return Tuple(parts)
    if not isinstance(space, Dict):
        return space
    kept: OrderedDict[Any, Space[Any]] = OrderedDict()  # Dict sorts the keys of any other
    for key, sub in space.spaces.items():
        at = _join(path, key)
        if at in paths:
            missing.difference_update(p for p in (at, *_keys(sub, at)) if p in missing)
        else:
            kept[key] = _drop(sub, at, missing, paths, who)
    if not kept:
        what = f"; drop {path!r} itself" if path else ""
        raise ArgumentError(f"{who} leaves nothing of {path or 'the observation'!r}{what}")
    return Dict(kept)


def drop_from_value(value: Tree, paths: tuple[str, ...], path: str = "") -> Tree:
    """Return values without the parts at ``paths``; nothing is copied."""
    if isinstance(value, dict):
        kept = ((key, item, _join(path, key)) for key, item in value.items())
        return {key: drop_from_value(item, paths, at) for key, item, at in kept if at not in paths}
    if isinstance(value, (tuple, list)):
        return tuple(drop_from_value(item, paths, _join(path, i)) for i, item in enumerate(value))
    return value


def _keys(space: Space[Any], path: str) -> list[str]:
    """Return the paths of all Dict keys and Tuple entries below."""
    if isinstance(space, Dict):
        pairs: list[tuple[Any, Space[Any]]] = list(space.spaces.items())
    elif isinstance(space, Tuple):
        pairs = list(enumerate(space.spaces))
    else:
        return []
    return [name for key, sub in pairs for name in (_join(path, key), *_keys(sub, _join(path, key)))]


def _join(path: str, key: Any) -> str:
    return f"{path}/{key}" if path else str(key)


@dataclass(eq=False, repr=False)
class FlattenObs(AgentConnector):
    """Joins all leaves of an observation into one vector ``(n, d)``, in the order of the space.

    Box and MultiBinary leaves of any rank are raveled; Discrete and each entry of MultiDiscrete become one-hot. The
    vector is float32, or float64 if any leaf that is kept is float64.

    Leaves are named by path: ``"camera/left"`` in nested Dicts, ``"0"`` in a Tuple. A path includes all below it.

    Args:
        keys: Paths to keep; None: all.
        drop: Paths to leave out.

    Raises:
        ArgumentError: Both ``keys`` and ``drop`` are given; or, in `bind`, a path is not in it.
        UnsupportedSpaceError: In `bind`: it has no leaves, or a kept leaf has no fixed size.
    """

    _: KW_ONLY
    keys: Sequence[str] | None = None
    drop: Sequence[str] | None = None

    _tree = from_setup(SpaceTree)
    _unchanged = from_setup(bool)  # whether observations are already such vectors

    def __post_init__(self) -> None:
        if self.keys is not None and self.drop is not None:
            raise ArgumentError("give keys to keep or keys to drop, not both")
        self.keys = None if self.keys is None else tuple(self.keys)
        self.drop = None if self.drop is None else tuple(self.drop)

    def __call__(self, rows: Rows) -> Rows:
        if self._unchanged and len(rows) and rows.obs.dtype == self._dtype:
            return rows
        leaves = self._tree.flatten(rows.obs)
        flat = np.empty((len(rows), self._width), self._dtype)
        for i, part in self._writers:
            part.write(leaves[i], flat)
        return rows.replace(obs=flat)

    def setup(self, space: Space[Any]) -> None:
        tree = SpaceTree(space)
        chosen = self._choose(tree)
        self._writers: list[tuple[int, _Part]] = []
        start = 0
        for i, leaf in chosen:
            self._writers.append((i, _Part(leaf, start)))
            start = self._writers[-1][1].stop
        self._tree, self._width = tree, start
        self._dtype = _dtype(leaf for _, leaf in chosen)
        leaf = tree.leaves[0]
        self._unchanged = tree.is_leaf and isinstance(leaf.space, Box) and len(leaf.shape) == 1

    def output_space(self, space: Space[Any]) -> Space[Any]:
        leaves = [leaf for _, leaf in self._choose(SpaceTree(space))]
        dtype = _dtype(leaves)
        bounds = [_bounds(leaf) for leaf in leaves]
        low = np.concatenate([low for low, _ in bounds]).astype(dtype)
        high = np.concatenate([high for _, high in bounds]).astype(dtype)
        return Box(low, high, dtype=dtype.type)

    def _choose(self, tree: SpaceTree) -> list[tuple[int, Leaf]]:
        chosen = self._named(tree)
        if not chosen:
            raise UnsupportedSpaceError(f"{self!r}: there is nothing to flatten in {tree.space}")
        for _, leaf in chosen:
            if leaf.is_object:
                raise UnsupportedSpaceError(
                    f"{self!r}: {leaf} is {type(leaf.space).__name__}, which has no fixed size and cannot be part of a "
                    f"vector; name it in drop=[…], or encode it before"
                )
        return chosen

    def _named(self, tree: SpaceTree) -> list[tuple[int, Leaf]]:
        wanted = self.keys if self.keys is not None else self.drop
        if wanted is None:
            return list(enumerate(tree.leaves))
        check_keys(wanted, tree)
        keep = self.keys is not None
        chosen = [
            (i, leaf) for i, leaf in enumerate(tree.leaves) if any(is_below(leaf.path, k) for k in wanted) is keep
        ]
        if not chosen:
            raise ArgumentError(f"{self!r} leaves nothing of the leaves {[leaf.path for leaf in tree.leaves]}")
        return chosen


class _Part:
    def __init__(self, leaf: Leaf, start: int) -> None:
        self.start = start
        self.one_hot = OneHot(leaf) if isinstance(leaf.space, (Discrete, MultiDiscrete)) else None
        self.stop = start + (int(np.prod(leaf.shape, dtype=np.int64)) if self.one_hot is None else self.one_hot.width)

    def write(self, value_n: Any, flat_nd: NDArray[Any]) -> None:
        """Write (n, *leaf.shape) into columns start to stop of (n, d)."""
        part = value_n.reshape(len(flat_nd), self.stop - self.start) if self.one_hot is None else self.one_hot(value_n)
        flat_nd[:, self.start : self.stop] = part


def _bounds(leaf: Leaf) -> tuple[NDArray[Any], NDArray[Any]]:
    if isinstance(leaf.space, Box):
        return leaf.space.low.ravel(), leaf.space.high.ravel()
    width = _Part(leaf, 0).stop
    return np.zeros(width), np.ones(width)


def _dtype(leaves: Any) -> np.dtype[Any]:
    return np.dtype(np.float64 if any(leaf.dtype == np.float64 for leaf in leaves) else np.float32)


class PadObs(LeafwiseObs):
    """Pads every Box leaf of the right rank with zeros at the ends of its axes; other leaves pass unchanged.

    For networks of a fixed input size. ``make(..., pad=True)`` already pads agents of one env to equal spaces.

    Args:
        shape: The new shape, or one number for vectors.
        keys: Paths of the leaves; None: all Boxes of ``len(shape)`` axes.

    Raises:
        ArgumentError: In `bind`: a path is not in it.
        UnsupportedSpaceError: In `bind`: no Box has this many axes, or a Box is larger.
    """

    def __init__(self, shape: int | Sequence[int], *, keys: Sequence[str] | None = None) -> None:
        super().__init__(keys=keys)
        self.shape = (shape,) if isinstance(shape, int) else tuple(int(length) for length in shape)
        if min(self.shape, default=0) < 0:
            raise ArgumentError(f"shape must be lengths of at least 0, got {self.shape}")
        self._kind = f"Boxes of {len(self.shape)} axes"

    def _plan(self, leaf: Leaf) -> LeafPlan | None:
        space = leaf.space
        if not isinstance(space, Box) or len(leaf.shape) != len(self.shape):
            return None
        if any(have > want for have, want in zip(leaf.shape, self.shape, strict=True)):
            raise UnsupportedSpaceError(
                f"{self!r}: {leaf} of shape {leaf.shape} is larger already; name the leaves to work on in keys=[…]"
            )
        pad = _Pad(leaf.shape, self.shape)
        low, high = pad(space.low[None])[0], pad(space.high[None])[0]
        return LeafPlan(Box(low, high, self.shape, leaf.dtype.type), pad)


class _Pad:
    def __init__(self, before: tuple[int, ...], after: tuple[int, ...]) -> None:
        self.corner = (slice(None), *map(slice, before))
        self.shape = after

    def __call__(self, values_n: NDArray[Any]) -> NDArray[Any]:
        out = np.zeros((len(values_n), *self.shape), values_n.dtype)
        out[self.corner] = values_n
        return out


@dataclass(eq=False, repr=False)
class ReshapeObs(LeafwiseObs):
    """Reshapes every Box leaf, with its numbers in the same order; other leaves pass unchanged.

    Args:
        shape: The new shape. One entry may be -1, computed from the others.
        keys: Paths of the leaves; None: all Boxes.

    Raises:
        ArgumentError: ``shape`` has a negative entry other than one -1; or, in `bind`, a path is not in
            it.
        UnsupportedSpaceError: In `bind`: there is no Box, or a Box has another number of entries.
    """

    shape: Sequence[int]

    _kind = "Boxes"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.shape = tuple(int(length) for length in self.shape)
        if min(self.shape, default=0) < -1 or self.shape.count(-1) > 1:
            raise ArgumentError(f"shape must be lengths, of which one may be -1; got {self.shape}")

    def _plan(self, leaf: Leaf) -> LeafPlan | None:
        space = leaf.space
        if not isinstance(space, Box):
            return None
        try:
            low, high = space.low.reshape(self.shape), space.high.reshape(self.shape)
        except ValueError:
            raise UnsupportedSpaceError(
                f"{self!r} cannot give {leaf} of shape {leaf.shape} that shape; name the leaves to work on in keys=[…]"
            ) from None
        return LeafPlan(Box(low, high, dtype=leaf.dtype.type), partial(_reshaped, low.shape))


def _reshaped(shape: tuple[int, ...], values_n: NDArray[Any]) -> NDArray[Any]:
    return values_n.reshape(len(values_n), *shape)


@dataclass(eq=False, repr=False)
class TransposeObs(LeafwiseObs):
    """Permutes the axes of every Box leaf of the right rank; other leaves pass unchanged.

    The results are views: nothing is copied.

    Args:
        axes: The axes in their new order, as for `numpy.transpose`; None for ``(2, 0, 1)``, which turns images
            ``(H, W, C)`` into ``(C, H, W)``.
        keys: Paths of the leaves; None: all Boxes of ``len(axes)`` axes.

    Raises:
        ArgumentError: ``axes`` does not name each axis once; or, in `bind`, a path is not in it.
        UnsupportedSpaceError: In `bind`: no Box has this many axes.
    """

    axes: Sequence[int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.axes = None if self.axes is None else tuple(int(axis) for axis in self.axes)
        self._order = (2, 0, 1) if self.axes is None else self.axes
        if sorted(self._order) != list(range(len(self._order))):
            raise ArgumentError(f"axes must name each of 0 to {len(self._order) - 1} once, got {self.axes}")
        self._kind = f"Boxes of {len(self._order)} axes"

    def _plan(self, leaf: Leaf) -> LeafPlan | None:
        space = leaf.space
        if not isinstance(space, Box) or len(leaf.shape) != len(self._order):
            return None
        low, high = (bound.transpose(self._order) for bound in (space.low, space.high))
        batched = (0, *(axis + 1 for axis in self._order))
        return LeafPlan(Box(low, high, dtype=leaf.dtype.type), partial(np.transpose, axes=batched))
