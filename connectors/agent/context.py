"""Adds context to observations: the agent, its team, the global state, the time, the action mask."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, Space
from numpy.typing import NDArray

from marlvec.connectors.agent.shape import drop_from_space, drop_from_value
from marlvec.connectors.agent_tables import (
    AgentTable,
    Remembers,
    blank_obs,
    fixed_size_tree,
    including_blank,
    stacked_space,
)
from marlvec.connectors.connector import AgentConnector, PositiveFloat, from_setup
from marlvec.connectors.leafwise import (
    DeclaredSpace,
    SpaceRule,
    append_to_obs,
    appended_space,
    check_function,
    read_only,
    space_after,
)
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, ContractError, UnsupportedSpaceError
from marlvec.spaces import SpaceTree
from marlvec.spaces.action_masks import why_no_mask
from marlvec.spaces.tree import map_space
from marlvec.trees import Tree


@dataclass(eq=False, repr=False)
class ActionMaskFromObs(AgentConnector):
    """Moves a leaf of a Dict observation to column ``action_mask``, (n, k) bool: True where it is not 0.

    If rows already have the column, both masks must allow an action. A Dict with one remaining key stays a Dict.

    Args:
        key: The leaf's path, e.g. ``"action_mask"`` or ``"game/legal"``: a MultiBinary or Box of shape (k,).

    Raises:
        ArgumentError: In `bind`: the path does not exist, or is all that the Dict has.
        UnsupportedSpaceError: In `bind`: the space is not a Dict, the leaf is not a vector of numbers,
            or the known action space has another number of actions, or is neither Discrete nor MultiDiscrete.
        ContractError: In a call: the rows already have a mask of another width.
    """

    key: str = "action_mask"

    _tree = from_setup(SpaceTree)

    def __call__(self, rows: Rows) -> Rows:
        mask = np.asarray(self._tree.flatten(rows.obs)[self._leaf]) != 0
        if "action_mask" in rows:
            if rows.action_mask.shape != mask.shape:
                raise ContractError(
                    f"the rows have an action_mask of shape {rows.action_mask.shape} already, and {self.key!r} of the "
                    f"observation gives one of {mask.shape}"
                )
            mask &= rows.action_mask
        return rows.replace(obs=drop_from_value(rows.obs, (self.key,)), action_mask=mask)

    def setup(self, space: Space[Any]) -> None:
        self.output_space(space)
        tree = SpaceTree(space)
        self._leaf = [leaf.path for leaf in tree.leaves].index(self.key)
        self._tree = tree

    def output_space(self, space: Space[Any]) -> Space[Any]:
        after = drop_from_space(space, (self.key,), repr(self))
        leaf = {leaf.path: leaf.space for leaf in SpaceTree(space).leaves}.get(self.key)
        if not isinstance(leaf, (Box, MultiBinary)) or len(leaf.shape) != 1:
            raise UnsupportedSpaceError(f"{self!r} needs a MultiBinary or Box of shape (k,), got {leaf}")
        if self.action_space is not None and (reason := why_no_mask(self.action_space)):
            raise UnsupportedSpaceError(f"{self!r}: action mask: {reason}")
        if isinstance(self.action_space, Discrete) and int(self.action_space.n) != leaf.shape[0]:
            raise UnsupportedSpaceError(f"{self!r} found a mask of {leaf.shape[0]} actions for {self.action_space}")
        return after


class AgentIndicator(AgentConnector):
    """Appends a one-hot of the agent, or of its type, to an observation vector: ``(d,)`` becomes ``(d + width,)``.

    Without arguments it uses the agents with which the pipeline was bound.

    Args:
        agents: Number of agents, or their names in the order of ``agent_index``; None: the pipeline's.
        mode: ``"one_hot"`` for one column per agent, ``"type"`` for one per type, in order of first appearance.
        types: Each agent's type, by position or by name; None: the name without its number, so ``adversary_0`` and
            ``adversary_1`` are both ``adversary``.

    Raises:
        ArgumentError: ``mode`` is neither, or ``types`` is given without it; or, in `bind`, the
            agents or their types are not known.
    """

    _codes = from_setup(np.ndarray[Any, Any])

    def __init__(
        self,
        agents: int | Sequence[str] | None = None,
        *,
        mode: Literal["one_hot", "type"] = "one_hot",
        types: Sequence[str] | Mapping[str, str] | None = None,
    ) -> None:
        if mode not in ("one_hot", "type"):
            raise ArgumentError(f'mode must be "one_hot" or "type", got {mode!r}')
        if types is not None and mode != "type":
            raise ArgumentError('types are only used with mode="type"')
        self.given = agents if agents is None or isinstance(agents, int) else tuple(agents)
        self.mode = mode
        self.types = types

    def __call__(self, rows: Rows) -> Rows:
        obs, codes = rows.obs, self._codes
        try:
            own = codes[rows.agent_index]
        except IndexError:
            raise ContractError(f"agent_index {int(rows.agent_index.max())} in rows of {len(codes)} agents") from None
        return rows.replace(obs=np.concatenate((obs, own), axis=1, dtype=obs.dtype, casting="unsafe"))

    def setup(self, space: Space[Any]) -> None:
        self._codes = self._table().astype(space.dtype)

    def output_space(self, space: Space[Any]) -> Space[Any]:
        code = Box(0, 1, self._table().shape[1:], np.dtype(space.dtype).type)
        return appended_space(space, code, 1, self.name)

    def params(self) -> dict[str, Any]:
        return {**super().params(), "agents": self.given}

    def _table(self) -> NDArray[np.bool_]:
        """Return (A, width): the numbers to append for each agent."""
        names = self.agents if self.given is None else self.given
        count = names if isinstance(names, int) else len(names)
        if count < 1:
            raise ArgumentError("the agents are not known: call bind(space, agents), or give AgentIndicator(agents)")
        if self.mode == "one_hot":
            return np.eye(count, dtype=np.bool_)
        types = self._types(names)
        kinds = list(dict.fromkeys(types))
        return np.array([[kind == other for other in kinds] for kind in types])

    def _types(self, names: int | tuple[str, ...]) -> list[str]:
        if isinstance(self.types, Mapping) or self.types is None:
            if isinstance(names, int):
                raise ArgumentError("types by name need agents by name: AgentIndicator([name, ...], ...)")
            if self.types is None:
                return [re.sub(r"_?\d+$", "", name) for name in names]
            if missing := [name for name in names if name not in self.types]:
                raise ArgumentError(f"no type is given for the agents {missing}")
            return [self.types[name] for name in names]
        count = names if isinstance(names, int) else len(names)
        if len(self.types) != count:
            raise ArgumentError(f"{len(self.types)} types are given for {count} agents")
        return list(self.types)


@dataclass(eq=False, repr=False)
class DeathMask(AgentConnector):
    """Replaces the last observation of a terminated agent by zeros, which a value function can recognise.

    Like SuperSuit's ``black_death``. A truncated agent's last observation stays, as its value is still needed. A
    Discrete's zero is its start.

    Args:
        append: Whether to append a number to an observation vector, 1 while alive and 0 when dead, to distinguish the
            dead from agents that observe zeros: ``(d,)`` becomes ``(d + 1,)``.

    Raises:
        UnsupportedSpaceError: In `bind`: a leaf has no fixed size; or, with ``append``, it is no
            vector.
        ContractError: In a call: the rows have no column ``terminated``.
    """

    append: bool = field(default=False, kw_only=True)

    _tree = from_setup(SpaceTree)

    def __call__(self, rows: Rows) -> Rows:
        tree = self._tree
        if "terminated" not in rows:
            raise ContractError(f"{self.name} needs column 'terminated', got {list(rows.keys())}")
        dead = rows.terminated
        if dead.any():
            leaves = []
            for leaf, blank in zip(tree.flatten(rows.obs), self._blanks, strict=True):
                leaf = np.array(leaf)
                leaf[dead] = blank
                leaves.append(leaf)
            rows = rows.replace(obs=tree.unflatten(leaves))
        return append_to_obs(rows, ~dead[:, None], self._dtype) if self.append else rows

    def setup(self, space: Space[Any]) -> None:
        tree = fixed_size_tree(space, self.name)
        self._blanks = [blank_obs(leaf) for leaf in tree.leaves]
        if self.append:
            self._dtype = np.dtype(self.output_space(space).dtype)
        self._tree = tree

    def output_space(self, space: Space[Any]) -> Space[Any]:
        fixed_size_tree(space, self.name)
        after = map_space(including_blank, space)
        if not self.append:
            return after
        alive = Box(0, 1, (1,), after.low.dtype.type if isinstance(after, Box) else np.float32)
        return appended_space(after, alive, 1, self.name)


@dataclass(eq=False, repr=False)
class StateInObs(AgentConnector):
    """Adds column ``state`` to the observation, for policies and value functions that see the whole env.

    The column exists if the envs were made with ``make(..., state=True)``.

    Args:
        state_space: Space of one state: ``envs.state_space``.
        mode: ``"dict"`` for ``{"obs": …, "state": …}``; ``"append"`` for one vector, where both are vectors.

    Raises:
        ArgumentError: ``mode`` is neither, or ``state_space`` is no space.
        UnsupportedSpaceError: In `bind`: with ``"append"``, observation or state is no vector.
        ContractError: In a call: the rows have no column ``state``, or it is not of ``state_space``.
    """

    state_space: Space[Any]
    mode: Literal["dict", "append"] = "dict"

    _dtype = from_setup(np.dtype[Any])

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.state_space, Space):
            raise ArgumentError(
                f"state_space must be a space, as envs.state_space is; got {type(self.state_space).__name__}"
            )
        self._tree = SpaceTree(self.state_space)

    def __call__(self, rows: Rows) -> Rows:
        if "state" not in rows:
            raise ContractError(
                f"{self.name} needs column 'state', got {list(rows.keys())}: make the envs with make(..., state=True)"
            )
        state = self._checked(rows)
        if self.mode == "dict":
            return rows.replace(obs={"obs": rows.obs, "state": state})
        return append_to_obs(rows, state, self._dtype)

    def setup(self, space: Space[Any]) -> None:
        self._dtype = np.dtype(self.output_space(space).dtype)

    def output_space(self, space: Space[Any]) -> Space[Any]:
        if self.mode == "dict":
            return Dict(OrderedDict([("obs", space), ("state", self.state_space)]))
        if not isinstance(self.state_space, Box) or len(self.state_space.shape) != 1:
            raise UnsupportedSpaceError(
                f'{self.name} cannot append {self.state_space}: use mode="dict", then FlattenObs'
            )
        return appended_space(space, self.state_space, 1, self.name)

    def _checked(self, rows: Rows) -> Any:
        leaves = self._tree.flatten(rows.state)
        for leaf, value in zip(self._tree.leaves, leaves, strict=True):
            if not leaf.is_object and (value.shape[1:] != leaf.shape or value.dtype != leaf.dtype):
                raise ContractError(
                    f"{self.name} expects {leaf.dtype} of shape {leaf.shape} for {leaf} of the state, and got "
                    f"{value.dtype} of shape {value.shape[1:]}; give it envs.state_space"
                )
        return self._tree.unflatten(leaves)


TeamFunction = Callable[[Tree, NDArray[np.bool_], Rows], Tree]


class TeamObs(Remembers, AgentConnector):
    """Shows every agent the last observations of all agents of its env with the same policy.

    By default an observation becomes ``{"own": …, "team": …, "team_mask": …}``: the observation itself; the team's
    observations, the agent's included, with a new first axis of length A in the order of ``agent_index``; and 1 for
    each present agent. Leaves of ``team`` are (n, A, …); agents that are absent or have another policy are blank:
    zeros, or the start of a Discrete.

    In turn-based games the others' observations are their last ones. An agent is present up to its own last row; rows
    of one moment show the same team.

    Args:
        function: Returns the observations of n rows: ``function(team_obs_nA, team_mask_nA, rows)``, the mask (n, A)
            bool; its arguments are read-only. None for the Dict above.
        output_space: Space of one observation after the function, or a function of the space before.

    Raises:
        ArgumentError: One of ``function`` and ``output_space`` is given without the other; or, where a space is first
            seen, the pipeline was bound without agents.
        UnsupportedSpaceError: In `bind`: a leaf has no fixed size.
        ContractError: In a call: the function's result differs from the declared space in structure, shape or dtype.
    """

    across_agents = True

    _tree = from_setup(SpaceTree)
    _declared = from_setup(DeclaredSpace)

    def __init__(self, function: TeamFunction | None = None, output_space: SpaceRule = None) -> None:
        if (function is None) != (output_space is None):
            raise ArgumentError("function and output_space: expected both or neither; the space is that of its results")
        if function is not None:
            check_function(function, output_space, "TeamObs")
        self.function = function
        self._rule = output_space

    def __call__(self, rows: Rows) -> Rows:
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
        if self.function is None:
            own_obs = self._tree.unflatten(own)
            return rows.replace(obs={"own": own_obs, "team": team_obs_nA, "team_mask": mask_nA.astype(np.int8)})
        given = Rows(read_only(dict(rows.items())))
        made = self.function(read_only(team_obs_nA), read_only(mask_nA), given)
        return rows.replace(obs=self._declared.batch(made, len(rows)))

    def setup(self, space: Space[Any]) -> None:
        tree = fixed_size_tree(space, self.name)
        if not self._tables or tree.space != self._tree.space:
            self._seen = [AgentTable(leaf.shape, leaf.dtype) for leaf in tree.leaves]  # last observations
            self._episode = AgentTable((), np.int64, -1)  # their episodes; -1: none
            self._tables = {"episode": self._episode, "seen": self._seen}
        self._blanks = [blank_obs(leaf) for leaf in tree.leaves]
        if self.function is not None:
            self._declared = DeclaredSpace(self.output_space(space), self.name)
        self._tree = tree

    def output_space(self, space: Space[Any]) -> Space[Any]:
        fixed_size_tree(space, self.name)
        count = len(self.agents)
        if not count:
            raise ArgumentError("the agents are not known: call bind(space, agents)")
        if self.function is not None:
            return space_after(self._rule, space, self.name)

        def stack(value: Any) -> NDArray[Any]:
            return np.stack([np.asarray(value)] * count)

        team = map_space(lambda leaf: stacked_space(including_blank(leaf), stack), space)
        return Dict(OrderedDict([("own", space), ("team", team), ("team_mask", MultiBinary(count))]))

    def params(self) -> dict[str, Any]:
        return {"function": self.function, "output_space": self._rule}

    def _take_in(self, rows: Rows, leaves: list[Any]) -> NDArray[np.int64]:
        """Store the rows' observations; return their episodes, (n,)."""
        env_id, agent_index = rows.env_id, rows.agent_index
        if len(rows) and int(agent_index.max()) >= len(self.agents):
            raise ContractError(f"agent_index {int(agent_index.max())} in rows of {len(self.agents)} agents")
        # Without episode ids, `reset` and the agents' last rows separate episodes.
        known = "eps_id" in rows
        episode: NDArray[np.int64] = rows.eps_id if known else np.zeros(len(rows), np.int64)
        for table, leaf in zip(self._seen, leaves, strict=True):
            table.set(env_id, agent_index, leaf)
        self._episode.set(env_id, agent_index, episode)
        return episode


@dataclass(eq=False, repr=False)
class TimeFeature(AgentConnector):
    """Appends ``min(t / horizon, 1)`` to an observation vector: ``(d,)`` becomes ``(d + 1,)``.

    ``t`` is the number of decisions the agent has taken in its episode. With it an agent can distinguish an end by time
    limit from other ends; without it, a time limit makes values ambiguous (Pardo et al., 2018, arXiv:1712.00378).
    Vectors of ints become floats.

    Args:
        horizon: Number of decisions at which 1 is reached; above 0.

    Raises:
        ArgumentError: ``horizon`` is not above 0.
        UnsupportedSpaceError: In `bind`: the space is not a vector.
        ContractError: In a call: the rows have no column ``t``.
    """

    horizon: PositiveFloat

    _extra = Box(0, 1, (1,), np.float32)
    _dtype = from_setup(np.dtype[Any])

    def __call__(self, rows: Rows) -> Rows:
        if "t" not in rows:
            raise ContractError(f"{self.name} needs column 't', the number of the decision; got {list(rows.keys())}")
        return append_to_obs(rows, np.minimum(rows.t / self.horizon, 1.0)[:, None], self._dtype)

    def setup(self, space: Space[Any]) -> None:
        self._dtype = np.dtype(self.output_space(space).dtype)

    def output_space(self, space: Space[Any]) -> Space[Any]:
        return appended_space(space, self._extra, 1, self.name)
