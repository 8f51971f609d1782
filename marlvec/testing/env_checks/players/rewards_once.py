"""Checks that a PettingZoo AEC env gives each reward once."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

from marlvec.envs.adapters.return_values import AgentId
from marlvec.testing.env_checks.report import Place, short

__all__ = ["RewardsOnce"]


class WatchedRewards(dict[Any, Any]):
    """Rewards of an env that record of which agents they were written since the last clear."""

    def __init__(self, rewards: Mapping[Any, Any]) -> None:
        super().__init__(rewards)
        self.written: set[Any] = set()

    def __setitem__(self, agent: Any, value: Any) -> None:
        self.written.add(agent)
        super().__setitem__(agent, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        for agent, value in dict(*args, **kwargs).items():
            self[agent] = value

    def __ior__(self, other: Any) -> WatchedRewards:  # type: ignore[misc]  # dict's own takes pairs, too
        self.update(other)
        return self


class RewardsOnce:
    """Tracks the rewards of one AEC env: each step shows its own, ``last()`` the sum since the agent's turn.

    A reward that is not cleared shows again in the next step, and counts twice.
    """

    def __init__(self) -> None:
        self._watched: WatchedRewards | None = None
        self._sums: dict[AgentId, float] | None = {}

    def begin(self) -> None:
        """Begin a game, with no rewards yet."""
        self._sums = {}

    def watch(self, env: Any) -> None:
        """Before a step: track the env's dict of rewards, if it is a plain dict."""
        owner = getattr(env, "unwrapped", env)
        rewards = getattr(owner, "rewards", None)
        if isinstance(rewards, WatchedRewards):
            self._watched = rewards
        elif type(rewards) is dict and env.rewards is rewards and "rewards" in vars(owner):
            owner.rewards = self._watched = WatchedRewards(rewards)
        else:
            self._watched = None
        if self._watched is not None:
            self._watched.written.clear()

    def check_step(self, place: Place, env: Any, mover: AgentId) -> None:
        """After the step of a live agent: check that no reward of an earlier step remains."""
        sums, rewards = self._sums, env.rewards
        if sums is not None and isinstance(rewards, Mapping):
            sums[mover] = 0.0
            if all(map(_is_number, rewards.values())):
                for agent, value in rewards.items():
                    sums[agent] = sums.get(agent, 0.0) + value
            else:
                self._sums = None
        if self._watched is None or rewards is not self._watched:
            return  # the step made a new dict
        for agent, value in rewards.items():
            if agent not in self._watched.written and _is_number(value) and value != 0:
                place.fault(
                    "rewards_once",
                    f"reward of agent {agent!r}",
                    "what this step brought it, 0 where that is nothing",
                    f"{short(value)} again, which an earlier call wrote, and which counts twice",
                )

    def check_dead_step(self, place: Place, env: Any, before: Mapping[Any, Any], dead: AgentId) -> None:
        """After a dead agent's step: check that earlier rewards are cleared. If not, nothing is summed any more."""
        rewards = env.rewards
        for agent, value in rewards.items() if isinstance(rewards, Mapping) else ():
            if _is_number(value) and value != 0 and agent in before and before[agent] == value:
                self._sums = None  # last() may add it up: not a second fault
                place.fault(
                    "rewards_once",
                    f"reward of agent {agent!r}",
                    f"0 after step(None) of the dead agent {dead!r}",
                    f"{short(value)} again, which would count twice",
                    "clear env.rewards in step(None), as AECEnv._was_dead_step() does",
                )

    def check_last(self, place: Place, agent: AgentId, reward: Any) -> None:
        """Check that ``last()`` returns the sum of an agent's rewards since its turn. If not, no more are summed."""
        if self._sums is None or not _is_number(reward):
            return
        expected = self._sums.get(agent, 0.0)
        if not math.isclose(reward, expected, rel_tol=1e-5, abs_tol=1e-6):
            self._sums = None
            place.fault(
                "rewards_once",
                f"reward that last() has of agent {agent!r}",
                f"{short(expected)}, the sum of what env.rewards showed since its last turn",
                short(reward),
                "in step(), set self._cumulative_rewards[agent] = 0 of the agent that acts, and call "
                "self._accumulate_rewards() once, when self.rewards is complete",
                kind="last()",
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value)
