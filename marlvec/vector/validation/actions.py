"""`ActionWriter`: checks the caller's actions and writes them into the buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiBinary, Space
from numpy.typing import NDArray

from marlvec.envs.adapters.return_values import warn_of_contract
from marlvec.envs.spec import AgentGroup, EnvSpec
from marlvec.errors import ActionError, ContractError
from marlvec.spaces import Contained, Leaf, Membership, check_size, membership, snapshot
from marlvec.spaces.action_masks import find_forbidden
from marlvec.vector.data.buffers import Buffers, Selection
from marlvec.vector.validation.agent_dicts import is_by_agent, join_agents
from marlvec.vector.validation.observations import CheckSchedule

__all__ = ["ActionWriter", "arrange", "take_copies"]

_SHOWN = 5  # keys of a dict in messages

AnyArray = NDArray[Any]
BoolArray = NDArray[np.bool_]
Where = Callable[[int, int], str]
"""Names the cell of row i, agent j of the group, in messages."""


class ActionWriter:
    """Checks actions and writes them into buffers.

    Structure, shapes and dtype kinds are always checked. Values of acting agents are checked against the action spaces
    and the action masks, as often as ``validate`` requires, or with ``always`` in every call (but for masks). Actions
    that masks forbid raise with ``"strict"``; else they are sent, with a warning in each such call (``"warn"``) or
    once.
    """

    def __init__(self, spec: EnvSpec, *, grouped: bool, validate: str, always: bool = False) -> None:
        self._spec = spec
        self._groups = spec.groups
        self._agents = spec.agents
        self._grouped = grouped
        self._schedule = CheckSchedule("strict" if always else validate)
        self._mask_schedule = CheckSchedule(validate) if always else None
        self._validate = validate
        self._warned = False  # of a forbidden action, with "sample"
        leaves = [
            (g, k, leaf) for g, group in enumerate(spec.groups) for k, leaf in enumerate(group.action_tree.leaves)
        ]
        self._checks = [
            (g, k, leaf, members) for g, k, leaf in leaves if (members := membership(leaf, in_buffer=False))
        ]
        # The common case, a single array of numbers, is found once here and needs only a quick check in write().
        (first, *others) = spec.groups
        is_plain = (
            not others and not grouped and first.action_tree.is_leaf and not first.action_tree.leaves[0].is_object
        )
        self._plain = first.action_tree.leaves[0] if is_plain else None
        self._plain_shape = (len(first.agents), *first.action_tree.leaves[0].shape) if is_plain else ()
        self._objects = [place for place in leaves if place[2].is_object]

    def write(self, buffers: Buffers, actions: Any, env_ids: NDArray[np.int64], rows: Selection) -> None:
        """Write one action per (env, agent), in a form of `VectorEnv.step`; ``rows`` are the same envs."""
        # ActionError: nothing was written. Discrete also as (n, A, 1); leaves without a fixed-size array form as arrays
        # of objects or lists of lists (n, A).
        if (
            (leaf := self._plain) is not None
            and actions.__class__ is np.ndarray
            and actions.dtype == leaf.dtype
            and actions.shape == (len(env_ids), *self._plain_shape)
        ):
            self._schedule.countdown -= 1
            if not self._schedule.countdown:
                self._schedule.restart()
                self._check_all_values([[actions]], buffers, env_ids, rows)
            buffers.actions[0][0][rows] = actions
            return
        if actions.__class__ is not np.ndarray and is_by_agent(self._spec, self._grouped, actions, len(env_ids)):
            actions = join_agents(self._spec, self._grouped, actions, buffers.acting[rows], env_ids)
        elif not self._grouped and self._groups[0].action_tree.is_leaf:
            _refuse_dicts(actions, self._agents, len(env_ids))
        if self._grouped:
            self._check_groups(actions)
        arrays = []
        for group in self._groups:
            own = actions[group.name] if self._grouped else actions
            parts = (own,) if group.action_tree.is_leaf else self._leaves(group, own)
            arrays.append([self._coerce(part, group, k, len(env_ids)) for k, part in enumerate(parts)])
        self._schedule.countdown -= 1
        if not self._schedule.countdown:
            self._schedule.restart()
            self._check_all_values(arrays, buffers, env_ids, rows)
        if self._objects:
            sizes = np.zeros(len(env_ids), np.int64)
            for g, k, leaf in self._objects:
                group = self._groups[g]
                wanted, where = buffers.acting[rows][:, group.agents], partial(self._cell, group, env_ids)
                arrays[g][k] = take_copies(leaf, arrays[g][k], wanted, sizes, where)
        for targets, parts in zip(buffers.actions, arrays, strict=True):
            for target, part in zip(targets, parts, strict=True):
                target[rows] = part

    def _check_groups(self, actions: Any) -> None:
        names = [group.name for group in self._groups]
        if not isinstance(actions, Mapping) or set(actions) != set(names):
            got = sorted(map(str, actions)) if isinstance(actions, Mapping) else type(actions).__name__
            raise ActionError(
                f"actions: expected a dict with one entry per group {names}, got {got}. Each entry is an array "
                f"(num_envs, agents of the group, …), or a tree of such arrays"
            )

    def _leaves(self, group: AgentGroup, actions: Any) -> list[Any]:
        try:
            return group.action_tree.flatten(actions)
        except ContractError as error:
            raise ActionError(f"actions of group {group.name!r}: {error}{_advice(actions)}") from None

    def _coerce(self, value: Any, group: AgentGroup, k: int, n: int) -> NDArray[Any]:
        leaf = group.action_tree.leaves[k]
        expected = (n, len(group.agents), *leaf.shape)
        if value.__class__ is np.ndarray and value.dtype == leaf.dtype and value.shape == expected:
            return value
        if leaf.is_object:
            try:
                return arrange(value, n, len(group.agents))
            except ActionError as error:
                raise ActionError(f"{self._where(group, leaf.path)}: {error}") from None
        try:
            array = np.asarray(value)
        except Exception as error:  # ragged lists, tensors on a device or with a gradient: __array__ may raise anything
            raise ActionError(
                f"{self._where(group, leaf.path)}: expected an array of shape {expected}, dtype {leaf.dtype}, got "
                f"{type(value).__name__}, not an array: {str(error).rstrip('.')}{_advice(value, unread=True)}"
            ) from error
        if array.shape == (*expected, 1) and isinstance(leaf.space, Discrete):
            array = array[..., 0]
        if array.shape != expected:
            axes = f"(num_envs={n}, agents={len(group.agents)}" + "".join(f", {d}" for d in leaf.shape) + ")"
            raise ActionError(
                f"{self._where(group, leaf.path)}: expected shape {expected} = {axes}, got {array.shape}"
                f"{_advice(value) or _remedy(array.shape, expected)}"
            )
        if array.dtype.kind not in _kinds(leaf.space):
            raise ActionError(
                f"{self._where(group, leaf.path)}: expected dtype {leaf.dtype}, got {array.dtype}"
                f"{_advice(value) or _cast(array.dtype, leaf.dtype)}"
            )
        return array

    def _check_all_values(
        self, arrays: Sequence[Sequence[AnyArray]], buffers: Buffers, env_ids: NDArray[np.int64], rows: Selection
    ) -> None:
        acting = buffers.acting[rows]
        for g, k, leaf, members in self._checks:
            array = arrays[g][k]
            if array.size and not members.are_all(array):
                self._check_acting(array, self._groups[g], leaf, members, acting, env_ids)
        if not self._warned and self._masks_are_due():
            self._check_masks(arrays, buffers, env_ids, rows)

    def _masks_are_due(self) -> bool:
        schedule = self._mask_schedule
        if schedule is None:  # masks are checked whenever values are
            return True
        schedule.countdown -= 1
        if schedule.countdown:
            return False
        schedule.restart()
        return True

    def _check_masks(
        self, arrays: Sequence[Sequence[AnyArray]], buffers: Buffers, env_ids: NDArray[np.int64], rows: Selection
    ) -> None:
        found = []
        masks = buffers.masks_given(rows)
        for group, array, mask, own in zip(self._groups, arrays, masks, buffers.own_choices, strict=True):
            if mask is not None:
                # Choices that padding has added are left out here: the env raises for them.
                allowed = mask[rows] | np.logical_not(own)
                forbidden = find_forbidden(group.action_space, array[0], allowed)
                forbidden &= buffers.acting[rows][:, list(group.agents)]
                found += [(i, group.agents[j], array[0][i, j].tolist()) for i, j in np.argwhere(forbidden).tolist()]
        if not found:
            return
        (i, a, action), more = found[0], f" ({len(found) - 1} more)" if len(found) > 1 else ""
        text = (
            f"actions: env {env_ids[i]}, agent {self._agents[a]!r}: expected an action that its action mask allows, "
            f"got {action}{more}; choose within infos['action_mask'], as envs.random_action() does"
        )
        if self._validate == "strict":
            raise ActionError(text)
        self._warned = self._validate == "sample"
        warn_of_contract(text)

    def _check_acting(
        self,
        array: AnyArray,
        group: AgentGroup,
        leaf: Leaf,
        members: Membership,
        acting: BoolArray,
        env_ids: NDArray[np.int64],
    ) -> None:
        wanted = acting[:, group.agents]
        bad = np.argwhere(wanted & ~members.rows(array, wanted))
        if not len(bad):
            return
        i, j = bad[0].tolist()
        if isinstance(members, Contained):
            raise ActionError(f"{self._cell(group, env_ids, i, j)}: {leaf}: {members.describe(array[i, j, ...])}")
        more = f" ({len(bad) - 1} more)" if len(bad) > 1 else ""
        raise ActionError(f"{self._cell(group, env_ids, i, j, leaf.path)}: {array[i, j]} is not in {leaf.space}{more}")

    def _cell(self, group: AgentGroup, env_ids: NDArray[np.int64], i: int, j: int, path: str = "") -> str:
        return f"{self._where(group, path)}: env {env_ids[i]}, agent {self._agents[group.agents[j]]!r}"

    def _where(self, group: AgentGroup, path: str) -> str:
        parts = [f"group {group.name!r}"] if self._grouped else []
        parts += [f"leaf {path!r}"] if path else []
        return "actions" + (f" of {', '.join(parts)}" if parts else "")


def _refuse_dicts(actions: Any, agents: Sequence[str], n: int) -> None:
    """Raise for dicts with unknown keys, and for a wrong number of dicts."""
    if isinstance(actions, Mapping) and (unknown := [key for key in actions if key not in agents]):
        raise ActionError(
            f"actions: expected an array, or a dict of the agents {_shown(agents)}, got a dict with the keys "
            f"{_shown(unknown)}; stack the agents' actions: np.stack([actions[agent] for agent in envs.agents], axis=1)"
        )
    if isinstance(actions, (list, tuple)) and len(actions) != n and all(isinstance(own, Mapping) for own in actions):
        raise ActionError(f"actions: expected a dict of agents for each of {n} envs, got {len(actions)} dicts")


def _advice(value: Any, *, unread: bool = False) -> str:
    """Return advice for actions of a wrong type, ``unread`` if numpy could not convert them; or an empty text."""
    part = value
    while isinstance(part, (list, tuple)) and len(part):
        part = part[0]
    inside = "" if part is value else f" in a {type(value).__name__}"
    if isinstance(part, Mapping):
        return (
            f". There is a dict with keys {_shown(sorted(map(str, part)))}{inside}: stack the agents' actions along "
            f"axis 1, in the order of `agents`, one row per env: np.stack([actions[agent] for agent in envs.agents], "
            f"axis=1). A dict is accepted only for Dict spaces, for several groups, and with agents as keys"
        )
    if unread and callable(getattr(part, "detach", None)):
        how = "with a gradient" if getattr(part, "requires_grad", False) else "that numpy cannot read"
        return f". There is a tensor {how}{inside}: give tensor.detach().cpu().numpy()"
    return ""


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{list(names[:_SHOWN])}{more}"


def _cast(got: np.dtype[Any], expected: np.dtype[Any]) -> str:
    is_float = got.kind == "f" and expected.kind in "iu"
    return f"; where they are whole numbers, give actions.astype(np.{expected})" if is_float else ""


def _remedy(got: tuple[int, ...], expected: tuple[int, ...]) -> str:
    """Return advice for an array of a wrong shape, or an empty text."""
    if got == expected[1:]:
        return f". That is the shape of one env; give such a row for each of {expected[0]} envs"
    if got == (expected[0], *expected[2:]):
        return f". That is one action per env; give one for each of its {expected[1]} agents, along axis 1"
    if got == (expected[1], expected[0], *expected[2:]):
        return ". Its axes are swapped: give np.swapaxes(actions, 0, 1)"
    if got == (expected[0] * expected[1], *expected[2:]):
        return f". If its rows go env by env: give actions.reshape{expected}"
    return ""


def _kinds(space: Space[Any]) -> str:
    """Return dtype kinds whose values a leaf can hold without a change of meaning."""
    if isinstance(space, Box) and space.dtype is not None and np.dtype(space.dtype).kind == "f":
        return "fiu"
    if isinstance(space, MultiBinary) or (isinstance(space, Box) and space.dtype == np.bool_):
        return "iub"
    return "iu"


def arrange(value: Any, rows: int, agents: int) -> AnyArray:
    """Arrange objects, an array or a sequence of sequences, in an array (rows, agents) of dtype object."""
    if value.__class__ is np.ndarray and value.dtype == np.object_ and value.shape == (rows, agents):
        array: AnyArray = value
        return array
    cells = np.full((rows, agents), None, np.object_)
    for i, row in enumerate(_parts(value, rows, f"{rows} rows, one per env")):
        for j, cell in enumerate(_parts(row, agents, f"rows of {agents} values, one per agent")):
            cells[i, j] = cell
    return cells


def _parts(value: Any, length: int, what: str) -> Any:
    is_row = isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim > 0)
    if not is_row or len(value) != length:
        got = f"{len(value)}" if is_row else type(value).__name__
        raise ActionError(f"expected an array of objects, or a list of lists, with {what}; got {got}")
    return value


def take_copies(leaf: Leaf, array: AnyArray, wanted: BoolArray, sizes: NDArray[np.int64], where: Where) -> AnyArray:
    """Copy the wanted objects of a leaf (n, A_g), so that the caller may change them later; the others become None.

    `sizes` (n,) are bytes of each env's objects so far; those of the copies are added. `where` names a cell.
    """
    copies = np.full(array.shape, None, np.object_)
    for i, j in np.argwhere(wanted).tolist():
        try:
            copies[i, j], size = snapshot(leaf, array[i, j], by_value=True)
            check_size(leaf, size, int(sizes[i]))
        except ContractError as error:
            raise ActionError(f"{where(i, j)}: {error}") from None
        sizes[i] += size
    return copies
