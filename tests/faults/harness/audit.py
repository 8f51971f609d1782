"""The checker: joins what envs wrote down with what their caller asked and was handed, and lets nothing pass.

    attempted = delivered + declared lost

Attempted is every action for a live agent; delivered every reward that came for one; declared lost every live agent of
an episode that a row calls lost. What was delivered is in the ledger, once, as it was told; what is in the ledger and
was not delivered was declared lost. Every row's labels, flags and CRCs are those that the env's script and its last row
call for, so that a stale, torn, doubled or swapped row, or an episode that began anew without a word, cannot pass.
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

from marlvec.testing import Script, Stamp, draw_script
from marlvec.vector import VectorStep

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


Bools = NDArray[np.bool_]

_AGENTS = np.arange(AGENT_NUM)
_RESET = -1  # in the place of a request's number
_NEVER = LONGEST + 1


@dataclass(frozen=True)
class Rows:
    """Rows as they came, whatever call brought them.

    Attributes:
        done: None where the call does not tell.
        final_obs: None where nobody ended.
        whole: Whose final observations are of a whole episode; None where nobody ended.
        codes: (n, A) what infos told, and 0 where they told nothing.
    """

    env_ids: Ints
    obs: Ints
    rewards: NDArray[np.float64]
    terminated: Bools
    truncated: Bools
    alive: Bools
    acting: Bools
    reset_mask: Bools
    fault: Bools
    done: Bools | None
    final_obs: Ints | None
    whole: Bools | None
    codes: Ints

    @classmethod
    def of_result(cls, step: VectorStep) -> Rows:
        """What `recv` brought."""
        rows = cls._of(step.env_ids, step.obs, step.rewards, step.terminated, step.truncated, step.infos, step.done)
        assert np.array_equal(rows.fault, step.fault)
        return rows

    @classmethod
    def of_step(cls, result: tuple[Any, ...]) -> Rows:
        """What `step` brought."""
        obs, rewards, terminated, truncated, infos = result
        return cls._of(np.arange(len(obs)), obs, rewards, terminated, truncated, infos, None)

    @classmethod
    def of_reset(cls, result: tuple[Any, dict[str, Any]], env_ids: Ints) -> Rows:
        """What `reset` brought to these envs."""
        obs, infos = result
        none = np.zeros((len(obs), AGENT_NUM), np.bool_)
        rows = cls._of(np.arange(len(obs)), obs, np.zeros(none.shape), none, none, infos, None)
        return rows.at(env_ids)

    @classmethod
    def _of(
        cls,
        env_ids: Ints,
        obs: Ints,
        rewards: NDArray[np.float64],
        terminated: Bools,
        truncated: Bools,
        infos: dict[str, Any],
        done: Bools | None,
    ) -> Rows:
        fault = infos.get("fault")
        assert fault is None or fault.any(), "infos have a fault where there is none"
        codes = np.zeros(rewards.shape, np.int64)
        if "code" in infos:
            np.copyto(codes, infos["code"], where=infos["_code"])
        return cls(
            env_ids,
            obs,
            rewards,
            terminated,
            truncated,
            infos["alive"],
            infos["acting"],
            infos["reset_mask"],
            np.zeros(len(env_ids), np.bool_) if fault is None else fault,
            done,
            infos.get("final_observation"),
            infos.get("_final_observation"),
            codes,
        )

    def at(self, places: Any) -> Rows:
        """Some of them: places, or a mask."""
        parts = (getattr(self, name) for name in self.__dataclass_fields__)
        return Rows(*(None if part is None else part[places] for part in parts))

    def where(self, mask: Bools) -> Rows:
        """Those of a mask, which is often all True."""
        return self if mask.all() else self.at(mask)


@dataclass(frozen=True)
class _Timetable:
    """All scripts at once: (N, E, T, A) who is alive, terminated, truncated after step t; (N, E, A) births, deaths."""

    alive: Bools
    terminated: Bools
    truncated: Bools
    births: Ints
    deaths: Ints
    lengths: Ints


@cache
def _timetable(num_envs: int) -> _Timetable:
    flags = np.zeros((3, num_envs, EPISODES, LONGEST + 1, AGENT_NUM), np.bool_)
    births = np.zeros((num_envs, EPISODES, AGENT_NUM), np.int64)
    deaths, lengths = np.zeros_like(births), np.zeros((num_envs, EPISODES), np.int64)
    for i in range(num_envs):
        for episode in range(EPISODES):
            script = script_of(i, episode)
            for t in range(script.length + 1):
                flags[:, i, episode, t] = script.alive(t), script.terminated(t), script.truncated(t)
            births[i, episode] = [_NEVER if birth is None else birth for birth in script.births]
            deaths[i, episode] = script.deaths
            lengths[i, episode] = script.length
    return _Timetable(*flags, births, deaths, lengths)


class Audit:
    """Follows one vectorizer of `LedgerEnv`s.

    Args:
        folder: Where their books are.
        num_envs: N.
        autoreset_mode: The vectorizer's.

    Attributes:
        running: (N,) bool, whose episode runs, as far as the caller knows.
        attempted, delivered, lost: Actions for live agents; see the head of this module.
        lost_but_done: Those of the lost that are in the ledger: the env did it, and nobody heard of it.
        env_steps: Env steps that were delivered.
        fault_rows: (N,) how often each env's episode was declared lost.
        incarnations: (N,) the last incarnation of each that was seen.
    """

    def __init__(self, folder: Path, num_envs: int, autoreset_mode: str) -> None:
        self.ledger = Ledger(folder, num_envs)
        self._table = _timetable(num_envs)
        self._at_once = autoreset_mode == "same_step"
        self.running = np.zeros(num_envs, np.bool_)
        self.incarnations = np.full(num_envs, -1)
        self.fault_rows = np.zeros(num_envs, np.int64)
        self.attempted = self.delivered = self.lost = self.lost_but_done = self.env_steps = 0
        self._episode = np.full(num_envs, -1)
        self._t = np.zeros(num_envs, np.int64)
        self._codes = np.zeros((num_envs, AGENT_NUM), np.int64)  # of each agent's last action in the episode
        self._alive = np.zeros((num_envs, AGENT_NUM), np.bool_)
        self._asked = np.zeros(num_envs, np.int64)  # number of the request in flight, or _RESET; 0 for none
        self._done: list[tuple[Ints, ...]] = []  # since the last join: env, incarnation, episode, t, agent, code
        self._lost: list[Ints] = []  # codes
        self._held = np.zeros(0, self.ledger.dtype)

    # --- what is asked

    def asked_step(self, env_ids: Ints, numbers: Ints) -> None:
        """The caller asks these envs for a step, by requests of these numbers."""
        assert not self._asked[env_ids].any()
        self._asked[env_ids] = numbers
        self.attempted += int(np.count_nonzero(self._alive[env_ids]))

    def asked_reset(self, env_ids: Ints) -> None:
        """The caller resets these envs."""
        assert not self._asked[env_ids].any()
        self._asked[env_ids] = _RESET

    # --- what comes

    def came(self, rows: Rows) -> None:
        """Look at rows that have come, of steps and of resets."""
        ids = rows.env_ids
        asked = self._asked[ids]
        assert asked.all(), f"came though nobody had asked: {ids[asked == 0]}"
        assert len(set(ids.tolist())) == len(ids), f"came twice at once: {ids}"
        self._asked[ids] = 0
        resets, lost, runs = asked == _RESET, rows.fault, self.running[ids]
        begins = ~(resets | lost | runs)
        assert not (lost & (resets | ~runs)).any(), f"declared lost without an episode: {ids[lost & (resets | ~runs)]}"
        _same(rows.reset_mask, begins, ids, "marks of autoresets")
        _same(rows.acting, rows.alive, ids, "who acts, and who is alive")
        if lost.any():
            self._came_lost(rows.at(lost), asked[lost])
        fresh = resets | begins
        if (steps := ~(fresh | lost)).any():
            self._came_step(rows.where(steps), asked[steps])
        if fresh.any():
            silent = rows.where(fresh)
            for name in ("rewards", "terminated", "truncated", "codes"):
                assert not getattr(silent, name).any(), f"envs {silent.env_ids}: {name} at the beginning"
            self._begin(silent)

    def _came_lost(self, rows: Rows, numbers: Ints) -> None:
        ids = rows.env_ids
        _same(rows.truncated, self._alive[ids], ids, "who was lost, and who was alive")
        for name in ("terminated", "rewards", "codes"):
            assert not getattr(rows, name).any(), f"envs {ids}: {name} of what was lost"
        assert rows.done is None or rows.done.all(), f"envs {ids}: lost, and not done: {rows.done}"
        assert rows.whole is None or not rows.whole.any(), f"envs {ids}: final observations of what was lost"
        self.lost += int(np.count_nonzero(rows.truncated))
        self.fault_rows[ids] += 1
        self._lost.append(code_of(numbers[:, None], _AGENTS)[self._alive[ids]])
        if self._at_once:
            before = self.incarnations[ids]
            self._begin(rows)
            assert (self.incarnations[ids] > before).all(), f"envs {ids}: lost, and the same incarnation goes on"
        else:
            self._stop(rows)

    def _came_step(self, rows: Rows, numbers: Ints) -> None:
        ids, table = rows.env_ids, self._table
        episode = self._episode[ids]
        where = ids, episode % EPISODES
        t = self._t[ids] + 1
        self._t[ids] = t
        acted = self._alive[ids]
        codes = np.where(acted, code_of(numbers[:, None], _AGENTS), 0)
        self._codes[ids] = np.where(acted, codes, self._codes[ids])
        moment = *where, t
        _same(rows.terminated, table.terminated[moment], ids, "who is terminated")
        _same(rows.truncated, table.truncated[moment], ids, "who is truncated")
        _same(rows.rewards, codes, ids, "rewards")
        self.delivered += int(np.count_nonzero(rows.rewards))
        self.env_steps += len(ids)
        done = t == table.lengths[where]
        assert rows.done is None or np.array_equal(rows.done, done), f"envs {ids}: done {rows.done}, expected {done}"
        told = (numbers & 15 == 0) & ~(done & self._at_once)  # there they are final infos
        _same(rows.codes, np.where(told[:, None], codes, 0), ids, "infos")
        n, a = np.nonzero(acted)
        at = ids[n]
        self._done.append((at, self.incarnations[at], episode[n], t[n], a, codes[n, a]))
        ended = rows.terminated | rows.truncated
        if ended.any():
            self._check_finals(rows, ended, done)
        if not done.all():
            on = ~done
            self._go_on(rows.where(on), ended[on], table.alive[moment][on])
        if done.any() and self._at_once:
            self._begin(rows.where(done))
        elif done.any():
            self._stop(rows.where(done), ended[done])

    def _check_finals(self, rows: Rows, ended: Bools, done: Bools) -> None:
        ids = rows.env_ids
        assert rows.final_obs is not None
        assert rows.whole is not None
        _same(rows.whole, done, ids, "marks of final observations of whole episodes")
        where = ids, self._episode[ids] % EPISODES
        # At the end of an episode those who left before are there, too.
        there = np.where(done[:, None], self._table.births[where] < _NEVER, ended)
        t = np.where(ended, self._t[ids, None], self._table.deaths[where])
        self._check_obs(rows.final_obs, ids, there, t, blank=done)

    def _go_on(self, rows: Rows, ended: Bools, alive: Bools) -> None:
        ids = rows.env_ids
        _same(rows.alive, alive, ids, "who is alive")
        self._check_obs(rows.obs, ids, alive | ended, self._t[ids, None])
        self._alive[ids] = alive

    def _stop(self, rows: Rows, ended: Bools | None = None) -> None:
        """The episodes are over, and the next have not begun."""
        ids = rows.env_ids
        assert not rows.alive.any(), f"envs {ids}: over, and somebody lives"
        there = np.zeros_like(rows.alive) if ended is None else ended
        self._check_obs(rows.obs, ids, there, self._t[ids, None])
        self.running[ids] = False
        self._alive[ids] = False

    def _begin(self, rows: Rows) -> None:
        """The rows begin episodes: the next one of the same incarnation, or the first one of a later incarnation."""
        ids = rows.env_ids
        labels = rows.obs[np.arange(len(ids)), rows.alive.argmax(axis=1)]
        incarnation, episode = labels[:, 1], labels[:, 2]
        known = self.incarnations[ids]
        same = (incarnation == known) & (episode == self._episode[ids] + 1)
        right = same | ((incarnation > known) & (episode == 0))
        assert right.all(), (
            f"envs {ids}: episodes {episode} of incarnations {incarnation} begin, after those of {known}"
        )
        self.incarnations[ids], self._episode[ids], self._t[ids], self._codes[ids] = incarnation, episode, 0, 0
        alive = self._table.alive[ids, episode % EPISODES, 0]
        _same(rows.alive, alive, ids, "who begins")
        self._check_obs(rows.obs, ids, alive, np.zeros((len(ids), 1), np.int64))
        self._alive[ids] = alive
        self.running[ids] = True

    def _check_obs(self, obs: Ints, ids: Ints, there: Bools, t: Ints, blank: Bools | None = None) -> None:
        """Observations of those that are there have the right label and CRC; others are zeros, in ``blank`` envs."""
        n, a = np.nonzero(there)
        i = ids[n]
        rows = obs[n, a]
        label = np.empty((len(n), LABEL), np.int64)
        label[:, 0], label[:, 1], label[:, 2], label[:, 4] = i, self.incarnations[i], self._episode[i], a
        label[:, 3] = t[n, 0] if t.shape[1] == 1 else t[n, a]
        label[:, 5] = self._codes[i, a]
        assert np.array_equal(rows[:, :LABEL], label), _first_wrong(rows[:, :LABEL], label)
        data, size = memoryview(rows.tobytes()), rows.shape[1] * 8
        crcs = [zlib.crc32(data[at : at + size - 8]) for at in range(0, len(data), size)]
        assert rows[:, -1].tolist() == crcs, f"torn: {rows[rows[:, -1] != crcs][0]}"
        others = ~there if blank is None else ~there & blank[:, None]
        assert not obs[others].any(), f"observations of agents that are not there: {obs[others]}"

    # --- the join

    def join(self) -> None:
        """Compare with the ledger all that has come since the last time. Steps in flight are left for the next time."""
        records = np.concatenate([self._held, self.ledger.read()])
        in_flight = np.isin(records["code"] >> 3, self._asked)
        self._held, records = records[in_flight], records[~in_flight]
        assert len(np.unique(records["code"])) == len(records), "an action was taken twice"
        lost = np.concatenate([np.zeros(0, np.int64), *self._lost])
        declared = np.isin(records["code"], lost)
        self.lost_but_done += int(np.count_nonzero(declared))
        written = np.sort(records[~declared], order="code")
        delivered = np.zeros(sum(len(part[0]) for part in self._done), self.ledger.dtype)
        for name, parts in zip(delivered.dtype.names or (), zip(*self._done, strict=True), strict=False):
            delivered[name] = np.concatenate(parts)
        delivered.sort(order="code")
        if not np.array_equal(written, delivered):
            extra, missing = np.setdiff1d(written, delivered), np.setdiff1d(delivered, written)
            raise AssertionError(f"only in the ledger: {extra[:5]}, only delivered: {missing[:5]}")
        self._done.clear()
        self._lost.clear()

    def settle(self) -> None:
        """The last join: nothing is in flight, and the equation holds."""
        assert not self._asked.any(), f"never answered: envs {np.flatnonzero(self._asked)}"
        self.join()
        assert not len(self._held)
        assert self.attempted == self.delivered + self.lost


def _same(got: NDArray[Any], right: NDArray[Any], ids: Ints, what: str) -> None:
    if not np.array_equal(got, right):
        wrong = np.reshape(got != right, (len(ids), -1)).any(axis=1)
        raise AssertionError(f"envs {ids[wrong]}: {what}: {got[wrong]}, expected {right[wrong]}")


def _first_wrong(rows: Ints, labels: Ints) -> str:
    k = int(np.flatnonzero((rows != labels).any(axis=1))[0])
    return f"labels {len(rows)} observations, one of them {rows[k].tolist()}, expected {labels[k].tolist()}"
