"""The checker: joins what envs wrote down with what their caller asked and was handed, and lets nothing pass.

    attempted = delivered + declared lost

Attempted is every action for a live agent; delivered every reward that came for one; declared lost every live agent of
an episode that a row calls lost. What was delivered is in the ledger, once, as it was told; what is in the ledger and
was not delivered was declared lost. Every row's labels, flags and CRCs are those that the env's script and its last row
call for, so that a stale, torn, doubled or swapped row, or an episode that began anew without a word, cannot pass.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.vector import VectorStep
from tests.faults.harness.ledger import AGENT_NUM, EPISODES, LABEL, LONGEST, Ledger, code_of, script_of

__all__ = ["Audit", "Rows"]

Ints = NDArray[np.int64]
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
