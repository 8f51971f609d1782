"""One env of marlvec as a PettingZoo Parallel env."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Self

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Space
from numpy.typing import NDArray
from pettingzoo import ParallelEnv

from marlvec.envs.autoreset import AutoresetMode
from marlvec.envs.spec import COMMON, AgentGroup
from marlvec.errors import ActionError, ArgumentError, ContractError
from marlvec.interop.rows.infos import merged
from marlvec.interop.rows.view_checks import check_view, render_mode_of, value_at
from marlvec.making import make
from marlvec.registry import EnvLike
from marlvec.vector.data.infos import infos_to_list
from marlvec.vector.vector_env import VectorEnv
from marlvec.vector.vector_step import VectorStep

__all__ = ["ParallelView"]


class ParallelView(ParallelEnv):  # type: ignore[misc]  # pettingzoo has no type information
    """A view of the one env of a `VectorEnv`, for code that is written for PettingZoo's Parallel envs.

    Whatever kind the env behind it is, observations, rewards, flags and infos are those of the agents that were alive
    before the step, and of those that were born in it.

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
        # Copies, each agent its own: whoever seeds or samples one must not disturb another, nor the env.
        self._observation_spaces = {agent: _observation_space(group) for agent, group in groups.items()}
        self._action_spaces = {agent: deepcopy(group.action_space) for agent, group in groups.items()}
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
        try:
            return cls(envs)
        except BaseException:
            envs.close()
            raise

    def observation_space(self, agent: str) -> Space[Any]:
        """One agent's observation space, the same object each time."""
        return self._observation_spaces[self._known(agent)]

    def action_space(self, agent: str) -> Space[Any]:
        """One agent's action space, the same object each time."""
        return self._action_spaces[self._known(agent)]

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
        self.envs.reset_send(seed=None if seed is None else [seed], options=options)
        result = self.envs.recv()
        self._note(result)
        return self._obs(result, self.agents), self._infos(result, self.agents)

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
        self.envs.step_send(self._arrays(actions))
        result = self.envs.recv()
        self._note(result)
        obs: dict[str, Any] = {}
        rewards: dict[str, float] = {}
        terminations: dict[str, bool] = {}
        truncations: dict[str, bool] = {}
        infos: dict[str, dict[str, Any]] = {}
        columns = (result.alive, result.acting, result.terminated, result.truncated, result.rewards)
        is_plain = self._has_plain_obs and not result.has_infos and result.action_masks[0] is None
        rows = result.obs_leaves[0][0][0] if is_plain else None
        values = zip(self.possible_agents, *(column[0].tolist() for column in columns), strict=True)
        for a, (agent, alive, acts, ended, cut, reward) in enumerate(values):
            # Whoever was alive before the step still is, or ended in it; the rest of these were born in it.
            if alive or ended or cut:
                rewards[agent], terminations[agent], truncations[agent] = reward, ended, cut
                if rows is not None:
                    obs[agent], infos[agent] = rows[a, ...].copy(), {"acting": acts}
        if rows is None:
            agents = list(rewards)
            obs, infos = self._obs(result, agents), self._infos(result, agents)
        return obs, rewards, terminations, truncations, infos

    def state(self) -> NDArray[Any]:
        """Global state, (*state_space.shape).

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

    def _note(self, result: VectorStep) -> None:
        """Keep what the next call must know."""
        alive = result.alive[0].tolist()
        self.agents = [agent for agent, here in zip(self.possible_agents, alive, strict=True) if here]
        self._acting = result.acting[0].tolist()
        self._all_act = all(self._acting)
        self._state = None if result.state is None else result.state[0].copy()

    def _obs(self, result: VectorStep, agents: list[str]) -> dict[str, Any]:
        return {agent: self._observation(result, *self._places[agent]) for agent in agents}

    def _observation(self, result: VectorStep, g: int, j: int) -> Any:
        obs = value_at(self.envs.spec.groups[g].observation_tree, result.obs_leaves[g], (0, j))
        # A mask that the env gives with its infos is in none of its spaces, and goes back to the infos.
        mask = result.action_masks[g] if self.envs.spec.groups[g].mask_size is not None else None
        return obs if mask is None else {"observation": obs, "action_mask": mask[0, j].astype(np.int8)}

    def _infos(self, result: VectorStep, agents: list[str]) -> dict[str, dict[str, Any]]:
        (said,) = infos_to_list(result.infos, self.envs.agents, 1)
        common = said.get(COMMON, {})
        acting = dict(zip(self.possible_agents, self._acting, strict=True))
        infos = {agent: merged(said.get(agent, {}), common, {"acting": acting[agent]}) for agent in agents}
        for agent in agents:
            g, j = self._places[agent]
            mask = result.action_masks[g]
            if mask is not None and self.envs.spec.groups[g].mask_size is None:
                infos[agent]["action_mask"] = mask[0, j].astype(np.int8)
        return infos

    def _arrays(self, actions: Mapping[str, Any]) -> Any:
        """The actions in the form that the vectorizer takes."""
        if self._has_plain_actions and self._all_act and actions.keys() == self._agent_set:
            chosen = [actions[agent] for agent in self.possible_agents]
            if all(action.__class__ in _INTS for action in chosen):
                return np.array([chosen], np.int64)
        if unknown := [agent for agent in actions if agent not in self._places]:
            raise ActionError(f"actions: no agent {unknown[0]!r}; there are {self.possible_agents}")
        acting = [agent for agent, acts in zip(self.possible_agents, self._acting, strict=True) if acts]
        if missing := [agent for agent in acting if agent not in actions]:
            raise ActionError(f"actions: expected one for each agent that must act, {acting}; missing are {missing}")
        groups: dict[str, Any] = {}
        for g, group in enumerate(self.envs.spec.groups):
            own = {self._places[agent][1]: actions[agent] for agent in acting if self._places[agent][0] == g}
            groups[group.name] = self._batch(group, own)
        return groups if self.envs.grouped else groups[self.envs.spec.groups[0].name]

    def _batch(self, group: AgentGroup, chosen: Mapping[int, Any]) -> Any:
        """Actions by place in the group to (1, A_g, …), zeros for agents that do not act."""
        tree = group.action_tree
        parts: list[dict[int, NDArray[Any]]] = [{} for _ in tree.leaves]
        for j, action in chosen.items():
            where = f"action of agent {self.possible_agents[group.agents[j]]!r}"
            try:
                values = tree.flatten(action)
            except ContractError as error:
                raise ActionError(f"{where}: {error}") from None
            for k, (value, leaf) in enumerate(zip(values, tree.leaves, strict=True)):
                array = np.asarray(value) if not leaf.is_object else _cell(value)
                if array.shape != leaf.shape:
                    raise ActionError(f"{where}: expected shape {leaf.shape} for {leaf}, got {array.shape}")
                parts[k][j] = array
        batch = []
        for leaf, arrays in zip(tree.leaves, parts, strict=True):
            # The dtype is the caller's, so that the vectorizer can refuse what would not keep its value.
            dtype = np.result_type(*arrays.values()) if arrays else leaf.dtype
            rows = leaf.blank(1, len(group.agents)).astype(dtype)
            for j, array in arrays.items():
                rows[0, j, ...] = array
            batch.append(rows)
        return tree.unflatten(batch)


_INTS = frozenset({int, np.int64})


def _cell(value: Any) -> NDArray[Any]:
    """An object as an array without axes."""
    cell = np.empty((), np.object_)
    cell.fill(value)
    return cell


def _observation_space(group: AgentGroup) -> Space[Any]:
    """One agent's observation space, with its mask put back."""
    space = deepcopy(group.observation_space)
    if group.mask_size is None:
        return space
    return Dict({"observation": space, "action_mask": Box(0, 1, (group.mask_size,), np.int8)})
