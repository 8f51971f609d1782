"""`FrameStack`: the last k observations along a new axis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Space
from numpy.typing import NDArray

from marlvec.connectors._support.agent_table import AgentTable, Tables, load_tables, save_tables
from marlvec.connectors.connector import AgentConnector, EnvIds, State
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, UnsupportedSpaceError
from marlvec.spaces import SpaceTree
from marlvec.spaces.tree import map_space

__all__ = ["FrameStack"]


class FrameStack(AgentConnector):
    """Puts an agent's last k observations, oldest first, in the place of its last one; leaf by leaf.

    By default they are joined along the last axis, so that a network sees one longer vector or an image of more
    channels: ``(d,)`` becomes ``(k*d,)``, ``(H, W, C)`` becomes ``(H, W, k*C)``. With ``new_axis`` they are stacked on
    an axis of their own: ``(d,)`` becomes ``(d, k)``, and ``(k, d)`` with ``axis=0``. A leaf without axes, as Discrete,
    becomes ``(k,)`` either way.

    The history begins anew where ``rows.first`` is set and after `reset`; frames that are not there yet are padding.

    Args:
        k: How many observations, at least 1.
        axis: The axis to join along; with ``new_axis``, where the new one is to be.
        new_axis: Whether to stack on a new axis.
        pad: ``"zero"``, or ``"repeat"`` for the episode's first observation. The zero of a Discrete that does not
            start at 0 is its start.

    Raises:
        ArgumentError: ``k`` is below 1 or ``pad`` is neither.
        UnsupportedSpaceError: Where a space is first seen: a leaf has no such axis, or no fixed size.
    """

    def __init__(
        self, k: int, *, axis: int = -1, new_axis: bool = False, pad: Literal["zero", "repeat"] = "zero"
    ) -> None:
        if k < 1:
            raise ArgumentError(f"k must be at least 1, got {k}")
        if pad not in ("zero", "repeat"):
            raise ArgumentError(f'pad must be "zero" or "repeat", got {pad!r}')
        self.k = k
        self.axis = axis
        self.new_axis = new_axis
        self.pad = pad
        self._tree: SpaceTree | None = None
        self._frames: list[_Frames] = []
        self._started = AgentTable((), np.bool_)

    def __call__(self, rows: Rows) -> Rows:
        if self._tree is None:
            raise self._not_set_up()
        env_id, agent_index = rows.env_id, rows.agent_index
        fresh = ~self._started.get(env_id, agent_index)
        if "first" in rows:
            fresh |= rows.first
        begins = np.flatnonzero(fresh)
        leaves = self._tree.flatten(rows.obs)
        stacked = [
            frames.push(env_id, agent_index, leaf, begins, self.pad == "repeat")
            for frames, leaf in zip(self._frames, leaves, strict=True)
        ]
        if len(begins):
            self._started.set(env_id, agent_index, True)
        return rows.replace(obs=self._tree.unflatten(stacked))

    def reset(self, env_ids: EnvIds | None = None) -> None:
        self._started.reset(env_ids)

    def setup(self, space: Space[Any]) -> None:
        tree = self._tree_of(space)
        if self._tree is None or tree.space != self._tree.space:  # frames from another space are not in this one
            self._frames = [self._frames_of(leaf.space) for leaf in tree.leaves]
            self._started = AgentTable((), np.bool_)
        self._tree = tree

    def output_space(self, space: Space[Any]) -> Space[Any]:
        self._tree_of(space)
        return map_space(lambda leaf: self._frames_of(leaf).space(leaf, self.pad == "zero"), space)

    def state_dict(self) -> State:
        if self._tree is None:
            return {}
        return save_tables(self._tables)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._tree is None:
            raise self._not_set_up()
        load_tables(state, self._tables, self.name)

    @property
    def _tables(self) -> Tables:
        return {"started": self._started, "frames": [frames.table for frames in self._frames]}

    def _tree_of(self, space: Space[Any]) -> SpaceTree:
        tree = SpaceTree(space)
        for leaf in tree.leaves:
            if leaf.is_object:
                raise UnsupportedSpaceError(
                    f"{self!r} cannot stack {leaf} of {type(leaf.space).__name__}, which has no fixed size; "
                    f"put FlattenObs(drop=[…]) before it, or encode the leaf"
                )
        return tree

    def _frames_of(self, space: Space[Any]) -> _Frames:
        assert space.shape is not None
        shape = tuple(int(n) for n in space.shape)
        rank = len(shape) + (1 if self.new_axis else 0)
        if not shape:
            return _Frames(shape, (self.k,), 0, space, self.k)
        if not -rank <= self.axis < rank:
            raise UnsupportedSpaceError(f"{self!r} has no such axis in {space}")
        at = self.axis % rank
        if self.new_axis:
            return _Frames(shape, (*shape[:at], self.k, *shape[at:]), at, space, self.k)
        return _Frames(shape, (*shape[:at], self.k * shape[at], *shape[at + 1 :]), at, space, self.k)


class _Frames:
    """One leaf's history: the frames stand on axis ``at`` of every slot of the table."""

    def __init__(self, shape: tuple[int, ...], out: tuple[int, ...], at: int, space: Space[Any], k: int) -> None:
        self.out = out
        self.at = at
        self.k = k
        lead: tuple[Any, ...] = (slice(None),) * (1 + at)
        self.older, self.newer, self.last = (*lead, slice(None, -1)), (*lead, slice(1, None)), (*lead, -1)
        self.zero = _zero(space)
        self.table = AgentTable((*shape[:at], k, *shape[at:]), self.zero.dtype)

    def push(
        self, env_id: NDArray[Any], agent_index: NDArray[Any], leaf_n: Any, begins: NDArray[Any], repeat: bool
    ) -> NDArray[Any]:
        """Add (n, *shape) to the rows' histories and return those, (n, *out)."""
        history = self.table.get(env_id, agent_index)
        stack = np.empty_like(history)
        stack[self.older] = history[self.newer]
        stack[self.last] = leaf_n
        if len(begins):
            pad = np.expand_dims(leaf_n[begins], 1 + self.at) if repeat else np.expand_dims(self.zero, self.at)
            part = stack[begins]
            part[self.older] = pad
            stack[begins] = part
        self.table.set(env_id, agent_index, stack)
        return stack.reshape(len(stack), *self.out)

    def space(self, space: Space[Any], zeros: bool) -> Space[Any]:
        """Space of the stacked leaf."""

        def stack(value: Any) -> NDArray[Any]:
            return np.stack([np.asarray(value)] * self.k, axis=self.at).reshape(self.out)

        if isinstance(space, Box):
            low, high = stack(space.low), stack(space.high)
            if zeros and self.k > 1:
                low, high = np.minimum(low, 0), np.maximum(high, 0)
            return Box(low, high, dtype=space.low.dtype.type)
        if isinstance(space, Discrete):
            return MultiDiscrete(stack(space.n), dtype=_int(space), start=stack(space.start))
        if isinstance(space, MultiDiscrete):
            return MultiDiscrete(stack(space.nvec), dtype=_int(space), start=stack(space.start))
        assert isinstance(space, MultiBinary)
        return MultiBinary(self.out)


def _zero(space: Space[Any]) -> NDArray[Any]:
    if isinstance(space, (Discrete, MultiDiscrete)):
        return np.asarray(space.start, space.dtype)
    return np.zeros(space.shape or (), space.dtype)


def _int(space: Space[Any]) -> Any:
    assert space.dtype is not None
    return np.dtype(space.dtype).type
