"""`EnvSpec`: the agents of one env, their spaces, and their groups; the three autoreset modes and their rules."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, Literal

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Space, Tuple
from numpy.typing import NDArray

from marlvec.errors import ArgumentError, ContractError
from marlvec.spaces import SpaceTree, describe_difference
from marlvec.spaces.action_masks import count_choices, own_choices, why_no_mask
from marlvec.spaces.padding import describe_incompatibility, widen

COMMON = "__common__"
"""Key of an env's `Info` for entries that belong to no single agent."""
Info = dict[str, dict[str, Any]]
"""One env's infos: agent name → its info, and `COMMON` → entries of the whole env."""
Spaces = tuple[Space[Any], ...]
_MOST_CHOICES = 65_536  # limits the memory for masks of envs that may never return one


@dataclass(frozen=True)
class AgentGroup:
    """The agents of one env that have equal observation and action spaces.

    It is named by the common prefix of its agents' names (``"adversary"``) if there is one, else ``"agents"`` if it is
    the only group, else by its first agent.
    """

    name: str
    agents: tuple[int, ...]  # indices on the agent axis, ascending
    observation_tree: SpaceTree
    action_tree: SpaceTree
    mask_size: int | None  # of the action mask that an agent's spaces declare

    @property
    def observation_space(self) -> Space[Any]:
        """One agent's observation space."""
        return self.observation_tree.space

    @property
    def action_space(self) -> Space[Any]:
        """One agent's action space."""
        return self.action_tree.space

    @property
    def choices(self) -> int | None:
        """Length of an agent's action mask, whether declared by its space or possible in its infos; None: no mask."""
        if self.mask_size is not None:
            return self.mask_size
        count = count_choices(self.action_space)
        return None if count is None or count > _MOST_CHOICES else count


@dataclass(frozen=True)
class EnvSpec:
    """The properties of an env that a vectorizer needs, in a form that can be pickled.

    Attributes:
        name: The env's name.
        agents: Agent names; their order is the order of the agent axis.
        observation_spaces: One per agent, without the action mask.
        action_spaces: One per agent.
        mask_sizes: Length of the action mask that each agent's spaces declare, or None. `ContractError`: the action
            space, e.g. a Tuple, cannot have one.
        state_space: Space of the global state, or None.
        metadata: The env's metadata.
        original_observation_spaces, original_action_spaces: With padding, each agent's own space; None without.
    """

    name: str
    agents: tuple[str, ...]
    observation_spaces: Spaces
    action_spaces: Spaces
    mask_sizes: tuple[int | None, ...]
    state_space: Space[Any] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    original_observation_spaces: Spaces | None = None
    original_action_spaces: Spaces | None = None

    def __post_init__(self) -> None:
        for agent, space, size in zip(self.agents, self.action_spaces, self.mask_sizes, strict=False):
            if size is not None and (reason := why_no_mask(space)):
                raise ContractError(f"{self.name}: mask size of agent {agent!r}: {reason}")

    @cached_property
    def groups(self) -> tuple[AgentGroup, ...]:
        """Groups of agents with equal spaces, in order of their first agent."""
        members: list[list[int]] = []
        outlined: dict[
            Hashable, list[list[int]]
        ] = {}  # compare only agents of equal outline in pairs: there may be a thousand different spaces
        for a in range(len(self.agents)):
            near = outlined.setdefault(self._outline(a), [])
            home = next((m for m in near if self._alike(m[0], a)), None)
            if home is None:
                home = []
                members.append(home)
                near.append(home)
            home.append(a)
        names = _group_names([[self.agents[a] for a in m] for m in members])
        return tuple(
            AgentGroup(
                name,
                tuple(m),
                SpaceTree(self.observation_spaces[m[0]]),
                SpaceTree(self.action_spaces[m[0]]),
                self.mask_sizes[m[0]],
            )
            for name, m in zip(names, members, strict=True)
        )

    def _alike(self, a: int, b: int) -> bool:
        return (
            describe_difference(self.observation_spaces[a], self.observation_spaces[b]) is None
            and describe_difference(self.action_spaces[a], self.action_spaces[b]) is None
            and self.mask_sizes[a] == self.mask_sizes[b]
        )

    def _outline(self, a: int) -> Hashable:
        return _outline(self.observation_spaces[a]), _outline(self.action_spaces[a]), self.mask_sizes[a]

    @property
    def own_observation_spaces(self) -> Spaces:
        """One space per agent, as the env declares it: before padding."""
        return self.original_observation_spaces or self.observation_spaces

    @property
    def own_action_spaces(self) -> Spaces:
        """As `own_observation_spaces`, for actions."""
        return self.original_action_spaces or self.action_spaces

    @cached_property
    def allowed(self) -> tuple[NDArray[np.bool_] | None, ...]:
        """Per agent, the mask that allows all actions of its own space, (n,) bool; None if that is all True."""
        if self.original_action_spaces is None:
            return (None,) * len(self.agents)
        spaces = zip(self.original_action_spaces, self.action_spaces, self.mask_sizes, strict=True)
        return tuple(
            None if size is None or own == padded else own_choices(own, padded) for own, padded, size in spaces
        )

    def difference(self, other: EnvSpec, mode: str = "equal") -> str | None:
        """Return in which field ``other`` first differs from this spec, or None if they are compatible.

        ``mode="compatible"``: the bounds of Boxes may differ.
        """
        if self.agents != other.agents:
            return f"agents: expected {self.agents}, got {other.agents}"
        describe = describe_incompatibility if mode == "compatible" else describe_difference
        fitting: set[tuple[int, int]] = set()  # agents often share one space object
        for what, mine, theirs in (
            ("observation space", self.observation_spaces, other.observation_spaces),
            ("action space", self.action_spaces, other.action_spaces),
            ("own observation space", self.own_observation_spaces, other.own_observation_spaces),
            ("own action space", self.own_action_spaces, other.own_action_spaces),
        ):
            for agent, a, b in zip(self.agents, mine, theirs, strict=True):
                pair = id(a), id(b)
                if pair not in fitting and (differs := describe(a, b)):
                    return f"{what} of agent {agent!r} {differs}"
                fitting.add(pair)
        if self.mask_sizes != other.mask_sizes:
            return f"action mask sizes: expected {self.mask_sizes}, got {other.mask_sizes}"
        state, others = self.state_space, other.state_space
        if state is None or others is None:
            return None if state is others else f"state space: expected {state}, got {others}"
        differs = describe(state, others)
        return f"state space {differs}" if differs else None

    def widened(self, other: EnvSpec) -> EnvSpec:
        """Return a spec for this env and a compatible one: their bounds are element by element the wider ones."""

        def widen_all(mine: Spaces | None, theirs: Spaces | None) -> Spaces | None:
            if mine is None or theirs is None:
                return None
            return tuple(widen(a, b) for a, b in zip(mine, theirs, strict=True))

        observation_spaces = widen_all(self.observation_spaces, other.observation_spaces)
        action_spaces = widen_all(self.action_spaces, other.action_spaces)
        assert observation_spaces is not None
        assert action_spaces is not None
        states = [space for space in (self.state_space, other.state_space) if space is not None]
        return replace(
            self,
            observation_spaces=observation_spaces,
            action_spaces=action_spaces,
            state_space=widen(*states) if len(states) == 2 else self.state_space,
            original_observation_spaces=widen_all(self.original_observation_spaces, other.original_observation_spaces),
            original_action_spaces=widen_all(self.original_action_spaces, other.original_action_spaces),
        )


def _outline(space: Space[Any]) -> Hashable:
    """Return a hashable value that is equal for equal spaces."""
    if isinstance(space, Dict):
        return type(space), frozenset((str(key), _outline(sub)) for key, sub in space.spaces.items())
    if isinstance(space, Tuple):
        return type(space), tuple(_outline(sub) for sub in space.spaces)
    if isinstance(space, Discrete):
        return type(space), int(space.n), int(space.start)
    return type(space), space.shape


def object_leaves(spec: EnvSpec) -> list[str]:
    """List, in words, the leaves without a fixed-size array form, for one agent of each group."""
    return [
        f"{what} of agent {spec.agents[group.agents[0]]!r}"
        + (f", leaf {leaf.path!r}" if leaf.path else "")
        + f" ({type(leaf.space).__name__})"
        for group in spec.groups
        for what, tree in (("observation", group.observation_tree), ("action", group.action_tree))
        for leaf in tree.leaves
        if leaf.is_object
    ]


def _group_names(groups: Sequence[Sequence[str]]) -> list[str]:
    """Name groups of agents: ``agent_0, agent_1`` share the prefix ``agent``."""
    prefixes = [{re.sub(r"_\d+$", "", name) for name in group} for group in groups]
    wanted = [next(iter(p)) if len(p) == 1 else None for p in prefixes]
    if len(groups) == 1:
        return [wanted[0] if wanted[0] is not None and len(groups[0]) > 1 else "agents"]
    known = Counter(prefix for found in prefixes for prefix in found)
    return [
        name if name is not None and known[name] == 1 else group[0] for name, group in zip(wanted, groups, strict=True)
    ]


def refuse_masks(spec: EnvSpec, info: Info, where: str = "") -> None:
    """Raise `ContractError` if infos have an action mask that forbids nothing, because no policy receives it.

    Adapters move masks out of the infos before. Agents whose spaces declare a mask, or whose action is a Box, may have
    an info of that name. `where` begins the message.
    """
    for who, entries in info.items():
        if entries.get("action_mask") is None:
            continue
        for agent, space, size in zip(spec.agents, spec.action_spaces, spec.mask_sizes, strict=True):
            if size is None and who in (agent, COMMON) and not isinstance(space, Box):
                raise ContractError(
                    f"{where}info of {'the env' if who == COMMON else f'agent {who!r}'}: 'action_mask': "
                    + (
                        why_no_mask(space)
                        or f"expected none in infos, where it forbids no action of {agent!r}, {space}. Write it with "
                        f"Slot.write_mask() (a MultiAgentEnv), into rows.action_masks (a NativeEnv with mask_sizes) or "
                        f"PoolReply.masks (a Pool); or put it under another key, e.g. 'my_mask'"
                    )
                )


class AutoresetMode(StrEnum):
    """Gymnasium's three modes, by marlvec's names; equal to the plain strings."""

    SAME_STEP = "same_step"
    """The step that ends an episode begins the next one, and returns its first observation."""
    NEXT_STEP = "next_step"
    """The step after the end begins the next episode, and ignores its action."""
    DISABLED = "disabled"
    """The caller begins the next episode, by `reset`."""

    @classmethod
    def named(cls, word: Any) -> AutoresetMode | None:
        """Return the mode for text or Gymnasium's enum, ``"same_step"``, ``"SameStep"``, ``"same-step"``, or None."""
        plain = _letters(getattr(word, "value", word))
        return next((mode for mode in cls if _letters(mode.value) == plain), None)

    @classmethod
    def declared_by(cls, metadata: Mapping[str, Any], name: str) -> AutoresetMode | None:
        """Return the mode that the metadata of an env or a pool declare; None if they declare none."""
        word = metadata.get("autoreset_mode")
        if word is None:
            return None
        if (mode := cls.named(word)) is None:
            raise ContractError(
                f"{name}: metadata: autoreset_mode is {word!r}: expected {' or '.join(repr(m.value) for m in cls)}"
            )
        return mode


@dataclass(frozen=True)
class AutoresetRules:
    """The rules of an autoreset mode. Other code uses these flags instead of comparing names."""

    mode: AutoresetMode

    @classmethod
    def of(cls, mode: str) -> AutoresetRules:
        """Return the rules of the mode with that name."""
        return cls(AutoresetMode(mode))

    @cached_property
    def begins_at_once(self) -> bool:
        return self.mode is AutoresetMode.SAME_STEP

    @cached_property
    def begins_on_next_step(self) -> bool:
        return self.mode is AutoresetMode.NEXT_STEP

    @cached_property
    def caller_begins(self) -> bool:
        return self.mode is AutoresetMode.DISABLED

    def check_env(self, name: str, *, resets_itself: bool, keeps_state: bool) -> None:
        """Raise if an env does not support this mode. `keeps_state`: the global state at the end is requested."""
        if not resets_itself:
            return
        if not self.begins_at_once:
            raise ArgumentError(
                f"{name} resets itself in the step that ends its episode: expected autoreset_mode='same_step', "
                f"got {self.mode.value!r}"
            )
        if keeps_state:
            raise ArgumentError(
                f"state=True: {name} resets itself, so the state at the end of an episode cannot be read"
            )

    def check_pool(self, name: str, own: AutoresetMode, *, steps_all: bool) -> None:
        """Raise if a pool does not support this mode. `steps_all`: it can only step all its envs at once."""
        if own is self.mode:
            return
        wanted = f"autoreset_mode={self.mode.value!r}: {name}"
        if own is AutoresetMode.SAME_STEP:
            raise ArgumentError(f"{wanted} begins the next episode in the same step by itself; take 'same_step'")
        if steps_all and not (own is AutoresetMode.DISABLED and self.begins_at_once):
            raise ArgumentError(f"{wanted} steps all its envs at once, and its own mode is {own.value!r}; take that")

    def next_episode_request(self, own: AutoresetMode) -> Literal["reset", "step"] | None:
        """Return the request that begins an env's next episode in a pool of the mode `own`, when this mode begins one.

        ``"step"`` if a step of an ended env begins it, whatever the action. None: no request is needed, since the pool
        has begun it by itself, or the caller begins it.
        """
        if self.caller_begins or own is AutoresetMode.SAME_STEP:
            return None
        return "step" if own is AutoresetMode.NEXT_STEP else "reset"


def _letters(word: Any) -> str:
    return str(word).lower().replace("_", "").replace("-", "")
