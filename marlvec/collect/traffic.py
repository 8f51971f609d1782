"""What goes to the envs and comes back, who is on the way, and who may go next.

Axis letters: N envs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.arrivals import Arrival
from marlvec.collect.halves import Halves
from marlvec.errors import EnvFault
from marlvec.vector.vector_env import VectorEnv

__all__ = ["EnvsNeeded", "Traffic"]

IntArray = NDArray[np.int64]

EnvsNeeded = Callable[[int], int]
"""Of how many envs one more step is needed, when so many steps that were not counted yet have brought all they can."""

_NOBODY: IntArray = np.zeros(0, np.int64)


class Traffic:
    """Sends to the envs and receives from them.

    Envs go in *rounds*: in each, all that live make a step, or as many as are still needed. Without overlap a round
    begins when all of the one before are back. With overlap an env goes on alone as soon as it is certain that the next
    round is one in which all take part, whatever those bring that are still on the way. So every env makes the steps
    it would have made without, and neither more nor fewer. Where that turns out to cost more than it brings (`Halves`),
    rounds begin as they do without.

    Args:
        envs: The envs.
        overlap: Whether envs are received as they become ready.

    Attributes:
        all_ids: Ids of all envs.
        living: Of those that are not masked; the others are never sent to.
        round_N: (N,) int64, the round that each env is in, or was in last.
    """

    def __init__(self, envs: VectorEnv, *, overlap: bool) -> None:
        self._envs, self._overlap = envs, overlap
        self._halves = Halves(envs.num_envs)
        self.all_ids: IntArray = np.arange(envs.num_envs)
        self.living = self.all_ids
        self._resting_N = np.zeros(envs.num_envs, np.bool_)
        self._going = self.all_ids  # of those that live, who does not rest
        self.round_N = np.zeros(envs.num_envs, np.int64)
        self._open = 0  # the last round that may begin
        self._behind = 0  # how many steps those that go are behind it, together
        self._all_begin = self._all_take_part = True  # whether those that are due begin a round, in which all are
        self._away_N = np.zeros(envs.num_envs, np.bool_)
        self._num_away = 0
        self._inbox: list[Arrival] = []  # came while others were waited for

    @property
    def is_on_the_way(self) -> bool:
        """Whether something was sent that was not received."""
        return self._num_away > 0

    @property
    def is_in_a_round(self) -> bool:
        """Whether some envs have come further than others, and those are to follow."""
        return self._overlap and (self._num_away > 0 or self._behind > 0)

    def among_those_back(self, env_ids: IntArray | None) -> NDArray[np.bool_] | None:
        """(N,) which envs these are; None where nobody else is back, so that all rows that wait are theirs."""
        if env_ids is None or len(env_ids) + self._num_away == len(self.living):
            return None
        chosen = np.zeros(len(self.all_ids), np.bool_)
        chosen[env_ids] = True
        return chosen

    # --- who may go

    def begin_call(self, needed: EnvsNeeded) -> None:
        """Something new is asked for: where a call has failed, what was certain then may be so no more."""
        self._halves.begin_call()
        to_come = self._num_away + self._behind
        if to_come and not needed(to_come - 1):
            self._open, self._behind = int(self.round_N.max()), 0
            self.round_N[:] = self._open

    def due(self, needed: EnvsNeeded, steps_N: IntArray) -> IntArray | None:
        """The envs that make their next step now; None for all.

        With overlap these are half of all at most: where more are back, ask again once those are on their way. Else
        envs that take equally long would all wait for the policies at the same time, for ever.

        Args:
            needed: How many are needed.
            steps_N: (N,) how many steps each has made: of some, those go that have made the fewest, so that all go
                round in turn.
        """
        going = self._going
        self._all_begin = not self._num_away and not (self._overlap and self._behind)
        if self._all_begin:
            k = needed(0)
            self._all_take_part = k >= len(going)
            if not self._all_take_part:
                chosen = np.sort(going[np.argsort(steps_N[going], kind="stable")[:k]])
            else:
                chosen = self._half(going) if self._in_halves else going
            return None if len(chosen) == len(self.all_ids) else chosen
        if not self._overlap or self._num_away == len(self.living):
            return _NOBODY
        idle = going[~self._away_N[going]]
        rounds = self.round_N[idle]
        may_open = self._in_halves and np.count_nonzero(rounds == self._open)
        if may_open and needed(self._num_away + self._behind) >= len(going):
            self._open += 1
            self._behind += len(going)
        return self._half(idle[rounds < self._open])

    @property
    def _in_halves(self) -> bool:
        return self._overlap and self._halves.pay

    def _half(self, env_ids: IntArray) -> IntArray:
        """Every other one of these where they are more than half of all: so every worker has some of both halves."""
        return env_ids[::2] if len(env_ids) > (len(self._going) + 1) // 2 else env_ids

    def rest(self, resting_N: NDArray[np.bool_]) -> None:
        """These envs are not `due`, until others are said to rest."""
        self._resting_N = resting_N
        self._going = self.living[~resting_N[self.living]]
        self._behind = int((self._open - self.round_N[self._going]).sum())

    # --- on the way

    def send(self, actions: Any, env_ids: IntArray | None) -> None:
        """Have envs step that were `due`."""
        self._envs.send(actions, env_ids)
        if self._all_begin:
            self._open = int(self.round_N[self.round_N.argmax()]) + 1  # a quarter of the time of max()
            self._behind = len(self._going)
        if env_ids is None or (self._all_begin and not self._all_take_part):
            self.round_N[:] = self._open  # whoever does not take part sits out this round
            self._behind = 0
        else:
            self.round_N[env_ids] += 1
            self._behind -= len(env_ids)
        self._note_sent(env_ids)

    def reset(self, *, env_ids: IntArray | None = None, seed: int | None = None) -> None:
        """Have some envs begin an episode, or all."""
        ask = self._envs.async_reset if self._num_away else self._envs.reset_send
        ask(seed=seed, env_ids=env_ids)
        self._note_sent(env_ids)

    def _note_sent(self, env_ids: IntArray | None) -> None:
        if env_ids is None:
            self._away_N[:] = True
            self._num_away = len(self.all_ids)
        else:
            self._away_N[env_ids] = True
            self._num_away += len(env_ids)

    # --- back

    def receive(self) -> Arrival:
        """What has come back: all, or with overlap at least so many that half of the envs are at work meanwhile.

        Raises:
            EnvFault: An env raised or a worker died.
        """
        if self._inbox:
            arrival = self._inbox.pop(0)
        else:
            at_least = (len(self._going) + 1) // 2
            arrival = self._take(at_least if self._in_halves and at_least < self._num_away else None)
        if self._overlap:
            self._halves.note(len(arrival.env_ids))
        return self._hand_out(arrival)

    def begin_next(self, arrival: Arrival, env_ids: IntArray, idle: Callable[[IntArray], Any]) -> IntArray:
        """Have these envs begin the next episode, again where that fails, and put its first rows into the arrival.

        Args:
            arrival: With the rows that ended the episodes before.
            env_ids: The envs.
            idle: Actions of envs in which nobody acts.

        Returns:
            Those that have begun one.
        """
        mode, waiting = self._envs.autoreset_mode, env_ids
        if mode == "same_step":
            return env_ids
        arrival.own()
        while len(waiting := self.of_living(waiting)):
            if mode == "next_step":
                self._envs.send(idle(waiting), waiting)  # a step that belongs to no round
                self._note_sent(waiting)
            else:
                self.reset(env_ids=waiting)
            again = []
            for fresh in self.receive_all(waiting):
                arrival.renew(fresh)
                self.leave_out_masked(fresh)
                again.append(fresh.env_ids[fresh.done])
            waiting = np.sort(np.concatenate(again))
        return env_ids

    def receive_all(self, env_ids: IntArray) -> Iterator[Arrival]:
        """What comes of these envs, until it has come of all; what else comes is received later.

        Raises:
            EnvFault: As `receive`.
        """
        missing = len(env_ids)
        while missing:
            arrival = self._take(None if missing == self._num_away else 1)
            mine = np.isin(arrival.env_ids, env_ids)
            if not mine.all():
                self._inbox.append(arrival.part(~mine))
                arrival = arrival.part(mine)
            missing -= len(arrival.env_ids)
            if len(arrival.env_ids):
                yield self._hand_out(arrival)

    def _take(self, at_least: int | None) -> Arrival:
        return Arrival(self._envs.recv(at_least), len(self.all_ids), writable=self._envs.copy)

    def _hand_out(self, arrival: Arrival) -> Arrival:
        self._away_N[arrival.where] = False
        self._num_away -= len(arrival.env_ids)
        return arrival

    def abandon(self) -> None:
        """Let what is on the way go by."""
        self._inbox.clear()
        if self._num_away:
            with suppress(EnvFault):
                self._envs.drain()
        self._away_N[:] = False
        self._num_away = 0

    # --- who is out for good

    def leave_out_masked(self, arrival: Arrival) -> None:
        """Have nothing to do any more with envs that are out for good, from when their own rows say so."""
        if masked := self._envs.masked_env_ids:
            silent = arrival.env_ids[~arrival.alive.any(axis=1)]
            self.living = self.living[~np.isin(self.living, np.intersect1d(silent, masked))]
            self.rest(self._resting_N)

    def of_living(self, env_ids: IntArray) -> IntArray:
        """Those of some envs that are not masked."""
        return env_ids if len(self.living) == len(self.all_ids) else env_ids[np.isin(env_ids, self.living)]
