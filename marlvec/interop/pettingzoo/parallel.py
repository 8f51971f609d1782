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
from marlvec.errors import ActionError, ArgumentError
from marlvec.interop.rows.infos import merged
from marlvec.interop.rows.view_checks import check_view, metadata_of, render_mode_of, value_at, viewed
from marlvec.making import make
from marlvec.registry import EnvLike
from marlvec.vector.data.infos import infos_to_list
from marlvec.vector.validation.agent_dicts import lay_out
from marlvec.vector.vector_env import VectorEnv

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
        # Agent to its group, and its index in it.
        self._places = {
            envs.agents[a]: (g, j) for g, group in enumerate(envs.spec.groups) for j, a in enumerate(group.agents)
        }
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

        Raises:
            MarlvecError: As `marlvec.make`.
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
        obs, raw_infos = self.envs.reset(seed=None if seed is None else [seed], options=options)
        self._note(raw_infos["alive"][0].tolist(), raw_infos)
        return self._obs(obs, raw_infos, self.agents), self._infos(raw_infos, self.agents)

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
        found, reward_NA, ended, cut, raw_infos = self.envs.step(self._arrays(actions))
        alive, flags = raw_infos["alive"][0].tolist(), zip(ended[0].tolist(), cut[0].tolist(), strict=True)
        self._note(alive, raw_infos)
        rewards: dict[str, float] = {}
        terminations: dict[str, bool] = {}
        truncations: dict[str, bool] = {}
        values = zip(self.possible_agents, alive, reward_NA[0].tolist(), flags, strict=True)
        for agent, is_alive, reward, (terminated, truncated) in values:
            # Agents alive before the step are alive or ended in it; the others here joined in it.
            if is_alive or terminated or truncated:
                rewards[agent], terminations[agent], truncations[agent] = reward, terminated, truncated
        agents = list(rewards)
        if self._has_plain_obs and len(raw_infos) == _STANDARD_KEYS and len(agents) == len(self.possible_agents):
            obs = dict(zip(agents, found[0] if self.envs.copy else found[0].copy(), strict=True))
            infos: dict[str, dict[str, Any]] = {
                agent: {"acting": acts} for agent, acts in zip(agents, self._acting, strict=True)
            }
        else:
            obs, infos = self._obs(found, raw_infos, agents), self._infos(raw_infos, agents)
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

    def _note(self, alive: list[bool], raw_infos: dict[str, Any]) -> None:
        """Store the agents alive, acting, and the state."""
        self.agents = [*compress(self.possible_agents, alive)]
        self._acting = raw_infos["acting"][0].tolist()
        self._all_act = False not in self._acting
        self._state = raw_infos["state"][0].copy() if "state" in raw_infos else None

    def _obs(self, obs: Any, raw_infos: dict[str, Any], agents: list[str]) -> dict[str, Any]:
        groups, grouped = self.envs.spec.groups, self.envs.grouped
        leaves = [group.observation_tree.flatten(obs[group.name] if grouped else obs) for group in groups]
        # Masks that no space declares stay in the infos.
        masks = self._masks(raw_infos, declared=True)
        found = {}
        for agent in agents:
            g, j = self._places[agent]
            value = value_at(groups[g].observation_tree, leaves[g], (0, j))
            mask = masks[g]
            found[agent] = value if mask is None else {"observation": value, "action_mask": mask[0, j].astype(np.int8)}
        return found

    def _infos(self, raw_infos: dict[str, Any], agents: list[str]) -> dict[str, dict[str, Any]]:
        (own,) = infos_to_list(raw_infos, self.envs.agents, 1)
        common = own.get(COMMON, {})
        acting = dict(zip(self.possible_agents, self._acting, strict=True))
        infos = {agent: merged(own.get(agent, {}), common, {"acting": acting[agent]}) for agent in agents}
        masks = self._masks(raw_infos, declared=False)
        for agent in agents:
            g, j = self._places[agent]
            if (mask := masks[g]) is not None:
                infos[agent]["action_mask"] = mask[0, j].astype(np.int8)
        return infos

    def _masks(self, raw_infos: dict[str, Any], *, declared: bool) -> list[NDArray[np.bool_] | None]:
        """Return each group's masks (1, A_g, n), of those that the spaces declare or of the others; else None."""
        masks = raw_infos.get("action_mask")
        if masks is None or not self.envs.grouped:
            masks = {self.envs.spec.groups[0].name: masks}
        return [
            masks.get(group.name) if (group.mask_size is not None) is declared else None
            for group in self.envs.spec.groups
        ]

    def _arrays(self, actions: Mapping[str, Any]) -> Any:
        """Convert actions to the vectorizer's form."""
        if self._has_plain_actions and self._all_act and actions.keys() == self._agent_set:
            chosen = [actions[agent] for agent in self.possible_agents]
            if _INTS.issuperset(map(type, chosen)):
                return np.array([chosen], np.int64)
        if unknown := [agent for agent in actions if agent not in self._places]:
            raise ActionError(f"actions: no agent {unknown[0]!r}; the agents are {self.possible_agents}")
        acting = [agent for agent, acts in zip(self.possible_agents, self._acting, strict=True) if acts]
        if missing := [agent for agent in acting if agent not in actions]:
            raise ActionError(f"actions: expected one for each agent that must act, {acting}; missing are {missing}")
        agents = self.possible_agents
        acts, spec = np.array([self._acting]), self.envs.spec
        return lay_out(spec, self.envs.grouped, [actions], acts, lambda _, a: f"action of agent {agents[a]!r}")


_INTS = frozenset({int, np.int64})
_STANDARD_KEYS = 3  # infos: alive, acting, reset_mask


def _observation_space(group: AgentGroup) -> Space[Any]:
    """Return one agent's observation space, including its mask."""
    space = deepcopy(group.observation_space)
    if group.mask_size is None:
        return space
    return Dict({"observation": space, "action_mask": Box(0, 1, (group.mask_size,), np.int8)})
