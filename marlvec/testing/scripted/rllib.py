"""Scripted RLlib-style envs, without RLlib."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from marlvec.testing.scripted.script import ScriptLike
from marlvec.testing.scripted.scripted_state import AgentStep, ScriptedState, Shell, old_flags

__all__ = ["KeyedEnv"]


class KeyedEnv(Shell):
    """An RLlib-style dict env driven by a script: observed agents act, the others wait.

    Args:
        script: The episodes; None draws one per episode from the env's random stream.
        agent_num: Number of agents.
        waits: Function of (t, a): whether live agent ``a`` is left out of the observations of step ``t``; it still gets
            its reward. None: no agent waits.
        int_ids: Whether agents are named 0, 1, 2, … instead of by strings.
        last_obs: Whether agents get a last observation when they end.
        old_api: Whether ``reset`` returns observations alone and ``step`` four dicts.
        options: See `ScriptedState`.

    Raises:
        ValueError: In ``step``: the actions are not those of the agents observed last, or one is not allowed.
    """

    _common_key = "__common__"

    def __init__(
        self,
        script: ScriptLike | None = None,
        *,
        agent_num: int = 3,
        waits: Callable[[int, int], bool] | None = None,
        int_ids: bool = False,
        last_obs: bool = True,
        old_api: bool = False,
        env_index: int = 0,
        **options: Any,
    ) -> None:
        self.world = ScriptedState(agent_num, script, env_index=env_index, **options)
        self.possible_agents: list[Any] = [a if int_ids else f"agent_{a}" for a in range(agent_num)]
        self.observation_spaces = dict.fromkeys(self.possible_agents, self.world.observation_space)
        self.action_spaces = dict.fromkeys(self.possible_agents, self.world.action_space)
        self._waits, self._last_obs, self._old_api = waits, last_obs, old_api
        self._acting: list[Any] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin the next episode; all agents present at the reset are observed."""
        obs = self._begin(seed)
        self._acting = list(obs)
        return obs if self._old_api else (obs, self._infos(list(obs)))

    def step(self, actions: dict[Any, Any]) -> Any:
        """Take one step."""
        here = self._advance(actions, self._acting)
        obs = {agent: self.world.observe_masked(step.place) for agent, step in here.items() if self._is_observed(step)}
        self._acting = [agent for agent in obs if here[agent].alive]
        rewards = {agent: step.reward for agent, step in here.items()}
        over = not any(step.alive for step in here.values())
        terminateds = {agent: step.terminated for agent, step in here.items()} | {"__all__": over}
        truncateds = {agent: step.truncated for agent, step in here.items()} | {"__all__": False}
        infos = self._infos(list(obs))
        if self._old_api:
            return obs, rewards, *old_flags(terminateds, truncateds, infos)
        return obs, rewards, terminateds, truncateds, infos

    def _is_observed(self, step: AgentStep) -> bool:
        if step.joins:
            return True
        if not step.alive:
            return self._last_obs
        return self._waits is None or not self._waits(self.world.t, step.place)
