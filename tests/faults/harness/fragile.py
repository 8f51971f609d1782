"""An env to which something happens when it is told so, and its double for rehearsals."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from marlvec import RestartQuietly
from marlvec.testing.scripted import ScriptedParallelEnv

__all__ = ["FragileEnv", "Rehearsal", "Strike", "order", "where"]


class FragileEnv(ScriptedParallelEnv):
    """Agents come and go by scripts that are drawn anew for each episode; a reset's ``salt`` shows in what it brings.

    Args:
        env_index: Index of the env.
        agent_num: Number of agents.
        marks: Folder in which incarnations are counted, or None.

    Attributes:
        plan: Operation to what happens when it is asked for next: ``"raise"``, ``"quiet"``, ``"exit"`` or ``"hang"``.
    """

    def __init__(self, *, env_index: int, agent_num: int, marks: Path | None = None) -> None:
        super().__init__(
            None,
            agent_num=agent_num,
            env_index=env_index,
            marks=marks,
            longest=4,
            reuse_buffer=env_index % 2 == 1,
        )
        self.plan: dict[str, str] = {}

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._come_to("reset")
        obs, infos = super().reset(seed, options)
        for row in obs.values():
            row[-1] += (options or {}).get("salt", 0)
        return obs, infos

    def step(self, actions: dict[str, Any]) -> Any:
        self._come_to("step")
        return super().step(actions)

    def strike(self, how: str) -> None:
        """Do what was planned."""
        if how == "raise":
            raise ValueError("it was told to")
        if how == "quiet":
            raise RestartQuietly
        if how == "exit":
            os._exit(3)
        time.sleep(3600.0)

    def _come_to(self, operation: str) -> None:
        if how := self.plan.pop(operation, None):
            self.strike(how)


class Strike(Exception):
    """What would have happened."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.how = how


class Rehearsal(FragileEnv):
    """The same, in the test's own process: it says what happens, and does not let it happen.

    Args:
        env_index, agent_num: See `FragileEnv`.
        incarnation: Which one it stands for.
    """

    def __init__(self, *, env_index: int, agent_num: int, incarnation: int) -> None:
        super().__init__(env_index=env_index, agent_num=agent_num)
        self.world.incarnation = incarnation
        self.world._rng = np.random.default_rng([env_index, incarnation])  # as of one that was counted

    def strike(self, how: str) -> None:
        raise Strike(how)


def order(env: FragileEnv, operation: str, how: str) -> None:
    """For `exec_func`: tell an env what is to happen to it."""
    env.plan[operation] = how


def where(env: FragileEnv) -> tuple[int, int, int]:
    """For `exec_func`: incarnation, episode and step of an env."""
    return env.world.incarnation, env.world.episode, env.world.t
