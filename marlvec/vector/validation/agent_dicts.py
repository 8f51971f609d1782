"""Actions in dicts of agents, the form of loops that were written for other libraries; slow.

* ``{agent: (n, …)}``: one dict, with each agent's actions in all envs;
* ``[{agent: action}, …]``: one dict per env, with single actions.

Agents that do not act may be missing, or None. Axis letters: n envs, A_g agents of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from marlvec.envs.spec import AgentGroup, EnvSpec
from marlvec.errors import ActionError, ContractError
from marlvec.spaces import Leaf, SpaceTree

__all__ = ["is_by_agent", "join_agents", "lay_out"]


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
        # A group of one agent has the agent's name: only the agent axis distinguishes the two forms.
        return actions.keys() != {group.name for group in spec.groups} or _lacks_axis(first, actions[first.name])
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


def _lacks_axis(group: AgentGroup, value: Any) -> bool:
    """Return whether the actions lack an agent axis: shape (n, …), one agent in all envs."""
    if value is None:
        return True
    try:
        part, leaf = group.action_tree.flatten(value)[0], group.action_tree.leaves[0]
        if leaf.is_object and not isinstance(part, np.ndarray):
            return not isinstance(part[0], (list, tuple, np.ndarray))
        return np.ndim(part) == 1 + len(leaf.shape)
    except (ContractError, ValueError, TypeError, LookupError):  # neither form; an error is raised later
        return False


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
