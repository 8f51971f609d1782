"""What many envs look like: agents, groups and spaces. Reading any of it never touches an env.

Axis letters: N envs, A agents, A_g agents of a group. See docs/shapes.md for every array, axis by axis.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from gymnasium import spaces

from marlvec.envs.spec import EnvSpec
from marlvec.errors import ArgumentError
from marlvec.spaces import batch_space

__all__ = ["Described"]


class Described:
    """The part of a vectorizer that only describes.

    Attributes:
        num_envs: N.
        agent_num: A.
        agents: Agent names, in order of the agent axis.
        groups: Group name → indices of its agents.
        grouped: Whether observations and actions are dicts of groups: there are several groups, or it was asked for.
        spec: What one env looks like.
        metadata: The envs' metadata, and ``"autoreset_mode"``.
    """

    num_envs: int

    def _describe(self, spec: EnvSpec, *, grouped: bool, autoreset_mode: str) -> None:
        """Take on what is known once the envs are built."""
        self.spec = spec
        self.agents = spec.agents
        self.agent_num = len(spec.agents)
        self.groups = {group.name: group.agents for group in spec.groups}
        self.grouped = bool(grouped) or len(spec.groups) > 1
        self.metadata: dict[str, Any] = {**spec.metadata, "autoreset_mode": autoreset_mode}

    def agent_observation_space(self, agent: str | int) -> spaces.Space[Any]:
        """One agent's own observation space, as its env declares it: not padded."""
        return self.spec.own_observation_spaces[self._agent_index(agent)]

    def agent_action_space(self, agent: str | int) -> spaces.Space[Any]:
        """One agent's own action space, as its env declares it: not padded."""
        return self.spec.own_action_spaces[self._agent_index(agent)]

    @property
    def state_space(self) -> spaces.Space[Any] | None:
        """Space of one env's global state, or None."""
        return self.spec.state_space

    @cached_property
    def single_observation_space(self) -> spaces.Space[Any]:
        """One env's observations: (A, …), or a Dict of groups to (A_g, …)."""
        return self._per_group([(g.name, batch_space(g.observation_space, len(g.agents))) for g in self.spec.groups])

    @cached_property
    def single_action_space(self) -> spaces.Space[Any]:
        """One env's actions: (A, …), or a Dict of groups to (A_g, …)."""
        return self._per_group([(g.name, batch_space(g.action_space, len(g.agents))) for g in self.spec.groups])

    @cached_property
    def observation_space(self) -> spaces.Space[Any]:
        """All envs' observations: (N, A, …), or a Dict of groups to (N, A_g, …)."""
        return batch_space(self.single_observation_space, self.num_envs)

    @cached_property
    def action_space(self) -> spaces.Space[Any]:
        """All envs' actions: (N, A, …), or a Dict of groups to (N, A_g, …)."""
        return batch_space(self.single_action_space, self.num_envs)

    def _per_group(self, parts: list[tuple[str, spaces.Space[Any]]]) -> spaces.Space[Any]:
        return spaces.Dict(dict(parts)) if self.grouped else parts[0][1]

    def _agent_index(self, agent: str | int) -> int:
        if isinstance(agent, str):
            if agent not in self.agents:
                raise ArgumentError(f"no agent {agent!r}; there are {list(self.agents)}")
            return self.agents.index(agent)
        if not -self.agent_num <= agent < self.agent_num:
            raise ArgumentError(f"no agent number {agent}; there are {self.agent_num}: {list(self.agents)}")
        return range(self.agent_num)[agent]
