"""Agents of N envs as rows of one batch; the agents of env i are rows i * A to i * A + A - 1, R in all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.utils.env_checker import data_equivalence
from numpy.typing import NDArray

from marlvec.errors import ActionError, ArgumentError, ContractError
from marlvec.interop.rows.view_checks import one_group
from marlvec.spaces import Leaf
from marlvec.vector.validation.agent_dicts import is_by_agent
from marlvec.vector.vector_env import VectorEnv

__all__ = ["AgentRows", "cleared"]

_SHOWN = 5  # names shown in messages


class AgentRows:
    """Row layout of a `VectorEnv` with one group."""

    def __init__(self, envs: VectorEnv, view: str) -> None:
        self.group = one_group(envs, view)
        self.agent_num = envs.agent_num
        self.row_num = envs.num_envs * envs.agent_num
        self._env_num = envs.num_envs
        self._grouped = envs.grouped
        self._spec = envs.spec

    def join(self, array: NDArray[Any]) -> NDArray[Any]:
        """(N, A, …) to (R, …), without a copy."""
        return array.reshape(self.row_num, *array.shape[2:])

    def spread(self, array: NDArray[Any]) -> NDArray[Any]:
        """Repeat values of envs for their agents: (N, …) to (R, …)."""
        return array.repeat(self.agent_num, axis=0)

    def of_envs(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Repeat one value per env for its agents: one value per row, the same object for all agents of an env."""
        return tuple(value for value in values for _ in range(self.agent_num))

    def per_env(self, values: Sequence[Any], what: str) -> list[Any]:
        """Reduce one value per row to one per env; ArgumentError names ``what`` if the values of one env differ."""
        if len(values) != self.row_num:
            raise ArgumentError(f"{what}: expected one per row, {self.row_num} in all, got {len(values)}")
        for row, value in enumerate(values):
            first = values[row - row % self.agent_num]
            if value is not first and not data_equivalence(value, first):
                raise ArgumentError(
                    f"{what}: expected equal values for rows of one env; row {row} differs from them: {value}"
                )
        return list(values[:: self.agent_num])

    def split(self, actions: Any) -> Any:
        """Convert actions (R, …), or a tree of them, to the form of `VectorEnv.step`; by agent, they have it."""
        if actions.__class__ is not np.ndarray and is_by_agent(self._spec, self._grouped, actions, self._env_num):
            return actions
        tree = self.group.action_tree
        if tree.is_leaf and not self._grouped:
            return self._split(actions, tree.leaves[0])
        try:
            parts = tree.flatten(actions)
        except ContractError as error:
            raise ActionError(f"actions: {error}") from None
        split = tree.unflatten([self._split(part, leaf) for part, leaf in zip(parts, tree.leaves, strict=True)])
        return {self.group.name: split} if self._grouped else split

    def _split(self, part: Any, leaf: Leaf) -> NDArray[Any]:
        where = f"actions of {leaf}" if leaf.path else "actions"
        if not leaf.is_object and (keys := _keys_in(part)) is not None:
            agents = list(self._spec.agents)
            raise ActionError(
                f"{where}: expected an array of shape {(self.row_num, *leaf.shape)}, one row per env and agent, got "
                f"{'a dict' if isinstance(part, Mapping) else 'dicts'} with keys {keys}. Give the rows env by env, in "
                f"the order of the agents: np.array([actions[i][agent] for i in range({self._env_num}) for agent in "
                f"{agents[:_SHOWN]}{'…' * (len(agents) > _SHOWN)}]); or one dict of agents for each env"
            )
        try:
            array = np.asarray(part)
        except (ValueError, TypeError) as error:  # ragged lists, tensors on a device
            raise ActionError(f"{where}: not an array: {error}") from error
        if array.shape[:1] != (self.row_num,):
            expected = (self.row_num, *leaf.shape)
            raise ActionError(f"{where}: expected shape {expected}, one row per env and agent, got {array.shape}")
        return array.reshape(self._env_num, self.agent_num, *array.shape[1:])


def _keys_in(part: Any) -> list[str] | None:
    """Return the keys of a dict, or of the first dict in a list; None if there is no dict."""
    first = part[0] if isinstance(part, (list, tuple)) and part else part
    return sorted(map(str, first))[:_SHOWN] if isinstance(first, Mapping) else None


def cleared(leaves: list[NDArray[Any]], rows: NDArray[np.bool_]) -> list[NDArray[Any]]:
    """Return leaves with these rows zeroed, in place if they are writable."""
    if not rows.any():
        return leaves
    leaves = [leaf if leaf.flags.writeable else leaf.copy() for leaf in leaves]
    for leaf in leaves:
        leaf[rows] = None if leaf.dtype == np.object_ else 0
    return leaves
