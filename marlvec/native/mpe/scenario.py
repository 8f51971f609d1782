"""Base of all mpe2 scenarios: bodies, spaces, order of a step, and conversion to the reference.

A new scenario defines its bodies and three compiled functions; `scenarios/simple.py` is the shortest example. Rewards
that may be -0.0 end in ``+ 0.0``: the reference's wrapper sums them from 0, which turns -0.0 into 0.0.
"""

from __future__ import annotations

import importlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
from gymnasium.spaces import Box, Discrete, Space
from numpy.typing import NDArray

from marlvec.arguments import check_int
from marlvec.errors import ArgumentError
from marlvec.native.mpe.physics import act_continuously, act_discretely, end_where, move, share_out, still
from marlvec.native.native_env import Ids, NativeEnv, Rows, refuse
from marlvec.native.rng_streams import as_generator

__all__ = ["Body", "Options", "Scenario", "check_ratio"]

_SENSITIVITY = 5.0
_FARTHEST = 1e100  # its square is finite


class Options(TypedDict, total=False):
    """Arguments that every scenario takes, as in mpe2."""

    max_cycles: int  # 25: steps after which all agents are truncated
    continuous_actions: bool  # False: Box actions instead of Discrete ones
    dynamic_rescaling: bool  # True: a renderer's option
    benchmark_data: bool  # not supported


@dataclass(frozen=True)
class Body:
    """One entity, with mpe2's defaults."""

    name: str
    size: float = 0.05  # radius
    collide: bool = True  # with other bodies that collide
    movable: bool = True  # an agent can move; landmarks never move
    silent: bool = True  # never communicates
    accel: float | None = None  # factor of its actions; None: 5
    max_speed: float | None = None  # None: no limit
    mass: float = 1.0


class Scenario(NativeEnv):
    """Many envs of one scenario: A agents, E bodies with the landmarks, utterances of C = ``dim_c`` numbers.

    ``view`` (N, S) float32 has the observations of all agents, concatenated: also the global state.
    """

    metadata: Mapping[str, Any] = {"render_modes": ["human", "rgb_array"], "is_parallelizable": True, "render_fps": 10}
    state_names: tuple[str, ...] = ("pos", "vel", "force", "comm", "steps", "_before")

    def __init__(
        self,
        num_envs: int,
        *,
        agents: Sequence[Body],
        landmarks: Sequence[Body],
        obs_sizes: Sequence[int],
        dim_c: int = 2,
        options: Options,
        own: Mapping[str, Any] | None = None,  # arguments of this scenario alone, for the reference
    ) -> None:
        super().__init__(num_envs)
        _check_options(self.name, options)
        self.agents = tuple(body.name for body in agents)
        self.metadata = {**type(self).metadata, "name": self.name}
        self._kwargs = {**options, **(own or {})}
        self._max_cycles = int(options.get("max_cycles", 25))
        self._continuous = bool(options.get("continuous_actions", False))
        self._act = act_continuously if self._continuous else act_discretely
        self.action_spaces = tuple(_action_space(body, dim_c, self._continuous) for body in agents)
        self.observation_spaces = tuple(map(_endless, obs_sizes))
        self.state_space = _endless(sum(obs_sizes))
        bodies = [*agents, *landmarks]
        self.size = np.array([body.size for body in bodies])
        self.pos = np.zeros((num_envs, len(bodies), 2))  # agents first
        self.vel = np.zeros((num_envs, len(agents), 2))
        self.force = np.zeros_like(self.vel)
        self.comm = np.zeros((num_envs, len(agents), dim_c))
        self.steps = np.zeros(num_envs, np.int64)  # since the episode began
        self.starts = np.cumsum([0, *obs_sizes[:-1]], dtype=np.int64)  # column of `view` where each agent begins
        self._before = self.rng.copy()  # each env's stream at the beginning of its episode
        self._collide = np.array([body.collide for body in bodies])
        self._mass = np.array([body.mass for body in agents])
        self._movable = np.array([body.movable for body in agents])
        self._speaks = np.array([not body.silent for body in agents])
        self._gain = np.array([_SENSITIVITY if body.accel is None else body.accel for body in agents])
        self._limit = np.array([np.inf if body.max_speed is None else body.max_speed for body in agents])

    @abstractmethod
    def place(self, ids: Ids) -> None:
        """Draw ``pos`` and all other start values of these envs, in the reference's order."""

    @abstractmethod
    def score(self, ids: Ids) -> None:
        """Write ``rows.reward`` and all other consequences of a move."""

    @abstractmethod
    def observe(self, ids: Ids) -> None:
        """Write ``view``."""

    def reached(self, ids: Ids) -> NDArray[np.bool_] | None:
        """Return (N,) bool, envs that have reached their goal (only entries of ``ids`` are used); None: no goal."""
        return None

    def attach(self, rows: Rows) -> None:
        super().attach(rows)
        groups = self.spec().groups
        self._groups = [np.array(group.agents, np.int64) for group in groups]
        self._inputs = [leaves[0] for leaves in rows.actions]
        if len(groups) == 1:
            self.view = rows.obs[0][0].reshape(self.num_envs, -1)  # a view: agents are contiguous
            self._shares = []
        else:
            assert self.state_space is not None
            assert self.state_space.shape is not None
            self.view = np.zeros((self.num_envs, *self.state_space.shape), np.float32)
            self._shares = [(leaves[0], self.starts[who]) for leaves, who in zip(rows.obs, self._groups, strict=True)]

    def reset(self, ids: Ids) -> None:
        still(ids, self.vel, self.comm, self.steps, self.rng, self._before)
        self.place(ids)
        self._observe(ids)
        self.set_alive(ids)

    def step(self, ids: Ids) -> None:
        rows = self.rows
        for actions, agents in zip(self._inputs, self._groups, strict=True):
            self._act(ids, actions, agents, self._movable, self._speaks, self._gain, self.force, self.comm)
        state = self.pos, self.vel, self.force
        bodies = self.size, self._collide, self._mass, self._limit, self._movable
        ends = rows.alive, rows.acting, rows.done
        move(ids, *state, *bodies, self.steps, self._max_cycles, rows.truncated, *ends)
        self.score(ids)
        reached = self.reached(ids)
        if reached is not None:
            end_where(ids, reached, rows.terminated, *ends)
        self._observe(ids)

    def _observe(self, ids: Ids) -> None:
        self.observe(ids)
        for obs, starts in self._shares:
            share_out(ids, self.view, obs, starts)

    def write_state(self, ids: Ids) -> None:
        """Write the observations of all agents, concatenated."""
        assert self.rows.state is not None
        self.rows.state[ids] = self.view[ids]

    def check_limits(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Check also that distances of positions are finite; else the search for the nearest would never end."""
        super().check_limits(arrays)
        for name, found in arrays.items():
            if found.dtype.kind != "f":
                continue
            if not np.isfinite(found).all() or (found.dtype == np.float64 and (np.abs(found) > _FARTHEST).any()):
                raise ArgumentError(
                    f"set_state(): {self.name}: {name}: expected numbers up to {_FARTHEST:g}, got others"
                )

    def state_arrays(self) -> dict[str, NDArray[Any]]:
        """Return also `view`, unless it is a view of the rows."""
        return {**super().state_arrays(), **({"view": self.view} if self._shares else {})}

    def reference(self, i: int, render_mode: str | None = None) -> Any:
        """Return mpe2's env in env ``i``'s state."""
        module = importlib.import_module(f"mpe2.{self.name}")
        env = module.parallel_env(**self._kwargs, render_mode=render_mode)
        inner = env.unwrapped
        inner.np_random = as_generator(self._before[i])  # begins the same episode: the same goals and colours
        env.reset()
        inner.np_random.bit_generator.state = as_generator(self.rng[i]).bit_generator.state
        inner.steps = int(self.steps[i])
        world = inner.world
        for e, entity in enumerate([*world.agents, *world.landmarks]):
            entity.state.p_pos = self.pos[i, e].copy()
        for a, agent in enumerate(world.agents):
            agent.state.p_vel = self.vel[i, a].copy()
            agent.state.c = self.comm[i, a].copy()
        self.dress(world, i)
        return env

    def dress(self, world: Any, i: int) -> None:
        """Copy env ``i``'s further state that changes during an episode into the reference's ``env``."""


def check_ratio(value: Any) -> float:
    """Return ``local_ratio`` from 0 to 1, or raise ArgumentError."""
    if not isinstance(value, (int, float, np.number)) or not 0.0 <= value <= 1.0:
        raise ArgumentError(f"local_ratio: expected a number from 0 to 1, got {value!r}")
    return float(value)


def _check_options(name: str, options: Options) -> None:
    unknown = set(options) - set(Options.__annotations__)
    if unknown:
        raise TypeError(f"{name} got an unexpected keyword argument {min(unknown)!r}")
    if options.get("benchmark_data", False):
        raise refuse(name, "benchmark_data=True")
    if "max_cycles" in options:
        check_int("max_cycles", options["max_cycles"], 1)


def _action_space(body: Body, dim_c: int, continuous: bool) -> Space[Any]:
    moves = 5 if body.movable else 0
    says = 0 if body.silent else dim_c
    if continuous:
        return Box(0, 1, (moves + says,))
    return Discrete(max(moves, 1) * max(says, 1))


def _endless(size: int) -> Space[Any]:
    return Box(-np.float32(np.inf), np.float32(np.inf), (size,), np.float32)
