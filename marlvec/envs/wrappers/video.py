"""Video files: frames are sent one by one to an ffmpeg process, which the extra ``video`` installs."""

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
from marlvec.serialization.saved import ProcessBound

__all__ = ["FORMATS", "VideoFile", "check_format", "check_fps", "find_ffmpeg", "own_fps"]

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
