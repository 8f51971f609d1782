"""`TeamObs`: shows each agent the last observations of all agents of its env with the same policy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium.spaces import Dict, MultiBinary, Space
from numpy.typing import NDArray

from marlvec.connectors._support.agent_table import AgentTable, load_tables, save_tables
from marlvec.connectors.agent._support.declared_space import (
    DeclaredSpace,
    SpaceRule,
    check_function,
    read_only,
    space_after,
)
from marlvec.connectors.agent._support.history import blank_obs, fixed_size_tree, including_blank, stacked_space
from marlvec.connectors.connector import AgentConnector, EnvIds, State
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, ContractError
from marlvec.spaces import SpaceTree
from marlvec.spaces.tree import map_space
from marlvec.trees import Tree

__all__ = ["TeamObs"]

TeamFunction = Callable[[Tree, NDArray[np.bool_], Rows], Tree]


class TeamObs(AgentConnector):
    """Shows every agent the last observation of each agent of its env that has this policy.

    By default an observation becomes ``{"own": …, "team": …, "team_mask": …}``: what it was, the team's observations
    with a new first axis of length A in the order of ``agent_index``, the agent itself among them, and 1 for each that
    is there. Leaves of ``team`` are (n, A, …); an agent that has not yet come, has ended or has another policy is
    blank: zeros, or the start of a Discrete.

    In a game of turns the others are as they were last seen. An agent is there up to and with its own last row; rows
    of one moment show the same team.

    Args:
        function: Makes the observations of n rows: ``function(team_obs_nA, team_mask_nA, rows)``, the mask (n, A) bool;
            what it gets is read-only. None for the Dict above.
        output_space: Space of one observation after the function, or a function that makes it of the space before.

    Raises:
        ArgumentError: One of ``function`` and ``output_space`` is given without the other; or, where a space is first
            seen, the pipeline was bound without agents.
        UnsupportedSpaceError: Where a space is first seen: a leaf has no fixed size.
        ContractError: In a call: what the function returned has another structure, shape or dtype than was declared.
    """

    across_agents = True

    def __init__(self, function: TeamFunction | None = None, output_space: SpaceRule = None) -> None:
        if (function is None) != (output_space is None):
            raise ArgumentError("a function needs an output_space, the space of what it returns, and only a function")
        if function is not None:
            check_function(function, output_space, "TeamObs")
        self.function = function
        self._rule = output_space
        self._tree: SpaceTree | None = None
        self._declared: DeclaredSpace | None = None
        self._blanks: list[NDArray[Any]] = []
        self._seen: list[AgentTable] = []  # last observations, one table per leaf
        self._episode = AgentTable((), np.int64, -1)  # which episode they are of; -1 for none

    def __call__(self, rows: Rows) -> Rows:
        if self._tree is None:
            raise self._not_set_up()
        own = self._tree.flatten(rows.obs)
        episode = self._take_in(rows, own)
        env_id, team = rows.env_id[:, None], np.arange(len(self.agents))
        mask_nA = self._episode.get(env_id, team) == episode[:, None]
        absent = None if mask_nA.all() else ~mask_nA
        leaves = []
        for table, blank in zip(self._seen, self._blanks, strict=True):
            leaf_nA = table.get(env_id, team)
            if absent is not None:
                leaf_nA[absent] = blank
            leaves.append(leaf_nA)
        if "last" in rows and rows.last.any():
            self._episode.set(rows.env_id[rows.last], rows.agent_index[rows.last], -1)
        team_obs_nA = self._tree.unflatten(leaves)
        if self.function is None or self._declared is None:
            own_obs = self._tree.unflatten(own)
            return rows.replace(obs={"own": own_obs, "team": team_obs_nA, "team_mask": mask_nA.astype(np.int8)})
        given = Rows(read_only(dict(rows.items())))
        made = self.function(read_only(team_obs_nA), read_only(mask_nA), given)
        return rows.replace(obs=self._declared.batch(made, len(rows)))

    def reset(self, env_ids: EnvIds | None = None) -> None:
        self._episode.reset(env_ids)

    def setup(self, space: Space[Any]) -> None:
        tree = fixed_size_tree(space, self.name)
        if self._tree is None or tree.space != self._tree.space:
            self._seen = [AgentTable(leaf.shape, leaf.dtype) for leaf in tree.leaves]
            self._episode = AgentTable((), np.int64, -1)
        self._blanks = [blank_obs(leaf) for leaf in tree.leaves]
        self._declared = None if self.function is None else DeclaredSpace(self.output_space(space), self.name)
        self._tree = tree

    def output_space(self, space: Space[Any]) -> Space[Any]:
        fixed_size_tree(space, self.name)
        count = len(self.agents)
        if not count:
            raise ArgumentError("the agents are not known: call bind(space, agents)")
        if self.function is not None:
            return space_after(self._rule, space, self.name)
        team = map_space(lambda leaf: stacked_space(including_blank(leaf), count), space)
        return Dict(OrderedDict([("own", space), ("team", team), ("team_mask", MultiBinary(count))]))

    def params(self) -> dict[str, Any]:
        return {"function": self.function, "output_space": self._rule}

    def state_dict(self) -> State:
        if self._tree is None:
            return {}
        return save_tables({"episode": self._episode, "seen": self._seen})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._tree is None:
            raise self._not_set_up()
        load_tables(state, {"episode": self._episode, "seen": self._seen}, self.name)

    def _take_in(self, rows: Rows, leaves: list[Any]) -> NDArray[np.int64]:
        """Remember what the rows' agents see; returns (n,) their episodes."""
        env_id, agent_index = rows.env_id, rows.agent_index
        if len(rows) and int(agent_index.max()) >= len(self.agents):
            raise ContractError(f"agent_index {int(agent_index.max())} in rows of {len(self.agents)} agents")
        # Where rows do not say their episode, `reset` and the agents' last rows keep one from the next.
        known = "eps_id" in rows
        episode: NDArray[np.int64] = rows.eps_id if known else np.zeros(len(rows), np.int64)
        for table, leaf in zip(self._seen, leaves, strict=True):
            table.set(env_id, agent_index, leaf)
        self._episode.set(env_id, agent_index, episode)
        return episode
