"""Envs that keep books, and the books: every step of an env is written down before it is answered.

An env appends 16 bytes per agent to a file of its own, in one write, before it replies; so what was done is known
whoever dies. The caller numbers its requests, and an action is that number: ledger, reward and observation all tell
which request they are of. What an env is told to do wrong stands in the action, too, and in a file of its own.
"""

from __future__ import annotations

import ctypes
import os
import time
import zlib
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cache
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray
from pettingzoo import ParallelEnv

from marlvec.testing.scripted import Script, Stamp, draw_script

__all__ = [
    "AGENT_NUM",
    "EPISODES",
    "LABEL",
    "LONGEST",
    "Ledger",
    "LedgerEnv",
    "Moment",
    "Order",
    "code_of",
    "encode",
    "moments",
    "script_of",
]

AGENT_NUM = 6
LONGEST = 40  # steps of the longest episode
EPISODES = 32  # after so many an env's scripts begin again
LABEL = len(Stamp._fields) + 1  # numbers at the head of an observation: the stamp, and the code of the last action

_NAMES = ("env", "incarnation", "episode", "t", "agent", "code")
_RECORD = np.dtype(list(zip(_NAMES, ("<u2", "<u2", "<u4", "<u2", "<u2", "<u4"), strict=True)))
_pack_record = Struct("<HHIHHI").pack  # a power of two: the kernel could be interrupted only where two pages meet
_pack_label = Struct(f"<{LABEL}q").pack
_pack_crc = Struct("<q").pack

Ints = NDArray[np.int64]


class Order(IntEnum):
    """What an env can be told to do in a step: something else than to answer, once that is written down."""

    NONE = 0
    RAISE_EARLY = 1  # before the ledger has the step
    RAISE_LATE = 2  # after it
    RAISE_IN_RESET = 3  # in the reset that comes next
    HANG = 4
    HANG_IN_C = 5  # holding the interpreter lock
    EXIT = 6


def code_of(number: Any, agent: Any) -> Any:
    """The code of one agent's action in request ``number`` (1 to 2**29 - 1): never 0, and nobody else's."""
    return number << 3 | agent


def encode(numbers: Ints, orders: Ints) -> Ints:
    """Actions (n, A) of requests with these numbers (n,) and `Order`s (n,)."""
    return orders[:, None] << 40 | code_of(numbers[:, None], np.arange(AGENT_NUM))


@dataclass(frozen=True, slots=True)
class Moment:
    """Who is alive, terminated, truncated, newly born after one step, by place."""

    alive: list[bool]
    terminated: list[bool]
    truncated: list[bool]
    born: list[bool]


@cache
def moments(env_index: int, episode: int) -> list[Moment]:
    """An episode step by step; ``episode`` below `EPISODES`."""
    script = script_of(env_index, episode)
    return [
        Moment(script.alive(t), script.terminated(t), script.truncated(t), [birth == t for birth in script.births])
        for t in range(script.length + 1)
    ]


def script_of(env_index: int, episode: int) -> Script:
    """Who lives when: different in every env and episode (below `EPISODES`), and known to whoever checks."""
    rng = np.random.default_rng([env_index, episode])
    return replace(draw_script(rng, AGENT_NUM, LONGEST), infos={}, common={})


class LedgerEnv(ParallelEnv):  # type: ignore[misc]  # pettingzoo has no type information
    """Agents come and go by `script_of`.

    An observation is the stamp and the code of the agent's last action, as often as ``copies`` says, and the CRC of all
    that, as int64: (6 * copies + 1,). A reward is the code of the action that earned it. Every 16th request is answered
    with infos: ``code`` again.

    Args:
        folder: Where books are kept.
        env_index: Which env this is.
        copies: How large observations are.
    """

    def __init__(self, folder: Path, *, env_index: int = 0, copies: int = 1) -> None:
        self._env, self._copies = env_index, copies
        self.incarnation = _append(folder / f"births-{env_index}", b".") - 1
        self._deeds = folder / f"deeds-{env_index}"
        self._ledger = os.open(folder / f"ledger-{env_index}", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
        self.metadata = {"name": "ledger", "render_modes": []}
        self.possible_agents = [f"agent_{a}" for a in range(AGENT_NUM)]
        self.agents: list[str] = []
        self._places = {name: a for a, name in enumerate(self.possible_agents)}
        self._spaces = Box(0, 2**40, (LABEL * copies + 1,), np.int64), Discrete(2**43)
        self._codes = [0] * AGENT_NUM
        self.episode, self.t = -1, 0
        self._raise_in_reset = False

    def observation_space(self, agent: str) -> Any:
        return self._spaces[0]

    def action_space(self, agent: str) -> Any:
        return self._spaces[1]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if self._raise_in_reset:
            raise ArithmeticError("ordered, in reset")
        self.episode += 1
        self.t = 0
        self._moments = moments(self._env, self.episode % EPISODES)
        self._codes = [0] * AGENT_NUM
        alive = self._moments[0].alive
        self.agents = [name for name, a in self._places.items() if alive[a]]
        return {name: self._observe(self._places[name]) for name in self.agents}, {}

    def step(self, actions: dict[str, Any]) -> Any:
        asked = {self._places[name]: int(action) for name, action in actions.items()}
        order = next(iter(asked.values())) >> 40
        codes = {a: action & (1 << 40) - 1 for a, action in asked.items()}
        if order:
            _append(self._deeds, bytes([order]))
        if order == Order.RAISE_EARLY:
            raise ArithmeticError("ordered, early")
        self.t = t = self.t + 1
        when = self._env, self.incarnation, self.episode, t
        os.write(self._ledger, b"".join([_pack_record(*when, a, code) for a, code in codes.items()]))
        if order:
            self._obey(Order(order))
        for a, code in codes.items():
            self._codes[a] = code
        now = self._moments[t]
        terminated, truncated, alive = now.terminated, now.truncated, now.alive
        here = {name: a for name, a in self._places.items() if a in codes or now.born[a]}
        self.agents = [name for name, a in here.items() if alive[a]]
        tells = next(iter(codes.values())) >> 3 & 15 == 0
        return (
            {name: self._observe(a) for name, a in here.items()},
            {name: float(codes.get(a, 0)) for name, a in here.items()},
            {name: terminated[a] for name, a in here.items()},
            {name: truncated[a] for name, a in here.items()},
            {name: {"code": codes[a]} if tells and a in codes else {} for name, a in here.items()},
        )

    def close(self) -> None:
        os.close(self._ledger)

    def _observe(self, a: int) -> NDArray[np.int64]:
        label = _pack_label(self._env, self.incarnation, self.episode, self.t, a, self._codes[a])
        body = label * self._copies
        return np.frombuffer(body + _pack_crc(zlib.crc32(body)), np.int64)

    def _obey(self, order: Order) -> None:
        if order == Order.RAISE_LATE:
            raise ArithmeticError("ordered, late")
        if order == Order.RAISE_IN_RESET:
            self._raise_in_reset = True
        if order == Order.HANG:
            time.sleep(3600)
        if order == Order.HANG_IN_C:
            ctypes.PyDLL(None).sleep(3600)
        if order == Order.EXIT:
            os._exit(3)


def _append(path: Path, what: bytes) -> int:
    """Append to a file in one write; how long it is then."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
    try:
        os.write(fd, what)
        return os.lseek(fd, 0, os.SEEK_CUR)
    finally:
        os.close(fd)


class Ledger:
    """The books of some envs, as their reader.

    Args:
        folder: Where they are.
        num_envs: How many envs keep them.
    """

    dtype = _RECORD

    def __init__(self, folder: Path, num_envs: int) -> None:
        self._folder, self._num_envs = folder, num_envs
        self._read = [0] * num_envs
        self._last = np.zeros((num_envs, 3), np.int64)  # incarnation, episode and step of each one's last record

    def read(self) -> NDArray[Any]:
        """Records that are new, of all envs: ``env``, ``incarnation``, ``episode``, ``t``, ``agent``, ``code``.

        Raises:
            AssertionError: An env has gone back in time: two of its incarnations live, or it took a step twice.
        """
        return np.concatenate([self._read_one(i) for i in range(self._num_envs)])

    def _read_one(self, i: int) -> NDArray[Any]:
        with (self._folder / f"ledger-{i}").open("rb") as file:
            file.seek(self._read[i])
            data = file.read()
        assert len(data) % _RECORD.itemsize == 0, f"env {i} was interrupted in the middle of a record"
        self._read[i] += len(data)
        records = np.frombuffer(data, _RECORD)
        if len(records):
            assert (records["env"] == i).all()
            when = np.stack([records[name].astype(np.int64) for name in ("incarnation", "episode", "t")], axis=1)
            steps = np.concatenate([self._last[i : i + 1], when])
            later = steps[1:] - steps[:-1]
            first = (later != 0).argmax(axis=1)  # what differs first must have grown
            assert (np.take_along_axis(later, first[:, None], axis=1) >= 0).all(), f"env {i} went back in time"
            self._last[i] = when[-1]
        return records

    def deeds(self, *orders: Order) -> NDArray[np.int64]:
        """(N,) how often each env has done one of these."""
        found = np.zeros(self._num_envs, np.int64)
        for i in range(self._num_envs):
            path = self._folder / f"deeds-{i}"
            done = path.read_bytes() if path.exists() else b""
            found[i] = sum(done.count(bytes([order])) for order in orders)
        return found

    def births(self) -> NDArray[np.int64]:
        """(N,) how often each env was built."""
        return np.array([(self._folder / f"births-{i}").stat().st_size for i in range(self._num_envs)])
