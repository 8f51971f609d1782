"""One marlvec env as a PettingZoo Parallel env, or as an AEC env, whose agents act one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from itertools import compress
from typing import Any, Self

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Space
from numpy.typing import NDArray
from pettingzoo import AECEnv, ParallelEnv

from marlvec.envs.spec import COMMON, AgentGroup
from marlvec.errors import ArgumentError, NotResetError
from marlvec.interop.rows import (
    check_view,
    join_actions,
    merged,
    metadata_of,
    places_of,
    render_mode_of,
    value_at,
    viewed,
)
from marlvec.making import make
from marlvec.registry import EnvLike
from marlvec.vector.infos import infos_to_list
from marlvec.vector.vector_env import VectorEnv
from marlvec.vector.vector_step import VectorStep

__all__ = ["ParallelView", "AECView"]


class ParallelView(ParallelEnv):  # type: ignore[misc]  # pettingzoo has no type information
    """A view of the single env of a `VectorEnv`, for code written for PettingZoo's Parallel envs.

    For every kind of env, observations, rewards, flags and infos are those of the agents that were alive before the
    step, and of those that joined in it.

    * If the env has action masks, observations are ``{"observation": …, "action_mask": …}``, the mask int8.
    * ``infos[agent]["acting"]`` is True if the agent must act now. The action of an agent that waits for its turn is
      ignored and may be left out; its mask allows everything.
    * Infos of the env as a whole are repeated in each agent's info. Keys that both have, and an env's own ``"acting"``,
      are in ``infos[agent]["__common__"]`` and ``infos[agent]["__agents__"]``.
    * Agent names are strings, also if the env uses numbers.

    Args:
        envs: The vectorizer, made with ``num_envs=1, autoreset_mode="disabled"``, as by `make`. No other code may step
            or reset it.

    Raises:
        ArgumentError: It has several envs, or resets them itself.

    Attributes:
        envs: The vectorizer.
        possible_agents: All agents' names.
        agents: Names of those alive now.
        observation_spaces, action_spaces: Agent to its space.
        state_space: Space of `state`; only if the env has a global state.
        metadata, render_mode: From the env.
    """

    def __init__(self, envs: VectorEnv) -> None:
        check_view(envs, "ParallelView")
        self.envs = envs
        self.possible_agents = list(envs.agents)
        self.agents: list[str] = []
        self.metadata = metadata_of(envs)
        self.render_mode = render_mode_of(envs)
        if envs.state_space is not None:
            self.state_space = envs.state_space
        self._acting = [False] * envs.agent_num
        self._agent_set = set(envs.agents)
        self._all_act = False
        self._state: NDArray[Any] | None = None
        self._places = places_of(envs.spec)
        groups = {agent: envs.spec.groups[g] for agent, (g, _) in self._places.items()}
        # One copy per agent: seeding or sampling one must not affect another, or the env.
        self.observation_spaces = {agent: _observation_space(group) for agent, group in groups.items()}
        self.action_spaces = {agent: deepcopy(group.action_space) for agent, group in groups.items()}
        # In a plain env, of one group, each agent observes one array and makes one choice: see `step`.
        first, *others = envs.spec.groups
        is_plain = not others and not envs.grouped
        tree = first.observation_tree
        is_array = tree.is_leaf and not tree.leaves[0].is_object and not isinstance(tree.space, Discrete)
        self._has_plain_obs = is_plain and is_array and first.mask_size is None
        self._has_plain_actions = is_plain and isinstance(first.action_space, Discrete)

    @classmethod
    def make(cls, env: EnvLike, *, backend: str = "sync", **kwargs: Any) -> Self:
        """Build one env and a view of it.

        Args:
            env: As in `marlvec.make`.
            backend: Where it runs; ``"sync"``: in this process.
            kwargs: Other arguments of `marlvec.make`, except ``num_envs`` and ``autoreset_mode``.
        """
        envs = make(env, 1, backend=backend, autoreset_mode="disabled", **kwargs)
        return viewed(cls, envs)

    def observation_space(self, agent: str) -> Space[Any]:
        """Return one agent's observation space, the same object each time."""
        return self.observation_spaces[self._known(agent)]

    def action_space(self, agent: str) -> Space[Any]:
        """Return one agent's action space, the same object each time."""
        return self.action_spaces[self._known(agent)]

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Begin an episode.

        Args:
            seed: For the env, used as it is; None: its random generator continues.
            options: For the env.

        Returns:
            ``(obs, infos)`` of the agents alive now.
        """
        self.envs.reset_send(seed=None if seed is None else [seed], options=options)
        result = self.envs.recv()
        self._note(result, result.alive[0].tolist())
        return self._obs(result, self.agents), self._infos(result, result.infos, self.agents)

    def step(
        self, actions: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float], dict[str, bool], dict[str, bool], dict[str, dict[str, Any]]]:
        """Step the env.

        Args:
            actions: Agent to action, for every agent that must act. Actions of other agents are ignored.

        Returns:
            ``(obs, rewards, terminations, truncations, infos)``.

        Raises:
            ActionError: An agent must act and has no action, a name is unknown, or an action is not in its space.
            NotResetError: The episode is over, or none has begun.
        """
        self.envs.step_send(self._arrays(actions))
        result = self.envs.recv()
        alive, flags = result.alive[0].tolist(), (result.terminated[0].tolist(), result.truncated[0].tolist())
        self._note(result, alive)
        rewards: dict[str, float] = {}
        terminations: dict[str, bool] = {}
        truncations: dict[str, bool] = {}
        values = zip(self.possible_agents, alive, result.rewards[0].tolist(), *flags, strict=True)
        for agent, is_alive, reward, terminated, truncated in values:
            # Agents alive before the step are alive or ended in it; the others here joined in it.
            if is_alive or terminated or truncated:
                rewards[agent], terminations[agent], truncations[agent] = reward, terminated, truncated
        agents = list(rewards)
        raw_infos = result.infos
        if self._has_plain_obs and len(raw_infos) == _STANDARD_KEYS and len(agents) == len(self.possible_agents):
            found = result.obs_leaves[0][0][0]
            obs = dict(zip(agents, found if self.envs.copy else found.copy(), strict=True))
            infos: dict[str, dict[str, Any]] = {
                agent: {"acting": acts} for agent, acts in zip(agents, self._acting, strict=True)
            }
        else:
            obs, infos = self._obs(result, agents), self._infos(result, raw_infos, agents)
        return obs, rewards, terminations, truncations, infos

    def state(self) -> NDArray[Any]:
        """Return the global state.

        Returns:
            ``(*state_space.shape)``, of the state space's dtype; a copy.

        Raises:
            ArgumentError: The env has no global state.
            NotResetError: No episode is running, and the vectorizer was not made with ``state=True``.
        """
        return self.envs.state()[0] if self._state is None else self._state.copy()

    def render(self) -> Any:
        """The frame of the env's ``render()``."""
        return self.envs.render()[0]

    def close(self) -> None:
        """Close the vectorizer and the env."""
        self.envs.close()

    def _known(self, agent: str) -> str:
        if agent not in self._places:
            raise ArgumentError(f"no agent {agent!r}; the agents are {self.possible_agents}")
        return agent

    def _note(self, result: VectorStep, alive: list[bool]) -> None:
        self.agents = [*compress(self.possible_agents, alive)]
        self._acting = result.acting[0].tolist()
        self._all_act = False not in self._acting
        self._state = None if result.state is None else result.state[0].copy()

    def _obs(self, result: VectorStep, agents: list[str]) -> dict[str, Any]:
        found = {}
        for agent in agents:
            g, j = self._places[agent]
            group, mask = self.envs.spec.groups[g], result.action_masks[g]
            value = value_at(group.observation_tree, result.obs_leaves[g], (0, j))
            if mask is not None and group.mask_size is not None:  # masks that no space declares stay in the infos
                value = {"observation": value, "action_mask": mask[0, j].astype(np.int8)}
            found[agent] = value
        return found

    def _infos(self, result: VectorStep, raw_infos: dict[str, Any], agents: list[str]) -> dict[str, dict[str, Any]]:
        (own,) = infos_to_list(raw_infos, self.envs.agents, 1)
        acting = dict(zip(self.possible_agents, self._acting, strict=True))
        infos = {}
        for agent in agents:
            g, j = self._places[agent]
            ours: dict[str, Any] = {"acting": acting[agent]}
            if (mask := result.action_masks[g]) is not None and self.envs.spec.groups[g].mask_size is None:
                ours["action_mask"] = mask[0, j].astype(np.int8)
            infos[agent] = merged(own.get(agent, {}), own.get(COMMON, {}), ours)
        return infos

    def _arrays(self, actions: Mapping[str, Any]) -> Any:
        if self._has_plain_actions and self._all_act and actions.keys() == self._agent_set:
            chosen = [actions[agent] for agent in self.possible_agents]
            if _INTS.issuperset(map(type, chosen)):
                return np.array([chosen], np.int64)
        return join_actions(self.envs, [actions], np.array([self._acting]))


_INTS = frozenset({int, np.int64})
_STANDARD_KEYS = 3  # infos: alive, acting, reset_mask


def _observation_space(group: AgentGroup) -> Space[Any]:
    """Return one agent's observation space, including its mask."""
    space = deepcopy(group.observation_space)
    if group.mask_size is None:
        return space
    return Dict({"observation": space, "action_mask": Box(0, 1, (group.mask_size,), np.int8)})


class AECView(AECEnv):  # type: ignore[misc]  # pettingzoo has no type information
    """A view of the single env of a `VectorEnv`, for code written for PettingZoo's AEC envs.

    A turn-based env keeps its turns. Agents that act simultaneously are queried one after the other, in the order of
    ``possible_agents``, and the env is stepped with the last one's action. ``agent_selection`` is the agent whose turn
    it is; agents that have ended come first, to be stepped with None, as PettingZoo requires.

    Observations, infos and names are those of `ParallelView`. `observe` returns an agent's latest observation, also
    while it waits for its turn.

    Args:
        envs: The vectorizer, made with ``num_envs=1, autoreset_mode="disabled"``, as by `make`. No other code may step
            or reset it.

    Raises:
        ArgumentError: It has several envs, or resets them itself.

    Attributes:
        envs: The vectorizer.
        possible_agents: All agents' names.
        agents: Names of agents that are alive, or have ended and were not yet stepped with None.
        agent_selection: The agent to step next.
        observation_spaces, action_spaces: Agent to its space.
        rewards, terminations, truncations, infos: Agent to the results of the env's latest step.
        metadata, render_mode: From the env.
    """

    def __init__(self, envs: VectorEnv) -> None:
        super().__init__()
        self._parallel = ParallelView(envs)
        self.envs = envs
        self.possible_agents = self._parallel.possible_agents
        self.observation_spaces = self._parallel.observation_spaces
        self.action_spaces = self._parallel.action_spaces
        self.metadata = self._parallel.metadata
        self.render_mode = self._parallel.render_mode
        if envs.state_space is not None:
            self.state_space = envs.state_space
        self.agents: list[str] = []
        self.agent_selection: str | None = None
        self._obs: dict[str, Any] = {}
        self._turns: list[str] = []  # agents that have not acted yet in this round
        self._actions: dict[str, Any] = {}  # actions of the agents that have

    @classmethod
    def make(cls, env: EnvLike, *, backend: str = "sync", **kwargs: Any) -> Self:
        """Build one env and a view of it; arguments as in `ParallelView.make`."""
        return cls(ParallelView.make(env, backend=backend, **kwargs).envs)

    def observation_space(self, agent: str) -> Space[Any]:
        """Return one agent's observation space, the same object each time."""
        return self._parallel.observation_space(agent)

    def action_space(self, agent: str) -> Space[Any]:
        """Return one agent's action space, the same object each time."""
        return self._parallel.action_space(agent)

    def observe(self, agent: str) -> Any:
        """Return an agent's latest observation."""
        return self._obs[agent]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Begin an episode.

        Args:
            seed: For the env, used as it is; None: its random generator continues.
            options: For the env.
        """
        self._obs, self.infos = self._parallel.reset(seed, options)
        self.agents = list(self._obs)
        self.rewards: dict[str, float] = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict(self.rewards)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self._skip_agent_selection: str | None = None
        self._next_round(None)

    def step(self, action: Any) -> None:
        """Apply an action of ``agent_selection``; None if that agent has ended.

        Raises:
            ActionError: An agent's action is not in its space. Raised in the step of the round's last agent; nothing
                was stepped, and that agent may act again.
            NotResetError: No episode is running.
            ValueError: An agent that has ended received an action.
        """
        agent = self.agent_selection
        if agent is None or agent not in self.agents:
            raise NotResetError("step(): no episode is running; call reset() first")
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        actions = {**self._actions, agent: action}
        if len(self._turns) > 1:
            self._cumulative_rewards[agent] = 0.0
            self._actions, self._turns = actions, self._turns[1:]
            self._clear_rewards()
            self.agent_selection = self._turns[0]
            return
        result = self._parallel.step(actions)
        self._cumulative_rewards[agent] = 0.0
        self._take(*result)
        self._next_round(agent)

    def state(self) -> NDArray[Any]:
        """Global state, see `ParallelView.state`."""
        return self._parallel.state()

    def render(self) -> Any:
        """The frame of the env's ``render()``."""
        return self._parallel.render()

    def close(self) -> None:
        """Close the vectorizer and the env."""
        self._parallel.close()

    def _take(
        self,
        obs: dict[str, Any],
        rewards: dict[str, float],
        terminations: dict[str, bool],
        truncations: dict[str, bool],
        infos: dict[str, dict[str, Any]],
    ) -> None:
        self._obs = {**self._obs, **obs}
        self.agents = list(rewards)
        self.rewards, self.terminations, self.truncations, self.infos = rewards, terminations, truncations, infos
        self._cumulative_rewards = {
            agent: self._cumulative_rewards.get(agent, 0.0) + reward for agent, reward in rewards.items()
        }

    def _next_round(self, latest: str | None) -> None:
        """Begin the next round, and select the agent, after the ``latest`` one that acted."""
        self._actions = {}
        while True:
            self._turns = [agent for agent in self._parallel.agents if self.infos[agent]["acting"]]
            ended = [agent for agent in self.agents if self.terminations[agent] or self.truncations[agent]]
            if self._turns or ended or not self._parallel.agents:
                break
            self._take(*self._parallel.step({}))  # no agent acts: step the env without actions
        if self._turns:
            self.agent_selection = self._turns[0]
            self._deads_step_first()
        elif ended:  # the episode is over: first the agent after the last one to act
            order = self.possible_agents
            after = order.index(latest) + 1 if latest is not None else 0
            self.agent_selection = next(agent for agent in (*order[after:], *order[:after]) if agent in ended)
        else:
            self.agent_selection = None
