"""`LockstepScheduler`: steps all envs together, or in two fixed halves that overlap with the policies.

Axis letters: N envs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.scheduling.env_step import EnvStep
from marlvec.errors import ArgumentError, EnvFault, EnvsDriven, StateError
from marlvec.serialization.saved import Saved, SavedField
from marlvec.serialization.state_fields import State
from marlvec.vector.vector_env import VectorEnv

__all__ = ["EnvsNeeded", "LockstepScheduler"]

IntArray = NDArray[np.int64]

EnvsNeeded = Callable[[int], int]
"""Takes how many env steps are under way or not counted yet; says how many envs must be stepped after them."""

_NO_ENVS: IntArray = np.zeros(0, np.int64)


class LockstepScheduler(Saved):
    """Sends to the envs and receives from them.

    Envs step in *rounds*: in each round all living envs (or as many as are still needed) make one step. Without
    overlap, a round begins when all envs of the last round have replied. With overlap, a round is sent in two halves; a
    half continues while the other half's replies are pending, once it is certain that all envs take part in the next
    round. So every env makes the same steps with and without overlap.

    Envs that were sent to together are received together, in the order of sending, so that timing has no effect.
    """

    saved_as = "rounds"
    saved_fields: ClassVar = {
        "round": SavedField("round_N"),
        "open": SavedField("_open"),
        "behind": SavedField("_behind"),
        "living": SavedField("living", (None,)),
    }

    def __init__(self, envs: VectorEnv, *, overlap: bool) -> None:
        self._envs, self._overlap = envs, overlap
        self._drive_count = 0  # the envs', as this object's last call left it
        self.all_ids: IntArray = np.arange(envs.num_envs)
        self.living = self.all_ids  # ids of envs that are not masked
        self._resting_N = np.zeros(envs.num_envs, np.bool_)
        self._going = self.all_ids  # of those that live, who does not rest
        self.round_N = np.zeros(envs.num_envs, np.int64)  # each env's current or last round
        self._open = 0  # the last round that may begin
        self._behind = 0  # how many steps those that go are behind it, together
        self._all_begin = self._all_take_part = True  # whether those that are due begin a round, in which all are
        self._away_N = np.zeros(envs.num_envs, np.bool_)
        self._num_away = 0
        self._sent: deque[IntArray] = deque()  # envs that were sent to together, and were not received
        self._inbox: list[EnvStep] = []  # came while others were waited for
        # Whether rows were requested and not yet received. True after an interrupted `receive`, which may be called
        # again: nothing was lost.
        self.is_waiting = False

    def check_alone(self) -> None:
        """Raise `EnvsDriven` if other code drove the envs since this object did; so do sending and receiving."""
        if self.is_driven:
            raise EnvsDriven(
                "the envs of this collector were reset, stepped or received from since it last did so itself: by code "
                "of yours, by another collector, or in a call that Ctrl-C has ended. So its running episodes are lost: "
                "call reset() to begin new ones, and give others envs of their own, marlvec.make(...)"
            )

    @property
    def is_driven(self) -> bool:
        """Whether `check_alone` would raise."""
        return self._envs.drive_count != self._drive_count

    @property
    def all_go_together(self) -> bool:
        """Whether each round is one step of all envs, and all have replied."""
        return not self._overlap and not self._num_away and len(self._going) == len(self.all_ids)

    @property
    def is_on_the_way(self) -> bool:
        """Whether a reply is pending."""
        return self._num_away > 0

    @property
    def is_in_a_round(self) -> bool:
        """Whether some envs are one step ahead of others."""
        return self._overlap and (self._num_away > 0 or self._behind > 0)

    def among_those_back(self, env_ids: IntArray) -> NDArray[np.bool_] | None:
        """Return an (N,) mask of these envs; None if no other env has replied, so that all waiting rows are theirs."""
        if len(env_ids) + self._num_away == len(self.living):
            return None
        chosen = np.zeros(len(self.all_ids), np.bool_)
        chosen[env_ids] = True
        return chosen

    # --- who may go

    def begin_call(self, needed: EnvsNeeded) -> None:
        """Begin a new call of `collect`; drop conclusions of the last call, which may have failed."""
        to_come = self._num_away + self._behind
        if to_come and not needed(to_come - 1):
            self._open, self._behind = int(self.round_N.max()), 0
            self.round_N[:] = self._open
        # Where all go together `due` is not called, and its last result was of those behind the ones it had sent.
        self._all_begin = self._all_take_part = not self._num_away and not self._behind

    def due(self, needed: EnvsNeeded, steps_N: IntArray) -> IntArray | None:
        """Return the envs that make their next step now; None for all.

        With overlap these are one half: call again after sending to them. If only some envs are needed, those with the
        fewest steps in ``steps_N`` go.
        """
        going = self._going
        self._all_begin = not self._num_away and not (self._overlap and self._behind)
        if self._all_begin:
            k = needed(0)
            self._all_take_part = k >= len(going)
            if not self._all_take_part:
                chosen = np.sort(going[np.argsort(steps_N[going], kind="stable")[:k]])
            else:
                # Every other one: so every worker has some of both halves.
                chosen = going[::2] if self._overlap else going
            return None if len(chosen) == len(self.all_ids) else chosen
        if not self._overlap or self._num_away == len(self.living):
            return _NO_ENVS
        idle = going[~self._away_N[going]]
        if not len(idle):
            return idle
        rounds = self.round_N[idle]
        if np.count_nonzero(rounds == self._open) and needed(self._num_away + self._behind) >= len(going):
            self._open, self._behind = self._open + 1, self._behind + len(going)
        last = rounds.min()
        return idle[rounds == last] if last < self._open else _NO_ENVS

    def rest(self, resting_N: NDArray[np.bool_]) -> None:
        """Exclude these envs from `due`, until the next call of `rest`."""
        self._resting_N = resting_N
        self._going = self.living[~resting_N[self.living]]
        self._behind = int((self._open - self.round_N[self._going]).sum())

    # --- on the way

    def send(self, actions: Any, env_ids: IntArray | None) -> None:
        """Send actions to envs that were `due`."""
        if self._envs.drive_count != self._drive_count:
            self.check_alone()
        self._envs.send(actions, env_ids)
        if self._all_begin:
            self._open = int(self.round_N[self.round_N.argmax()]) + 1  # a quarter of the time of max()
            self._behind = len(self._going)
        if env_ids is None or (self._all_begin and not self._all_take_part):
            self.round_N[:] = self._open  # an env that does not take part is left out of this round
            self._behind = 0
        else:
            self.round_N[env_ids] += 1
            self._behind -= len(env_ids)
        self._note_sent(env_ids)
        self._sent.append(self.all_ids if env_ids is None else env_ids)

    def reset(self, *, env_ids: IntArray | None = None, seed: int | None = None) -> None:
        """Begin an episode in some envs, or in all."""
        self.check_alone()
        ask = self._envs.async_reset if self._num_away else self._envs.reset_send
        ask(seed=seed, env_ids=env_ids)
        self._note_sent(env_ids)

    def _note_sent(self, env_ids: IntArray | None) -> None:
        self._drive_count = self._envs.drive_count
        if env_ids is None:
            self._away_N[:] = True
            self._num_away = len(self.all_ids)
        else:
            self._away_N[env_ids] = True
            self._num_away += len(env_ids)

    # --- back

    def receive(self) -> EnvStep:
        """Return the step of the envs that were sent to first."""
        self.is_waiting = False
        sent = self._sent[0]
        if len(sent) == self._num_away and not self._inbox:  # nothing else can come, and nothing has
            env_step = self._take(None)
        else:
            mine_N = np.zeros(len(self.all_ids), np.bool_)
            mine_N[sent] = True
            while missing := len(sent) - sum(int(mine_N[some.env_ids].sum()) for some in self._inbox):
                self._inbox.append(self._take(missing))
            chosen = [(some, mine_N[some.env_ids]) for some in self._inbox]
            env_step = EnvStep.join([some.part(mine) for some, mine in chosen if mine.any()])
            self._inbox = [some if not mine.any() else some.part(~mine) for some, mine in chosen if not mine.all()]
        self._sent.popleft()
        return self._hand_out(env_step)

    def begin_next(self, env_step: EnvStep, env_ids: IntArray, idle: Callable[[IntArray], Any]) -> IntArray:
        """Begin the next episode in these envs (retry after faults), and put its first rows into ``env_step``.

        ``idle`` returns actions of envs in which no agent acts. Returns the envs that have begun an episode.
        """
        autoreset, waiting = self._envs.autoreset, env_ids
        if autoreset.begins_at_once:
            return env_ids
        env_step.own()
        while len(waiting := self.of_living(waiting)):
            if autoreset.begins_on_next_step:
                self.check_alone()
                self._envs.send(idle(waiting), waiting)  # a step that belongs to no round
                self._note_sent(waiting)
            else:
                self.reset(env_ids=waiting)
            again = []
            for fresh in self.receive_all(waiting):
                env_step.renew(fresh)
                self.leave_out_masked(fresh)
                again.append(fresh.env_ids[fresh.done])
            waiting = np.sort(np.concatenate(again))
        return env_ids

    def receive_all(self, env_ids: IntArray) -> Iterator[EnvStep]:
        """Yield the steps of these envs until all have replied; other replies are received later."""
        missing = len(env_ids)
        while missing:
            env_step = self._take(None if missing == self._num_away else 1)
            mine = np.isin(env_step.env_ids, env_ids)
            if not mine.all():
                self._inbox.append(env_step.part(~mine))
                env_step = env_step.part(mine)
            missing -= len(env_step.env_ids)
            if len(env_step.env_ids):
                yield self._hand_out(env_step)

    def _take(self, at_least: int | None) -> EnvStep:
        if self._envs.drive_count != self._drive_count:
            self.check_alone()
        self.is_waiting = True
        step = self._envs.recv(at_least)
        self.is_waiting = False
        self._drive_count = self._envs.drive_count
        return EnvStep(step, len(self.all_ids), writable=self._envs.copy)

    def _hand_out(self, env_step: EnvStep) -> EnvStep:
        self._away_N[env_step.where] = False
        self._num_away -= len(env_step.env_ids)
        return env_step

    def abandon(self) -> None:
        """Drop all pending replies, and let all envs begin their next round."""
        self._inbox.clear()
        self._sent.clear()
        with suppress(EnvFault):
            self._envs.drain()
        self._away_N[:] = False
        self._num_away = self._behind = 0
        self._open = int(self.round_N.max())  # no round comes twice: rows are ordered by them
        self.round_N[:] = self._open
        self._drive_count = self._envs.drive_count

    # --- saved

    def get_state(self) -> State:
        """Return the rounds of all envs and the ids of living ones; no step may be in flight (`StateError`)."""
        if self._num_away:
            raise StateError(f"{self._num_away} envs have not come back")
        return super().get_state()

    def derive(self, values: dict[str, Any]) -> dict[str, Any]:
        """Check the ids of envs."""
        living = values["living"]
        if not np.array_equal(np.intersect1d(living, self.all_ids), living):
            raise ArgumentError(f"{self.saved_as}: living: expected ascending ids of envs, got {living.tolist()}")
        return {**values, "_going": living, "_num_away": 0, "is_waiting": False}

    def install(self, values: Mapping[str, Any]) -> None:
        """Set the attributes, once the envs are in the state of that moment."""
        self._inbox.clear()
        self._sent.clear()
        self._away_N[:] = False
        super().install({**values, "_drive_count": self._envs.drive_count})
        self._resting_N[:] = False

    # --- who is out for good

    def leave_out_masked(self, env_step: EnvStep) -> None:
        """Exclude masked envs, once their own rows report it."""
        if masked := self._envs.masked_env_ids:
            silent = env_step.env_ids[~env_step.alive.any(axis=1)]
            self.living = self.living[~np.isin(self.living, np.intersect1d(silent, masked))]
            self.rest(self._resting_N)

    def of_living(self, env_ids: IntArray) -> IntArray:
        """Drop masked envs from these ids."""
        return env_ids if len(self.living) == len(self.all_ids) else env_ids[np.isin(env_ids, self.living)]
