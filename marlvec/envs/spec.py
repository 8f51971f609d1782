"""What one env looks like: its agents, their spaces, and the groups they fall into."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space

from marlvec.spaces import SpaceTree, describe_difference

__all__ = ["COMMON", "AgentGroup", "EnvSpec", "Info", "split_action_mask"]

COMMON = "__common__"
"""Key under which an env's `Info` keeps what belongs to no single agent."""

Info = dict[str, dict[str, Any]]
"""One env's infos: agent name → its info, and `COMMON` → what belongs to the whole env."""


@dataclass(frozen=True)
class AgentGroup:
    """The agents of one env that have equal observation and action spaces.

    Attributes:
        name: Common prefix of its agents' names where there is one (``"adversary"``), else ``"agents"`` if it is the
            only group, else its first agent's name.
        agents: Their indices on the agent axis, ascending.
        observation_tree: Structure of one agent's observation.
        action_tree: Structure of one agent's action.
        mask_size: Length of an agent's action mask, or None if the env gives none.
    """

    name: str
    agents: tuple[int, ...]
    observation_tree: SpaceTree
    action_tree: SpaceTree
    mask_size: int | None

    @property
    def observation_space(self) -> Space[Any]:
        """One agent's observation space."""
        return self.observation_tree.space

    @property
    def action_space(self) -> Space[Any]:
        """One agent's action space."""
        return self.action_tree.space


@dataclass(frozen=True)
class EnvSpec:
    """What a vectorizer must know of an env, in a form that crosses to another process.

    Attributes:
        name: The env's own name.
        agents: Agent names; their order is the order of the agent axis.
        observation_spaces: One per agent, without the action mask.
        action_spaces: One per agent.
        mask_sizes: Length of each agent's action mask, or None.
        state_space: Space of the global state, or None.
        metadata: The env's metadata.
    """

    name: str
    agents: tuple[str, ...]
    observation_spaces: tuple[Space[Any], ...]
    action_spaces: tuple[Space[Any], ...]
    mask_sizes: tuple[int | None, ...]
    state_space: Space[Any] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def groups(self) -> tuple[AgentGroup, ...]:
        """Agents of equal spaces, in order of their first agent."""
        members: list[list[int]] = []
        for a in range(len(self.agents)):
            home = next((m for m in members if self._alike(m[0], a)), None)
            if home is None:
                members.append([a])
            else:
                home.append(a)
        names = _group_names([[self.agents[a] for a in m] for m in members])
        return tuple(
            AgentGroup(
                name,
                tuple(m),
                SpaceTree(self.observation_spaces[m[0]]),
                SpaceTree(self.action_spaces[m[0]]),
                self.mask_sizes[m[0]],
            )
            for name, m in zip(names, members, strict=True)
        )

    def _alike(self, a: int, b: int) -> bool:
        return bool(
            self.observation_spaces[a] == self.observation_spaces[b]
            and self.action_spaces[a] == self.action_spaces[b]
            and self.mask_sizes[a] == self.mask_sizes[b]
        )

    def difference(self, other: EnvSpec) -> str | None:
        """Say in which field ``other`` first differs from this spec, or None where it fits beside it."""
        if self.agents != other.agents:
            return f"agents: expected {self.agents}, got {other.agents}"
        for what, mine, theirs in (
            ("observation space", self.observation_spaces, other.observation_spaces),
            ("action space", self.action_spaces, other.action_spaces),
        ):
            for agent, a, b in zip(self.agents, mine, theirs, strict=True):
                if differs := describe_difference(a, b):
                    return f"{what} of agent {agent!r} {differs}"
        if self.mask_sizes != other.mask_sizes:
            return f"action mask sizes: expected {self.mask_sizes}, got {other.mask_sizes}"
        if self.state_space != other.state_space:
            return f"state space: expected {self.state_space}, got {other.state_space}"
        return None


def _group_names(groups: Sequence[Sequence[str]]) -> list[str]:
    """Name groups of agents: ``agent_0, agent_1`` share the prefix ``agent``."""
    prefixes = [{re.sub(r"_\d+$", "", name) for name in group} for group in groups]
    wanted = [next(iter(p)) if len(p) == 1 else None for p in prefixes]
    if len(groups) == 1:
        return [wanted[0] if wanted[0] is not None and len(groups[0]) > 1 else "agents"]
    return [
        name if name is not None and sum(name in p for p in prefixes) == 1 else group[0]
        for name, group in zip(wanted, groups, strict=True)
    ]


def split_action_mask(space: Space[Any], action_space: Space[Any]) -> tuple[Space[Any], int | None]:
    """Take the action mask out of an observation space, PettingZoo's way of giving one.

    ``Dict(observation=X, action_mask=M)`` gives ``X``; any other Dict with an ``action_mask`` gives the Dict without
    it. A mask has one entry per choice: ``n`` of a Discrete, the sum of ``nvec`` of a MultiDiscrete; an entry of that
    name that has any other shape is an observation like all others.

    Returns:
        The observation space without mask, and the mask's length or None.
    """
    if not isinstance(space, Dict) or "action_mask" not in space.spaces:
        return space, None
    mask = space.spaces["action_mask"]
    if not isinstance(action_space, (Discrete, MultiDiscrete)) or not isinstance(mask, (Box, MultiBinary)):
        return space, None
    choices = int(action_space.n) if isinstance(action_space, Discrete) else int(action_space.nvec.sum())
    if mask.shape != (choices,):
        return space, None
    rest = {key: sub for key, sub in space.spaces.items() if key != "action_mask"}
    inner = rest["observation"] if rest.keys() == {"observation"} else Dict(rest)
    return inner, int(mask.shape[0])
