"""``marlvec record``: a video of envs played side by side, a frame after every reset and step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from marlvec.collect import Collector
from marlvec.collect.progress_bar import ProgressBar
from marlvec.env_ids import EnvIds
from marlvec.envs.rendering import check_frame, tile_frames
from marlvec.envs.wrappers.video import FORMATS, VideoFile, check_fps, find_ffmpeg, own_fps
from marlvec.errors import ArgumentError
from marlvec.vector import VectorEnv, VectorStep, load_state
from marlvec.vector.data.report import Report

__all__ = [
    "Camera",
    "FilmedEpisode",
    "Moment",
    "Recording",
    "check_output",
    "print_recording",
    "read_moment",
    "record_episodes",
]

_MOST_LISTED = 8  # episodes


@dataclass(frozen=True, slots=True)
class FilmedEpisode:
    """One episode of the film.

    Attributes:
        env_id: Its env.
        length: Env steps.
        episode_return: Sum of all agents' rewards.
    """

    env_id: int
    length: int
    episode_return: float


@dataclass(frozen=True, slots=True)
class Recording:
    """What came out.

    Attributes:
        name: Of the env.
        path: The file; None if there is none, because Ctrl-C came before the first frame.
        shape: Height and width of the picture.
        frames: Number of frames.
        fps: Frames a second.
        episodes: Those that are in it to their end, in the order of their ends.
        interrupted: Whether Ctrl-C ended it.
    """

    name: str
    path: Path | None
    shape: tuple[int, int]
    frames: int
    fps: float
    episodes: tuple[FilmedEpisode, ...]
    interrupted: bool


def check_output(path: Path, fps: float | None) -> None:
    """Make sure that a video can be written there, before anything runs.

    Raises:
        ArgumentError: The suffix names no format of videos, the folder does not exist, or such files cannot have so
            many frames a second.
        MissingExtraError: There is no ffmpeg; names the extra that brings it.
    """
    file_format = path.suffix[1:].lower()
    if file_format not in FORMATS:
        raise ArgumentError(f"--output {path}: expected a name that ends in .{' or .'.join(FORMATS)}")
    if not path.parent.is_dir():
        raise ArgumentError(f"--output {path}: there is no folder {path.parent}")
    if fps is not None:
        check_fps(fps, file_format, "--fps")
    find_ffmpeg()


@dataclass(frozen=True, slots=True)
class Moment:
    """Where a film begins: a moment of an env's episode.

    Attributes:
        path: The file that it is in.
        state: What is in the file.
        env_id: The env in it.
    """

    path: Path
    state: dict[str, Any]
    env_id: int

    @property
    def backend(self) -> str | None:
        """The only backend on which it can be, or None."""
        return "native" if self.state["kind"] == "native" else None

    def put_into(self, envs: VectorEnv) -> None:
        """Have all envs go on from it.

        Raises:
            ArgumentError: It is of another env; says what differs.
        """
        try:
            envs.set_state(self.state, range(envs.num_envs), from_ids=[self.env_id] * envs.num_envs)
        except ArgumentError as error:
            raise ArgumentError(f"--from {self.path}: {error}") from error


def read_moment(path: Path | None, env_id: int | None) -> Moment | None:
    """Read the state of an env that a film is to begin with; None if there is none.

    Args:
        path: A file of `marlvec.save_state`, or None.
        env_id: Which of the envs in it; None: the only one.

    Raises:
        CheckpointError: There is no such file, it is damaged, or holds something else.
        ArgumentError: It is not said which env; there is no such env in it; or the env has no running episode.
    """
    if path is None:
        if env_id is not None:
            raise ArgumentError(f"--env-id {env_id} says which env of --from FILE, and there is no --from")
        return None
    state = load_state(path)
    ids = np.asarray(state["env_ids"]).tolist()
    if env_id is None and len(ids) != 1:
        raise ArgumentError(f"--from {path}: it holds the envs {ids}; choose one by --env-id")
    chosen = ids[0] if env_id is None else env_id
    if chosen not in ids:
        raise ArgumentError(f"--env-id {chosen}: the file {path} holds the envs {ids}")
    place = ids.index(chosen)
    if not state["running"][place] or state["over"][place]:
        raise ArgumentError(f"--from {path}: env {chosen} was saved between two episodes, so there is nothing to show")
    return Moment(path, state, chosen)


class Camera:
    """Envs that are filmed: a frame of all of them, in a grid, whenever rows come in.

    Stands in the collector's way to them, so that it sees an episode's last frame before the collector begins the next
    one. An env that has played its episodes is not looked at any more: its last frame stays.

    Args:
        envs: The envs, made with ``autoreset_mode="disabled"``.
        video: Where the frames go.
        episodes: How many to film of each env.
        begin: Where the first episode of each begins; None: at its beginning.

    Attributes:
        episodes: Those that have ended.
        shape: Height and width of the picture; zeros before the first.
    """

    def __init__(self, envs: VectorEnv, video: VideoFile, episodes: int, begin: Moment | None = None) -> None:
        self._envs, self._video, self._begin = envs, video, begin
        self._first: VectorStep | None = None  # rows of that moment, which nobody has received
        self._left = np.full(envs.num_envs, episodes)
        self._tiles: list[NDArray[np.uint8] | None] = [None] * envs.num_envs
        self._returns = np.zeros(envs.num_envs)
        self._lengths = np.full(envs.num_envs, -1)  # what comes first is a reset
        self.episodes: list[FilmedEpisode] = []
        self.shape = (0, 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._envs, name)

    @property
    def done(self) -> bool:
        """Whether every env has played its episodes."""
        return not self._left.any()

    def reset_send(self, seed: int | None = None, env_ids: EnvIds | None = None) -> None:
        """Have envs begin an episode, as `VectorEnv.reset_send`; or, the first time, go on with one."""
        self._envs.reset_send(seed=seed, env_ids=env_ids)
        if self._begin is not None:
            self._envs.recv()
            self._begin.put_into(self._envs)
            self._begin, self._first = None, _first_rows(self._envs)

    def recv(self, min_envs: int | None = None, timeout: float | None = None) -> VectorStep:
        """Receive rows, as `VectorEnv.recv`, and take a frame."""
        if self._first is None:
            step = self._envs.recv(min_envs, timeout)
        else:
            step, self._first = self._first, None
        rows = np.flatnonzero(self._left[step.env_ids])
        if len(rows):
            self._look(step.env_ids[rows])
            self._count(step, rows)
        return step

    def _look(self, ids: NDArray[np.int64]) -> None:
        frames = self._envs.render(ids)
        for i, frame in zip(ids.tolist(), frames, strict=True):
            self._tiles[i] = check_frame(frame, f"{self._envs.spec.name}, env {i}")
        picture = tile_frames(self._tiles)
        self.shape = picture.shape[:2]
        self._video.write(picture)

    def _count(self, step: VectorStep, rows: NDArray[np.int64]) -> None:
        for k in rows.tolist():
            i = int(step.env_ids[k])
            self._lengths[i] += 1
            self._returns[i] += step.rewards[k].sum()
            if step.done[k]:
                self.episodes.append(FilmedEpisode(i, int(self._lengths[i]), float(self._returns[i])))
                self._left[i] -= 1
                self._returns[i], self._lengths[i] = 0.0, -1


def _first_rows(envs: VectorEnv) -> VectorStep:
    """What the envs show now, as if they had been reset to it: what the last step brought was before the film."""
    step = envs._make_step(np.arange(envs.num_envs), Report())
    step.rewards[...] = 0.0
    for flags in (step.terminated, step.truncated, step.final_missing, step.done, step.reset_mask):
        flags[...] = False
    return step


def record_episodes(
    envs: VectorEnv,
    collector_of: Callable[[VectorEnv], Collector],
    *,
    output: Path,
    episodes: int,
    fps: float | None,
    console: Console,
    begin: Moment | None = None,
) -> Recording:
    """Play, and write a video of it.

    Args:
        envs: The envs, made with ``autoreset_mode="disabled"`` and ``render_mode="rgb_array"``.
        collector_of: Who plays: from envs to what steps them.
        output: The file, see `check_output`.
        episodes: How many of each env.
        fps: Frames a second; None: what the env says.
        console: Where the progress bar goes; nothing is shown if it is no terminal.
        begin: Where the first episode of each env begins; None: at its beginning.
    """
    rate = own_fps(envs.metadata, output.suffix[1:].lower()) if fps is None else fps
    video = VideoFile(output, rate, find_ffmpeg())
    camera = Camera(envs, video, episodes, begin)
    # A collector asks nothing of envs but what the camera passes on.
    collector = collector_of(cast(VectorEnv, camera))
    interrupted = False
    try:
        began = perf_counter()
        total = episodes * envs.num_envs
        with ProgressBar(envs.spec.name, "episodes", total, speed_unit="frames", console=console) as bar:
            try:
                while not camera.done:
                    collector.collect(env_steps=envs.num_envs)
                    speed = video.frames / (perf_counter() - began)
                    bar.show(len(camera.episodes), speed=speed, note=f"{video.frames:,} frames")
            except KeyboardInterrupt:
                interrupted = True
        path = video.finish() if video.frames else None
    finally:
        video.discard()
    return Recording(
        envs.spec.name, path, camera.shape, video.frames, rate, tuple(camera.episodes), interrupted=interrupted
    )


def print_recording(console: Console, result: Recording) -> None:
    """Say what was written, and how the episodes went."""
    stopped = "stopped early; " if result.interrupted else ""
    if result.path is None:
        console.print(f"{stopped}nothing was written", markup=False, highlight=False)
        return
    height, width = result.shape
    plural = "s" * (len(result.episodes) != 1)
    console.print(
        f"{stopped}{len(result.episodes)} episode{plural} of {result.name}: {result.frames:,} frames of "
        f"{width} × {height} pixels, {result.frames / result.fps:.1f} s at {result.fps:g} frames/s",
        markup=False,
        highlight=False,
    )
    if result.episodes:
        returns = np.array([episode.episode_return for episode in result.episodes])
        lengths = [episode.length for episode in result.episodes]
        parts = [f"{r:.2f} in {n} steps" for r, n in list(zip(returns, lengths, strict=True))[:_MOST_LISTED]]
        more = f", … (mean {returns.mean():.2f}, {min(lengths)} to {max(lengths)} steps)"
        listed = ", ".join(parts) + (more if len(returns) > _MOST_LISTED else "")
        console.print(f"Return{plural}, all agents together: {listed}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"Video: {result.path}", markup=False, highlight=False, soft_wrap=True)
