"""A PettingZoo Parallel env that leaves out what the API asks for: names of its agents, flags of those that leave."""

from __future__ import annotations

from typing import Any

from gymnasium.spaces import Space
from pettingzoo import ParallelEnv

from marlvec.testing.scripted import Script, ScriptedParallelEnv

__all__ = ["INCOMPLETE", "IncompleteEnv"]

SCRIPTS = [
    Script([0, 0, 0], [3, 5, 4], ["truncated", "truncated", "terminated"], {(3, 0): {"last": 3}, (2, 1): {"t": 2}}),
    Script([0, 2, None], [4, 3, 1], ["truncated", "truncated", "both"], {(0, 0): {"t": 0}}, {2: {"clock": 2}}),
    Script([0, 0, 1], [2, 2, 2], ["truncated", "truncated", "truncated"]),
    Script([0, 0, 0], [1, 6, 2], ["both", "terminated", "truncated"]),
]
"""Of the first, all agents are there at the reset; every way to leave, the last of them all among these."""

INCOMPLETE: dict[str, dict[str, Any]] = {
    "no names": {"has_names": False},
    "gone": {"leave": "gone"},
    "observed": {"leave": "observed"},
    "observed alone": {"leave": "observed alone"},
    "all": {"has_names": False, "leave": "gone", "masked": True},
}
"""Arguments of `IncompleteEnv`, by what it leaves out."""


class IncompleteEnv(ParallelEnv):  # type: ignore[misc]  # pettingzoo has no type information
    """Its data say where they come from; see `ScriptedParallelEnv`.

    Args:
        has_names: Whether there are ``possible_agents``.
        leave: What is said of agents that the script truncates: ``"flag"``: all; ``"observed"``: all but the flag;
            ``"observed alone"``: their observation; ``"gone"``: nothing. They are not in `agents` any more.
        options: See `ScriptedParallelEnv`.
    """

    def __init__(self, *, has_names: bool = True, leave: str = "flag", **options: Any) -> None:
        self._env = ScriptedParallelEnv(SCRIPTS, **options)
        self._leave = leave
        self.metadata = {"name": "incomplete"}
        self.agents: list[str] = []
        if has_names:
            self.possible_agents = self._env.possible_agents

    def observation_space(self, agent: str) -> Space[Any]:
        return self._env.observation_space(agent)

    def action_space(self, agent: str) -> Space[Any]:
        return self._env.action_space(agent)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        result = self._env.reset(seed=seed, options=options)
        self.agents = self._env.agents
        return result

    def step(self, actions: dict[str, Any]) -> Any:
        result = self._env.step(actions)
        obs, rewards, terminations, truncations, infos = result
        self.agents = self._env.agents
        leaving = [agent for agent in obs if truncations[agent] and not terminations[agent]]
        if self._leave == "flag":
            return result
        for agent in leaving:
            truncations[agent] = False
            for table in (rewards, terminations, truncations, infos) if self._leave != "observed" else ():
                table.pop(agent, None)
            if self._leave == "gone":
                del obs[agent]
        return result
