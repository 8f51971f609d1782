"""The slot contract: one multi-agent env that writes into its row of the buffers, the `Slot`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
from gymnasium.spaces import Discrete, Space
from numpy.typing import NDArray

from marlvec.envs.spec import EnvSpec, Info
from marlvec.errors import ContractError
from marlvec.spaces import Leaf, SpaceTree, check_member, check_size, snapshot
from marlvec.spaces.action_masks import mask_refusal, read_mask
from marlvec.spaces.members import fit
from marlvec.spaces.padding import Crop, cut


class MultiAgentEnv(ABC):
    """Base class of a single multi-agent env.

    Subclasses set the attributes in ``__init__`` and write into the slot in `reset` and `step`.

    Attributes:
        name: The env's name.
        agents: Agent names; their order is the agent axis.
        observation_spaces: One per agent, in that order, without the action mask.
        action_spaces: One per agent.
        mask_sizes: Length of each agent's action mask, or None; empty means that no agent has one.
        state_space: Space of the global state, or None.
        metadata: Any entries.
        resets_itself: Whether the step that ends an episode also begins the next one; see `Slot.begun`.
    """

    name: str = "env"
    agents: tuple[str, ...]
    observation_spaces: tuple[Space[Any], ...]
    action_spaces: tuple[Space[Any], ...]
    mask_sizes: tuple[int | None, ...] = ()
    state_space: Space[Any] | None = None
    metadata: Mapping[str, Any] = {}
    resets_itself: bool = False

    @abstractmethod
    def reset(self, slot: Slot, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Info | None:
        """Begin an episode.

        On entry the slot's obs rows are zero, ``alive`` and ``acting`` are False and masks allow everything. The env
        writes obs, ``alive``, ``acting`` and masks. It must not write reward and flags: in a same-step autoreset they
        still belong to the episode that just ended.

        Args:
            slot: The env's row.
            seed: New seed, or None to continue the env's own random stream.
            options: The user's options, or None.

        Returns:
            Infos, or None if all are empty. Action masks belong in the slot.
        """

    @abstractmethod
    def step(self, slot: Slot) -> Info | None:
        """Take one step with the slot's actions.

        On entry reward and flags are zero and dead agents' obs rows are zero. The env writes everything that has
        changed, and sets ``slot.done`` when the episode is over.

        Returns:
            Infos, or None if all are empty.
        """

    def cut_short(self, slot: Slot) -> None:
        """End the episode here, between two steps, for a reason outside of the env, such as a time limit.

        Every agent that is alive is truncated. An env whose agents do not observe in every step writes their final
        observations. The next call is a reset.
        """
        slot.cut_short()

    def write_state(self, slot: Slot) -> None:
        """Write the global state into ``slot.state``. Called only if ``state_space`` is given."""
        raise ContractError(f"{self.name} declares a state_space and has no write_state()")

    def state_obstacle(self) -> str | None:
        """Return why the env's state cannot be saved, and what to do, in one sentence; None if it can."""
        kind = type(self)
        if kind.get_state is not MultiAgentEnv.get_state and kind.set_state is not MultiAgentEnv.set_state:
            return None
        return f"{self.name} is a {kind.__name__}, which has no get_state() and set_state(state): give it both"

    def get_state(self) -> Any:
        """Return everything that the next steps depend on, except the slot's contents; called between two steps.

        Returns:
            Plain data: numbers, texts, None, arrays, and lists, tuples and dicts of these; copies, no part of the env.
        """
        raise NotImplementedError(f"{self.name}.get_state()")

    def set_state(self, state: Any) -> None:
        """Restore a state, read from this env or from another of its kind. The env must not keep or change it.

        The caller writes the slot afterwards.
        """
        raise NotImplementedError(f"{self.name}.set_state()")

    def close(self) -> None:
        """Release the env's resources."""

    @property
    def unwrapped(self) -> Any:
        """The user's own env object."""
        return self

    def spec(self) -> EnvSpec:
        """Describe this env.

        Returns:
            Agents, groups, spaces and the kind of state: all that a vectorizer needs before the first reset.

        Raises:
            ContractError: The env has no agents, or a space is missing.
        """
        agents = tuple(self.agents)
        if not agents:
            raise ContractError(f"{self.name} has no agents: possible_agents must name at least one")
        if len(set(agents)) != len(agents):
            raise ContractError(f"{self.name} names an agent twice: {agents}")
        sizes = tuple(self.mask_sizes) or (None,) * len(agents)
        for what, got in (("observation", self.observation_spaces), ("action", self.action_spaces), ("mask", sizes)):
            if len(got) != len(agents):
                raise ContractError(f"{self.name} has {len(agents)} agents and {len(got)} {what} spaces")
        return EnvSpec(
            name=self.name,
            agents=agents,
            observation_spaces=tuple(self.observation_spaces),
            action_spaces=tuple(self.action_spaces),
            mask_sizes=sizes,
            state_space=self.state_space,
            metadata=dict(self.metadata),
        )


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
