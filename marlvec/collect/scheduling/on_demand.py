"""`OnDemandScheduler`: serves envs driven from outside as their rows arrive.

Axis letters: N envs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.scheduling.env_step import EnvStep
from marlvec.collect.scheduling.lockstep import EnvsNeeded, LockstepScheduler
from marlvec.vector.vector_env import VectorEnv

__all__ = ["OnDemandScheduler", "scheduler_for"]

IntArray = NDArray[np.int64]

_NO_ENVS: IntArray = np.zeros(0, np.int64)


class OnDemandScheduler(LockstepScheduler):
    """Sends to external envs, whose simulators decide when they reply, and receives from them.

    Each env continues as soon as its agents' actions are sent, and begins its next episode when its simulator does.
    There are no rounds: `round_N` numbers arrivals. No more rows are returned than are needed; others wait for the next
    call.
    """

    def __init__(self, envs: VectorEnv) -> None:
        super().__init__(envs, overlap=False)
        self._beginning_N = np.zeros(envs.num_envs, np.bool_)  # sent for, and no episode runs yet
        self._needed = 0
        self._number = 0

    @property
    def all_go_together(self) -> bool:
        """False: each env steps independently."""
        return False

    @property
    def is_on_the_way(self) -> bool:
        """False: no reply is waited for."""
        return False

    @property
    def is_in_a_round(self) -> bool:
        """False: there are none."""
        return False

    def begin_call(self, needed: EnvsNeeded) -> None:
        """Do nothing: no call depends on the last one."""

    def due(self, needed: EnvsNeeded, steps_N: IntArray) -> IntArray | None:
        """Return all envs that have replied; steps beyond this call are kept for the next one."""
        self._needed = needed(0)
        if not self._needed or self._num_away == len(self.all_ids):
            return _NO_ENVS
        idle = self._going[~self._away_N[self._going]]
        return None if len(idle) == len(self.all_ids) else idle

    def send(self, actions: Any, env_ids: IntArray | None) -> None:
        """Send actions to envs that were `due`."""
        self.check_alone()
        self._envs.send(actions, env_ids)
        self._note_sent(env_ids)

    def reset(self, *, env_ids: IntArray | None = None, seed: int | None = None) -> None:
        """Request the next episode of some envs, or of all; it begins when its simulator begins it."""
        self.check_alone()
        self._envs.async_reset(seed=seed, env_ids=env_ids)
        self._beginning_N[slice(None) if env_ids is None else env_ids] = True
        self._note_sent(env_ids)

    def begin_next(self, env_step: EnvStep, env_ids: IntArray, idle: Callable[[IntArray], Any]) -> IntArray:
        """Schedule the next episode of these envs, which have no running episode."""
        self.reset(env_ids=env_ids)
        return _NO_ENVS

    def receive_all(self, env_ids: IntArray) -> Iterator[EnvStep]:
        """Yield nothing: replies are received as they arrive."""
        return iter(())

    def receive(self) -> EnvStep:
        """Return arrived rows of one kind: first rows of episodes, or replies to actions; errors keep arrived rows."""
        self.is_waiting = False
        if not self._inbox:
            self._sort_in(self._take(1))
        env_step = self._inbox.pop(0)
        if not env_step.is_first and len(env_step.env_ids) > self._needed:
            chosen = np.zeros(len(env_step.env_ids), np.bool_)
            chosen[: self._needed] = True
            self._inbox.insert(0, env_step.part(~chosen))
            env_step = env_step.part(chosen)
        self._number += 1
        self.round_N[env_step.env_ids] = self._number
        self._beginning_N[env_step.env_ids] = False
        return self._hand_out(env_step)

    def _sort_in(self, env_step: EnvStep) -> None:
        first = self._beginning_N[env_step.env_ids]
        for chosen, is_first in ((first, True), (~first, False)):
            if chosen.any():
                part = env_step if chosen.all() else env_step.part(chosen)
                part.is_first = is_first
                self._inbox.append(part)


def scheduler_for(envs: VectorEnv, *, overlap: bool) -> LockstepScheduler:
    """Return the scheduler for these envs; where no env goes in rounds there is nothing to overlap."""
    return LockstepScheduler(envs, overlap=overlap) if envs.lockstep else OnDemandScheduler(envs)
