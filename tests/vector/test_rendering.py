"""``render()`` and the grid of frames."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import marlvec
from marlvec.envs.video import tile_frames
from marlvec.errors import ArgumentError, BusyError, EnvRaised
from marlvec.testing import KeyedEnv, ScriptedParallelEnv, SingleEnv
from tests.painter import SMALLEST, PainterEnv, read
from tests.vector.support.reference import refused

BACKENDS = ("sync", "async")
N = 3


def painters(n: int = N, **kwargs: Any) -> marlvec.VectorEnv:
    return marlvec.make(PainterEnv, n, **{"backend": "sync", "render_mode": "rgb_array", **kwargs})


def sizes(*frames: Any) -> list[tuple[int, ...]]:
    return [frame.shape for frame in frames]


# --- render()


@pytest.mark.checklist(76)
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_frame_per_env_or_of_those_chosen_and_a_grid_of_unequal_ones(backend: str) -> None:
    larger = [{"size": (SMALLEST[0] + 10 * i, SMALLEST[1] + 7 * i)} for i in range(N)]
    with painters(backend=backend, env_kwargs=larger) as envs:
        envs.reset(seed=0)
        for _ in range(8):  # whole episodes, the next ones included
            envs.step(np.zeros((N, 2), np.int64))
            where = list(zip(range(N), envs.get_attr("episode"), envs.get_attr("t"), strict=True))
            drawn = envs.get_attr("renders")
            frames = envs.render()
            assert isinstance(frames, tuple)
            assert sizes(*frames) == [(*size["size"], 3) for size in larger]
            assert [read(frame) for frame in frames] == where
            for chosen, ids in (([2, 0], [2, 0]), (np.array([False, True, False]), [1]), ([1], [1])):
                assert [read(frame) for frame in envs.render(chosen)] == [where[i] for i in ids]
            assert envs.get_attr("renders") == (drawn[0] + 2, drawn[1] + 3, drawn[2] + 2), "nobody else draws"
        height, width, _ = frames[-1].shape
        grid = tile_frames(frames)
        assert grid.shape == (2 * height, 2 * width, 3)
        for i, frame in enumerate(frames):
            cell = grid[i // 2 * height : (i // 2 + 1) * height, i % 2 * width : (i % 2 + 1) * width]
            h, w, _ = frame.shape
            top, left = (height - h) // 2, (width - w) // 2
            np.testing.assert_array_equal(cell[top : top + h, left : left + w], frame)
            rest = np.ones(cell.shape[:2], np.bool_)
            rest[top : top + h, left : left + w] = False
            assert not cell[rest].any()
        assert not grid[height:, width:].any(), "the fourth cell is empty"


@pytest.mark.parametrize("backend", BACKENDS)
def test_frames_stay_as_they_were(backend: str) -> None:
    """The envs draw on the same arrays again and again."""
    with painters(backend=backend) as envs:
        envs.reset(seed=0)
        before = envs.render()
        kept = [frame.copy() for frame in before]
        envs.step(np.zeros((N, 2), np.int64))
        after = envs.render()
        for frame, copy, new in zip(before, kept, after, strict=True):
            np.testing.assert_array_equal(frame, copy)
            assert (frame != new).any()
            frame[:] = 0  # a frame is the caller's, and nothing of it is the env's
        assert [read(frame)[2] for frame in envs.render()] == [1] * N


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_frames_while_a_step_is_pending_and_the_step_is_still_there(backend: str) -> None:
    with painters(backend=backend) as envs:
        envs.reset(seed=0)
        envs.step_send(np.zeros((N, 2), np.int64))
        refused(BusyError, "step", envs.render)
        obs, *_ = envs.step_fetch(timeout=60)
        assert obs[:, :, 1].tolist() == [[1, 1]] * N
        assert [read(frame)[2] for frame in envs.render()] == [1] * N


@pytest.mark.parametrize("backend", BACKENDS)
def test_other_modes_give_what_the_envs_give(backend: str) -> None:
    with painters(backend=backend, render_mode=["human", "ansi", "rgb_array"]) as envs:
        envs.reset(seed=0)
        nothing, text, frame = envs.render()
        assert nothing is None
        assert text == "env 1, episode 0, step 0"
        assert read(frame) == (2, 0, 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_last_frame_of_an_episode_is_there_where_nothing_resets(backend: str) -> None:
    with painters(backend=backend, autoreset_mode="disabled", env_kwargs={"length": 3}) as envs:
        envs.reset(seed=0)
        for t in range(1, 4):
            envs.step(np.zeros((N, 2), np.int64))
            assert [read(frame) for frame in envs.render()] == [(i, 0, t) for i in range(N)]
        envs.reset(env_ids=[1])
        assert [read(frame)[1:] for frame in envs.render()] == [(0, 3), (1, 0), (0, 3)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_envs_without_a_render_mode_say_what_to_pass(backend: str) -> None:
    with painters(backend=backend, render_mode="single_rgb_array") as envs:
        envs.reset(seed=0)
        e = refused(EnvRaised, r'painter was made without a render mode; pass render_mode="rgb_array"', envs.render)
        assert isinstance(e.__cause__, ArgumentError)
        assert e.env_ids == (1, 2)
        assert read(e.result[0]) == (0, 0, 0)
        assert [read(frame) for frame in envs.render(indices=[0])] == [(0, 0, 0)]
        envs.step(np.zeros((N, 2), np.int64))  # and no episode is lost


def test_envs_that_cannot_render_say_so() -> None:
    class Unable(SingleEnv):
        """Gymnasium's base class has a render() that raises NotImplementedError."""

        render_mode = "rgb_array"

    without = "was made without a render mode; pass render_mode"
    for env, words in (
        (ScriptedParallelEnv, without),
        (partial(Unable, 3), r"has no render\(\)"),
        (KeyedEnv, r"KeyedEnv has no render\(\)"),
    ):
        with marlvec.make(env, 1, backend="sync") as envs:
            envs.reset(seed=0)
            refused(EnvRaised, words, envs.render)


def test_an_env_that_knows_nothing_of_modes_just_renders() -> None:
    class Plain(PainterEnv):
        def __init__(self) -> None:
            super().__init__("rgb_array")
            del self.render_mode

        def render(self) -> Any:
            self.renders += 1
            return self._canvas.draw(self.env_index, self.episode, self.t)

    with marlvec.make(Plain, 1, backend="sync") as envs:
        envs.reset(seed=0)
        assert read(envs.render()[0]) == (0, 0, 0)


def test_lists_of_frames_are_copies_too() -> None:
    with marlvec.make("CartPole-v1", 1, backend="sync", render_mode="rgb_array_list") as envs:
        envs.reset(seed=0)
        for _ in range(8):
            envs.step(np.ones((1, 1), np.int64))
        (frames,) = envs.render()
        assert sizes(*frames) == [(400, 600, 3)] * 9
        assert (frames[0] != frames[-1]).any()
        assert all(frame.base is None for frame in frames)


@pytest.mark.parametrize(("env", "backend"), [("simple_spread", "async"), ("CartPole-v1", "sync")])
def test_real_envs_in_one_picture(env: str, backend: str) -> None:
    with marlvec.make(env, 3, backend=backend, render_mode="rgb_array") as envs:
        envs.reset(seed=0)
        first = tile_frames(envs.render(), columns=3)
        for _ in range(8):
            envs.step(np.ones((3, envs.agent_num), np.int64))
        frames = envs.render()
        second = tile_frames(frames, columns=3)
    height, width, _ = frames[0].shape
    assert first.shape == second.shape == (height, 3 * width, 3)
    for i in range(3):
        cells = (grid[:, i * width : (i + 1) * width] for grid in (first, second))
        assert len({cell.tobytes() for cell in cells}) == 2, "every env has moved"


# --- the grid

dimension = st.integers(1, 9)


@settings(max_examples=60)
@given(
    st.lists(st.none() | st.tuples(dimension, dimension, st.sampled_from([0, 1, 3, 4])), min_size=1, max_size=11),
    st.none() | st.integers(1, 13),
    st.integers(0, 255) | st.tuples(*[st.integers(0, 255)] * 3),
    st.integers(0, 2**32),
)
def test_every_frame_is_in_the_middle_of_its_cell(
    shapes: list[Any], columns: int | None, background: Any, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    frames = [None if s is None else rng.integers(0, 256, s if s[2] else s[:2], np.uint8) for s in shapes]
    if not any(frame is not None for frame in frames):
        with pytest.raises(ArgumentError, match=f"at least one frame, got {len(frames)} empty ones"):
            tile_frames(frames, columns, background)
        return
    grid = tile_frames(frames, columns, background)
    height, width = (max(s[axis] for s in shapes if s) for axis in (0, 1))
    across = columns or next(c for c in range(1, 12) if c * c >= len(frames))
    down = -(-len(frames) // across)
    assert grid.shape == (down * height, across * width, 3)
    assert grid.dtype == np.uint8
    expected = np.empty(grid.shape, np.float64)
    expected[:] = background
    for i, frame in enumerate(frames):
        if frame is not None:
            h, w = frame.shape[:2]
            top, left = i // across * height + (height - h) // 2, i % across * width + (width - w) // 2
            cell = expected[top : top + h, left : left + w]
            picture = frame.reshape(h, w, -1).astype(np.float64)
            if picture.shape[2] == 4:
                alpha = picture[:, :, 3:] / 255
                picture = picture[:, :, :3] * alpha + cell * (1 - alpha)
            cell[:] = picture
    np.testing.assert_allclose(grid, expected, atol=0.5 + 1e-9)


def test_a_grid_is_as_square_as_can_be_and_a_picture_of_its_own() -> None:
    one = np.full((2, 3, 3), 7, np.uint8)
    shapes = [tile_frames([one] * n).shape[:2] for n in range(1, 11)]
    assert [(h // 2, w // 3) for h, w in shapes] == [
        (1, 1), (1, 2), (2, 2), (2, 2), (2, 3), (2, 3), (3, 3), (3, 3), (3, 3), (3, 4)
    ]  # fmt: skip
    grid = tile_frames((one,))
    grid[:] = 0
    assert one.all()
    np.testing.assert_array_equal(tile_frames(np.stack([one, one])), tile_frames([one, one]))


GOOD = np.zeros((4, 5, 3), np.uint8)


@pytest.mark.parametrize(
    ("frames", "options", "words"),
    [
        (
            [GOOD, GOOD / 255],
            {},
            "frame 1: expected uint8 of shape (H, W, 3), (H, W, 4) or (H, W), got float64 of shape",
        ),
        (
            [GOOD, GOOD[0, 0]],
            {},
            "frame 1: expected uint8 of shape (H, W, 3), (H, W, 4) or (H, W), got uint8 of shape (3,)",
        ),
        ([GOOD, GOOD[:, :, :2]], {}, "got uint8 of shape (4, 5, 2)"),
        ([GOOD, GOOD[:0]], {}, "got uint8 of shape (0, 5, 3)"),
        ([None, "o-o"], {}, "frame 1: expected an array, uint8 of shape (H, W, 3), got str"),
        (GOOD, {}, "expected several frames, got an array of one, (4, 5, 3)"),
        ("o-o", {}, "expected a list or tuple of frames, got str"),
        (None, {}, "expected a list or tuple of frames, got NoneType"),
        ([], {}, "expected at least one frame, got 0 empty ones"),
        ([GOOD], {"columns": 0}, "columns: expected an int of at least 1, got 0"),
        ([GOOD], {"columns": 1.5}, "columns: expected an int of at least 1, got 1.5"),
        ([GOOD], {"background": 256}, "background: expected an int or three, from 0 to 255 each, got 256"),
        ([GOOD], {"background": (1, 2)}, "background: expected an int or three"),
        ([GOOD], {"background": 0.5}, "background: expected an int or three"),
    ],
)
def test_what_is_no_frame_is_named(frames: Any, options: dict[str, Any], words: str) -> None:
    refused(ArgumentError, re.escape(words), tile_frames, frames, **options)
