"""`RecordVideo`: which videos there are, and what every frame of them shows."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import imageio_ffmpeg
import numpy as np
import pytest
from pettingzoo.utils.conversions import parallel_to_aec

import marlvec
from marlvec.envs.video import RecordVideo, VideoFile, find_ffmpeg
from marlvec.errors import ArgumentError, ContractError, EnvRaised, MarlvecError, MissingExtraError, WorkerDied
from tests.painter import (
    SMALLEST,
    Canvas,
    KeyedPainterEnv,
    PainterEnv,
    Place,
    SinglePainterEnv,
    fps_of,
    frames_of,
    places_of,
    read,
)
from tests.vector.support.reference import refused
from tests.waiting import until

MODES = ("same_step", "next_step", "disabled")


def recorded(env: Any, n: int, *recorder: RecordVideo, **kwargs: Any) -> marlvec.VectorEnv:
    return marlvec.make(env, n, **{"backend": "sync", "render_mode": "rgb_array", "wrappers": recorder, **kwargs})


def play(envs: marlvec.VectorEnv, steps: int, seed: int = 0) -> list[list[int]]:
    """Take so many steps; per env the lengths of its episodes, that of the running one last."""
    envs.reset(seed=seed)
    lengths: list[list[int]] = [[0] for _ in range(envs.num_envs)]
    for _ in range(steps):
        _, _, terminated, truncated, infos = envs.step(envs.random_action())
        over = (terminated | truncated | ~infos["alive"]).all(axis=1)
        if envs.autoreset_mode == "same_step":
            over = (terminated | truncated).any(axis=1)
        for i in np.flatnonzero(~infos["reset_mask"]).tolist():
            lengths[i][-1] += 1
            if over[i]:
                lengths[i].append(0)
        if envs.autoreset_mode == "disabled" and over.any():
            envs.reset(env_ids=over)
    return lengths


def episode(env: int, number: int, length: int) -> list[Place]:
    """What the video of an episode must show: its first frame, and one after each step."""
    return [(env, number, t) for t in range(length + 1)]


def videos(folder: Path) -> dict[str, list[Place]]:
    return {path.name: places_of(path) for path in sorted(folder.iterdir())}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- what is in a video


@pytest.mark.mostly_slow("films whole episodes", quick=4)
@pytest.mark.checklist(78)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("backend", "form"), [("sync", "gif"), ("thread", "mp4"), ("async", "mp4"), ("async", "gif")])
def test_every_episode_from_its_first_frame_to_its_last(backend: str, form: str, mode: str, tmp_path: Path) -> None:
    odd = (SMALLEST[0] + 3, SMALLEST[1] + 5)
    recorder = RecordVideo(tmp_path, format=form)
    options = {"num_workers": 2} if backend != "sync" else {}
    with recorded(PainterEnv, 2, recorder, backend=backend, autoreset_mode=mode, size=odd, **options) as envs:
        lengths = play(envs, 11)
    expected = {}
    for i, own in enumerate(lengths):
        *whole, rest = own
        assert len(whole) >= 2
        for number, length in enumerate(whole):
            expected[f"painter-env{i}-episode{number}.{form}"] = episode(i, number, length)
        if rest:
            expected[f"painter-env{i}-episode{len(whole)}-cut.{form}"] = episode(i, len(whole), rest)
    assert videos(tmp_path) == expected


@pytest.mark.parametrize("mode", MODES)
def test_the_step_that_ends_an_episode_brings_its_video(mode: str, tmp_path: Path) -> None:
    with recorded(partial(PainterEnv, length=3), 1, RecordVideo(tmp_path), autoreset_mode=mode) as envs:
        envs.reset(seed=0)
        for _ in range(2):
            envs.step(envs.random_action())
            assert [path.suffix for path in tmp_path.iterdir()] in ([], [".part"])
        envs.step(envs.random_action())
        assert videos(tmp_path) == {"painter-env0-episode0.mp4": episode(0, 0, 3)}


@pytest.mark.mostly_slow("films whole episodes", quick=3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("env", "options"),
    [
        (partial(PainterEnv, length=9), {"max_episode_steps": 4}),
        (partial(PainterEnv, length=4), {"max_episode_steps": 4}),
        (partial(PainterEnv, length=9, first_leaves=4), {"done_on": "any"}),
        (partial(PainterEnv, length=4, first_leaves=2), {}),
        (partial(PainterEnv, length=4), {"pad": True}),
    ],
)
def test_however_an_episode_ends(env: Any, options: dict[str, Any], mode: str, tmp_path: Path) -> None:
    recorder = RecordVideo(tmp_path, format="gif")
    with recorded(env, 1, recorder, autoreset_mode=mode, **options) as envs:
        envs.reset(seed=0)
        for _ in range(2):
            for _ in range(4):
                envs.step(np.zeros((1, 2), np.int64))
            if mode == "disabled":
                envs.reset()
            elif mode == "next_step":
                envs.step(np.zeros((1, 2), np.int64))
    assert videos(tmp_path) == {f"painter-env0-episode{number}.gif": episode(0, number, 4) for number in range(2)}


def alternating(render_mode: str | None = None, env_index: int = 0) -> Any:
    return parallel_to_aec(PainterEnv(render_mode, env_index=env_index, length=3))


@pytest.mark.mostly_slow("films whole episodes", quick=4)
@pytest.mark.parametrize("wrap", [False, True], ids=["plain", "wrapped"])
@pytest.mark.parametrize("form", ["parallel", "turns", "single", "keyed"])
def test_every_form_of_env(form: str, wrap: bool, tmp_path: Path) -> None:
    makers: dict[str, Callable[..., Any]] = {
        "parallel": partial(PainterEnv, length=3),
        "turns": alternating,
        "single": SinglePainterEnv,
        "keyed": KeyedPainterEnv,
    }
    inner = [gymnasium.wrappers.RecordEpisodeStatistics] if form == "single" and wrap else []
    with marlvec.make(
        makers[form],
        2,
        backend="sync",
        render_mode="rgb_array",
        wrappers=[*inner, RecordVideo(tmp_path, name="{env_index}-{episode}")],
    ) as envs:
        envs.reset(seed=0)
        for _ in range(3 * (2 if form == "turns" else 1)):
            envs.step(envs.random_action())
    found = videos(tmp_path)
    assert list(found) == ["0-0.mp4", "1-0.mp4"]
    for i, places in enumerate(found.values()):
        assert list(dict.fromkeys(places)) == episode(i, 0, 3)
        assert len(places) == (7 if form == "turns" else 4), "one for the reset, one for each step"


@pytest.mark.mostly_slow("films whole episodes", quick=2)
@pytest.mark.parametrize("backend", ["sync", "async"])
def test_real_envs(backend: str, tmp_path: Path) -> None:
    recorder = RecordVideo(tmp_path, episodes=[0])
    with recorded("CartPole-v1", 1, recorder, backend=backend) as envs:
        ((length, *_),) = play(envs, 60)
    path = tmp_path / "CartPole-v1-env0-episode0.mp4"
    assert names(tmp_path) == [path.name]
    frames = frames_of(path)
    assert len(frames) == length + 1

    # The pole: where the brown is, high up against low down. It ends an episode by leaning over 12 degrees.
    def lean(frame: Any) -> float:
        brown = (frame[:, :, 0].astype(int) - frame[:, :, 2]) > 60
        rows = np.flatnonzero(brown.any(axis=1))
        top, low = (float(np.flatnonzero(brown[row]).mean()) for row in (rows[5], rows[-20]))
        return abs(top - low) / (rows[-20] - rows[5])

    assert lean(frames[0]) < 0.1 < np.tan(np.radians(11)) < lean(frames[-1])


# --- nothing else changes


@pytest.mark.mostly_slow("films whole episodes", quick=3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", ["sync", "async"])
def test_what_envs_return_is_the_same(backend: str, mode: str, tmp_path: Path) -> None:
    def trace(*recorder: RecordVideo) -> list[Any]:
        with recorded(PainterEnv, 2, *recorder, backend=backend, autoreset_mode=mode) as envs:
            told: list[Any] = [envs.reset(seed=3)]
            for _ in range(12):
                step = envs.step(envs.random_action())
                told.append(step)
                if mode == "disabled":
                    over = ~step[-1]["alive"].any(axis=1)
                    if over.any():
                        told.append(envs.reset(env_ids=over))
        return told

    with_videos, without = trace(RecordVideo(tmp_path)), trace()
    np.testing.assert_equal(with_videos, without)
    assert len(names(tmp_path)) >= 4


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_control_calls_reach_the_users_env(backend: str, tmp_path: Path) -> None:
    inner = gymnasium.wrappers.RecordEpisodeStatistics
    with marlvec.make(
        SinglePainterEnv, 2, backend=backend, render_mode="rgb_array", wrappers=[inner, RecordVideo(tmp_path)]
    ) as envs:
        envs.reset(seed=0)
        assert envs.get_attr("env_index") == (0, 1)
        assert (
            envs.exec_func(lambda env: (type(env).__name__, env.unwrapped.t)) == (("RecordEpisodeStatistics", 0),) * 2
        )
        assert envs.env_is_wrapped(inner) == (True, True)
        envs.set_attr("episode", 20)
        assert [read(frame) for frame in envs.render()] == [(0, 20, 0), (1, 20, 0)]
        assert envs.spec.name == "SinglePainterEnv"
        assert envs.metadata["render_modes"] == ["rgb_array"]


# --- which episodes, which envs, what names


@pytest.mark.mostly_slow("films whole episodes", quick=3)
@pytest.mark.parametrize(
    ("episodes", "chosen"),
    [
        ("all", [0, 1, 2, 3, 4]),
        (1, [0, 1, 2, 3, 4]),
        (2, [0, 2, 4]),
        (np.int64(3), [0, 3]),
        ([1, 4, 9], [1, 4]),
        (range(2), [0, 1]),
        (np.array([3]), [3]),
        ([], []),
        (lambda number: number > 2, [3, 4]),
    ],
)
def test_chosen_episodes_and_no_frame_of_others(episodes: Any, chosen: list[int], tmp_path: Path) -> None:
    recorder = RecordVideo(tmp_path, episodes=episodes)
    with recorded(partial(PainterEnv, length=2), 1, recorder, autoreset_mode="disabled") as envs:
        for _ in range(5):
            envs.reset()
            envs.step(envs.random_action())
            envs.step(envs.random_action())
        assert envs.get_attr("renders") == (3 * len(chosen),)
    assert videos(tmp_path) == {f"painter-env0-episode{number}.mp4": episode(0, number, 2) for number in chosen}


def test_chosen_envs_and_a_single_renderer(tmp_path: Path) -> None:
    record = RecordVideo(tmp_path, env_ids=[0], name="{episode:03d}")
    with recorded(partial(PainterEnv, length=2), 3, record, backend="async", render_mode="single_rgb_array") as envs:
        play(envs, 4)
        assert envs.get_attr("renders")[1:] == (0, 0)
    assert videos(tmp_path) == {f"00{number}.mp4": episode(0, number, 2) for number in range(2)}
    with pytest.raises(
        ArgumentError, match=r"env 1, .*painter was made with render_mode=None, expected 'rgb_array'.*env_ids"
    ):
        recorded(PainterEnv, 3, RecordVideo(tmp_path), render_mode="single_rgb_array")
    with pytest.raises(ArgumentError, match="render_mode='ansi', expected 'rgb_array'"):
        recorded(PainterEnv, 3, RecordVideo(tmp_path), render_mode="ansi")


def test_resets_cut_episodes_off_and_those_without_a_step_do_not_count(tmp_path: Path) -> None:
    with recorded(partial(PainterEnv, length=3), 2, RecordVideo(tmp_path)) as envs:
        envs.reset(seed=0)
        envs.reset(seed=0)
        envs.step(envs.random_action())
        envs.reset(env_ids=[1])
        for _ in range(3):
            envs.step(envs.random_action())
        envs.reset()
    assert videos(tmp_path) == {
        "painter-env0-episode0.mp4": episode(0, 1, 3),
        "painter-env0-episode1-cut.mp4": episode(0, 2, 1),
        "painter-env1-episode0-cut.mp4": episode(1, 1, 1),
        "painter-env1-episode1.mp4": episode(1, 2, 3),
    }


def test_an_env_that_fails_leaves_what_there_was(tmp_path: Path) -> None:
    class Failing(PainterEnv):
        def step(self, actions: Any) -> Any:
            if self.episode == 0 and self.t == 2:
                raise RuntimeError("lost")
            return super().step(actions)

    with recorded(partial(Failing, length=3), 1, RecordVideo(tmp_path)) as envs:
        envs.reset(seed=0)
        envs.step(envs.random_action())
        envs.step(envs.random_action())
        refused(EnvRaised, "lost", envs.step, envs.random_action())
        envs.reset()
        for _ in range(3):
            envs.step(envs.random_action())
    assert videos(tmp_path) == {
        "painter-env0-episode0-cut.mp4": episode(0, 0, 2),
        "painter-env0-episode1.mp4": episode(0, 1, 3),
    }


def test_names_are_names_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slashed(PainterEnv):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs, length=2)
            self.metadata["name"] = "ALE/My Game: v5"

    monkeypatch.chdir(tmp_path)
    record = RecordVideo("here/and there", name="run_7.{env}.{env_index}/{episode}")
    monkeypatch.chdir("/")
    for _ in range(2):  # the second time in place of the first
        with recorded(Slashed, 1, record) as envs:
            play(envs, 2)
    found = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert found == [tmp_path / "here" / "and there" / "run_7.ALE_My_Game_v5.0" / "0.mp4"]
    assert places_of(found[0]) == episode(0, 0, 2)


@pytest.mark.mostly_slow("films whole episodes", quick=2)
@pytest.mark.parametrize(
    ("fps", "own", "form", "expected"),
    [
        (None, 10, "mp4", 10),
        (None, None, "mp4", 30),
        (None, 120.0, "mp4", 120),
        (None, 120, "gif", 50),
        (12.5, 10, "mp4", 12.5),
        (np.float32(20), 10, "gif", 20),
    ],
)
def test_frames_a_second(fps: Any, own: Any, form: str, expected: float, tmp_path: Path) -> None:
    record = RecordVideo(tmp_path, fps=fps, format=form)
    with recorded(partial(PainterEnv, length=5, fps=own), 1, record) as envs:
        play(envs, 5)
    assert fps_of(tmp_path / f"painter-env0-episode0.{form}") == pytest.approx(expected, rel=0.01)


# --- what goes wrong


class Wrong(PainterEnv):
    """From the second step of the first episode on it gives something else."""

    def __init__(self, frame: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, length=3)
        self.frame = frame

    def render(self) -> Any:
        return self.frame if self.episode == 0 and self.t == 2 else super().render()


@pytest.mark.mostly_slow("films whole episodes", quick=2)
@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (None, "expected render() to return a frame, uint8 of shape (H, W, 3), got NoneType"),
        ([np.zeros((4, 4, 3), np.uint8)], "got list"),
        (np.zeros((4, 4, 3)), "got float64 of shape (4, 4, 3)"),
        (np.zeros((4, 4, 4), np.uint8), "got uint8 of shape (4, 4, 4)"),
        (np.zeros((4, 4), np.uint8), "got uint8 of shape (4, 4)"),
        (np.zeros((0, 4, 3), np.uint8), "got uint8 of shape (0, 4, 3)"),
        (
            np.zeros((50, 96, 3), np.uint8),
            "frame 2 of painter-env0-episode0.mp4: expected the shape of the earlier frames, (48, 96, 3), "
            "got (50, 96, 3)",
        ),
    ],
)
def test_wrong_frames_break_the_contract(frame: Any, words: str, tmp_path: Path) -> None:
    with recorded(partial(Wrong, frame), 1, RecordVideo(tmp_path)) as envs:
        envs.reset(seed=0)
        envs.step(envs.random_action())
        refused(ContractError, re.escape(words), envs.step, envs.random_action())
        envs.reset()
        for _ in range(3):
            envs.step(envs.random_action())
    assert videos(tmp_path) == {
        "painter-env0-episode0-cut.mp4": episode(0, 0, 1),
        "painter-env0-episode1.mp4": episode(0, 1, 3),
    }


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"format": "avi"}, "format: expected 'mp4' or 'gif', got 'avi'"),
        ({"episodes": "some"}, "episodes: expected 'all', an int k of at least 1"),
        ({"episodes": 0}, "episodes: expected 'all', an int k of at least 1"),
        ({"episodes": True}, "episodes: expected 'all', an int k of at least 1"),
        ({"episodes": 1.5}, "episodes: expected 'all', an int k of at least 1"),
        ({"episodes": [1, -1]}, "episodes: expected numbers from 0, got [1, -1]"),
        ({"env_ids": 0}, "env_ids: expected numbers from 0, got 0"),
        ({"env_ids": "0"}, "env_ids: expected numbers from 0, got ['0']"),
        ({"env_ids": [0.0]}, "env_ids: expected numbers from 0, got [0.0]"),
        ({"fps": 0}, "fps: expected a positive number of frames a second, got 0"),
        ({"fps": float("nan")}, "fps: expected a positive number"),
        ({"fps": "30"}, "fps: expected a positive number"),
        ({"fps": 60, "format": "gif"}, "fps: viewers show a GIF with at most 50 frames a second, got 60"),
        ({"name": "{game}-{episode}"}, "name: the fields are {env}, {env_index} and {episode}, got '{game}-{episode}'"),
        ({"name": "{"}, "name: the fields are"),
        ({"name": "{episode}"}, "name: expected {env_index} and {episode} in it"),
        ({"name": "{env_index}"}, "name: expected {env_index} and {episode} in it"),
        ({"name": "{env_index}", "env_ids": [1]}, "name: expected {episode} in it"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    refused(ArgumentError, re.escape(f"RecordVideo: {words}"), RecordVideo, tmp_path, **options)
    (tmp_path / "file").touch()
    refused(ArgumentError, "expected a folder, .*file is a file", RecordVideo, tmp_path / "file")


def test_an_env_with_nonsense_for_a_frame_rate(tmp_path: Path) -> None:
    with recorded(partial(PainterEnv, fps="fast"), 1, RecordVideo(tmp_path)) as envs:
        envs.reset(seed=0)
        with pytest.raises(EnvRaised, match=r'metadata\["render_fps"\]: expected a positive number .* got \'fast\''):
            envs.step(envs.random_action())


def test_envs_that_reset_themselves_are_refused(tmp_path: Path) -> None:
    class Restless(SinglePainterEnv):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.metadata["autoreset_mode"] = gymnasium.vector.AutoresetMode.SAME_STEP

    with pytest.raises(ArgumentError, match="resets itself in the step that ends its episode"):
        recorded(Restless, 1, RecordVideo(tmp_path))


@pytest.mark.parametrize(("name", "file"), [("[a]{{}}-{episode:03d}", "[a]{}-007"), ("in/{episode}x", "in/3x-cut")])
def test_files_that_would_be_replaced_are_named(name: str, file: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for other in ("mine.mp4", "[a]{}-007.gif", "in/3.mp4", "a-1.mp4"):
        (tmp_path / other).touch()
    options: dict[str, Any] = {"env_ids": [0], "name": name}
    RecordVideo(tmp_path, **options)
    (tmp_path / f"{file}.mp4").touch()
    with pytest.warns(
        UserWarning, match=f"{tmp_path} holds 1 videos of such names, for example {re.escape(Path(file).name)}.mp4"
    ):
        RecordVideo(tmp_path, **options)


def test_without_the_extra_nothing_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    refused(MissingExtraError, r'pip install "marlvec\[video\]"', RecordVideo, tmp_path / "videos")
    assert names(tmp_path) == []


def test_without_an_ffmpeg_nothing_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise RuntimeError("No ffmpeg exe could be found")

    monkeypatch.setattr(imageio_ffmpeg, "get_ffmpeg_exe", none)
    with pytest.raises(MissingExtraError, match=r'No ffmpeg exe could be found.*pip install "marlvec\[video\]"'):
        RecordVideo(tmp_path / "videos")


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("exit 3", "Broken pipe|exit code 3"),
        ("echo no space left >&2; exit 1", "ffmpeg could not write .*painter-env0-episode0.mp4: no space left"),
        (
            'for last; do :; done; cat >"$last"; echo cannot end >&2; exit 1',  # the last argument is its file
            "ffmpeg could not write .*painter-env0-episode0.mp4: cannot end",
        ),
        (None, "ffmpeg could not write .*painter-env0-episode0.mp4: .*No such file"),
    ],
)
def test_an_ffmpeg_that_fails_says_why_and_leaves_nothing(
    text: str | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = str(tmp_path / "gone") if text is None else script(tmp_path / "ffmpeg", text)
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", program)
    folder = tmp_path / "videos"
    with recorded(partial(PainterEnv, length=2, size=(400, 600)), 1, RecordVideo(folder)) as envs:
        envs.reset(seed=0)
        with pytest.raises(EnvRaised, match=words) as caught:
            for _ in range(2):
                envs.step(envs.random_action())
        assert isinstance(caught.value.__cause__, MarlvecError)
    assert names(folder) == []


# --- processes and memory


def running(folder: Path) -> list[int]:
    """Processes that have something to do with this folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if os.fsencode(folder) in command:
                found.append(int(entry.name))
    return found


@pytest.mark.parametrize("backend", ["sync", "thread", "async"])
def test_no_process_outlives_close(backend: str, tmp_path: Path) -> None:
    with recorded(partial(PainterEnv, length=30), 2, RecordVideo(tmp_path), backend=backend) as envs:
        play(envs, 2)
        until(lambda: len(running(tmp_path)) == 2)
    assert running(tmp_path) == []
    assert names(tmp_path) == ["painter-env0-episode0-cut.mp4", "painter-env1-episode0-cut.mp4"]


@pytest.mark.mostly_slow("films whole episodes", quick=3)
@pytest.mark.parametrize("context", ["forkserver", "fork"])
def test_no_process_outlives_a_worker_that_is_killed(context: str, tmp_path: Path) -> None:
    record = RecordVideo(tmp_path)
    with recorded(partial(PainterEnv, length=30), 1, record, backend="async", context=context) as envs:
        play(envs, 2)
        until(lambda: running(tmp_path) and names(tmp_path))
        (ffmpeg,) = running(tmp_path)
        os.kill(ffmpeg, signal.SIGSTOP)  # so that it cannot end by itself when its input does
        os.kill(envs.exec_func(lambda env: os.getpid())[0], signal.SIGKILL)
        refused(WorkerDied, "", envs.step, envs.random_action())
        until(lambda: not running(tmp_path))
    assert [path.suffix for path in tmp_path.iterdir()] == [".part"]


FRAME = np.zeros((*SMALLEST, 3), np.uint8)


def test_a_process_that_is_forked_meanwhile_keeps_no_video_waiting(tmp_path: Path) -> None:
    """It has a copy of every pipe, and ffmpeg ends only when the last one is closed."""
    video = VideoFile(tmp_path / "x.mp4", 30, find_ffmpeg())
    video.write(FRAME)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    try:
        os.close(reader)
        video.finish()
        assert len(frames_of(tmp_path / "x.mp4")) == 1
    finally:
        os.close(writer)
        os.waitpid(child, 0)


def test_ctrl_c_does_not_cut_a_video(tmp_path: Path) -> None:
    video = VideoFile(tmp_path / "x.mp4", 30, find_ffmpeg())
    video.write(FRAME)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ()), "here it still counts"
    until(lambda: running(tmp_path) and names(tmp_path))
    (ffmpeg,) = running(tmp_path)
    for _ in range(3):
        os.kill(ffmpeg, signal.SIGINT)
        time.sleep(0.02)
        video.write(FRAME)
    video.finish()
    assert len(frames_of(tmp_path / "x.mp4")) == 4
    assert names(tmp_path) == ["x.mp4"]


def test_a_frame_that_was_written_in_part_is_left_out(tmp_path: Path) -> None:
    """As when Ctrl-C comes in the midst of it."""
    video = VideoFile(tmp_path / "x.gif", 25, find_ffmpeg())
    for _ in range(3):
        video.write(FRAME)
    video._pipe.write(FRAME.tobytes()[:100])
    assert video.finish(tmp_path / "y.gif") == tmp_path / "y.gif"
    assert names(tmp_path) == ["y.gif"]
    assert len(frames_of(tmp_path / "y.gif")) == 3


def test_frames_are_not_kept(tmp_path: Path) -> None:
    video = VideoFile(tmp_path / "x.mp4", 30, find_ffmpeg())
    canvas = Canvas((200, 300))
    tracemalloc.start()
    for t in range(60):
        video.write(np.asfortranarray(canvas.draw(3, 5, t)))  # as from pygame: in an order of its own
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    video.finish()
    assert peak < 5 * canvas.frame.nbytes
    assert video.frames == 60
    assert places_of(tmp_path / "x.mp4") == [(3, 5, t) for t in range(60)]


def test_a_video_without_a_frame_is_none(tmp_path: Path) -> None:
    video = VideoFile(tmp_path / "x.mp4", 30, find_ffmpeg())
    refused(MarlvecError, "at least one frame", video.finish)
    video.discard()
    assert names(tmp_path) == []


@pytest.mark.mostly_slow("films whole episodes", quick=3)
@pytest.mark.parametrize("mode", MODES)
def test_an_episode_entered_by_a_saved_state_has_no_video_and_takes_no_others_place(tmp_path: Path, mode: str) -> None:
    """Back to the first step of episode 0 from within episode 1: both were begun here, and keep their videos."""
    record = RecordVideo(tmp_path, name="{env_index}-{episode}")
    make = partial(PainterEnv, length=3)
    with recorded(make, 1, record, autoreset_mode=mode, env_state="deepcopy") as envs:
        envs.reset(seed=0)
        begun = envs.get_state()
        envs.step(envs.random_action())
        within = envs.get_state()
        for _ in range(4):
            _, _, _, _, infos = envs.step(envs.random_action())
            if mode == "disabled" and not infos["alive"].any():
                envs.reset()
        before = {path.name: path.read_bytes() for path in tmp_path.glob("*.mp4")}
        envs.set_state(within)
        for _ in range(2):
            envs.step(envs.random_action())
        envs.set_state(begun)
        for _ in range(3):
            envs.step(envs.random_action())
    assert "0-0.mp4" in before
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    assert all(shown[0][2] == 0 for shown in videos(tmp_path).values())
