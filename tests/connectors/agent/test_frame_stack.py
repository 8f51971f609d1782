from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from marlvec.connectors import AgentPipeline, FrameStack, Rows
from marlvec.errors import ArgumentError, StateError, UnsupportedSpaceError
from marlvec.trees import map_tree, zip_trees
from tests.connectors.helpers.samples import (
    Space,
    all_inside,
    any_spaces,
    batch,
    boxes,
    pairs_of,
    rows_of,
    same_tree,
    unbatch,
    vectors,
)


def make(space: Space, k: int, **kwargs: Any) -> FrameStack:
    piece = FrameStack(k, **kwargs)
    AgentPipeline([piece]).bind(space)
    return piece


class Deques:
    """The plain reference: a deque per (env, agent), one row at a time."""

    def __init__(self, zero: Any, k: int, pad: str) -> None:
        self.zero, self.k, self.pad = zero, k, pad
        self.frames: dict[tuple[int, int], deque[Any]] = {}

    def push(self, pair: tuple[int, int], obs: Any, *, first: bool) -> list[Any]:
        if first or pair not in self.frames:
            self.frames[pair] = deque([obs if self.pad == "repeat" else self.zero] * self.k, self.k)
        self.frames[pair].append(obs)
        return list(self.frames[pair])

    def reset(self, env: int) -> None:
        self.frames = {pair: frames for pair, frames in self.frames.items() if pair[0] != env}


def joined(frames: list[Any], axis: int, *, new_axis: bool) -> Any:
    if not np.ndim(frames[0]) or new_axis:
        return np.stack(frames, axis=axis if np.ndim(frames[0]) else 0)
    return np.concatenate(frames, axis=axis)


@pytest.mark.slow("draws many batches")
@pytest.mark.checklist(87)
@given(
    space=boxes(ranks=(0, 1, 2, 3)),
    k=st.integers(1, 4),
    axis=st.sampled_from([0, -1]),
    new_axis=st.booleans(),
    pad=st.sampled_from(["zero", "repeat"]),
    data=st.data(),
)
def test_history_is_each_agents_own_and_ends_with_its_episode(
    space: spaces.Box, k: int, axis: int, new_axis: bool, pad: Any, data: st.DataObject
) -> None:
    """Episodes of 3 envs × 2 agents that come and go, rows in any order, against a deque per agent."""
    piece = make(space, k, axis=axis, new_axis=new_axis, pad=pad)
    model = Deques(np.zeros(space.shape, space.dtype), k, pad)
    declared = piece.output_space(space)
    for tick in range(data.draw(st.integers(1, 8))):
        pairs = data.draw(st.lists(st.sampled_from(pairs_of(3, 2)), unique=True, max_size=6))
        first = np.array([data.draw(st.sampled_from([False, False, True])) for _ in pairs], bool)
        obs = batch(space, len(pairs), seed=tick)
        out = piece(rows_of(pairs, obs, first=first)).obs
        want = [
            joined(model.push(pair, obs[i], first=bool(first[i])), axis, new_axis=new_axis)
            for i, pair in enumerate(pairs)
        ]
        assert out.dtype == space.dtype
        assert declared.shape == out.shape[1:]
        assert len(out) == len(pairs)
        for got, expected in zip(out, want, strict=True):
            np.testing.assert_array_equal(got, expected)
        assert all_inside(declared, out, len(pairs))
        for env in data.draw(st.sets(st.integers(0, 4))):
            piece.reset([env])
            model.reset(env)


@pytest.mark.slow("draws many batches")
@given(space=any_spaces(), k=st.integers(1, 3), pad=st.sampled_from(["zero", "repeat"]))
def test_every_leaf_of_a_tree_has_its_history(space: Space, k: int, pad: Any) -> None:
    piece = make(space, k, pad=pad)
    declared = piece.output_space(space)
    pairs, ticks = pairs_of(2, 2), [batch(space, 4, seed) for seed in range(k + 1)]
    outs = [piece(rows_of(pairs, obs)).obs for obs in ticks]
    assert all(all_inside(declared, out, 4) for out in outs)
    full = zip_trees(
        lambda frames: np.stack(frames, 1) if frames[0].ndim == 1 else np.concatenate(frames, -1), ticks[-k:]
    )
    same_tree(map_tree(np.asarray, outs[-1]), full)
    assert unbatch(declared, outs[-1], 0) is not None


def test_what_users_expect_of_the_shapes() -> None:
    assert make(vectors(18), 4).output_space(vectors(18)).shape == (72,)
    image = spaces.Box(0, 255, (8, 6, 3), np.uint8)
    assert FrameStack(4).output_space(image) == spaces.Box(0, 255, (8, 6, 12), np.uint8)
    assert FrameStack(4, new_axis=True, axis=0).output_space(image).shape == (4, 8, 6, 3)
    assert FrameStack(4, axis=0).output_space(image).shape == (32, 6, 3)
    assert FrameStack(3).output_space(spaces.Discrete(5)) == spaces.MultiDiscrete([5] * 3)
    assert FrameStack(2).output_space(spaces.MultiBinary([2, 3])) == spaces.MultiBinary([2, 6])
    assert FrameStack(2).output_space(spaces.Box(1, 2, (1,))) == spaces.Box(0, 2, (2,))
    assert FrameStack(2, pad="repeat").output_space(spaces.Box(1, 2, (1,))) == spaces.Box(1, 2, (2,))


def test_oldest_first() -> None:
    piece = make(vectors(1), 3)
    outs = [piece(rows_of([(0, 0)], np.array([[x]], np.float32))).obs[0].tolist() for x in (1, 2, 3, 4)]
    assert outs == [[0, 0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4]]
    repeat = make(vectors(1), 3, pad="repeat")
    assert repeat(rows_of([(0, 0)], np.ones((1, 1), np.float32))).obs.tolist() == [[1, 1, 1]]


def test_rows_without_a_first_column_begin_when_they_are_new() -> None:
    piece = make(vectors(1), 2)
    ones = np.ones((1, 1), np.float32)
    assert piece(rows_of([(1, 0)], ones)).obs.tolist() == [[0, 1]]
    assert piece(rows_of([(1, 0)], ones)).obs.tolist() == [[1, 1]]
    piece.reset()
    assert piece(rows_of([(1, 0)], ones)).obs.tolist() == [[0, 1]]


def test_what_it_gave_is_not_changed_by_what_comes_after() -> None:
    piece = make(vectors(1), 2)
    obs = np.ones((1, 1), np.float32)
    out = piece(rows_of([(0, 0)], obs)).obs
    obs[:] = 5
    out[:, 0] = 7
    assert piece(rows_of([(0, 0)], np.full((1, 1), 2, np.float32))).obs.tolist() == [[1, 2]]


def test_a_state_is_exact() -> None:
    space = spaces.Dict({"a": vectors(2), "b": spaces.Discrete(3, start=1)})
    one, two = make(space, 3), make(space, 3)
    for seed in range(3):
        one(rows_of(pairs_of(3, 2)[seed:], batch(space, 6 - seed, seed)))
    one.reset([2])
    two.load_state_dict(one.state_dict())
    for seed in range(3, 6):
        again = rows_of(pairs_of(3, 2)[::-1], batch(space, 6, seed))
        same_tree(one(again), two(again))
        same_tree(one.state_dict(), two.state_dict())


def test_refusals() -> None:
    with pytest.raises(ArgumentError, match="k must be at least 1, got 0"):
        FrameStack(0)
    with pytest.raises(ArgumentError, match='pad must be "zero" or "repeat"'):
        FrameStack(2, pad="none")  # type: ignore[arg-type]  # a wrong value is the point
    with pytest.raises(UnsupportedSpaceError, match="has no such axis"):
        make(vectors(2), 2, axis=1)
    with pytest.raises(StateError, match="does not know its space"):
        FrameStack(2).load_state_dict({})
    assert FrameStack(2).state_dict() == {}
    piece = make(vectors(2), 2)
    with pytest.raises(ArgumentError, match=r"FrameStack: .* missing \['started', 'frames'\], unknown \['x'\]"):
        piece.load_state_dict({"x": 1})
    with pytest.raises(ArgumentError, match="FrameStack: frames: values: expected"):
        piece.load_state_dict(make(vectors(3), 2).state_dict())
    assert isinstance(piece(rows_of([], np.zeros((0, 2), np.float32))), Rows)
