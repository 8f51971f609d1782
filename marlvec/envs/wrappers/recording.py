"""`RecordVideo`: videos of episodes, written by the worker that runs the env."""

from __future__ import annotations

import glob
import re
import string
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.envs.detect import adapt
from marlvec.envs.env import MultiAgentEnv
from marlvec.envs.rendering import check_frame, render_env, render_mode
from marlvec.envs.slot import Slot
from marlvec.envs.spec import Info
from marlvec.envs.wrappers.base import EnvWrapper
from marlvec.envs.wrappers.video import VideoFile, check_format, check_fps, find_ffmpeg, own_fps
from marlvec.errors import ArgumentError, ContractError
from marlvec.serialization.saved import ProcessBound

__all__ = ["Episodes", "RecordVideo"]

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
