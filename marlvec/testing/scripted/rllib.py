"""Scripted RLlib-style envs, without RLlib."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from marlvec.testing.scripted.script import ScriptLike
from marlvec.testing.scripted.scripted_state import ScriptedState

__all__ = ["KeyedEnv"]


class KeyedEnv:
    """An RLlib-style dict env by a script: only agents that are observed act, the others wait.

    Args:
        script: Who lives when; None: drawn anew for each episode from the env's own random stream.
        agent_num: Number of agents.
        waits: (t, a) to whether live agent ``a`` is left out of the observations of step ``t``; it gets its reward all
            the same. None: none ever waits.
        int_ids: Whether agents are named 0, 1, 2, … instead of by strings.
        last_obs: Whether agents get a last observation when they end.
        old_api: Whether ``reset`` gives observations alone and ``step`` four dicts.
        options: See `ScriptedState`.

    Raises:
        ValueError: In ``step``: actions for other agents than those observed last, or an action that is not allowed.
    """

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
        self.closed = False
        self._waits, self._last_obs, self._old_api = waits, last_obs, old_api
        self._acting: list[Any] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin the next episode; all agents that are there at the reset are observed."""
        world = self.world
        world.reset(seed)
        alive = world.script.alive(0)
        obs = {agent: world.observe_masked(a) for a, agent in enumerate(self.possible_agents) if alive[a]}
        self._acting = list(obs)
        return obs if self._old_api else (obs, self._infos(list(obs)))

    def step(self, actions: dict[Any, Any]) -> Any:
        """Take one step."""
        world, script = self.world, self.world.script
        if actions.keys() != set(self._acting):
            raise ValueError(f"expected actions of {self._acting}, got {list(actions)}")
        before = script.alive(world.t)
        world.act({self.possible_agents.index(agent): action for agent, action in actions.items()})
        t = world.t
        ended, cut, alive = script.terminated(t), script.truncated(t), script.alive(t)
        obs: dict[Any, Any] = {}
        rewards: dict[Any, float] = {}
        for a, agent in enumerate(self.possible_agents):
            born = script.births[a] == t
            if not (before[a] or born):
                continue
            rewards[agent] = world.reward(a, actions.get(agent, 0))
            waits = alive[a] and not born and self._waits is not None and self._waits(t, a)
            if not waits and (alive[a] or born or self._last_obs):
                obs[agent] = world.observe_masked(a)
        self._acting = [agent for a, agent in enumerate(self.possible_agents) if agent in obs and alive[a]]
        flagged = [(agent, ended[a], cut[a]) for a, agent in enumerate(self.possible_agents) if agent in rewards]
        over = not any(alive)
        terminateds = {agent: end for agent, end, _ in flagged} | {"__all__": over}
        truncateds = {agent: end for agent, _, end in flagged} | {"__all__": False}
        infos = self._infos(list(obs))
        if not self._old_api:
            return obs, rewards, terminateds, truncateds, infos
        dones = {agent: end or cut_ for agent, end, cut_ in flagged} | {"__all__": over}
        for agent, _, cut_ in flagged:
            if cut_:
                infos[agent] = {**infos.get(agent, {}), "TimeLimit.truncated": True}
        return obs, rewards, dones, infos

    def close(self) -> None:
        """Note that it was closed."""
        self.closed = True

    def _infos(self, agents: list[Any]) -> dict[Any, dict[str, Any]]:
        infos = {agent: self.world.info(self.possible_agents.index(agent)) for agent in agents}
        shared = self.world.script.common.get(self.world.t)
        return {**infos, "__common__": shared} if shared else infos
