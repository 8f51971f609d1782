"""`TimeLimit`: a limit on the length of episodes."""

from __future__ import annotations

from typing import Any

from marlvec.arguments import whole_number
from marlvec.envs.env import MultiAgentEnv
from marlvec.envs.slot import Slot
from marlvec.envs.spec import Info
from marlvec.envs.wrappers.base import EnvWrapper
from marlvec.errors import ArgumentError

__all__ = ["TimeLimit", "check_limit"]


def check_limit(max_episode_steps: Any) -> int:
    """Return a number of steps as an int, at least 1."""
    number = whole_number(max_episode_steps)
    if number is None or number < 1:
        raise ArgumentError(f"max_episode_steps: expected an int of at least 1, got {max_episode_steps!r}")
    return number


class TimeLimit(EnvWrapper):
    """Truncates every agent that is still alive after ``max_episode_steps`` steps of the env.

    An agent that ends by itself in that step keeps its own flags; an agent that ended before does not change. In a
    turn-based env one move is one step.
    """

    def __init__(self, env: MultiAgentEnv, max_episode_steps: int) -> None:
        super().__init__(env)
        self._limit = check_limit(max_episode_steps)
        self._steps = 0

    def reset(self, slot: Slot, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Info | None:
        self._steps = 0
        return self.env.reset(slot, seed=seed, options=options)

    def step(self, slot: Slot) -> Info | None:
        info = self.env.step(slot)
        self._steps += 1
        if slot.begun:
            self._steps = 0
        elif self._steps >= self._limit and not slot.done:
            self.env.cut_short(slot)
        return info

    def get_state(self) -> dict[str, Any]:
        return {"steps": self._steps, "env": self.env.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        if not isinstance(state, dict) or state.keys() != {"steps", "env"}:
            raise ArgumentError(f"{self.name}: state has no step count: it was saved without max_episode_steps")
        self._steps = state["steps"]
        self.env.set_state(state["env"])
