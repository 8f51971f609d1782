"""Video files: frames go one by one to an ffmpeg process, which the extra ``video`` brings."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import tempfile
import uuid
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from marlvec.envs.rendering import check_frame
from marlvec.errors import ArgumentError, ContractError, MarlvecError, MissingExtraError

__all__ = ["FORMATS", "VideoFile", "check_format", "check_fps", "find_ffmpeg", "own_fps"]

_ENCODERS = {
    # H.264 in the form that every player knows, which wants even sizes. One thread: the cores are busy with envs.
    "mp4": (
        *("-vf", "pad=ceil(iw/2)*2:ceil(ih/2)*2", "-c:v", "libx264", "-pix_fmt", "yuv420p"),
        *("-preset", "veryfast", "-crf", "18", "-threads", "1"),
    ),
    # A palette for each frame: one for all of them could not be known before the last one came.
    "gif": (
        *("-vf", "split[a][b];[a]palettegen=stats_mode=single[p];[b][p]paletteuse=new=1:dither=none"),
        *("-loop", "0"),
    ),
}
FORMATS = tuple(_ENCODERS)
"""File types that can be written."""

_MAX_GIF_FPS = 50.0  # a GIF counts in 1/100 s, and viewers show frames of less than two of them slowly
_DEFAULT_FPS = 30.0
_MAX_COMPLAINT = 1_000  # characters
_PATIENCE = 60.0  # seconds for ffmpeg to write what it still holds

_open: weakref.WeakSet[VideoFile] = weakref.WeakSet()


def find_ffmpeg() -> str:
    """Path of the ffmpeg that writes videos.

    Raises:
        MissingExtraError: There is none; names the extra that brings it.
    """
    try:
        from imageio_ffmpeg import get_ffmpeg_exe

        return str(get_ffmpeg_exe())
    except (ImportError, RuntimeError) as error:
        raise MissingExtraError(
            f'videos need ffmpeg, which was not found ({error}); install it with: pip install "marlvec[video]"'
        ) from error


def check_format(name: Any, what: str) -> str:
    """Make sure that this is a type of video files.

    Raises:
        ArgumentError: It is none; names those that are.
    """
    if name not in FORMATS:
        raise ArgumentError(f"{what}: expected {' or '.join(map(repr, FORMATS))}, got {name!r}")
    return str(name)


def check_fps(fps: Any, file_format: str, what: str = "fps") -> float:
    """Make sure that this is a number of frames a second.

    Raises:
        ArgumentError: It is none that a file of this type can have.
    """
    number = isinstance(fps, (int, float, np.integer, np.floating)) and not isinstance(fps, bool)
    if not number or not math.isfinite(fps) or fps <= 0:
        raise ArgumentError(f"{what}: expected a positive number of frames a second, got {fps!r}")
    if file_format == "gif" and fps > _MAX_GIF_FPS:
        raise ArgumentError(f"{what}: viewers show a GIF with at most {_MAX_GIF_FPS:g} frames a second, got {fps!r}")
    return float(fps)


def own_fps(metadata: Mapping[str, Any], file_format: str) -> float:
    """Frames a second that an env asks for in ``metadata["render_fps"]``; 30 if it does not.

    Raises:
        ArgumentError: What it says is no such number.
    """
    asked = metadata.get("render_fps")
    if asked is None:
        return _DEFAULT_FPS
    fps = check_fps(asked, "mp4", 'metadata["render_fps"]')
    return min(fps, _MAX_GIF_FPS) if file_format == "gif" else fps


class VideoFile:
    """A video that is being written. Its file gets its name once it is whole; until then it is ``<name>.….part``.

    Frames are not kept: what ffmpeg cannot take in yet, `write` waits for.

    Args:
        path: Where it goes; its folder is made. The suffix decides the format.
        fps: Frames a second.
        ffmpeg: The program, see `find_ffmpeg`.

    Attributes:
        path: As given.
        frames: How many were written.
    """

    def __init__(self, path: Path, fps: float, ffmpeg: str) -> None:
        self.path = path
        self.frames = 0
        self._fps, self._ffmpeg = fps, ffmpeg
        self._part = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.part")
        self._process: subprocess.Popen[bytes] | None = None
        self._complaints: IO[bytes] | None = None
        self._shape: tuple[int, ...] = ()

    def write(self, frame: Any) -> None:
        """Add a frame.

        Args:
            frame: (H, W, 3) uint8, of the same size as all others.

        Raises:
            ContractError: It is none, or of another size.
            MarlvecError: ffmpeg gave up, e.g. because the disk is full; what there was is removed.
        """
        picture = check_frame(frame, f"frame {self.frames} of {self.path.name}")
        if self.frames and picture.shape != self._shape:
            raise ContractError(
                f"frame {self.frames} of {self.path.name}: expected one like those before it, of shape {self._shape}, "
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
        """Write the end, and give the file its name.

        Args:
            path: Another one than `path`, in the same folder.

        Returns:
            Where it is.

        Raises:
            MarlvecError: ffmpeg failed; what there was is removed.
        """
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
        """Stop, and remove what there is. Does nothing to a video that is finished."""
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
        """Clear up, and say what happened, in ffmpeg's own words where it found some."""
        said = ""
        if self._complaints is not None:
            self._complaints.seek(0)
            said = "; ".join(self._complaints.read().decode(errors="replace").split("\n")).strip("; ")
        self.discard()
        return MarlvecError(f"ffmpeg could not write {self.path}: {said[:_MAX_COMPLAINT] or why}")

    def _forget(self) -> None:
        """In a forked child: its copy of the pipe would keep ffmpeg waiting after the parent has closed it."""
        if self._process is not None:
            self._pipe.close()
            self._process.returncode = 0  # so that no destructor waits for, or warns about, what is not our child
            self._process = None


@contextlib.contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """Start processes that Ctrl-C in the terminal does not end: this one decides what becomes of their files.

    They inherit the mask. They stay in this process group, so that a signal that kills it kills them, too. On Windows
    they hear of Ctrl-C all the same.
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
