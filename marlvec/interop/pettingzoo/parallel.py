"""One marlvec env as a PettingZoo Parallel env."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from itertools import compress
from typing import Any, Self

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Space
from numpy.typing import NDArray
from pettingzoo import ParallelEnv

from marlvec.envs.spec import COMMON, AgentGroup
from marlvec.errors import ArgumentError
from marlvec.interop.dicts import join_actions, places_of
from marlvec.interop.rows.infos import merged
from marlvec.interop.rows.view_checks import check_view, metadata_of, render_mode_of, value_at, viewed
from marlvec.making import make
from marlvec.registry import EnvLike
from marlvec.vector.data.infos import infos_to_list
from marlvec.vector.vector_env import VectorEnv
from marlvec.vector.vector_step import VectorStep

__all__ = ["ParallelView"]


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
        """Begin an episode; return ``(obs, infos)`` of the agents alive now.

        Args:
            seed: For the env, used as it is; None: its random generator continues.
            options: For the env.
        """
        self.envs.reset_send(seed=None if seed is None else [seed], options=options)
        result = self.envs.recv()
        self._note(result, result.alive[0].tolist())
        return self._obs(result, self.agents), self._infos(result, result.infos, self.agents)

    def step(
        self, actions: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float], dict[str, bool], dict[str, bool], dict[str, dict[str, Any]]]:
        """Step the env; return ``(obs, rewards, terminations, truncations, infos)``.

        Args:
            actions: Agent to action, for every agent that must act. Actions of other agents are ignored.

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
