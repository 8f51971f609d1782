"""Contract of native envs: one object holds N copies of an env, and steps them by compiled functions.

A `NativeEnv` keeps the state of all its envs as plain arrays, whose first axis is the env, and reads and writes their
rows of the buffers. Its functions get the envs to work on as an int64 array of indices, ascending, and are called for
disjoint sets of envs from several threads at once: they touch only these envs, and release the interpreter lock
(`marlvec.native.jit.kernel`).

A native env does **not** do the runner's work: check actions against their
spaces, clear rewards and flags, count steps for a time limit, keep final observations, begin the next episode, split
work over threads, spread seeds.

How to write one
----------------
Subclass `NativeEnv`, set the attributes that describe one env, and write two methods, each a line that calls a
compiled function::

    class Counter(NativeEnv):
        "Counts to ten; the agent that adds the most gets a reward."

        name, agents = "counter_v0", ("agent_0", "agent_1")
        observation_spaces = (Box(0, 10, (1,), np.float32),) * 2
        action_spaces = (Discrete(3),) * 2
        state_names = ("count",)

        def __init__(self, num_envs):
            super().__init__(num_envs)
            self.count = np.zeros(num_envs, np.int64)

        def reset(self, ids):
            _reset(ids, self.rng, self.count, self.rows.obs[0][0])
            self.set_alive(ids)                       # all alive, all acting: or write alive and acting yourself

        def step(self, ids):
            r = self.rows
            _step(ids, self.count, r.actions[0][0], r.obs[0][0], r.reward, r.terminated, r.alive, r.acting, r.done)

    @kernel
    def _step(ids, count, actions, obs, reward, terminated, alive, acting, done):
        for i in ids:
            count[i] += actions[i].sum()
            for a in range(2):
                obs[i, a, 0] = count[i]
                reward[i, a] = actions[i, a]
            if count[i] >= 10:
                terminated[i] = True
                alive[i] = False
                acting[i] = False
                done[i] = True

and register it with `marlvec.native.register_native`. A scenario like mpe's derives from
`marlvec.native.mpe.scenario.Scenario` instead, which needs less code.

To be exact, use the reference's order of operations and of random draws, in its precision (float64 for Python floats
and numpy's default), and never let a compiler reorder floats (`kernel` does not). ``np.exp`` is a trap: a twentieth of
its values differ from the C library's in the last place, so call numpy on the whole batch between two compiled
functions. `tests/native/` compares every native env with its reference over whole episodes, bit for bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from operator import attrgetter
from typing import Any, Protocol

import numpy as np
from gymnasium.spaces import Space
from numpy.typing import NDArray

from marlvec.envs.spec import EnvSpec, Info
from marlvec.errors import ArgumentError, ContractError
from marlvec.native.rng_streams import fresh_streams

__all__ = ["Ids", "NativeEnv", "Rows", "refuse"]

AnyArray = NDArray[Any]
BoolArray = NDArray[np.bool_]
Ids = NDArray[np.int64]


class Rows(Protocol):
    """The rows of all envs, laid out by `marlvec.vector.data.buffers.Buffers`; N envs, A agents, A_g of a group.

    ``obs`` and ``actions``: per group of the spec, per leaf, (N, A_g, *leaf.shape), C-contiguous, of the leaf's dtype.
    ``action_masks``: per group (N, A_g, n) bool, or None if its actions have no choices. ``reward``: (N, A) float64.
    ``terminated``, ``truncated``, ``alive``, ``acting``: (N, A) bool, and ``done``: (N,) bool, strided columns of one
    block. ``state``: (N, *state_space.shape), or None.
    """

    @property
    def obs(self) -> list[list[AnyArray]]:
        """Observations."""

    @property
    def actions(self) -> list[list[AnyArray]]:
        """Actions."""

    @property
    def action_masks(self) -> list[BoolArray | None]:
        """Allowed choices of each agent."""

    @property
    def reward(self) -> NDArray[np.float64]:
        """Each agent's reward of this step."""

    @property
    def terminated(self) -> BoolArray:
        """Whether an agent was terminated in this step."""

    @property
    def truncated(self) -> BoolArray:
        """Whether an agent was truncated in this step."""

    @property
    def alive(self) -> BoolArray:
        """Whether an agent is in the episode."""

    @property
    def acting(self) -> BoolArray:
        """Whether an agent must act now."""

    @property
    def done(self) -> BoolArray:
        """Whether an env's episode ended in this step."""

    @property
    def state(self) -> AnyArray | None:
        """Global states."""


class NativeEnv(ABC):
    """N copies of one env.

    Subclasses set the attributes that describe one env (as `MultiAgentEnv` has them), in the class or in
    ``__init__``, whose arguments are ``num_envs`` and those of the reference's constructor, with its defaults.
    ``__init__`` raises the error of `refuse` for arguments that only the reference supports.

    Args:
        num_envs: N.

    Attributes:
        name: The reference's name.
        agents: Agent names; their order is the agent axis.
        observation_spaces: One per agent, without the action mask; equal to the reference's.
        action_spaces: One per agent.
        mask_sizes: Length of each agent's action mask if the reference's spaces declare it, else None; empty: no masks.
        state_space: Space of the global state, or None.
        metadata: The reference's metadata.
        has_infos: Whether the runner calls `infos` after resets and steps.
        state_names: Names of the arrays (N, …) that an env's next steps depend on, besides its random stream and rows:
            attributes, or ``"attribute.field"`` of a NamedTuple. Each class lists what it adds to its bases, or ``()``;
            without it, states cannot be saved.
        viewer_names: Attributes in which the reference keeps its window; `render` passes it to the next reference, as
            a window's memory is never freed.
        num_envs: Number of envs, N.
        rng: (N, 6) uint64, one numpy random stream (PCG64) per env, seeded by the runner; see
            `marlvec.native.rng_kernels`. It continues across episodes.
        rows: The arrays to read and write; set by `attach`.
    """

    name: str
    agents: tuple[str, ...]
    observation_spaces: tuple[Space[Any], ...]
    action_spaces: tuple[Space[Any], ...]
    mask_sizes: tuple[int | None, ...] = ()
    state_space: Space[Any] | None = None
    metadata: Mapping[str, Any] = {}
    has_infos: bool = False
    state_names: tuple[str, ...]
    viewer_names: tuple[str, ...] = ()

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self._viewer: dict[str, Any] = {}
        self.rng = fresh_streams(num_envs)

    def attach(self, rows: Rows) -> None:
        """Set ``rows``; called once, before the first reset."""
        self.rows = rows

    @abstractmethod
    def reset(self, ids: Ids) -> None:
        """Begin an episode in each of these envs.

        Writes obs, ``alive``, ``acting``, and masks if spaces declare them; not reward and flags, which in a same-step
        autoreset belong to the episode that just ended. On entry no agent is alive or acting, masks allow everything,
        and observations are unchanged. Reset options are not passed: references of native envs use none.
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
        """Check these envs' actions, known to lie in their spaces, before any env moves.

        Raises:
            ActionError: An acting agent cannot take its action; names env and agent.
        """

    def cut_short(self, ids: Ids) -> None:
        """Write the final observations of envs that reach the runner's time limit in this step.

        The runner writes flags, ``alive`` and ``acting`` afterwards. Does nothing if all agents observe in every step.
        """

    def write_state(self, ids: Ids) -> None:
        """Write these envs' global states into ``rows.state``. Called only if ``state_space`` is given."""
        raise ContractError(f"{self.name}: state_space: expected a method write_state() beside it, got none")

    def infos(self, ids: Ids) -> dict[int, Info]:
        """Return infos of these envs' last reset or step, by env; called only if ``has_infos``."""
        return {}

    def reference(self, i: int, render_mode: str | None = None) -> Any:
        """Build the reference env in env ``i``'s state, for rendering and reading attributes.

        Args:
            i: The env.
            render_mode: Its constructor's ``render_mode``.

        Raises:
            ArgumentError: This env cannot build its reference.
        """
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
        """Return the least and greatest legal number of state arrays: name → (least, greatest).

        List all `state_arrays` that kernels use as indices: compiled code checks no bounds, and a state may come from a
        file. Subclasses extend their base's dict.
        """
        return {}

    def check_limits(self, arrays: Mapping[str, AnyArray]) -> None:
        """Check that arrays of a saved state, (n, …) each, are within `state_limits`.

        Raises:
            ArgumentError: An array is not; names it.
        """
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


def refuse(name: str, what: str) -> ArgumentError:
    """Return the error for an option that only the reference supports.

    Args:
        name: Name of the env.
        what: The option, e.g. ``"benchmark_data=True"``.
    """
    return ArgumentError(f"{name}: the native backend does not support {what}; backend='async' does")
