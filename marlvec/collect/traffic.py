"""What goes to the envs and comes back, and which of them still answer."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.arrivals import Arrival
from marlvec.collect.callbacks.hooks import Hooks
from marlvec.errors import EnvFault
from marlvec.vector.vector_env import VectorEnv

__all__ = ["Traffic"]

IntArray = NDArray[np.int64]


class Traffic:
    """Sends to the envs and receives from them.

    Args:
        envs: The envs.
        hooks: Who is told what happens, and wants to see what comes.

    Attributes:
        all_ids: Ids of all envs.
        living: Of those that are not masked; the others are never sent to.
        is_pending: Whether something was sent that was not received.
    """

    def __init__(self, envs: VectorEnv, hooks: Hooks) -> None:
        self._envs, self._hooks = envs, hooks
        self.all_ids: IntArray = np.arange(envs.num_envs)
        self.living = self.all_ids
        self.is_pending = False

    def send(self, actions: Any, env_ids: IntArray | None) -> None:
        """Have some envs step, or all."""
        self._envs.send(actions, env_ids)
        self.is_pending = True

    def reset(self, *, env_ids: IntArray | None = None, seed: int | None = None) -> None:
        """Have some envs begin an episode, or all."""
        self._envs.reset_send(seed=seed, env_ids=env_ids)
        self.is_pending = True

    def receive(self) -> Arrival:
        """What has come back.

        Raises:
            EnvFault: An env raised or a worker died; nothing more will come.
        """
        try:
            step = self._envs.recv()
        except EnvFault:
            self.is_pending = False
            raise
        self.is_pending = False
        self._hooks.receive(step)
        return Arrival(step, len(self.all_ids), writable=self._envs.copy)

    def leave_out_masked(self, arrival: Arrival) -> None:
        """Have nothing to do any more with envs that are out for good, from when their own rows say so."""
        if masked := self._envs.masked_env_ids:
            silent = arrival.env_ids[~arrival.alive.any(axis=1)]
            self.living = self.living[~np.isin(self.living, np.intersect1d(silent, masked))]

    def of_living(self, env_ids: IntArray) -> IntArray:
        """Those of some envs that are not masked."""
        return env_ids if len(self.living) == len(self.all_ids) else env_ids[np.isin(env_ids, self.living)]

    def longest_waiting(self, k: int, steps_N: IntArray) -> IntArray | None:
        """The k envs that have stepped least: as all go round in turn, those that have waited longest. None for all."""
        chosen = self.living
        if k < len(chosen):
            chosen = np.sort(chosen[np.argsort(steps_N[chosen], kind="stable")[:k]])
        return None if len(chosen) == len(self.all_ids) else chosen
