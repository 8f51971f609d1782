"""`ValueChecker`: checks observations, actions, rewards and infos from outside against the declared spaces."""

from __future__ import annotations

import math
from collections.abc import Mapping
from reprlib import repr as short_repr
from typing import Any

import numpy as np
from gymnasium.spaces import Box
from numpy.typing import NDArray

from marlvec.envs.adapters.return_values import infos_by_agent, names_of
from marlvec.envs.spec import COMMON, EnvSpec, Info
from marlvec.errors import ArgumentError, ContractError
from marlvec.spaces import Leaf, Membership, SpaceTree, check_member, membership, snapshot
from marlvec.spaces.action_masks import mask_refusal, read_mask
from marlvec.spaces.members import fit

__all__ = ["ValueChecker", "split_mask"]

_COMMON = (COMMON, "common")  # "common" is PettingZoo's key
_ARRAY = 256  # bytes of an empty array and of the reference to it
_OURS = ("off_policy_action", "logged_action", "training_enabled")  # infos that the collector reads


class ValueChecker:
    """Checks and copies values from outside. `values`: also against their spaces; shapes and dtypes always are.

    Everywhere, `ArgumentError`: an agent is unknown; `ContractError`: a value is wrong, with the agent's name.
    """

    def __init__(self, spec: EnvSpec, *, values: bool = True) -> None:
        self.agents = spec.agents
        self._index = {name: a for a, name in enumerate(spec.agents)}
        self._mask_sizes, self._action_spaces = spec.mask_sizes, spec.action_spaces
        self._obs = [_Form(space, values=values) for space in spec.observation_spaces]
        self._actions = [_Form(space, values=True) for space in spec.action_spaces]
        self._choices: list[int | None] = [None] * len(spec.agents)
        for group in spec.groups:
            for a in group.agents:
                self._choices[a] = group.choices
        self.agent_bytes = max(
            obs.size + action.size + 8 * (choices or 0)
            for obs, action, choices in zip(self._obs, self._actions, self._choices, strict=True)
        )  # upper estimate for one agent's observation, action and mask, without object leaves

    def indices(self, table: Any, what: str) -> dict[int, Any]:
        """Return a dict by agent name as one by agent index."""
        if not isinstance(table, Mapping):
            raise ArgumentError(f"{what}: expected a dict of agent name to value, got {type(table).__name__}")
        try:
            return {self._index[name]: value for name, value in table.items()}
        except KeyError:
            unknown = [name for name in table if name not in self._index]
            raise ArgumentError(
                f"{what}: unknown agents {names_of(unknown)}; there are {names_of(self.agents)}"
            ) from None

    def observations(self, table: Any, masks: Any, *, acting: bool) -> tuple[dict[int, Any], dict[int, NDArray[Any]]]:
        """Check observations and action masks of some agents. An observation may contain its mask.

        `acting`: whether they act on them; a declared mask is required then.
        """
        found = self.indices(table, "observations")
        given = {} if masks is None else self.indices(masks, "masks")
        if stray := [self.agents[a] for a in given if a not in found]:
            raise ArgumentError(
                f"masks: expected masks only of agents with an observation, got one of {names_of(stray)}"
            )
        obs: dict[int, Any] = {}
        for a, value in found.items():
            bare, mask = split_mask(value) if self._mask_sizes[a] is not None else (value, None)
            if mask is not None:
                given.setdefault(a, mask)
            obs[a] = self._checked(self._obs[a], bare, f"observation of agent {self.agents[a]!r}")
            if acting and self._mask_sizes[a] is not None and a not in given:
                raise ContractError(
                    f"observation of agent {self.agents[a]!r}: expected an action mask with it, in a dict under "
                    f"'action_mask' or in masks, got none"
                )
        return obs, {a: self._mask(a, mask) for a, mask in given.items()} if acting else {}

    def _mask(self, a: int, value: Any) -> NDArray[Any]:
        size = self._choices[a]
        try:
            if size is None:
                raise ContractError(mask_refusal(self._action_spaces[a]))
            mask = read_mask(value)
            if len(mask) != size:
                raise ContractError(f"expected {size} entries, got {len(mask)}")
            if not mask.any():
                raise ContractError("expected at least one allowed action, got none")
        except ContractError as error:
            raise ContractError(f"action mask of agent {self.agents[a]!r}: {error}") from None
        return mask.copy()

    def actions(self, table: Any, agents: Mapping[int, Any], *, are_env: bool = True) -> dict[int, Any]:
        """Check actions of some of `agents`, chosen outside. Actions that are not env actions are not checked."""
        found = self.indices(table, "actions")
        if stray := [self.agents[a] for a in found if a not in agents]:
            raise ArgumentError(
                f"actions: expected actions only of agents with an observation, got one of {names_of(stray)}"
            )
        if not are_env:
            return found
        return {
            a: self._checked(self._actions[a], value, f"action of agent {self.agents[a]!r}")
            for a, value in found.items()
        }

    def rewards(self, table: Any) -> dict[int, float]:
        """Check that rewards are finite numbers."""
        return {a: self._reward(a, value) for a, value in self.indices(table, "rewards").items()}

    def _reward(self, a: int, value: Any) -> float:
        if not isinstance(value, (str, bytes)) and np.ndim(value) == 0:
            try:
                number = float(value)
            except (TypeError, ValueError, OverflowError):
                number = math.nan
            if math.isfinite(number):
                return number
        raise ContractError(f"reward of agent {self.agents[a]!r}: expected a finite number, got {short_repr(value)}")

    def flags(self, given: Any, agents: Mapping[int, Any], what: str) -> dict[int, bool]:
        """Parse flags: one bool for all `agents`, or a dict of bools; missing agents are False."""
        if isinstance(given, (bool, np.bool_)):
            return dict.fromkeys(agents, bool(given))
        table = self.indices(given, what)
        for a, flag in table.items():
            if a not in agents or not isinstance(flag, (bool, np.bool_)):
                raise ArgumentError(f"{what}: expected bools of agents that end, got {self.agents[a]!r}: {flag!r}")
        return {a: bool(table.get(a, False)) for a in agents}

    def infos(self, table: Any) -> Info:
        """Copy infos by agent; ``"__common__"``: of no single agent. Keys that the collector reads are refused."""
        if not isinstance(table, Mapping):
            raise ArgumentError(f"infos: expected a dict of agent name to dict, got {type(table).__name__}")
        self.indices({name: None for name in table if name not in _COMMON}, "infos")
        found = infos_by_agent(table, self._index, self.agents, "infos") or {}
        for who, info in found.items():
            if ours := [key for key in _OURS if key in info]:
                raise ArgumentError(f"infos of {who!r}: the key {ours[0]!r} is reserved; choose another one")
            a = self._index.get(who)
            if a is not None and info.get("action_mask") is not None and self._takes_masks(a):
                raise ArgumentError(
                    f"infos of {who!r}: expected no 'action_mask', which no policy would see; give it as "
                    f"masks={{{who!r}: …}} beside the observations"
                )
        return found

    def _takes_masks(self, a: int) -> bool:
        """Return whether an ``action_mask`` in an agent's info is meant to forbid actions."""
        return self._mask_sizes[a] is None and not isinstance(self._action_spaces[a], Box)

    @staticmethod
    def _checked(form: _Form, value: Any, what: str) -> Any:
        try:
            return form.checked(value)
        except ContractError as error:
            raise ContractError(f"{what}: {error}") from None


def split_mask(value: Any) -> tuple[Any, Any]:
    """Split an observation from the action mask in it; the mask is None if there is none."""
    if not isinstance(value, Mapping) or "action_mask" not in value:
        return value, None
    rest = {key: part for key, part in value.items() if key != "action_mask"}
    return (rest["observation"] if rest.keys() == {"observation"} else rest), value["action_mask"]


class _Form:
    __slots__ = ("_bare", "_leaves", "_tree")

    def __init__(self, space: Any, *, values: bool) -> None:
        self._tree = SpaceTree(space)
        self._leaves = [(leaf, leaf.blank(), membership(leaf) if values else None) for leaf in self._tree.leaves]
        self._bare = self._leaves[0] if self._tree.is_leaf and not self._tree.leaves[0].is_object else None

    @property
    def size(self) -> int:
        """Approximate bytes of a value."""
        return sum(_ARRAY + blank.nbytes for _, blank, _ in self._leaves)

    def checked(self, value: Any) -> Any:
        """Return a checked copy of a value; `ContractError` names the leaf."""
        if self._bare is not None:
            return _checked_leaf(*self._bare, value)
        parts = self._tree.flatten(value)
        return self._tree.unflatten(
            [_checked_leaf(*leaf, part) for leaf, part in zip(self._leaves, parts, strict=True)]
        )


def _checked_leaf(leaf: Leaf, blank: NDArray[Any], members: Membership | None, value: Any) -> Any:
    if leaf.is_object:
        check_member(leaf, value)
        return snapshot(leaf, value)[0]
    if value.__class__ is np.ndarray and value.dtype == blank.dtype and value.shape == blank.shape:
        array = value.copy()
    else:
        array = np.array(fit(blank, value, leaf), blank.dtype)
    if members is not None and not members.are_all(array):
        one = array[None, None]
        if not members.rows(one, np.ones((1, 1), np.bool_)).all():
            raise ContractError(f"{leaf}: {members.describe(array)}")
    return array
