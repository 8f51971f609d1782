"""Write and read the observations and rewards of scripted envs.

An observation is a row of `WIDTH` numbers: its origin (the `Stamp`), a running checksum of all actions that reached
this agent in this episode, and a number that the env drew from its random stream at the reset. A reward encodes its
episode, step, agent and action. All are exact in float64, and in float32 while counts stay below 2**24.
"""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import numpy as np
from gymnasium.spaces import Box
from numpy.typing import ArrayLike, DTypeLike, NDArray

__all__ = [
    "ALIVE_CHECKSUM",
    "WIDTH",
    "Stamp",
    "action_code",
    "checksum",
    "decode",
    "decode_reward",
    "draw",
    "next_checksum",
    "reward_of",
    "stamp_row",
    "stamp_space",
]

WIDTH = 7
"""Numbers in one observation: the five of the `Stamp`, the checksum, the draw."""

ALIVE_CHECKSUM = 1
"""An agent's checksum before its first action; so a row of zeros is never a live agent's."""

_MODULUS = 65_521


class Stamp(NamedTuple):
    """Origin of an observation.

    Attributes:
        env: Index of the env.
        incarnation: Number of envs built at its index before it.
        episode: Number of resets before this episode's.
        t: Steps since the reset.
        agent: Place on the agent axis.
    """

    env: int
    incarnation: int
    episode: int
    t: int
    agent: int


def stamp_space(dtype: DTypeLike = np.float64) -> Box:
    """Return the space of stamped observations, shape ``(WIDTH,)``."""
    high = float(2**24 if np.dtype(dtype) == np.float32 else 2**53)
    return Box(0.0, high, (WIDTH,), np.dtype(dtype).type)


def stamp_row(stamp: Stamp, actions: int, drawn: int, out: NDArray[Any]) -> NDArray[Any]:
    """Write one observation, shape ``(WIDTH,)``, into ``out`` and return it."""
    out[:] = (*stamp, actions, drawn)
    return out


def decode(obs: ArrayLike) -> Stamp:
    """Read the stamp of one observation, shape ``(WIDTH,)``.

    Raises:
        ValueError: It is not a stamped observation.
    """
    row = np.asarray(obs)
    if row.shape != (WIDTH,):
        raise ValueError(f"expected one observation of shape ({WIDTH},), got shape {row.shape}")
    numbers = [float(x) for x in row[: len(Stamp._fields)]]
    if not all(x.is_integer() and x >= 0 for x in numbers):
        raise ValueError(f"not a stamped observation: {row}")
    return Stamp(*(int(x) for x in numbers))


def checksum(obs: ArrayLike) -> int:
    """Read an observation's checksum of actions."""
    return int(np.asarray(obs)[5])


def draw(obs: ArrayLike) -> int:
    """Read the number that the env drew from its random stream at its last reset."""
    return int(np.asarray(obs)[6])


def action_code(action: Any) -> int:
    """Return a number in 0..4095 for an action: a small int itself, or a hash of the bytes."""
    if isinstance(action, (int, np.integer)) and 0 <= int(action) < 4096:
        return int(action)
    if isinstance(action, dict):
        return zlib.crc32(repr([(key, action_code(action[key])) for key in sorted(action)]).encode()) % 4096
    if isinstance(action, (tuple, list)):
        return zlib.crc32(repr([action_code(part) for part in action]).encode()) % 4096
    return zlib.crc32(np.ascontiguousarray(action).tobytes()) % 4096


def next_checksum(before: int, action: Any) -> int:
    """Return the checksum after one more action."""
    return (before * 31 + action_code(action) + 1) % _MODULUS


def reward_of(episode: int, t: int, agent: int, action: Any = 0) -> float:
    """Return the reward of ``agent`` for its action in step ``t`` (from 1); decodable for t and agent below 1000."""
    return episode * 1_000_000.0 + t * 1_000.0 + agent + action_code(action) / 4096


def decode_reward(reward: float) -> tuple[int, int, int, int]:
    """Read (episode, t, agent, action code) from a reward."""
    whole, code = divmod(reward, 1.0)
    episode, rest = divmod(int(whole), 1_000_000)
    t, agent = divmod(rest, 1_000)
    return episode, t, agent, round(code * 4096)
