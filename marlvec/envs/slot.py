"""`Slot`: one env's row of the buffers, for reading actions and writing results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from gymnasium.spaces import Discrete
from numpy.typing import NDArray

from marlvec.envs.spec import EnvSpec, Info
from marlvec.errors import ContractError
from marlvec.spaces import Leaf, SpaceTree, check_member, check_size, snapshot
from marlvec.spaces.action_masks import mask_refusal, read_mask
from marlvec.spaces.members import fit
from marlvec.spaces.padding import Crop, cut

__all__ = ["Slot", "ActionReader", "ObjectCells"]

AnyArray = NDArray[Any]


class Slot:
    """One env's row of the buffers; values that an env writes here are not copied again. A agents, n actions.

    Made by `Slot.of_groups`; the constructor takes arrays by agent, which `narrowed` needs: per agent, per leaf its row
    of shape leaf.shape (``obs``, ``final_obs``); readers of actions with the indices of their agents; (A,) float64
    ``reward`` and (A,) bool flags.

    Attributes:
        done: Whether the episode is over. The vectorizer sets it to False before each call; the env sets it to True
            in the step in which its last agent ends.
        begun: Set to True, with ``done``, by an env that has reset itself in this step (`MultiAgentEnv.resets_itself`):
            observations, ``alive``, ``acting`` and masks then belong to its next episode, reward and flags to the
            ended one, whose last observations were written by `write_final`.
        final_info: With ``begun``: infos of the last step of the ended episode, or None.
        reward, terminated, truncated, alive, acting: memoryviews of length A, the fastest way to write scalars.
        final_missing: memoryview of length A: True, set together with its flag, for an agent that ends without an
            observation. Its row keeps its previous observation.
        gave_mask: memoryview of length 1: whether the env has ever written a mask that its spaces do not declare.
        fast_rows: Per agent a memoryview of its observation's row, if that is one array with one axis; else None.
            ``fast_rows[a][:] = value`` takes half the time of `write_obs`, and never broadcasts or casts: it raises
            ValueError or TypeError unless ``value`` is a buffer of the same shape and format; call `write_obs` then.
        fast_actions: A C function with the result of `read_actions`; None if there is none.
        action_mask: Per agent its (n,) bool row, or None if its action space cannot have a mask.
        state: The global state's row, or None.
    """

    __slots__ = (
        "_action_spaces",
        "_allowed",
        "_declared",
        "_fast",
        "_final",
        "_final_objects",
        "_names",
        "_objects",
        "_obs",
        "_readers",
        "_trees",
        "acting",
        "action_mask",
        "alive",
        "begun",
        "done",
        "fast_actions",
        "fast_rows",
        "final_info",
        "final_missing",
        "gave_mask",
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
        final_obs: Sequence[Sequence[AnyArray]],
        readers: Sequence[tuple[tuple[int, ...], ActionReader]],
        action_mask: Sequence[AnyArray | None],
        gave_mask: AnyArray,
        reward: AnyArray,
        terminated: AnyArray,
        truncated: AnyArray,
        final_missing: AnyArray,
        alive: AnyArray,
        acting: AnyArray,
        state: AnyArray | None,
    ) -> None:
        self.done = self.begun = False
        self.final_info: Info | None = None
        # typeshed supports memoryviews of ints only.
        self.reward = cast("memoryview[float]", reward.data)
        self.terminated = terminated.data
        self.truncated = truncated.data
        self.final_missing = final_missing.data
        self.alive = alive.data
        self.acting = acting.data
        self.gave_mask = gave_mask.data
        self.state = state
        self._names = spec.agents
        self._trees: list[SpaceTree] = [SpaceTree(space) for space in spec.observation_spaces]
        self._obs = [tuple(leaves) for leaves in obs]
        self._final = [tuple(leaves) for leaves in final_obs]
        self._objects, self._final_objects = ObjectCells(self._obs), ObjectCells(self._final)
        self._fast: list[tuple[AnyArray, np.dtype[Any], tuple[int, ...]] | None] = [
            (leaves[0], leaves[0].dtype, leaves[0].shape) if tree.is_leaf and not tree.leaves[0].is_object else None
            for tree, leaves in zip(self._trees, self._obs, strict=True)
        ]
        self.fast_rows: list[memoryview | None] = [_cell(fast[0]) if fast else None for fast in self._fast]
        self._readers = list(readers)
        self.fast_actions = readers[0][1].quick if len(readers) == 1 else None
        self.action_mask = list(action_mask)
        self._action_spaces = spec.action_spaces
        self._allowed = spec.allowed
        self._declared = [size is not None for size in spec.mask_sizes]

    @classmethod
    def of_groups(
        cls,
        spec: EnvSpec,
        *,
        obs: Sequence[Sequence[AnyArray]],
        final_obs: Sequence[Sequence[AnyArray]],
        actions: Sequence[Sequence[AnyArray]],
        action_mask: Sequence[AnyArray | None],
        **rows: Any,
    ) -> Slot:
        """Make a slot from arrays by group.

        `obs`, `final_obs`, `actions`: per group, per leaf: this env's row, (A_group, *leaf.shape); `action_mask`: per
        group (A_group, n) bool, or None; `rows`: the other arguments of the constructor.
        """
        agent_num = len(spec.agents)
        obs_of: list[list[AnyArray]] = [[]] * agent_num
        final_of: list[list[AnyArray]] = [[]] * agent_num
        mask_of: list[AnyArray | None] = [None] * agent_num
        for g, group in enumerate(spec.groups):
            mask = action_mask[g]
            for j, a in enumerate(group.agents):
                obs_of[a] = [leaf[j, ...] for leaf in obs[g]]
                final_of[a] = [leaf[j, ...] for leaf in final_obs[g]]
                mask_of[a] = None if mask is None else mask[j]
        pairs = zip(spec.groups, actions, strict=True)
        readers = [
            (group.agents, ActionReader(group.action_tree, leaves, len(group.agents))) for group, leaves in pairs
        ]
        return cls(spec, obs=obs_of, final_obs=final_of, readers=readers, action_mask=mask_of, **rows)

    def narrowed(
        self,
        spec: EnvSpec,
        *,
        obs: Sequence[Sequence[Crop]],
        actions: Sequence[Sequence[Crop]],
        action_mask: Sequence[AnyArray | None],
    ) -> Slot:
        """Return a slot for an env with smaller spaces, whose arrays are views of parts of this slot's.

        `obs`, `actions`: per agent, per leaf: the part of its row that belongs to its own space; `action_mask`: per
        agent.
        """

        def cut_all(rows: Sequence[Sequence[AnyArray]]) -> list[list[AnyArray]]:
            return [list(map(cut, leaves, crops)) for leaves, crops in zip(rows, obs, strict=True)]

        ((agents, reader),) = self._readers
        names = ("gave_mask", "reward", "terminated", "truncated", "final_missing", "alive", "acting")
        flags = {name: np.asarray(getattr(self, name)) for name in names}
        return Slot(
            spec,
            obs=cut_all(self._obs),
            final_obs=cut_all(self._final),
            readers=[(agents, reader.cropped(actions))],
            action_mask=action_mask,
            **flags,
            state=self.state,
        )

    def write_obs(self, agent: int, value: Any) -> None:
        """Write agent number ``agent``'s observation.

        `ContractError`, and the row is unchanged: wrong keys or shape, or a dtype that cannot be cast without changing
        its kind; an object that its space does not contain, that cannot be pickled or is too large.
        """
        fast = self._fast[agent]
        if fast is not None:
            row, dtype, shape = fast
            if value.__class__ is np.ndarray and value.dtype == dtype and value.shape == shape:
                row[...] = value
                return
        self._write_tree(self._obs[agent], self._objects, agent, value, "observation")

    def write_final(self, agent: int, value: Any) -> None:
        """As `write_obs`, the final observation, in an env that has itself begun the next episode."""
        self._write_tree(self._final[agent], self._final_objects, agent, value, "final observation")

    def write_mask(self, agent: int, value: Any) -> None:
        """Write agent number ``agent``'s action mask, in a form that `action_masks.read_mask` accepts."""
        row = self.action_mask[agent]
        try:
            if row is None:
                raise ContractError(mask_refusal(self._action_spaces[agent]))
            mask = read_mask(value)
            if mask.shape != row.shape:
                raise ContractError(f"expected shape {row.shape}, got {mask.shape}")
        except ContractError as error:
            raise ContractError(f"action mask of agent {self._names[agent]!r}: {error}") from None
        row[...] = mask
        if not self._declared[agent]:
            self.gave_mask[0] = True

    def clear_mask(self, agent: int) -> None:
        """Allow all actions of an agent, as for every agent that is not acting."""
        row = self.action_mask[agent]
        if row is not None and (self._declared[agent] or self.gave_mask[0]):
            allowed = self._allowed[agent]
            row[...] = True if allowed is None else allowed

    def cut_short(self) -> None:
        """End the episode here: every agent that is alive is truncated."""
        for a, alive in enumerate(self.alive):
            if alive:
                self.truncated[a] = True
                self.alive[a] = self.acting[a] = False
                self.clear_mask(a)
        self.done = True

    def zero_obs(self, agent: int) -> None:
        """Set one agent's observation to zeros; object leaves to None."""
        for row in self._obs[agent]:
            row[...] = None if row.dtype == np.object_ else 0

    def write_state(self, value: Any) -> None:
        """Write the global state."""
        if self.state is None:
            raise ContractError("this env declared no state_space, so it has no state to write")
        self.state[...] = fit(self.state, value, "the global state")

    def _write_tree(self, rows: Sequence[AnyArray], objects: ObjectCells, agent: int, value: Any, what: str) -> None:
        tree = self._trees[agent]
        try:
            parts = [
                objects.fit(agent, k, leaf, part) if leaf.is_object else fit(row, part, leaf)
                for k, (row, leaf, part) in enumerate(zip(rows, tree.leaves, tree.flatten(value), strict=True))
            ]
        except ContractError as error:
            raise ContractError(f"{what} of agent {self._names[agent]!r}: {error}") from None
        for row, fitting in zip(rows, parts, strict=True):
            row[...] = fitting

    def read_actions(self) -> list[Any]:
        """Return one action per agent, in order of the agent axis; undefined for agents that are not acting.

        Discrete actions are Python ints, arrays are copies, actions of Dict and Tuple spaces are trees.
        """
        if self.fast_actions is not None:
            return self.fast_actions()
        if len(self._readers) == 1:
            return self._readers[0][1].read()
        out: list[Any] = [None] * len(self._names)
        for agents, reader in self._readers:
            for a, action in zip(agents, reader.read(), strict=True):
                out[a] = action
        return out


def _cell(row: AnyArray) -> memoryview | None:
    return row.data if row.ndim == 1 and row.size and row.flags.c_contiguous else None


class ActionReader:
    """Reads the actions of some agents of one env; `rows`: per leaf, (agents, *leaf.shape).

    `crops`: per agent and leaf, the part of the row that belongs to the agent's own space; None: all of it.
    """

    __slots__ = ("_agent_num", "_crops", "_is_bare", "_rows", "_tree")

    def __init__(
        self,
        tree: SpaceTree,
        rows: Sequence[AnyArray],
        agent_num: int,
        crops: Sequence[Sequence[Crop]] | None = None,
    ) -> None:
        self._tree = tree
        self._rows = tuple(rows)
        self._agent_num = agent_num
        self._crops = crops
        self._is_bare = [leaf.is_object or isinstance(leaf.space, Discrete) for leaf in tree.leaves]

    @property
    def quick(self) -> Callable[[], list[Any]] | None:
        """Return a C function equivalent to `read`, or None."""
        return self._rows[0].tolist if self._tree.is_leaf and self._is_bare[0] else None

    def cropped(self, crops: Sequence[Sequence[Crop]]) -> ActionReader:
        """Return a reader for agents whose actions are parts of their rows."""
        return ActionReader(self._tree, self._rows, self._agent_num, crops)

    def read(self) -> list[Any]:
        """Return one action per agent: Discrete actions are Python ints, arrays are copies, objects are unchanged."""
        if self._tree.is_leaf:
            return self._read_leaf(0)
        if not self._rows:  # an empty Dict or Tuple
            return [self._tree.unflatten(()) for _ in range(self._agent_num)]
        leaves = [self._read_leaf(k) for k in range(len(self._rows))]
        return [self._tree.unflatten(parts) for parts in zip(*leaves, strict=True)]

    def _read_leaf(self, k: int) -> list[Any]:
        if self._is_bare[k]:
            values: list[Any] = self._rows[k].tolist()
            return values
        # A list over a copy: the env may keep its action, which must not change in the next step.
        copy = self._rows[k].copy()
        if self._crops is not None:
            return [cut(copy[j, ...], crops[k]) for j, crops in enumerate(self._crops)]
        return list(copy) if copy.ndim > 1 else [copy[j, ...] for j in range(len(copy))]  # 0-d arrays, not scalars


class ObjectCells:
    """Checks and copies objects that an env returns; limits their total size. Cells of object leaves have no axes."""

    __slots__ = ("_rows", "_sizes")

    def __init__(self, rows: Sequence[Sequence[AnyArray]]) -> None:
        self._rows = rows
        self._sizes: dict[tuple[int, int], int] = {}  # (agent, leaf) → bytes of the value there

    def fit(self, agent: int, k: int, leaf: Leaf, value: Any) -> AnyArray:
        """Return an array without axes with a copy of a value for the cell of agent number ``agent``'s leaf ``k``."""
        check_member(leaf, value)
        copy, size = snapshot(leaf, value)
        # Other code clears cells, too, so empty cells are left out of the sum.
        check_size(leaf, size, sum(n for at, n in self._sizes.items() if at != (agent, k) and self._is_full(*at)))
        self._sizes[agent, k] = size
        cell = np.empty((), np.object_)
        cell.fill(copy)  # an assignment would unpack sequences
        return cell

    def _is_full(self, agent: int, k: int) -> bool:
        return self._rows[agent][k][()] is not None
