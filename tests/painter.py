"""Envs that draw where they are, so that a frame tells which env, episode and step it is of, and what reads it back."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import gymnasium
import imageio_ffmpeg
import numpy as np
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray
from pettingzoo import ParallelEnv

Frame = NDArray[np.uint8]
Place = tuple[int, int, int]
"""Env, episode, step."""

_BLOCK = 16  # pixels: compression does not blur that much
_BITS = 6
SMALLEST = (3 * _BLOCK, _BITS * _BLOCK)


class Canvas:
    """Draws a row of black and white blocks for each number, always on the same array.

    Args:
        size: Height and width of frames; what is below and right of the blocks is grey.
    """

    def __init__(self, size: tuple[int, int] = SMALLEST) -> None:
        self.frame = np.full((*size, 3), 90, np.uint8)

    def draw(self, *numbers: int) -> Frame:
        for row, number in enumerate(numbers):
            for bit in range(_BITS):
                top, left = row * _BLOCK, bit * _BLOCK
                self.frame[top : top + _BLOCK, left : left + _BLOCK] = 255 * (number >> bit & 1)
        return self.frame


def read(frame: Frame) -> Place:
    """The numbers that are drawn on a frame."""
    found = []
    for row in range(3):
        blocks = frame[row * _BLOCK : (row + 1) * _BLOCK, : _BITS * _BLOCK].reshape(_BLOCK, _BITS, _BLOCK, 3)
        means = blocks.mean(axis=(0, 2, 3))
        assert ((means < 60) | (means > 195)).all(), f"no blocks of black and white: {means}"
        found.append(sum(1 << bit for bit in range(_BITS) if means[bit] > 128))
    return found[0], found[1], found[2]


def frames_of(path: Path) -> list[Frame]:
    """Every frame of a video file, each one once."""
    decoded = _ffmpeg("-i", path, "-fps_mode", "passthrough", "-f", "image2pipe", "-c:v", "ppm", "-").stdout
    found = []
    while decoded:
        kind, size, _, rest = decoded.split(b"\n", 3)
        assert kind == b"P6"
        width, height = map(int, size.split())
        n = width * height * 3
        found.append(np.frombuffer(rest[:n], np.uint8).reshape(height, width, 3))
        decoded = rest[n:]
    return found


def places_of(path: Path) -> list[Place]:
    """What every frame of a video file shows."""
    return [read(frame) for frame in frames_of(path)]


def fps_of(path: Path) -> float:
    """Frames a second of a video file."""
    (fps,) = re.findall(rb"([\d.]+) fps", _ffmpeg("-i", path, "-f", "null", "-").stderr.split(b"Output")[0])
    return float(fps)


def _ffmpeg(*args: object) -> subprocess.CompletedProcess[bytes]:
    # Not imageio_ffmpeg.read_frames(): it leaves its pipes open.
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-nostdin", *map(str, args)]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True)


class PainterEnv(ParallelEnv):  # type: ignore[misc]  # pettingzoo has no type information
    """Two agents; ``agent_0`` may leave before the end. How long an episode is comes from the seed.

    Args:
        size: Of frames.
        length: Steps of every episode; None: 2 to 5, drawn.
        first_leaves: The step in which ``agent_0`` is terminated; None: at the end.
        fps: In the metadata; None: nothing.
    """

    def __init__(
        self,
        render_mode: str | None = None,
        *,
        size: tuple[int, int] = SMALLEST,
        length: int | None = None,
        first_leaves: int | None = None,
        fps: Any = 25,
        env_index: int = 0,
    ) -> None:
        self.metadata: dict[str, Any] = {"name": "painter", "render_modes": ["rgb_array", "ansi", "human"]}
        if fps is not None:
            self.metadata["render_fps"] = fps
        self.render_mode = render_mode
        self.possible_agents = ["agent_0", "agent_1"]
        self.agents: list[str] = []
        self.env_index, self.episode, self.t = env_index, -1, 0
        self.renders = 0
        self._length, self._first_leaves = length, first_leaves
        self._canvas = Canvas(size)
        self._rng = np.random.default_rng()

    def observation_space(self, agent: str) -> Any:
        return Box(-1.0, 1e6, (3,), np.float64)

    def action_space(self, agent: str) -> Any:
        return Discrete(3)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        self.agents = list(self.possible_agents)
        self.episode, self.t = self.episode + 1, 0
        self.end = self._length or int(self._rng.integers(2, 6))
        return self._observe(), {agent: {"end": self.end} for agent in self.agents}

    def step(self, actions: dict[str, int]) -> Any:
        self.t += 1
        over = self.t >= self.end
        flags = {agent: over or (agent == "agent_0" and self.t == self._first_leaves) for agent in self.agents}
        rewards = {agent: float(self.t + actions[agent]) for agent in self.agents}
        observations = self._observe()
        self.agents = [agent for agent in self.agents if not flags[agent]]
        return observations, rewards, flags, dict.fromkeys(flags, False), {agent: {} for agent in flags}

    def _observe(self) -> dict[str, Any]:
        noise = self._rng.random()
        return {agent: np.array([self.episode, self.t, noise]) for agent in self.agents}

    def render(self) -> Any:
        self.renders += 1
        if self.render_mode == "human":
            return None
        if self.render_mode == "ansi":
            return f"env {self.env_index}, episode {self.episode}, step {self.t}"
        return self._canvas.draw(self.env_index, self.episode, self.t)


class SinglePainterEnv(gymnasium.Env[Any, Any]):
    """The same for one agent, in Gymnasium's form, and without a frame rate."""

    def __init__(self, render_mode: str | None = None, *, length: int = 3, env_index: int = 0) -> None:
        self.metadata = {"render_modes": ["rgb_array"]}
        self.render_mode = render_mode
        self.observation_space, self.action_space = Box(0.0, 1e6, (2,), np.float64), Discrete(3)
        self.env_index, self.episode, self.t = env_index, -1, 0
        self._length = length
        self._canvas = Canvas()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return np.array([self.episode, 0.0]), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return np.array([self.episode, float(self.t)]), float(action), self.t >= self._length, False, {}

    def render(self) -> Any:
        return self._canvas.draw(self.env_index, self.episode, self.t)


class KeyedPainterEnv:
    """The same in RLlib's form: dicts, and ``"__all__"``."""

    def __init__(self, render_mode: str | None = None, *, env_index: int = 0) -> None:
        self.env = SinglePainterEnv(render_mode, env_index=env_index)
        self.render_mode = render_mode
        self.observation_spaces = {"only": self.env.observation_space}
        self.action_spaces = {"only": self.env.action_space}
        self.possible_agents = ["only"]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        obs, info = self.env.reset(seed=seed)
        return {"only": obs}, {"only": info}

    def step(self, actions: dict[str, Any]) -> Any:
        obs, reward, terminated, truncated, info = self.env.step(actions["only"])
        flags = ({"only": flag, "__all__": flag} for flag in (terminated, truncated))
        return {"only": obs}, {"only": reward}, *flags, {"only": info}

    def render(self) -> Any:
        return self.env.render()
