"""``marlvec record``: a video of envs side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from marlvec.cli.console import check_writable
from marlvec.collect import Collector
from marlvec.collect.progress_bar import ProgressBar
from marlvec.env_ids import EnvIds
from marlvec.envs.video import FORMATS, VideoFile, check_fps, check_frame, find_ffmpeg, own_fps, tile_frames
from marlvec.errors import ArgumentError
from marlvec.vector import VectorEnv, VectorStep, load_state
from marlvec.vector.infos import ShardReport

_MOST_LISTED = 8  # episodes


@dataclass(frozen=True, slots=True)
class FilmedEpisode:
    """One episode in the video."""

    env_id: int
    length: int  # env steps
    episode_return: float  # of all agents


@dataclass(frozen=True, slots=True)
class Recording:
    """Results of a recording."""

    name: str
    path: Path | None  # None if Ctrl-C came before the first frame
    shape: tuple[int, int]  # height and width
    frames: int
    fps: float
    episodes: tuple[FilmedEpisode, ...]  # complete ones, in the order of their ends
    interrupted: bool  # by Ctrl-C


def check_output(path: Path, fps: float | None) -> None:
    """Raise ArgumentError, or MissingExtraError without ffmpeg, if no such video can be written to this file."""
    file_format = path.suffix[1:].lower()
    if file_format not in FORMATS:
        raise ArgumentError(f"--output {path}: expected a name that ends in .{' or .'.join(FORMATS)}")
    check_writable(path, "--output")
    if fps is not None:
        check_fps(fps, file_format, "--fps")
    find_ffmpeg()


@dataclass(frozen=True, slots=True)
class SavedStep:
    """A saved step of an env's episode, from which a video starts."""

    path: Path  # its file
    state: dict[str, Any]  # the file's contents
    env_id: int  # the env in it

    @property
    def backend(self) -> str | None:
        """The only backend that can load it, or None."""
        return "native" if self.state["kind"] == "native" else None

    def put_into(self, envs: VectorEnv) -> None:
        """Make all envs continue from it, or raise ArgumentError that names the difference."""
        try:
            envs.set_state(self.state, range(envs.num_envs), from_ids=[self.env_id] * envs.num_envs)
        except ArgumentError as error:
            raise ArgumentError(f"--from {self.path}: {error}") from error


def read_moment(path: Path | None, env_id: int | None) -> SavedStep | None:
    """Read the saved step of env ``env_id`` (None: the only one) from a file of `marlvec.save_state`."""
    if path is None:
        if env_id is not None:
            raise ArgumentError(f"--env-id {env_id}: expected --from FILE, whose env it selects, got none")
        return None
    state = load_state(path)
    ids = np.asarray(state["env_ids"]).tolist()
    if env_id is None and len(ids) != 1:
        raise ArgumentError(f"--from {path}: it holds the envs {ids}; choose one with --env-id")
    chosen = ids[0] if env_id is None else env_id
    if chosen not in ids:
        raise ArgumentError(f"--env-id {chosen}: the file {path} holds the envs {ids}")
    place = ids.index(chosen)
    if not state["running"][place] or state["over"][place]:
        raise ArgumentError(f"--from {path}: env {chosen} was saved between two episodes; expected a running one")
    return SavedStep(path, state, chosen)


class Camera:
    """Filmed envs: takes a frame of all of them, in a grid, whenever rows are received.

    It is between the collector and the envs, so that it receives an episode's last frame before the collector begins
    the next one. An env that has played its episodes keeps its last frame. The first ones continue from ``begin``, if
    given.
    """

    def __init__(self, envs: VectorEnv, video: VideoFile, episodes: int, begin: SavedStep | None = None) -> None:
        self._envs, self._video, self._begin = envs, video, begin
        self._first: VectorStep | None = None  # rows of that step, not received yet
        self._left = np.full(envs.num_envs, episodes)
        self._tiles: list[NDArray[np.uint8] | None] = [None] * envs.num_envs
        self._returns = np.zeros(envs.num_envs)
        self._lengths = np.full(envs.num_envs, -1)  # the first row is a reset
        self.episodes: list[FilmedEpisode] = []  # finished ones
        self.shape = (0, 0)  # height and width of the picture

    def __getattr__(self, name: str) -> Any:
        return getattr(self._envs, name)

    @property
    def done(self) -> bool:
        """Whether every env has played its episodes."""
        return not self._left.any()

    def reset_send(self, seed: int | None = None, env_ids: EnvIds | None = None) -> None:
        """Begin episodes, as `VectorEnv.reset_send`; the first time, continue from the saved step, if any."""
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
    """Return the envs' current rows as those of a reset, without the results of the step before."""
    step = envs._make_step(np.arange(envs.num_envs), ShardReport())
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
    begin: SavedStep | None = None,
) -> Recording:
    """Play episodes, ``episodes`` of each env, and write a video of them; see `Camera`.

    The envs are made with ``autoreset_mode="disabled"`` and ``render_mode="rgb_array"``.
    """
    rate = own_fps(envs.metadata, output.suffix[1:].lower()) if fps is None else fps
    video = VideoFile(output, rate, find_ffmpeg())
    camera = Camera(envs, video, episodes, begin)
    # The camera forwards everything that a collector calls.
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
    """Print the file, and the results of the episodes."""
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
