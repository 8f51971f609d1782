"""One env of marlvec as a PettingZoo Parallel env."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from itertools import compress
from typing import Any, Self

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Space
from numpy.typing import NDArray
from pettingzoo import ParallelEnv

from marlvec.envs.autoreset import AutoresetMode
from marlvec.envs.spec import COMMON, AgentGroup
from marlvec.errors import ActionError, ArgumentError
from marlvec.interop.rows.infos import merged
from marlvec.interop.rows.view_checks import check_view, render_mode_of, value_at, viewed
from marlvec.making import make
from marlvec.registry import EnvLike
from marlvec.vector.data.infos import infos_to_list
from marlvec.vector.validation.agent_dicts import lay_out
from marlvec.vector.vector_env import VectorEnv

__all__ = ["ParallelView"]


class ParallelView(ParallelEnv):  # type: ignore[misc]  # pettingzoo has no type information
    """A view of the one env of a `VectorEnv`, for code that is written for PettingZoo's Parallel envs.

    Whatever kind the env behind it is, observations, rewards, flags and infos are those of the agents that were alive
    before the step, and of those that joined in it.

    * Where the env gives action masks, observations are ``{"observation": …, "action_mask": …}``, the mask int8.
    * ``infos[agent]["acting"]`` says whether the agent must act now. The action of one that only waits for its turn is
      ignored and may be left out; the mask of one that waits allows everything.
    * What the env says as a whole stands in the info of each agent. Keys that both use, and an env's own ``"acting"``,
      stand in ``infos[agent]["__common__"]`` and ``infos[agent]["__agents__"]``.
    * Agents are named by strings, also where the env uses numbers.

    Args:
        envs: The vectorizer, made with ``num_envs=1, autoreset_mode="disabled"``; `make` does that. Nothing else may
            step or reset it.

    Raises:
        ArgumentError: It has several envs, or resets them itself.

    Attributes:
        envs: The vectorizer.
        possible_agents: All agents' names.
        agents: Names of those alive now.
        observation_spaces, action_spaces: Agent to what `observation_space` and `action_space` give.
        state_space: Space of `state`; there only if the env has one.
        metadata, render_mode: The env's.
    """

    def __init__(self, envs: VectorEnv) -> None:
        why = "it drives one env by itself"
        check_view(envs, "ParallelView", why, num_envs=1, modes=[AutoresetMode.DISABLED], has_make=True)
        self.envs = envs
        self.possible_agents = list(envs.agents)
        self.agents: list[str] = []
        self.metadata = {key: value for key, value in envs.metadata.items() if key != "autoreset_mode"}
        self.render_mode = render_mode_of(envs)
        if envs.state_space is not None:
            self.state_space = envs.state_space
        self._acting = [False] * envs.agent_num
        self._agent_set = set(envs.agents)
        self._all_act = False
        self._state: NDArray[Any] | None = None
        # Per agent: its group, and its place in it.
        self._places = {
            envs.agents[a]: (g, j) for g, group in enumerate(envs.spec.groups) for j, a in enumerate(group.agents)
        }
        groups = {agent: envs.spec.groups[g] for agent, (g, _) in self._places.items()}
        # Copies, each agent its own: seeding or sampling one must not disturb another, nor the env.
        self.observation_spaces = {agent: _observation_space(group) for agent, group in groups.items()}
        self.action_spaces = {agent: deepcopy(group.action_space) for agent, group in groups.items()}
        # Known once: in a plain env, of one group, agents observe one array each and make one choice.
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
            kwargs: All else that `marlvec.make` takes, except ``num_envs`` and ``autoreset_mode``.

        Raises:
            MarlvecError: As `marlvec.make`.
        """
        envs = make(env, 1, backend=backend, autoreset_mode="disabled", **kwargs)
        return viewed(cls, envs)

    def observation_space(self, agent: str) -> Space[Any]:
        """One agent's observation space, the same object each time."""
        return self.observation_spaces[self._known(agent)]

    def action_space(self, agent: str) -> Space[Any]:
        """One agent's action space, the same object each time."""
        return self.action_spaces[self._known(agent)]

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Begin an episode.

        Args:
            seed: For the env, as it is; None: its own random stream goes on.
            options: For the env.

        Returns:
            ``(obs, infos)`` of the agents alive now.
        """
        obs, said = self.envs.reset(seed=None if seed is None else [seed], options=options)
        self._note(said["alive"][0].tolist(), said)
        return self._obs(obs, said, self.agents), self._infos(said, self.agents)

    def step(
        self, actions: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float], dict[str, bool], dict[str, bool], dict[str, dict[str, Any]]]:
        """Step the env.

        Args:
            actions: Agent to action, for every agent that must act. Those of other agents are ignored.

        Returns:
            ``(obs, rewards, terminations, truncations, infos)``.

        Raises:
            ActionError: An agent must act and has no action, a name is unknown, or an action is not in its space.
            NotResetError: The episode is over, or none was begun.
        """
        found, reward_NA, ended, cut, said = self.envs.step(self._arrays(actions))
        alive, flags = said["alive"][0].tolist(), zip(ended[0].tolist(), cut[0].tolist(), strict=True)
        self._note(alive, said)
        rewards: dict[str, float] = {}
        terminations: dict[str, bool] = {}
        truncations: dict[str, bool] = {}
        values = zip(self.possible_agents, alive, reward_NA[0].tolist(), flags, strict=True)
        for agent, is_alive, reward, (terminated, truncated) in values:
            # An agent that was alive before the step still is, or ended in it; the rest of these joined in it.
            if is_alive or terminated or truncated:
                rewards[agent], terminations[agent], truncations[agent] = reward, terminated, truncated
        agents = list(rewards)
        if self._has_plain_obs and len(said) == _SAID_ALWAYS and len(agents) == len(self.possible_agents):
            obs = dict(zip(agents, found[0] if self.envs.copy else found[0].copy(), strict=True))
            infos: dict[str, dict[str, Any]] = {
                agent: {"acting": acts} for agent, acts in zip(agents, self._acting, strict=True)
            }
        else:
            obs, infos = self._obs(found, said, agents), self._infos(said, agents)
        return obs, rewards, terminations, truncations, infos

    def state(self) -> NDArray[Any]:
        """Global state, (*state_space.shape).

        Returns:
            ``(*state_space.shape)``, of the state space's dtype; a copy.

        Raises:
            ArgumentError: The env has none.
            NotResetError: There is no running episode, and the vectorizer was not made with ``state=True``.
        """
        return self.envs.state()[0] if self._state is None else self._state.copy()

    def render(self) -> Any:
        """What the env's own ``render()`` returns."""
        return self.envs.render()[0]

    def close(self) -> None:
        """Close the vectorizer and the env."""
        self.envs.close()

    def _known(self, agent: str) -> str:
        if agent not in self._places:
            raise ArgumentError(f"no agent {agent!r}; there are {self.possible_agents}")
        return agent

    def _note(self, alive: list[bool], said: dict[str, Any]) -> None:
        """Keep what the next call must know."""
        self.agents = [*compress(self.possible_agents, alive)]
        self._acting = said["acting"][0].tolist()
        self._all_act = False not in self._acting
        self._state = said["state"][0].copy() if "state" in said else None

    def _obs(self, obs: Any, said: dict[str, Any], agents: list[str]) -> dict[str, Any]:
        groups, grouped = self.envs.spec.groups, self.envs.grouped
        leaves = [group.observation_tree.flatten(obs[group.name] if grouped else obs) for group in groups]
        # A mask that the env gives with its infos is in none of its spaces, and goes back to the infos.
        masks = self._masks(said, declared=True)
        found = {}
        for agent in agents:
            g, j = self._places[agent]
            value = value_at(groups[g].observation_tree, leaves[g], (0, j))
            mask = masks[g]
            found[agent] = value if mask is None else {"observation": value, "action_mask": mask[0, j].astype(np.int8)}
        return found

    def _infos(self, said: dict[str, Any], agents: list[str]) -> dict[str, dict[str, Any]]:
        (own,) = infos_to_list(said, self.envs.agents, 1)
        common = own.get(COMMON, {})
        acting = dict(zip(self.possible_agents, self._acting, strict=True))
        infos = {agent: merged(own.get(agent, {}), common, {"acting": acting[agent]}) for agent in agents}
        masks = self._masks(said, declared=False)
        for agent in agents:
            g, j = self._places[agent]
            if (mask := masks[g]) is not None:
                infos[agent]["action_mask"] = mask[0, j].astype(np.int8)
        return infos

    def _masks(self, said: dict[str, Any], *, declared: bool) -> list[NDArray[np.bool_] | None]:
        """Masks per group (1, A_g, n) that the spaces declare, or those that came with the infos; else None."""
        masks = said.get("action_mask")
        if masks is None or not self.envs.grouped:
            masks = {self.envs.spec.groups[0].name: masks}
        return [
            masks.get(group.name) if (group.mask_size is not None) is declared else None
            for group in self.envs.spec.groups
        ]

    def _arrays(self, actions: Mapping[str, Any]) -> Any:
        """The actions in the form that the vectorizer takes."""
        if self._has_plain_actions and self._all_act and actions.keys() == self._agent_set:
            chosen = [actions[agent] for agent in self.possible_agents]
            if _INTS.issuperset(map(type, chosen)):
                return np.array([chosen], np.int64)
        if unknown := [agent for agent in actions if agent not in self._places]:
            raise ActionError(f"actions: no agent {unknown[0]!r}; there are {self.possible_agents}")
        acting = [agent for agent, acts in zip(self.possible_agents, self._acting, strict=True) if acts]
        if missing := [agent for agent in acting if agent not in actions]:
            raise ActionError(f"actions: expected one for each agent that must act, {acting}; missing are {missing}")
        agents = self.possible_agents
        acts, spec = np.array([self._acting]), self.envs.spec
        return lay_out(spec, self.envs.grouped, [actions], acts, lambda _, a: f"action of agent {agents[a]!r}")


_INTS = frozenset({int, np.int64})
_SAID_ALWAYS = 3  # infos: alive, acting, reset_mask


def _observation_space(group: AgentGroup) -> Space[Any]:
    """One agent's observation space, with its mask put back."""
    space = deepcopy(group.observation_space)
    if group.mask_size is None:
        return space
    return Dict({"observation": space, "action_mask": Box(0, 1, (group.mask_size,), np.int8)})
