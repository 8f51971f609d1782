"""Grouping of agents chosen by the caller, and checks of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from marlvec.envs.spec import AgentGroup, EnvSpec
from marlvec.errors import ArgumentError
from marlvec.interop.rows.view_checks import places_of
from marlvec.spaces import describe_difference

__all__ = ["GroupMap", "GroupPlaces", "group_agents", "find_places"]

GroupMap = str | Mapping[str, Sequence[str]] | None
"""``"spaces"`` or None, ``"all"``, ``"each"``, ``"prefix"``; or group name → names of its agents, in order."""


def group_agents(spec: EnvSpec, group_map: GroupMap = None) -> dict[str, list[str]]:
    """Return the names of each group's agents, or raise ArgumentError with all problems.

    ``"spaces"`` or None: marlvec's own groups; ``"all"``: one group, ``"agents"``; ``"each"``: one group per agent,
    with its name; ``"prefix"``: ``agent_0, agent_1`` form the group ``agent``, a name without a number its own.
    """
    agents = list(spec.agents)
    if group_map is None or group_map == "spaces":
        return {group.name: [agents[a] for a in group.agents] for group in spec.groups}
    if group_map == "all":
        return {"agents": agents}
    if group_map == "each":
        return {agent: [agent] for agent in agents}
    if group_map == "prefix":
        found: dict[str, list[str]] = {}
        for agent in agents:
            found.setdefault(re.sub(r"_\d+$", "", agent), []).append(agent)
        return found
    if isinstance(group_map, Mapping):
        return _checked(group_map, agents)
    raise ArgumentError(
        f"group_map: expected 'spaces', 'all', 'each', 'prefix', or a dict of group name to agent names, "
        f"got {group_map!r}"
    )


@dataclass(frozen=True)
class GroupPlaces:
    """Positions of one group's agents: slices where possible, which avoids copies."""

    name: str
    group: int  # index in `spec.groups`
    own: slice | list[int]  # positions in that group
    on_axis: slice | list[int]  # positions on the agent axis
    count: int
    whole: bool  # all agents of that group, in its order


def find_places(spec: EnvSpec, name: str, members: Sequence[str]) -> GroupPlaces:
    """Find the positions of a group's agents, or raise ArgumentError if their spaces differ."""
    places = places_of(spec)
    g = places[members[0]][0]
    home = spec.groups[g]
    if other := next((agent for agent in members if places[agent][0] != g), None):
        raise ArgumentError(
            f"group_map: expected equal spaces for the agents of group {name!r}, which share one tensor, but "
            f"{members[0]!r} and {other!r} differ: {_difference(home, spec.groups[places[other][0]])}. Put them in two "
            f"groups, or make them equal with make(..., pad=True)"
        )
    own = [places[agent][1] for agent in members]
    on_axis = [home.agents[j] for j in own]
    return GroupPlaces(name, g, _cut(own), _cut(on_axis), len(own), own == list(range(len(home.agents))))


def _cut(places: list[int]) -> slice | list[int]:
    run = range(places[0], places[0] + len(places))
    return slice(run.start, run.stop) if places == list(run) else places


def _checked(group_map: Mapping[Any, Any], agents: list[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name, members in group_map.items():
        if not isinstance(name, str) or not name:
            raise ArgumentError(f"group_map: expected names of groups that are strings, got {name!r}")
        if isinstance(members, str) or not isinstance(members, Sequence):
            raise ArgumentError(f"group_map[{name!r}]: expected a list of agent names, got {members!r}")
        groups[name] = list(members)
    placed = [agent for members in groups.values() for agent in members]
    wrong = {
        "these groups are empty": [name for name, members in groups.items() if not members],
        "these agents are unknown": [agent for agent in placed if agent not in agents],
        "these agents are in it more than once": [agent for agent in agents if placed.count(agent) > 1],
        "these agents are missing": [agent for agent in agents if agent not in placed],
    }
    if found := [f"{what}: {', '.join(map(str, who))}" for what, who in wrong.items() if who]:
        raise ArgumentError(
            f"group_map: every agent must be in exactly one group; {'; '.join(found)}. Agents: {agents}"
        )
    return groups


def _difference(mine: AgentGroup, theirs: AgentGroup) -> str:
    for what, a, b in (
        ("observation space", mine.observation_space, theirs.observation_space),
        ("action space", mine.action_space, theirs.action_space),
    ):
        if differs := describe_difference(a, b):
            return f"{what} {differs}"
    return f"action masks of length {mine.mask_size} and {theirs.mask_size}"
