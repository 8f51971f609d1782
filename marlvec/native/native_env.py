"""Contract of native envs: one object holds N copies of an env, and steps them by compiled functions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol

import numpy as np
from gymnasium.spaces import Box, Discrete, Space
from numpy.typing import NDArray

from marlvec.env_ids import rows_of
from marlvec.envs.env import MultiAgentEnv, Slot
from marlvec.envs.spec import EnvSpec, Info, refuse_masks
from marlvec.envs.wrappers import padded_spec
from marlvec.errors import ActionError, ArgumentError, ContractError
from marlvec.native.rng_streams import fresh_streams

AnyArray = NDArray[Any]
BoolArray = NDArray[np.bool_]
Ids = NDArray[np.int64]


class Rows(Protocol):
    """The rows of all envs, laid out by `marlvec.vector.buffers.Buffers`; N envs, A agents, A_g of a group.

    Flags are strided columns of one block.
    """

    @property
    def obs(self) -> list[list[AnyArray]]:
        """Observations: per group, per leaf, (N, A_g, *leaf.shape), C-contiguous, of the leaf's dtype."""

    @property
    def actions(self) -> list[list[AnyArray]]:
        """Actions, laid out like ``obs``."""

    @property
    def action_masks(self) -> list[BoolArray | None]:
        """Allowed choices: per group (N, A_g, n) bool, or None if its actions have no choices."""

    @property
    def reward(self) -> NDArray[np.float64]:
        """Rewards of this step, (N, A)."""

    @property
    def terminated(self) -> BoolArray:
        """Whether an agent was terminated in this step, (N, A)."""

    @property
    def truncated(self) -> BoolArray:
        """Whether an agent was truncated in this step, (N, A)."""

    @property
    def alive(self) -> BoolArray:
        """Whether an agent is in the episode, (N, A)."""

    @property
    def acting(self) -> BoolArray:
        """Whether an agent must act now, (N, A)."""

    @property
    def done(self) -> BoolArray:
        """Whether an env's episode ended in this step, (N,)."""

    @property
    def state(self) -> AnyArray | None:
        """Global states, (N, *state_space.shape), or None."""


class NativeEnv(ABC):
    """N copies of one env, whose state is plain arrays with the env as first axis.

    Subclasses set the attributes that describe one env (as `MultiAgentEnv` has them), in the class or in ``__init__``,
    whose arguments are ``num_envs`` and those of the reference's constructor, with its defaults. It raises the error of
    `refuse` for arguments that only the reference supports.

    Methods get the envs to work on as ascending indices, and are called for disjoint sets of envs from several threads
    at once: they touch only these envs, and release the interpreter lock (`marlvec.native.kernels.kernel`). The runner
    checks actions against their spaces, clears rewards and flags, counts steps for a time limit, keeps final
    observations, begins the next episode, and seeds the streams.
    """

    name: str  # the reference's
    agents: tuple[str, ...]  # in the order of the agent axis
    observation_spaces: tuple[Space[Any], ...]  # per agent, without the action mask; the reference's
    action_spaces: tuple[Space[Any], ...]
    # length of each agent's action mask if the reference's spaces declare it, else None; (): no masks
    mask_sizes: tuple[int | None, ...] = ()
    state_space: Space[Any] | None = None
    metadata: Mapping[str, Any] = {}
    has_infos: bool = False  # whether the runner calls `infos` after resets and steps
    # Names of the arrays (N, …) of an env's state: attributes, or "attribute.field" of a NamedTuple. Its random stream
    # and its rows are saved without a name here. Each class lists what it adds to its bases, or (); a class without a
    # list cannot save states.
    state_names: tuple[str, ...]
    # Attributes in which the reference keeps its window; `render` passes it to the next reference, as a window's memory
    # is never freed.
    viewer_names: tuple[str, ...] = ()

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self._viewer: dict[str, Any] = {}
        self.rng = fresh_streams(num_envs)  # (N, 6): numpy's PCG64, continued across episodes; see `rng_kernels`

    def attach(self, rows: Rows) -> None:
        """Set ``rows``, the arrays to read and write; called once, before the first reset."""
        self.rows = rows

    @abstractmethod
    def reset(self, ids: Ids) -> None:
        """Begin an episode in each of these envs: write obs, ``alive``, ``acting``, and masks if spaces declare them.

        Do not write reward and flags: in a same-step autoreset they belong to the episode that just ended. On entry no
        agent is alive or acting, masks allow everything, and observations are unchanged. References of native envs use
        no options.
        """

    @abstractmethod
    def step(self, ids: Ids) -> None:
        """Take one step in each of these envs, all of which have a running episode, with the actions in their rows.

        On entry rewards and flags are zero, and actions lie in their spaces (except of agents that are not acting:
        never read these). Writes obs, reward and, if they change, flags, ``alive``, ``acting`` and masks. All agents of
        an env end in the same step, which sets ``terminated`` or ``truncated`` (or both, like the reference), clears
        ``alive`` and ``acting``, allows everything in the masks, writes each agent's last observation, and sets
        ``done``.

        Turn-based envs must equal their reference in the AEC adapter (`marlvec.envs.adapters.aec`): one step is one
        move; after it the next agent to act observes, at the end all do; others keep their last observation. The mask
        of an agent that is not acting allows everything. A step's rewards are all rewards given in it.
        """

    def check_actions(self, ids: Ids) -> None:
        """Raise ActionError, before any env moves, if an acting agent cannot take an action of its space now."""

    def cut_short(self, ids: Ids) -> None:
        """Write the final observations of envs that reach the runner's time limit in this step.

        The runner writes flags, ``alive`` and ``acting`` afterwards. Does nothing if all agents observe in every step.
        """

    def write_state(self, ids: Ids) -> None:
        """Write these envs' global states into ``rows.state``. Called only if ``state_space`` is given."""
        raise ContractError(f"{self.name}: state_space: expected a method write_state() beside it, got none")

    def infos(self, ids: Ids) -> dict[int, Info]:
        """Return infos of these envs' last reset or step, without masks, by env; called only if ``has_infos``."""
        return {}

    def reference(self, i: int, render_mode: str | None = None) -> Any:
        """Build the reference env in env ``i``'s state, for rendering and reading attributes."""
        raise refuse(self.name, "an env object per env (render, get_attr)")

    def render(self, i: int, render_mode: str | None) -> Any:
        """Let the reference draw env ``i``."""
        env = self.reference(i, render_mode)
        for name, value in self._viewer.items():
            setattr(env, name, value)
        frame = env.render()
        self._viewer = {name: getattr(env, name) for name in self.viewer_names}
        return frame

    def state_obstacle(self) -> str | None:
        """Return why these envs' states cannot be saved, or None."""
        if "state_names" in vars(type(self)):
            return None
        return (
            f"the native env {self.name} ({type(self).__name__}) does not say which of its arrays are its state: "
            f"declare state_names, as in marlvec.native.NativeEnv"
        )

    def state_arrays(self) -> dict[str, AnyArray]:
        """Return the state other than the rows: name → (N, …), the arrays themselves, not copies."""
        names = [name for kind in type(self).__mro__ for name in vars(kind).get("state_names", ())]
        return {"rng": self.rng, **{name: attrgetter(name)(self) for name in names}}

    def state_limits(self) -> dict[str, tuple[int, int]]:
        """Return legal limits of all `state_arrays` that kernels use as indices: name → (least, greatest).

        Compiled code checks no bounds, and a state may come from a file. Subclasses extend their base's dict.
        """
        return {}

    def check_limits(self, arrays: Mapping[str, AnyArray]) -> None:
        """Raise ArgumentError if an array of a saved state, (n, …) each, is outside of `state_limits`."""
        for name, (least, most) in self.state_limits().items():
            found = arrays[name]
            if found.size and not (least <= found.min() and found.max() <= most):
                raise ArgumentError(
                    f"set_state(): {self.name}: {name}: expected numbers from {least} to {most}, got from "
                    f"{found.min()} to {found.max()}"
                )

    def set_alive(self, ids: Ids) -> None:
        """Set all agents of these envs alive and acting; for use in `reset`."""
        self.rows.alive[ids] = True
        self.rows.acting[ids] = True

    def spec(self) -> EnvSpec:
        """Describe one env; equals the spec of the reference's adapter."""
        return EnvSpec(
            name=self.name,
            agents=tuple(self.agents),
            observation_spaces=tuple(self.observation_spaces),
            action_spaces=tuple(self.action_spaces),
            mask_sizes=tuple(self.mask_sizes) or (None,) * len(self.agents),
            state_space=self.state_space,
            metadata=dict(self.metadata),
        )


def own_arguments(scope: Mapping[str, Any]) -> dict[str, Any]:
    """Return a constructor's arguments but ``num_envs`` and ``options``, from ``locals()`` in its first line."""
    return {name: value for name, value in scope.items() if name not in ("self", "num_envs", "options", "__class__")}


def refuse(name: str, what: str) -> ArgumentError:
    """Return the error for an option that only the reference supports, e.g. ``"benchmark_data=True"``."""
    return ArgumentError(f"{name}: the native backend does not support {what}; backend='async' does")


class NativeEnvView:
    """Env ``i`` of a `NativeEnv`: an array with one row per env appears as this env's row, which may be written to.

    Attributes common to all envs appear unchanged. Only names with a leading underscore can be set, on this object.
    """

    def __init__(self, env: NativeEnv, i: int, render_mode: str | None) -> None:
        self.render_mode = render_mode
        self._of = env
        self._i = i

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or callable(getattr(type(self._of), name, None)):
            raise AttributeError(name)  # methods of the whole batch are hidden
        value = getattr(self._of, name)
        if isinstance(value, np.ndarray) and value.ndim and len(value) == self._of.num_envs:
            return value[self._i, ...]
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if "_i" in vars(self) and name not in vars(self) and not name.startswith("_"):
            raise AttributeError("compiled envs read only their arrays: write into these by exec_func()")
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        return f"<env {self._i} of {self._of.name}>"

    def render(self) -> Any:
        """Return a frame, drawn by the reference."""
        return self._of.render(self._i, self.render_mode)

    def reference(self) -> Any:
        """Build the reference env in this env's state: an independent copy."""
        return self._of.reference(self._i, self.render_mode)


_ONLY = np.zeros(1, np.int64)


class NativeSingleEnv(MultiAgentEnv):
    """A native env with a batch of one, for envs without a Python form; it is not faster than a Python env."""

    def __init__(self, env: NativeEnv) -> None:
        self._env = env
        self._spec = env.spec()
        self._rows = _OneRow(self._spec)
        self._view = NativeEnvView(env, 0, None)
        env.attach(self._rows)
        self.name, self.agents, self.metadata = env.name, env.agents, env.metadata
        self.observation_spaces, self.action_spaces = env.observation_spaces, env.action_spaces
        self.mask_sizes, self.state_space = env.mask_sizes, env.state_space

    @property
    def unwrapped(self) -> NativeEnvView:
        return self._view

    def reset(self, slot: Slot, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Info | None:
        rows = self._rows
        if seed is not None:
            from marlvec.native.kernels import seed_envs  # imports numba, which the env has imported already

            seed_envs(self._env.rng, _ONLY, [seed])
        rows.alive[:] = rows.acting[:] = False
        for mask in rows.action_masks:
            if mask is not None:
                mask[:] = True
        self._env.reset(_ONLY)
        return self._copy_out(slot)

    def step(self, slot: Slot) -> Info | None:
        rows = self._rows
        rows.reward[:] = 0
        rows.terminated[:] = rows.truncated[:] = False
        rows.done[:] = False
        actions = slot.read_actions()
        for group, leaves in zip(self._spec.groups, rows.actions, strict=True):
            for j, a in enumerate(group.agents):
                if rows.acting[0, a]:  # actions of waiting agents may be anything
                    for leaf, part in zip(leaves, group.action_tree.flatten(actions[a]), strict=True):
                        leaf[0, j] = part
        self._env.step(_ONLY)
        for a in range(len(self.agents)):
            slot.reward[a] = rows.reward[0, a]
            slot.terminated[a], slot.truncated[a] = rows.terminated[0, a], rows.truncated[0, a]
        slot.done = bool(rows.done[0])
        return self._copy_out(slot)

    def cut_short(self, slot: Slot) -> None:
        self._env.cut_short(_ONLY)
        self._copy_out(slot)
        super().cut_short(slot)

    def write_state(self, slot: Slot) -> None:
        self._env.write_state(_ONLY)
        assert self._rows.state is not None
        slot.write_state(self._rows.state[0])

    def state_obstacle(self) -> str | None:
        return self._env.state_obstacle()

    def get_state(self) -> dict[str, Any]:
        return {name: array.copy() for name, array in self._state_arrays().items()}

    def set_state(self, state: dict[str, Any]) -> None:
        self._env.check_limits(state)
        for name, array in self._state_arrays().items():
            array[...] = state[name]

    def _state_arrays(self) -> dict[str, Any]:
        rows = self._rows
        found = self._env.state_arrays() | {"alive": rows.alive, "acting": rows.acting}
        for g, leaves in enumerate(rows.obs):
            found |= {f"obs/{g}/{k}": leaf for k, leaf in enumerate(leaves)}
        return found | {f"mask/{g}": mask for g, mask in enumerate(rows.action_masks) if mask is not None}

    def _copy_out(self, slot: Slot) -> Info | None:
        rows = self._rows
        for g, group in enumerate(self._spec.groups):
            mask = rows.action_masks[g]
            for j, a in enumerate(group.agents):
                slot.write_obs(a, group.observation_tree.unflatten([leaf[0, j, ...] for leaf in rows.obs[g]]))
                slot.alive[a], slot.acting[a] = rows.alive[0, a], rows.acting[0, a]
                if mask is not None and group.mask_size is not None:
                    slot.write_mask(a, mask[0, j])
        return self._env.infos(_ONLY).get(0) if self._env.has_infos else None


class _OneRow:
    """The rows of one env; see `marlvec.native.native_env.Rows`."""

    def __init__(self, spec: EnvSpec) -> None:
        agent_num, groups = len(spec.agents), spec.groups
        self.obs = [group.observation_tree.zeros(1, len(group.agents)) for group in groups]
        self.actions = [group.action_tree.zeros(1, len(group.agents)) for group in groups]
        self.action_masks = [
            None if group.choices is None else np.ones((1, len(group.agents), group.choices), np.bool_)
            for group in groups
        ]
        self.reward = np.zeros((1, agent_num))
        self.terminated = np.zeros((1, agent_num), np.bool_)
        self.truncated, self.alive, self.acting = (self.terminated.copy() for _ in range(3))
        self.done = np.zeros(1, np.bool_)
        space = spec.state_space
        self.state = None if space is None else np.zeros((1, *(space.shape or ())), space.dtype)


@dataclass
class _OwnRows:
    """Rows of the wrapped envs: their own observations and actions, and the padded env's other arrays."""

    outer: Rows
    obs: list[list[AnyArray]]
    actions: list[list[AnyArray]]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.outer, name)


class PaddedNativeEnv(NativeEnv):
    """A native env whose agents share one observation space and one action space, large enough for all.

    Raises ContractError if the spaces cannot be padded, ArgumentError if one is not a Box or Discrete, or has a mask.
    """

    def __init__(self, env: NativeEnv) -> None:
        self._env = env
        self._own = env.spec()
        self._padded = padded_spec(self._own)
        spaces = [*self._own.observation_spaces, *self._own.action_spaces]
        if any(self._own.mask_sizes) or not all(isinstance(space, (Box, Discrete)) for space in spaces):
            raise refuse(env.name, "pad=True")
        self.num_envs, self.rng = env.num_envs, env.rng
        self.name, self.agents, self.metadata = env.name, env.agents, env.metadata
        self.state_space, self.has_infos = env.state_space, env.has_infos
        most = np.iinfo(np.int64).max
        self._sizes = np.array([getattr(space, "n", most) for space in self._own.action_spaces])
        for name in ("write_state", "state_obstacle", "state_limits", "check_limits", "reference", "render"):
            setattr(self, name, getattr(env, name))  # padding does not change these

    def spec(self) -> EnvSpec:
        return self._padded

    def attach(self, rows: Rows) -> None:
        super().attach(rows)
        n, groups = self.num_envs, self._own.groups
        self._members = [list(group.agents) for group in groups]
        obs = [group.observation_tree.zeros(n, len(group.agents)) for group in groups]
        actions = [group.action_tree.zeros(n, len(group.agents)) for group in groups]
        self._inner = _OwnRows(rows, obs, actions)
        self._env.attach(self._inner)

    def check_actions(self, ids: Ids) -> None:
        (given,) = self.rows.actions[0]
        if given.ndim != 2:
            return
        bad = np.argwhere((given[ids] >= self._sizes) & self.rows.acting[ids])
        if len(bad):
            k, a = bad[0].tolist()
            action, space = given[ids[k], a], self._own.action_spaces[a]
            raise ActionError(f"actions: env {ids[k]}, agent {self.agents[a]!r}: expected one of {space}, got {action}")

    def infos(self, ids: Ids) -> dict[int, Info]:
        found = self._env.infos(ids)
        for i, info in found.items():
            refuse_masks(self._own, info, f"{self.name}: env {i}: ")  # the padded spec has masks
        return found

    def reset(self, ids: Ids) -> None:
        self._env.reset(ids)
        self._show(ids)

    def step(self, ids: Ids) -> None:
        rows = rows_of(ids)
        (given,) = self.rows.actions[0]
        for members, (actions,) in zip(self._members, self._inner.actions, strict=True):
            own: Any = (slice(None), members, *map(slice, actions.shape[2:]))
            actions[rows] = given[rows][own]
        self._env.step(ids)
        self._show(ids)

    def cut_short(self, ids: Ids) -> None:
        self._env.cut_short(ids)
        self._show(ids)

    def state_arrays(self) -> dict[str, AnyArray]:
        own = {f"obs/{g}": leaves[0] for g, leaves in enumerate(self._inner.obs)}
        return {**self._env.state_arrays(), **own}

    def _show(self, ids: Ids) -> None:
        """Copy the envs' own observations into the first corner of the padded ones; the rest stays zero."""
        rows = rows_of(ids)
        (shown,) = self.rows.obs[0]
        for members, (obs,) in zip(self._members, self._inner.obs, strict=True):
            for j, a in enumerate(members):
                shown[rows, a, *map(slice, obs.shape[2:])] = obs[rows, j]
