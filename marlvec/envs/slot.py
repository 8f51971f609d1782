"""One env's row of the buffers, as the env sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from gymnasium.spaces import Discrete
from numpy.typing import NDArray

from marlvec.envs.spec import EnvSpec
from marlvec.errors import ContractError
from marlvec.spaces import SpaceTree

__all__ = ["Slot"]

AnyArray = NDArray[Any]


class Slot:
    """One env's row of the buffers; what an env writes here needs no further copy.

    Args:
        spec: The env's spec.
        obs: Per group, per leaf: this env's row, shape (A_group, *leaf.shape).
        actions: Likewise for actions.
        action_mask: Per group (A_group, n) bool, or None.
        reward: (A,) float64.
        terminated, truncated, alive, acting: (A,) bool.
        state: Row of the global state, or None.

    Attributes:
        done: Whether the episode is over. The vectorizer sets it to False before each call; the env sets it to True
            in the step in which its last agent ends.
        reward, terminated, truncated, alive, acting: memoryviews of length A: scalars go in at their fastest.
        cells: Per agent a memoryview of its observation's row, where that is one array with one axis; else None.
            ``cells[a][:] = value`` takes half the time of `write_obs`, and never broadcasts or casts: it raises
            ValueError or TypeError unless ``value`` is a buffer of the same shape and format; `write_obs` then knows
            what to do.
        action_mask: Per agent its (n,) bool row, or None.
        state: The global state's row, or None.
    """

    __slots__ = (
        "_fast",
        "_names",
        "_obs",
        "_readers",
        "_trees",
        "acting",
        "action_mask",
        "alive",
        "cells",
        "done",
        "reward",
        "state",
        "terminated",
        "truncated",
    )

    def __init__(
        self,
        spec: EnvSpec,
        *,
        obs: Sequence[Sequence[AnyArray]],
        actions: Sequence[Sequence[AnyArray]],
        action_mask: Sequence[AnyArray | None],
        reward: AnyArray,
        terminated: AnyArray,
        truncated: AnyArray,
        alive: AnyArray,
        acting: AnyArray,
        state: AnyArray | None,
    ) -> None:
        self.done = False
        # typeshed knows memoryviews of ints only.
        self.reward = cast("memoryview[float]", reward.data)
        self.terminated = terminated.data
        self.truncated = truncated.data
        self.alive = alive.data
        self.acting = acting.data
        self.state = state
        self._names = spec.agents
        # Everything below is by agent index, so that adapters need no idea of groups.
        agent_num = len(spec.agents)
        self._obs: list[tuple[AnyArray, ...]] = [()] * agent_num
        self._trees: list[SpaceTree] = [SpaceTree(space) for space in spec.observation_spaces]
        self._fast: list[tuple[AnyArray, np.dtype[Any], tuple[int, ...]] | None] = [None] * agent_num
        self.action_mask: list[AnyArray | None] = [None] * agent_num
        self._readers: list[tuple[tuple[int, ...], _ActionReader]] = []
        for g, group in enumerate(spec.groups):
            self._readers.append((group.agents, _ActionReader(group.action_tree, actions[g])))
            mask = action_mask[g]
            for j, a in enumerate(group.agents):
                leaves = tuple(leaf[j, ...] for leaf in obs[g])
                self._obs[a] = leaves
                if group.observation_tree.is_leaf:
                    self._fast[a] = (leaves[0], leaves[0].dtype, leaves[0].shape)
                if mask is not None:
                    self.action_mask[a] = mask[j]
        self.cells: list[memoryview | None] = [_cell(fast[0]) if fast else None for fast in self._fast]

    def write_obs(self, agent: int, value: Any) -> None:
        """Write agent number ``agent``'s observation.

        Raises:
            ContractError: Wrong keys, shape, or a dtype that does not cast without changing its kind.
        """
        fast = self._fast[agent]
        if fast is not None:
            row, dtype, shape = fast
            if value.__class__ is np.ndarray and value.dtype == dtype and value.shape == shape:
                row[...] = value
                return
        tree = self._trees[agent]
        try:
            for row, leaf, part in zip(self._obs[agent], tree.leaves, tree.flatten(value), strict=True):
                _write_leaf(row, part, str(leaf))
        except ContractError as error:
            raise ContractError(f"observation of agent {self._names[agent]!r}: {error}") from None

    def write_mask(self, agent: int, value: Any) -> None:
        """Write agent number ``agent``'s action mask; anything that is not zero means allowed."""
        row = self.action_mask[agent]
        mask = np.asarray(value)
        if row is None or mask.shape != row.shape:
            expected = "no mask" if row is None else f"shape {row.shape}"
            raise ContractError(f"action mask of agent {self._names[agent]!r}: expected {expected}, got {mask.shape}")
        np.not_equal(mask, 0, out=row)

    def clear_mask(self, agent: int) -> None:
        """Allow every action: the mask of an agent that is not acting."""
        row = self.action_mask[agent]
        if row is not None:
            row[...] = True

    def zero_obs(self, agent: int) -> None:
        """Zero one agent's observation."""
        for row in self._obs[agent]:
            row[...] = 0

    def write_state(self, value: Any) -> None:
        """Write the global state."""
        if self.state is None:
            raise ContractError("this env declared no state_space, so it has no state to write")
        _write_leaf(self.state, value, "the global state")

    def read_actions(self) -> list[Any]:
        """One action per agent, in order of the agent axis; those of agents that are not acting mean nothing.

        Discrete ones are Python ints, arrays are private copies, Dict and Tuple spaces give trees.
        """
        if len(self._readers) == 1:
            return self._readers[0][1].read()
        out: list[Any] = [None] * len(self._names)
        for agents, reader in self._readers:
            for a, action in zip(agents, reader.read(), strict=True):
                out[a] = action
        return out


class _ActionReader:
    """Turns one group's rows of the action buffers into actions as an env expects them."""

    __slots__ = ("_is_scalar", "_rows", "_tree")

    def __init__(self, tree: SpaceTree, rows: Sequence[AnyArray]) -> None:
        self._tree = tree
        self._rows = tuple(rows)
        self._is_scalar = [isinstance(leaf.space, Discrete) for leaf in tree.leaves]

    def read(self) -> list[Any]:
        if self._tree.is_leaf:
            return self._read_leaf(0)
        leaves = [self._read_leaf(k) for k in range(len(self._rows))]
        return [self._tree.unflatten(parts) for parts in zip(*leaves, strict=True)]

    def _read_leaf(self, k: int) -> list[Any]:
        if self._is_scalar[k]:
            scalars: list[Any] = self._rows[k].tolist()
            return scalars
        # A list over a copy: the env may keep its action, and it must not change under its hands in the next step.
        copy = self._rows[k].copy()
        return list(copy) if copy.ndim > 1 else [copy[j, ...] for j in range(len(copy))]  # 0-d arrays, not scalars


def _write_leaf(row: AnyArray, value: Any, where: str) -> None:
    """Write one leaf, refusing what numpy would broadcast or convert in silence."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as error:  # a ragged list, an object that refuses to become an array
        raise ContractError(f"{where}: expected shape {row.shape}, got no array at all ({error})") from None
    if array.shape != row.shape:
        raise ContractError(f"{where}: expected shape {row.shape}, got {array.shape}")
    if np.can_cast(array.dtype, row.dtype, "safe"):
        row[...] = array
        return
    if array.dtype.kind in "iub" and row.dtype.kind in "iub":
        cast = array.astype(row.dtype)
        if np.array_equal(cast, array):
            row[...] = cast
            return
        raise ContractError(f"{where}: the value {value!r} does not fit dtype {row.dtype}")
    if array.dtype.kind in "iubf" and row.dtype.kind == "f":
        row[...] = array
        return
    raise ContractError(f"{where}: expected dtype {row.dtype}, got {array.dtype}, which would change the value")


def _cell(row: AnyArray) -> memoryview | None:
    return row.data if row.ndim == 1 and row.size and row.flags.c_contiguous else None
