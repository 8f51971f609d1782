"""`RecordVideo`: videos of episodes, written by the worker that runs the env; frames, and many as one picture."""

from __future__ import annotations

import contextlib
import glob
import math
import os
import re
import signal
import string
import subprocess
import tempfile
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from marlvec.arguments import whole_number
from marlvec.envs.detect import adapt
from marlvec.envs.env import MultiAgentEnv, Slot
from marlvec.envs.spec import Info
from marlvec.envs.user_env import find_method, get_attribute
from marlvec.envs.wrappers import EnvWrapper
from marlvec.errors import ArgumentError, ContractError, MarlvecError, MissingExtraError
from marlvec.serialization.saved import ProcessBound

Episodes = str | int | Iterable[int] | Callable[[int], bool]
"""``"all"``; an int k for every k-th, beginning with the first; a list of numbers; or a function of the number."""

_CUT = "-cut"
_ODD = re.compile(r"[^\w.-]+")  # characters of an env's name to replace in file names


class RecordVideo:
    """Makes a video of each chosen episode, from its first frame to its last.

        record = marlvec.RecordVideo("videos", episodes=10, env_ids=[0])
        envs = marlvec.make("simple_spread", 16, render_mode="single_rgb_array", wrappers=[record])

    One frame is taken after each reset and after each step, in the env's process and before the next episode begins: so
    the last frame is recorded in every autoreset mode, and no frame is sent to another process. A video is complete,
    and has its name, when the step that ended its episode returns. If a reset, an error or ``close()`` cuts an episode
    off, its video's name ends with ``-cut``. An episode without any step has no video, and does not count. A worker
    that is killed may leave a ``.part`` file. Files of the same names are replaced; if the folder has such files, a
    warning is given.

    It must be the last of ``wrappers``: it returns a `MultiAgentEnv`, which wrappers of other libraries cannot wrap.

    Args:
        folder: Folder of the videos; created if it does not exist.
        episodes: Which episodes of each env: ``"all"``; an int k for every k-th, beginning with the first; a list of
            numbers; or a function of the number, called where the env lives.
        env_ids: Which envs are recorded; None for all. The others are not wrapped, and need no render mode.
        fps: Frames a second; None: the env's ``metadata["render_fps"]``, or else 30. At most 50 in a GIF.
        format: ``"mp4"`` or ``"gif"``.
        name: Name of the files, without suffix: ``{env}`` is the env's name, ``{env_index}`` its index, ``{episode}``
            the episode's number from 0.

    Raises:
        MissingExtraError: ffmpeg was not found; names the extra that installs it.
        ArgumentError: Wrong ``episodes``, ``env_ids``, ``fps``, ``format`` or ``name``, or ``folder`` is a file. When
            an env is wrapped: it has another render mode than ``"rgb_array"``, or resets itself.

    Attributes:
        folder: The folder's absolute path.
        env_ids, fps, format, name: As given.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        episodes: Episodes = "all",
        env_ids: Iterable[int] | None = None,
        fps: float | None = None,
        format: str = "mp4",
        name: str = "{env}-env{env_index}-episode{episode}",
    ) -> None:
        self.format = check_format(format, "RecordVideo: format")
        self.fps = None if fps is None else check_fps(fps, self.format, "RecordVideo: fps")
        self.env_ids = None if env_ids is None else _numbers(env_ids, "env_ids")
        self._every, self._wanted = _chosen(episodes)
        self.name = name
        self._check_name()
        self._ffmpeg = find_ffmpeg()
        self.folder = Path(folder).absolute()  # a worker may have another working directory
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise ArgumentError(f"RecordVideo: expected a folder, {self.folder} is a file") from None
        if found := self._files_there():
            warnings.warn(
                f"RecordVideo: {self.folder} holds {len(found)} videos of such names, for example {found[0].name}; "
                f"those of the same env and episode are replaced: choose another folder or name to keep them",
                UserWarning,
                stacklevel=2,
            )

    def __call__(self, env: Any, env_index: int = 0) -> Any:
        """Wrap an env of any API that marlvec supports.

        Returns:
            A `MultiAgentEnv`; ``env`` itself if it is not among ``env_ids``.
        """
        if self.env_ids is not None and env_index not in self.env_ids:
            return env
        return _RecordedEnv(adapt(env), self, env_index)

    def __repr__(self) -> str:
        return f"RecordVideo({str(self.folder)!r}, format={self.format!r})"

    def wants(self, episode: int) -> bool:
        """Return whether an env's episode with this number is recorded."""
        if callable(self._wanted):
            return bool(self._wanted(episode))
        return episode % self._every == 0 if self._wanted is None else episode in self._wanted

    def open(self, env: MultiAgentEnv, env_index: int, episode: int) -> VideoFile:
        """Begin the video of an episode, by its number from 0, of the env with the index ``env_index``.

        Returns:
            A file for frames (height, width, 3) uint8.
        """
        fps = own_fps(env.metadata, self.format) if self.fps is None else self.fps
        name = self._file_name(_ODD.sub("_", env.name), env_index, episode)
        return VideoFile(self.folder / name, fps, self._ffmpeg)

    def _file_name(self, env: str, env_index: int, episode: int) -> str:
        return f"{self.name.format(env=env, env_index=env_index, episode=episode)}.{self.format}"

    def _files_there(self) -> list[Path]:
        """Return videos in the folder whose names match ``name``, for any env and episode."""
        pattern = "".join(
            glob.escape(text) + ("*" if field is not None else "")
            for text, field, _, _ in string.Formatter().parse(self.name)
        )
        return sorted({path for end in ("", _CUT) for path in self.folder.glob(f"{pattern}{end}.{self.format}")})

    def _check_name(self) -> None:
        fields = "{env}, {env_index} and {episode}"
        only_one = self.env_ids is not None and len(self.env_ids) == 1
        places = ((0, 0), (0, 1)) if only_one else ((0, 0), (0, 1), (1, 0))
        try:
            names = {self._file_name("env", *place) for place in places}
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise ArgumentError(f"RecordVideo: name: the fields are {fields}, got {self.name!r} ({error!r})") from None
        if len(names) < len(places):
            needed = "{episode}" if only_one else "{env_index} and {episode}"
            raise ArgumentError(
                f"RecordVideo: name: expected {needed} in it, so that no video replaces another, got {self.name!r}"
            )


class _RecordedEnv(ProcessBound, EnvWrapper):
    _instead = "a fork would write videos of the same names; call make() in each process, with folders of its own"

    def __init__(self, env: MultiAgentEnv, recorder: RecordVideo, env_index: int) -> None:
        super().__init__(env)
        mode = render_mode(env, default="rgb_array")
        if mode != "rgb_array":
            raise ArgumentError(
                f"RecordVideo: {env.name} was made with render_mode={mode!r}, expected 'rgb_array'; "
                f'pass render_mode="rgb_array" to make(), or RecordVideo(env_ids=…) to record other envs only'
            )
        if env.resets_itself:
            raise ArgumentError(
                f"RecordVideo: {env.name} resets itself in the step that ends its episode, so its last frame cannot "
                f"be recorded"
            )
        self._recorder = recorder
        self._env_index = env_index
        self._episode = 0
        self._stepped = False  # whether the episode has a step, and so a number and a file
        self._opening: NDArray[np.uint8] | None = None  # first frame of an episode that has not been stepped
        self._video: VideoFile | None = None

    def reset(self, slot: Slot, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Info | None:
        self._check_process("RecordVideo: reset()")
        self._end(complete=False)
        info = self.env.reset(slot, seed=seed, options=options)
        if self._recorder.wants(self._episode):
            self._opening = self._frame()
        return info

    def step(self, slot: Slot) -> Info | None:
        self._check_process("RecordVideo: step()")
        info = self.env.step(slot)
        self._stepped = True
        if self._opening is not None:
            opening, self._opening = self._opening, None
            self._video = self._recorder.open(self.env, self._env_index, self._episode)
            self._write(opening)
        if self._video is not None:
            self._write(self._frame())
        if slot.done:
            self._end(complete=True)
        return info

    def cut_short(self, slot: Slot) -> None:
        """End the episode here; its last frame was recorded already."""
        self._check_process("RecordVideo: cut_short()")
        super().cut_short(slot)
        self._end(complete=True)

    def get_state(self) -> dict[str, Any]:
        """Return the episode's number, whether it was stepped, and the env's own state; no frames."""
        return {"episode": self._episode, "stepped": self._stepped, "env": self.env.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a state from `get_state`. The present video is cut; a restored episode with steps is not recorded.

        The number of an episode never decreases, so that no video replaces an earlier one.
        """
        if not isinstance(state, dict) or state.keys() != {"episode", "stepped", "env"}:
            raise ArgumentError(f"{self.name}: expected the state of an env with RecordVideo, got one without it")
        self._check_process("RecordVideo: set_state()")
        self._end(complete=False)
        self._episode = max(self._episode, state["episode"])
        self._stepped = state["stepped"]
        self.env.set_state(state["env"])
        if not self._stepped and self._recorder.wants(self._episode):
            self._opening = self._frame()

    def close(self) -> None:
        """Finish the present video, and close the env. A forked process leaves the video to its parent."""
        try:
            if not self._is_forked:
                self._end(complete=False)
        finally:
            super().close()

    def _frame(self) -> NDArray[np.uint8]:
        return check_frame(render_env(self.env), self.name)

    def _write(self, frame: NDArray[np.uint8]) -> None:
        assert self._video is not None
        try:
            self._video.write(frame)
        except ContractError:
            raise  # the frame was not written, and the video so far can be kept
        except BaseException:
            video, self._video = self._video, None
            video.discard()
            raise

    def _end(self, *, complete: bool) -> None:
        video, self._video, self._opening = self._video, None, None
        if self._stepped:
            self._stepped = False
            self._episode += 1
        if video is not None:
            path = video.path
            video.finish(path if complete else path.with_stem(path.stem + _CUT))


def _chosen(episodes: Any) -> tuple[int, frozenset[int] | Callable[[int], bool] | None]:
    """Return the interval between recorded episodes, and a set or function of their numbers (None: all of these)."""
    if isinstance(episodes, str):
        if episodes == "all":
            return 1, None
    elif isinstance(episodes, (int, np.integer)) and not isinstance(episodes, bool):
        if episodes >= 1:
            return int(episodes), None
    elif callable(episodes):
        return 1, episodes
    elif isinstance(episodes, Iterable):
        return 1, _numbers(episodes, "episodes")
    raise ArgumentError(
        f"RecordVideo: episodes: expected 'all', an int k of at least 1 for every k-th, a list of numbers, or a "
        f"function of the number, got {episodes!r}"
    )


def _numbers(values: Any, what: str) -> frozenset[int]:
    found = list(values) if isinstance(values, Iterable) else None
    if found is None or not all(isinstance(n, (int, np.integer)) and type(n) is not bool and n >= 0 for n in found):
        raise ArgumentError(f"RecordVideo: {what}: expected numbers from 0, got {values if found is None else found!r}")
    return frozenset(map(int, found))


_ENCODERS = {
    # H.264 in the form that every player supports, which requires even sizes. One thread: cores are busy with envs.
    "mp4": (
        *("-vf", "pad=ceil(iw/2)*2:ceil(ih/2)*2", "-c:v", "libx264", "-pix_fmt", "yuv420p"),
        *("-preset", "veryfast", "-crf", "18", "-threads", "1"),
    ),
    # A palette for each frame: a common one would need all frames before the first is written.
    "gif": (
        *("-vf", "split[a][b];[a]palettegen=stats_mode=single[p];[b][p]paletteuse=new=1:dither=none"),
        *("-loop", "0"),
    ),
}
FORMATS = tuple(_ENCODERS)
"""File types that can be written."""

_MAX_GIF_FPS = 50.0  # GIFs have units of 1/100 s, and viewers slow down frames shorter than two units
_DEFAULT_FPS = 30.0
_MAX_COMPLAINT = 1_000  # characters
_PATIENCE = 60.0  # seconds for ffmpeg to write its remaining frames

_open: weakref.WeakSet[VideoFile] = weakref.WeakSet()


def find_ffmpeg() -> str:
    """Return the path of ffmpeg; the error names the extra that installs it."""
    try:
        from imageio_ffmpeg import get_ffmpeg_exe

        return str(get_ffmpeg_exe())
    except (ImportError, RuntimeError) as error:
        raise MissingExtraError(
            f'videos need ffmpeg, which was not found ({error}); install it with: pip install "marlvec[video]"'
        ) from error


def check_format(name: Any, what: str) -> str:
    """Return a video format, of `FORMATS`, as text."""
    if name not in FORMATS:
        raise ArgumentError(f"{what}: expected {' or '.join(map(repr, FORMATS))}, got {name!r}")
    return str(name)


def check_fps(fps: Any, file_format: str, what: str = "fps") -> float:
    """Return a number of frames a second, which the format supports, as a float."""
    number = isinstance(fps, (int, float, np.integer, np.floating)) and not isinstance(fps, bool)
    if not number or not math.isfinite(fps) or fps <= 0:
        raise ArgumentError(f"{what}: expected a positive number of frames a second, got {fps!r}")
    if file_format == "gif" and fps > _MAX_GIF_FPS:
        raise ArgumentError(f"{what}: viewers show a GIF with at most {_MAX_GIF_FPS:g} frames a second, got {fps!r}")
    return float(fps)


def own_fps(metadata: Mapping[str, Any], file_format: str) -> float:
    """Return the frames a second in an env's ``metadata["render_fps"]``; 30 without it."""
    asked = metadata.get("render_fps")
    if asked is None:
        return _DEFAULT_FPS
    fps = check_fps(asked, "mp4", 'metadata["render_fps"]')
    return min(fps, _MAX_GIF_FPS) if file_format == "gif" else fps


class VideoFile(ProcessBound):
    """A video that is being written. Until it is complete, its file is named ``<name>.….part``.

    Frames are not kept: `write` waits until ffmpeg has read the frame. The path's suffix determines the format.
    """

    def __init__(self, path: Path, fps: float, ffmpeg: str) -> None:
        self.path = path
        self.frames = 0  # written so far
        self._fps, self._ffmpeg = fps, ffmpeg
        self._part = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.part")
        self._process: subprocess.Popen[bytes] | None = None
        self._complaints: IO[bytes] | None = None
        self._shape: tuple[int, ...] = ()

    def write(self, frame: Any) -> None:
        """Add a frame, (H, W, 3) uint8, of the same size as all others.

        `MarlvecError`, and the file is removed: ffmpeg failed, e.g. because the disk is full.
        """
        self._check_process(f"video {self.path.name}: write()")
        picture = check_frame(frame, f"frame {self.frames} of {self.path.name}")
        if self.frames and picture.shape != self._shape:
            raise ContractError(
                f"frame {self.frames} of {self.path.name}: expected the shape of the earlier frames, {self._shape}, "
                f"got {picture.shape}"
            )
        left = np.ascontiguousarray(picture).reshape(-1).data
        try:
            if not self.frames:
                self._start(picture.shape)
            while left:
                left = left[self._pipe.write(left) :]
        except OSError as error:
            raise self._failed(error) from error
        self.frames += 1

    def finish(self, path: Path | None = None) -> Path:
        """Write the end, and rename the file to its final name, or to `path` in the same folder; return its path."""
        self._check_process(f"video {self.path.name}: finish()")
        if self._process is None:
            raise MarlvecError(f"{self.path}: a video needs at least one frame")
        target = self.path if path is None else path
        try:
            self._pipe.close()
            code = self._process.wait(_PATIENCE)
            if code != 0:
                raise self._failed(f"exit code {code}")
            self._part.replace(target)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise self._failed(error) from error
        finally:
            self.discard()
        return target

    def discard(self) -> None:
        """Stop, and remove the file. Has no effect on a finished video."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._pipe.close()
            self._process = None
            self._part.unlink(missing_ok=True)
        if self._complaints is not None:
            self._complaints.close()
            self._complaints = None
        _open.discard(self)

    @property
    def _pipe(self) -> Any:
        assert self._process is not None
        assert self._process.stdin is not None
        return self._process.stdin

    def _start(self, shape: tuple[int, ...]) -> None:
        self._shape = shape
        height, width, _ = shape
        file_format = self.path.suffix[1:].lower()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        command = (
            *(self._ffmpeg, "-hide_banner", "-loglevel", "error", "-nostdin", "-y"),
            *("-f", "rawvideo", "-pixel_format", "rgb24", "-video_size", f"{width}x{height}"),
            *("-framerate", repr(self._fps), "-i", "pipe:0"),
            *_ENCODERS[file_format],
            *("-f", file_format, str(self._part)),
        )
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115  (discard() closes it)
        with _deaf_to_ctrl_c():
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self._complaints, bufsize=0
            )
        _open.add(self)

    def _failed(self, why: Any) -> MarlvecError:
        """Clean up, and return the error, with ffmpeg's own message if it has one."""
        message = ""
        if self._complaints is not None:
            self._complaints.seek(0)
            message = "; ".join(self._complaints.read().decode(errors="replace").split("\n")).strip("; ")
        self.discard()
        return MarlvecError(f"ffmpeg could not write {self.path}: {message[:_MAX_COMPLAINT] or why}")

    def _forget(self) -> None:
        """Close the pipe in a forked child, which would keep ffmpeg waiting after the parent has closed it."""
        if self._process is not None:
            self._pipe.close()
            self._process.returncode = 0  # so that no destructor waits for, or warns about, the parent's child
            self._process = None


@contextlib.contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """Block Ctrl-C for processes started in the block: this process finishes or removes their files.

    They inherit the signal mask. They stay in this process group, so that a signal that kills the group kills them,
    too. On Windows they still receive Ctrl-C.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _after_fork_in_child() -> None:
    for video in list(_open):
        video._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def render_mode(env: MultiAgentEnv, default: str | None = None) -> Any:
    """Return the render mode of an env's outermost layer that has one."""
    try:
        return get_attribute(env, "render_mode")
    except ArgumentError:
        return default


def render_env(env: MultiAgentEnv) -> Any:
    """Render an env; frames are copied, since envs may draw over them later.

    `ArgumentError`: it has no ``render()``, or was made without a render mode.
    """
    try:
        render = find_method(env, "render")
    except ArgumentError:
        raise ArgumentError(f"{env.name} has no render()") from None
    # An env without the attribute has a single way to render.
    if render_mode(env, default="") is None:
        raise ArgumentError(f'{env.name} was made without a render mode; pass render_mode="rgb_array" to make()')
    try:
        drawn = render()
    except NotImplementedError as error:  # the libraries' base classes raise this
        raise ArgumentError(f"{env.name} has no render() of its own") from error
    if isinstance(drawn, (list, tuple)):
        return type(drawn)(map(_own, drawn)) if type(drawn) in (list, tuple) else drawn
    return _own(drawn)


def check_frame(frame: Any, where: str) -> NDArray[np.uint8]:
    """Return a frame, (H, W, 3) uint8; `ContractError` if it is something else."""
    if isinstance(frame, np.ndarray) and frame.dtype == np.uint8 and frame.shape[2:] == (3,) and frame.size:
        return frame
    got = f"{frame.dtype} of shape {frame.shape}" if isinstance(frame, np.ndarray) else type(frame).__name__
    raise ContractError(f"{where}: expected render() to return a frame, uint8 of shape (H, W, 3), got {got}")


def _own(drawn: Any) -> Any:
    return drawn.copy() if isinstance(drawn, np.ndarray) else drawn


Frame = NDArray[np.uint8]


def tile_frames(
    frames: Sequence[Any] | NDArray[np.uint8],
    columns: int | None = None,
    background: int | tuple[int, int, int] = 0,
) -> Frame:
    """Lay frames out in a grid, row by row, one cell each.

    Every cell is as high as the highest frame and as wide as the widest; smaller frames are centered.

    Args:
        frames: Frames from `VectorEnv.render`, each uint8: (H, W, 3), (H, W, 4), whose transparent parts show the
            background, or grey, (H, W) or (H, W, 1). None is an empty cell.
        columns: Cells in a row; default: ⌈√n⌉ for n frames.
        background: Color around and in place of frames: a grey value or an RGB triple, 0 to 255.

    Returns:
        (rows * H, columns * W, 3) uint8, a new array.

    Raises:
        ArgumentError: An entry is not a frame (names its index and shape), there is none, or an argument is invalid.
    """
    if isinstance(frames, np.ndarray) and frames.ndim == 3 and frames.shape[2] in (3, 4):
        raise ArgumentError(
            f"tile_frames(): expected several frames, got an array of one, {frames.shape}; put it in [ ]"
        )
    if isinstance(frames, (str, bytes)) or not isinstance(frames, (Sequence, np.ndarray)):
        raise ArgumentError(f"tile_frames(): expected a list or tuple of frames, got {type(frames).__name__}")
    colour = _colour(background)
    pictures = [None if frame is None else _rgb(i, frame, colour) for i, frame in enumerate(frames)]
    shapes = [picture.shape for picture in pictures if picture is not None]
    if not shapes:
        raise ArgumentError(f"tile_frames(): expected at least one frame, got {len(pictures)} empty ones")
    if columns is None:
        columns = math.ceil(math.sqrt(len(pictures)))
    elif (whole_number(columns) or 0) < 1:
        raise ArgumentError(f"tile_frames(): columns: expected an int of at least 1, got {columns!r}")
    rows = math.ceil(len(pictures) / columns)
    height, width = (max(shape[axis] for shape in shapes) for axis in (0, 1))
    grid = np.empty((rows * height, columns * width, 3), np.uint8)
    grid[...] = colour
    for i, picture in enumerate(pictures):
        if picture is not None:
            h, w, _ = picture.shape
            top = i // columns * height + (height - h) // 2
            left = i % columns * width + (width - w) // 2
            grid[top : top + h, left : left + w] = picture
    return grid


def _colour(background: Any) -> Frame:
    values = np.asarray(background)
    whole = values.dtype.kind in "iu" and values.shape in ((), (3,))
    if not whole or values.min() < 0 or values.max() > 255:
        raise ArgumentError(
            f"tile_frames(): background: expected an int or three, from 0 to 255 each, got {background!r}"
        )
    return np.broadcast_to(values, (3,)).astype(np.uint8)


def _rgb(i: int, frame: Any, background: Frame) -> Frame:
    """Return frame number ``i`` as (H, W, 3); grey is broadcast."""
    if not isinstance(frame, np.ndarray):
        raise ArgumentError(
            f"tile_frames(): frame {i}: expected an array, uint8 of shape (H, W, 3), got {type(frame).__name__}; "
            f'the envs need render_mode="rgb_array"'
        )
    picture = frame[:, :, np.newaxis] if frame.ndim == 2 else frame
    if frame.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] not in (1, 3, 4) or not frame.size:
        raise ArgumentError(
            f"tile_frames(): frame {i}: expected uint8 of shape (H, W, 3), (H, W, 4) or (H, W), "
            f"got {frame.dtype} of shape {frame.shape}"
        )
    if picture.shape[2] < 4:
        return np.broadcast_to(picture, (*picture.shape[:2], 3))
    alpha = picture[:, :, 3:].astype(np.uint16)
    mixed: Frame = ((picture[:, :, :3] * alpha + background * (255 - alpha) + 127) // 255).astype(np.uint8)
    return mixed
