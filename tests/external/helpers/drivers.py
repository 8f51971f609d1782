"""Simulators for the tests: envs of PettingZoo's two kinds, played from outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from marlvec.errors import EpisodeCut
from marlvec.external import ExternalEnv, ExternalVectorEnv
from marlvec.policies import FunctionPolicy

__all__ = ["Play", "by_sight", "play_parallel", "play_turns"]


def by_sight(salt: int = 3) -> FunctionPolicy:
    """Decides by what is seen alone, so that no order of rows and no other row makes a difference."""

    def act(rows: Any) -> Any:
        numbers = np.abs(np.floor(rows["obs"].reshape(len(rows), -1).sum(axis=1) * 997)).astype(np.int64) * 31 + salt
        if "action_mask" not in rows:
            return numbers % 5
        allowed = [np.flatnonzero(mask) for mask in rows["action_mask"]]
        return np.array([choices[n % len(choices)] for choices, n in zip(allowed, numbers, strict=True)])

    return FunctionPolicy(act)


def play_parallel(self: ExternalEnv, env: Any, env_id: int | None, seed: int | None, **options: Any) -> None:
    """One episode of a PettingZoo Parallel env."""
    episode = self.start_episode(env_id=env_id, **options)
    obs, _ = env.reset(seed=seed)
    while True:
        try:
            actions = self.get_action(episode, obs)
        except EpisodeCut:  # time was up
            return
        obs, rewards, terminated, truncated, infos = env.step(actions)
        self.log_returns(episode, rewards, infos)
        over = {agent for agent in obs if terminated[agent] or truncated[agent]}
        flags = {"terminated": {a: terminated[a] for a in over}, "truncated": {a: truncated[a] for a in over}}
        last = {agent: obs.pop(agent) for agent in over}
        if not obs:
            self.end_episode(episode, last, **flags)
            return
        if over:
            self.end_agents(episode, last, **flags)


def play_turns(self: ExternalEnv, env: Any, env_id: int | None, seed: int | None, **options: Any) -> None:
    """One episode of a PettingZoo AEC env whose agents all end together."""
    episode = self.start_episode(env_id=env_id, **options)
    env.reset(seed=seed)
    while env.agents and not any(env.terminations.values()):
        agent = env.agent_selection
        actions = self.get_action(episode, {agent: env.observe(agent)})
        env.step(actions[agent])
        self.log_returns(episode, env.rewards)
    self.end_episode(episode, {agent: env.observe(agent) for agent in env.possible_agents}, terminated=True)


class Play(ExternalEnv):
    """Plays some episodes of an env, one after the other.

    Args:
        envs: Where.
        env: The env.
        play: One episode of it.
        env_id: The slot it plays in, or None.
        seed: Of the env's first reset.
        episodes: How many; None: until it is stopped.
        options: As `ExternalEnv`.
    """

    def __init__(
        self,
        envs: ExternalVectorEnv,
        env: Any,
        play: Callable[..., None],
        *,
        env_id: int | None = None,
        seed: int | None = None,
        episodes: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(envs, **options)
        self.env, self.play, self.env_id, self.seed, self.episodes = env, play, env_id, seed, episodes

    def run(self) -> None:
        seed, played = self.seed, 0
        while not self.stopping and played != self.episodes:
            self.play(self, self.env, self.env_id, seed)
            seed, played = None, played + 1
        self.env.close()
