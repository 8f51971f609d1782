"""Actions and observations that are refused, and where actions are written into the buffers.

`ActionWriter` checks and writes the caller's actions, also from dicts of agents; `ObservationValidator` checks that
values from envs lie in their spaces; `CheckSchedule` says when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.spaces import Box, Discrete, MultiBinary, Space
from numpy.typing import NDArray

from marlvec.envs.adapters.base import warn_of_contract
from marlvec.envs.spec import AgentGroup, EnvSpec
from marlvec.errors import ActionError, ContractError
from marlvec.spaces import Contained, Finite, Leaf, Membership, SpaceTree, check_size, membership, snapshot
from marlvec.spaces.action_masks import find_forbidden
from marlvec.vector.buffers import Buffers, EnvSelection
from marlvec.vector.vector_step import VectorStep

AnyArray = NDArray[Any]
BoolArray = NDArray[np.bool_]


_SHOWN = 5  # keys of a dict in messages

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

    def write(self, buffers: Buffers, actions: Any, env_ids: NDArray[np.int64], rows: EnvSelection) -> None:
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
        self, arrays: Sequence[Sequence[AnyArray]], buffers: Buffers, env_ids: NDArray[np.int64], rows: EnvSelection
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
        self, arrays: Sequence[Sequence[AnyArray]], buffers: Buffers, env_ids: NDArray[np.int64], rows: EnvSelection
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


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim > 0)


def _parts(value: Any, length: int, what: str) -> Any:
    is_row = _is_sequence(value)
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


def is_by_agent(spec: EnvSpec, grouped: bool, actions: Any, n: int) -> bool:
    """Return whether actions of ``n`` envs have one of the two forms."""
    # The structure of the action space, or of the groups, does not count, even if its keys are agents.
    first = spec.groups[0]
    if not isinstance(actions, Mapping):
        return (
            isinstance(actions, (list, tuple))
            and len(actions) == n > 0
            and all(isinstance(own, Mapping) and all(key in spec.agents for key in own) for own in actions)
            and (grouped or not _is_tuple_action(first, actions))
        )
    if not actions or not all(key in spec.agents for key in actions):
        return False
    if grouped:
        # A group of one agent has the agent's name, and names may be equal by chance: only the agent axis tells.
        return actions.keys() != {group.name for group in spec.groups} or _lack_axis(spec.groups, actions)
    space = first.action_space
    return not isinstance(space, spaces.Dict) or actions.keys() != space.spaces.keys()


def join_agents(
    spec: EnvSpec, grouped: bool, actions: Any, acting: NDArray[np.bool_], env_ids: NDArray[np.int64]
) -> Any:
    """Convert actions in one of the two forms to the array form of `VectorEnv.step`; dtypes and values stay."""
    # ActionError: an agent that acts, (n, A) bool, has no action, or one of another structure or shape.
    per_env = not isinstance(actions, Mapping)
    dicts = actions if per_env else [actions] * len(env_ids)
    given = np.array([[own.get(name) is not None for name in spec.agents] for own in dicts], np.bool_)
    given = given.reshape(acting.shape)  # of no envs, too
    for i, a in np.argwhere(acting & ~given)[:1].tolist():
        raise ActionError(
            f"actions: env {env_ids[i]}, agent {spec.agents[a]!r}: expected an action, since it acts, got None; "
            f"actions are given for {sorted(name for name, action in dicts[i].items() if action is not None)}"
        )
    if per_env:
        return lay_out(
            spec, grouped, actions, acting, lambda i, a: f"actions: env {env_ids[i]}, agent {spec.agents[a]!r}"
        )
    joined = {g.name: g.action_tree.unflatten(_read_agents(spec, g, actions, len(env_ids))) for g in spec.groups}
    return joined if grouped else joined[spec.groups[0].name]


def lay_out(
    spec: EnvSpec,
    grouped: bool,
    actions: Sequence[Mapping[str, Any]],
    acting: NDArray[np.bool_],
    where: Callable[[int, int], str],
) -> Any:
    """Convert one dict of agents per env, with all that act, to the array form of `VectorEnv.step`; zeros for others.

    `acting` is (n, A) bool; other agents in the dicts are ignored. `where(i, a)` names agent number a of dict number i.
    """
    laid_out = {group.name: _lay_out_group(spec, group, actions, acting, where) for group in spec.groups}
    return laid_out if grouped else laid_out[spec.groups[0].name]


def _lay_out_group(
    spec: EnvSpec,
    group: AgentGroup,
    actions: Sequence[Mapping[str, Any]],
    acting: NDArray[np.bool_],
    where: Callable[[int, int], str],
) -> Any:
    at = np.nonzero(acting[:, group.agents])
    cells = [(i, group.agents[j]) for i, j in zip(at[0].tolist(), at[1].tolist(), strict=True)]
    own = [actions[i][spec.agents[a]] for i, a in cells]
    tree = group.action_tree
    if tree.is_leaf:
        columns: list[Sequence[Any]] = [own]
    else:
        trees = [_flatten(tree, action, partial(where, *cell)) for action, cell in zip(own, cells, strict=True)]
        columns = list(zip(*trees, strict=True)) or [()] * len(tree.leaves)
    leaves = []
    for leaf, column in zip(tree.leaves, columns, strict=True):
        rows = _stack(leaf, column, cells, where)
        whole = leaf.blank(len(actions), len(group.agents)).astype(rows.dtype, copy=False)
        whole[at] = rows
        leaves.append(whole)
    return tree.unflatten(leaves)


def _stack(
    leaf: Leaf, parts: Sequence[Any], cells: Sequence[tuple[int, int]], where: Callable[[int, int], str]
) -> NDArray[Any]:
    """Return one leaf of m actions as (m, …)."""
    if not parts:
        return leaf.blank(0)
    if not leaf.is_object:
        try:
            rows = np.array(parts)
        except Exception:  # an action is not an array, or has another shape: found below
            rows = np.zeros(())
        if rows.shape == (len(parts), *leaf.shape):
            return rows
    return np.stack([_array(part, leaf, (), partial(where, *cell)) for part, cell in zip(parts, cells, strict=True)])


def _is_tuple_action(group: AgentGroup, actions: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether these dicts are the parts of a Tuple action, such as ``({},)`` for ``Tuple(Dict())``."""
    space = group.action_space
    if not isinstance(space, spaces.Tuple) or not all(isinstance(part, spaces.Dict) for part in space.spaces):
        return False
    try:
        group.action_tree.flatten(actions)
    except ContractError:
        return False
    return True


def _lack_axis(groups: Sequence[AgentGroup], actions: Mapping[str, Any]) -> bool:
    """Return whether actions by the names of these groups lack the agent axis, since each is of one agent: (n, …)."""
    for group in groups:
        if actions[group.name] is None:
            return True
        try:
            parts = group.action_tree.flatten(actions[group.name])
        except ContractError:  # neither form; an error is raised later
            continue
        for part, leaf in zip(parts, group.action_tree.leaves, strict=True):
            if (lacks := _lacks_axis(part, leaf, len(group.agents))) is not None:
                return lacks
    # Without leaves, both forms of groups of one agent are the same.
    return not any(group.action_tree.leaves or len(group.agents) > 1 for group in groups)


def _lacks_axis(part: Any, leaf: Leaf, agents: int) -> bool | None:
    """Return whether a leaf of actions is (n, …), not (n, agents, …); None if it could be either, or neither."""
    if leaf.is_object and isinstance(part, (list, tuple)):
        # An object may be a sequence, as the row of a group is: which of both is in the space?
        if any(not _is_sequence(row) or len(row) != agents for row in part):
            return True
        cells = np.full((2, len(part)), None, np.object_)
        for k, row in enumerate(part):
            cells[0, k], cells[1, k] = row, row[0]
        as_object, as_row = Contained(leaf).rows(cells, np.ones(cells.shape, np.bool_))
        return None if np.array_equal(as_object, as_row) else bool((as_object > as_row).any())
    try:
        return np.ndim(part) == 1 + len(leaf.shape)
    except ValueError:  # a ragged list
        return None


def _read_agents(spec: EnvSpec, group: AgentGroup, actions: Mapping[str, Any], n: int) -> list[NDArray[Any]]:
    """Return leaves (n, A_g, …) from a dict with each agent's actions in all envs."""
    columns: list[list[NDArray[Any]]] = []
    for name in (spec.agents[a] for a in group.agents):
        if actions.get(name) is None:
            columns.append(group.action_tree.zeros(n))
            continue
        where = partial("actions[{!r}]".format, name)
        parts = zip(_flatten(group.action_tree, actions[name], where), group.action_tree.leaves, strict=True)
        columns.append([_array(part, leaf, (n,), where) for part, leaf in parts])
    return [np.stack(leaves, axis=1) for leaves in zip(*columns, strict=True)]


def _flatten(tree: SpaceTree, value: Any, where: Callable[[], str]) -> list[Any]:
    try:
        return tree.flatten(value)
    except ContractError as error:
        raise ActionError(f"{where()}: {error}") from None


def _array(part: Any, leaf: Leaf, lead: tuple[int, ...], where: Callable[[], str]) -> NDArray[Any]:
    """Convert one leaf of one action, or with ``lead`` of one action per env."""

    def refuse(problem: str) -> ActionError:
        return ActionError(f"{where()}, {leaf}: {problem}" if leaf.path else f"{where()}: {problem}")

    if leaf.is_object:
        cells = np.full(lead, None, np.object_)
        if not lead:
            cells[()] = part
        elif not isinstance(part, (list, tuple, np.ndarray)) or len(part) != lead[0]:
            raise refuse(f"expected a list of {lead[0]} objects, one per env, got {type(part).__name__}")
        else:
            for i, value in enumerate(part):
                cells[i] = value
        return cells
    expected = (*lead, *leaf.shape)
    try:
        array = np.asarray(part)
    except Exception as error:  # ragged lists, tensors on a device or with a gradient: __array__ may raise anything
        raise refuse(f"expected shape {expected}, got {type(part).__name__}, not an array: {error}") from error
    if array.shape == (*expected, 1) and isinstance(leaf.space, spaces.Discrete):
        array = array[..., 0]
    if array.shape != expected:
        raise refuse(f"expected shape {expected}, got {array.shape}")
    return array


_REWARDS = Finite()
_FIRST, _EVERY = 16, 16
_NEVER = -1  # counting down from here never reaches 0


class CheckSchedule:
    """Counts calls. The caller decrements ``countdown`` itself, which saves a function call if no check is due.

        schedule.countdown -= 1
        if not schedule.countdown:
            schedule.restart()
            ...

    ``"strict"`` and ``"warn"``: every call is due; ``"sample"``: the first 16 and every 16th after that; ``"off"``:
    none.
    """

    __slots__ = ("_left", "_mode", "countdown")

    def __init__(self, validate: str) -> None:
        self._mode = validate
        self._left = _FIRST  # remaining calls of the first 16
        self.countdown = _NEVER if validate == "off" else 1

    def restart(self) -> None:
        """Count down to the next call that is due."""
        if self._mode == "sample" and self._left > 0:
            self._left -= 1
        self.countdown = _EVERY if self._mode == "sample" and not self._left else 1


class ObservationValidator:
    """Checks the values of observations and rewards.

    An observation must lie in its space in the sense of ``space.contains``: within the bounds, infinity only within an
    infinite bound, never NaN. A reward must be finite. Only observations of living agents and final observations of
    agents that have just ended are checked; the zeros of other agents, and of agents that wait for their first turn,
    may lie outside. Padded observations are checked against the padded space.

    Leaves whose dtype has no invalid values (uint8 from 0 to 255) cost nothing; nor do object leaves, which are checked
    whenever they are written. Problems are returned with ``"strict"``; else one `ContractWarning` per env is given if
    an agent's leaf is wrong in a new way. With ``"sample"`` a bound exceeded by rounding does not end a long run.
    """

    def __init__(self, spec: EnvSpec, mode: str) -> None:
        self._mode = mode
        self._agents = spec.agents
        self.schedule = CheckSchedule(mode)
        self._warned: set[tuple[int, str, str, str, str]] = set()
        self._checks = [
            _Check(g, k, group, leaf, members)
            for g, group in enumerate(spec.groups)
            for k, leaf in enumerate(group.observation_tree.leaves)
            if (members := membership(leaf)) is not None
        ]

    def check(
        self, step: VectorStep, env_ids: Sequence[int] | NDArray[np.int64] | None = None
    ) -> list[tuple[int, str]]:
        """Check a call's rows (``env_ids``: the new ones); with ``"strict"``, return invalid envs and problems."""
        # The caller consults `schedule` first. A repeated problem gives no second warning.
        if not len(step):
            return []
        problems: list[_Problem] = []
        if not _REWARDS.are_all(step.rewards):
            problems += self._bad_rewards(step)
        problems += self._bad_leaves("observation", step.obs_leaves, step.alive, step)
        if step.final_leaves is not step.obs_leaves:
            shown = step.has_final & ~step.final_missing
            problems += self._bad_leaves("final observation", step.final_leaves, shown, step)
        if env_ids is not None:
            problems = [problem for problem in problems if problem.env_id in env_ids]
        if not problems:
            return []
        by_env: dict[int, list[_Problem]] = {i: [] for i in step.env_ids.tolist()}
        for problem in problems:
            by_env[problem.env_id].append(problem)
        bad = {i: found for i, found in by_env.items() if found}
        if self._mode == "strict":
            advice = "Correct the env or its spaces, or see make(validate=…)"
            return [(i, f"{found[0]}{_and_more(found)}. {advice}") for i, found in bad.items()]
        self._warn(bad)
        return []

    def _bad_rewards(self, step: VectorStep) -> Iterator[_Problem]:
        for i, a in np.argwhere(~np.isfinite(step.rewards)).tolist():
            yield _Problem(int(step.env_ids[i]), self._agents[a], "reward", "", step.rewards[i, a, ...], _REWARDS)

    def _bad_leaves(
        self, subject: str, leaves: list[list[AnyArray]], present: BoolArray, step: VectorStep
    ) -> Iterator[_Problem]:
        for check in self._checks:
            array = leaves[check.g][check.k]
            if check.members.are_all(array):
                continue
            agents = check.group.agents
            here = present[:, list(agents)]
            if leaves is step.obs_leaves:
                here &= _observed(step.acting[:, list(agents)], leaves[check.g])
            for i, j in np.argwhere(here & ~check.members.rows(array, here)).tolist():
                agent, path = self._agents[agents[j]], check.leaf.path
                yield _Problem(int(step.env_ids[i]), agent, subject, path, array[i, j, ...], check.members)

    def _warn(self, bad: dict[int, list[_Problem]]) -> None:
        for i, found in bad.items():
            new = [problem for problem in found if problem.key not in self._warned]
            if new:
                self._warned.update(problem.key for problem in new)
                warn_of_contract(f"env {i}: {new[0]}{_and_more(found)}")


@dataclass(frozen=True, slots=True)
class _Check:
    """Leaf ``k`` of group ``g``, and the set of its valid values."""

    g: int
    k: int
    group: AgentGroup
    leaf: Leaf
    members: Membership


@dataclass(frozen=True, slots=True)
class _Problem:
    env_id: int
    agent: str
    subject: str
    path: str
    value: AnyArray
    members: Membership

    @property
    def key(self) -> tuple[int, str, str, str, str]:
        """Problems of equal keys give one warning; observations and final observations count as the same."""
        is_nan = self.value.dtype.kind == "f" and np.isnan(self.value).any()
        return self.env_id, self.agent, self.subject.split()[-1], self.path, "nan" if is_nan else "value"

    def __str__(self) -> str:
        where = f"{self.subject} of agent {self.agent!r}" + (f", leaf {self.path!r}" if self.path else "")
        return f"{where}: {self.members.describe(self.value)}"


def _observed(acting: BoolArray, leaves: list[AnyArray]) -> BoolArray:
    """Return (n, A_g) bool: agents that act or have a non-zero row; a living agent with neither was never observed."""
    out = acting.copy()
    for leaf in leaves:
        if leaf.dtype == np.object_:
            out |= np.array([[cell is not None for cell in row] for row in leaf.tolist()], np.bool_)
        else:
            out |= (leaf != 0).any(axis=tuple(range(2, leaf.ndim)))
    return out


def _and_more(problems: list[_Problem]) -> str:
    return f" ({len(problems) - 1} more like it in this env)" if len(problems) > 1 else ""
