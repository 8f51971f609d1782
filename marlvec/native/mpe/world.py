"""Base of all mpe2 scenarios: bodies, spaces, the order of a step, and mpe2's physics, operation by operation."""

from __future__ import annotations

import importlib
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
from gymnasium.spaces import Box, Discrete, Space
from numpy.typing import NDArray

from marlvec.arguments import check_int
from marlvec.env_ids import rows_of
from marlvec.errors import ArgumentError
from marlvec.native.kernels import end_episode, kernel, uniform
from marlvec.native.native_env import Ids, NativeEnv, Rows, refuse
from marlvec.native.rng_streams import as_generator

_MOVES = 5  # actions that move: none, left, right, down, up
_DT = 0.1
_DAMPING = 0.25
_CONTACT_FORCE = 1e2
_CONTACT_MARGIN = 1e-3
_LOG_2 = 0.693147180559945309417232121458176568  # numpy's, for logaddexp
_NOTHING_LEFT = 746.0  # exp(-x) is zero from here on


@kernel
def act_discretely(
    ids: Any, actions: Any, agents: Any, movable: Any, speaks: Any, gain: Any, force: Any, comm: Any
) -> None:
    """Turn Discrete actions (N, A_g), move + 5 * symbol of an agent that does both, into forces and utterances."""
    for k in range(len(ids)):
        i = ids[k]
        for j in range(len(agents)):
            a, action = agents[j], actions[i, j]
            if movable[a]:
                way = action % _MOVES
                action //= _MOVES
                x = y = 0.0
                if way == 1:
                    x = -1.0
                elif way == 2:
                    x = 1.0
                elif way == 3:
                    y = -1.0
                elif way == 4:
                    y = 1.0
                force[i, a, 0] = x * gain[a]
                force[i, a, 1] = y * gain[a]
            if speaks[a]:
                comm[i, a, :] = 0.0
                comm[i, a, action] = 1.0


@kernel
def act_continuously(
    ids: Any, actions: Any, agents: Any, movable: Any, speaks: Any, gain: Any, force: Any, comm: Any
) -> None:
    """Turn Box actions (N, A_g, 5 and/or C) of these agents into forces and utterances."""
    for k in range(len(ids)):
        i = ids[k]
        for j in range(len(agents)):
            a, first = agents[j], 0
            if movable[a]:
                first = _MOVES
                # The two numbers of an axis are subtracted in float32, as in the reference.
                force[i, a, 0] = (0.0 + (actions[i, j, 2] - actions[i, j, 1])) * gain[a]
                force[i, a, 1] = (0.0 + (actions[i, j, 4] - actions[i, j, 3])) * gain[a]
            if speaks[a]:
                for c in range(comm.shape[2]):
                    comm[i, a, c] = actions[i, j, first + c]


@kernel
def move(
    ids: Any,
    pos: Any,
    vel: Any,
    force: Any,
    size: Any,
    collide: Any,
    mass: Any,
    limit: Any,
    movable: Any,
    steps: Any,
    max_cycles: Any,
    truncated: Any,
    alive: Any,
    acting: Any,
    done: Any,
) -> None:
    """Collide, integrate, and end the episodes whose time is up."""
    for k in range(len(ids)):
        i = ids[k]
        _collide(i, pos, force, size, collide, movable)
        for a in range(len(mass)):
            if movable[a]:
                _integrate(i, a, pos, vel, force, mass, limit)
        steps[i] += 1
        if steps[i] >= max_cycles:
            end_episode(i, truncated, alive, acting, done)


@kernel
def _collide(i: Any, pos: Any, force: Any, size: Any, collide: Any, movable: Any) -> None:
    agent_num = len(movable)
    for a in range(agent_num):
        if not collide[a]:
            continue
        for b in range(a + 1, len(size)):
            if not collide[b]:
                continue
            x, y = pos[i, a, 0] - pos[i, b, 0], pos[i, a, 1] - pos[i, b, 1]
            dist = math.sqrt(x * x + y * y)
            depth = -(dist - (size[a] + size[b])) / _CONTACT_MARGIN
            if depth < -_NOTHING_LEFT and dist < math.inf:
                continue  # a force of zero changes nothing: no force is ever -0.0
            push = _log_add_exp(depth) * _CONTACT_MARGIN
            x, y = _CONTACT_FORCE * x / dist * push, _CONTACT_FORCE * y / dist * push
            if movable[a]:
                force[i, a, 0] = x + force[i, a, 0]
                force[i, a, 1] = y + force[i, a, 1]
            if b < agent_num and movable[b]:
                force[i, b, 0] = -x + force[i, b, 0]
                force[i, b, 1] = -y + force[i, b, 1]


@kernel
def _log_add_exp(x: Any) -> Any:
    """Return ``np.logaddexp(0, x)``, as numpy computes it."""
    if x == 0.0:
        return _LOG_2
    if x < 0.0:
        return math.log1p(math.exp(x))
    return x + math.log1p(math.exp(-x))


@kernel
def _integrate(i: Any, a: Any, pos: Any, vel: Any, force: Any, mass: Any, limit: Any) -> None:
    """Add the velocity to the position, then update the velocity."""
    x, y = vel[i, a, 0], vel[i, a, 1]
    pos[i, a, 0] += x * _DT
    pos[i, a, 1] += y * _DT
    x, y = x * (1 - _DAMPING), y * (1 - _DAMPING)
    x += (force[i, a, 0] / mass[a]) * _DT
    y += (force[i, a, 1] / mass[a]) * _DT
    speed = math.sqrt(x * x + y * y)
    if speed > limit[a]:
        x, y = x / speed * limit[a], y / speed * limit[a]
    vel[i, a, 0], vel[i, a, 1] = x, y


@kernel
def end_where(ids: Any, reached: Any, terminated: Any, alive: Any, acting: Any, done: Any) -> None:
    """Terminate the episodes that have ``reached`` (N,) their goal, unless truncated."""
    for k in range(len(ids)):
        i = ids[k]
        if reached[i] and not done[i]:
            end_episode(i, terminated, alive, acting, done)


@kernel
def still(ids: Any, vel: Any, comm: Any, steps: Any, rng: Any, before: Any) -> None:
    """Begin an episode: no agent moves or speaks. Copy the random streams to ``before`` (N, 6)."""
    for k in range(len(ids)):
        i = ids[k]
        vel[i] = 0.0
        comm[i] = 0.0
        steps[i] = 0
        before[i] = rng[i]


@kernel
def scatter(i: Any, rng: Any, pos: Any, first: Any, last: Any, reach: Any) -> None:
    """Draw positions of entities ``first`` to ``last - 1``, uniform in ±``reach`` on each axis."""
    for e in range(first, last):
        pos[i, e, 0] = uniform(rng, i, -reach, reach)
        pos[i, e, 1] = uniform(rng, i, -reach, reach)


@kernel
def distance(pos: Any, i: Any, a: Any, b: Any) -> Any:
    """Return the distance of two entities: ``np.sqrt(np.sum(np.square(…)))``."""
    x, y = pos[i, a, 0] - pos[i, b, 0], pos[i, a, 1] - pos[i, b, 1]
    return math.sqrt(x * x + y * y)


def norms(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the lengths (…,) of vectors (…, 2), bit for bit as ``np.linalg.norm`` of each single vector."""
    # norm() is a BLAS dot product, which may use a fused multiply-add; matmul of a row and a column calls the same.
    squares = np.matmul(vectors[..., None, :], vectors[..., :, None])[..., 0, 0]
    return np.asarray(np.sqrt(squares))


@kernel
def touching(pos: Any, size: Any, i: Any, a: Any, b: Any) -> Any:
    """Return whether two entities overlap."""
    return distance(pos, i, a, b) < size[a] + size[b]


@kernel
def nearer(value: Any, least: Any) -> Any:
    """Return Python's ``min(least, value)``, NaNs included."""
    return value if value < least else least


@kernel
def put(view: Any, i: Any, k: Any, x: Any, y: Any) -> Any:
    """Write two numbers at index ``k`` of env ``i``'s observations (N, S) float32; return the next index."""
    view[i, k] = x
    view[i, k + 1] = y
    return k + 2


@kernel
def put_own(view: Any, i: Any, k: Any, what: Any, a: Any) -> Any:
    """Write agent ``a``'s own velocity or position."""
    return put(view, i, k, what[i, a, 0], what[i, a, 1])


@kernel
def put_offset(view: Any, i: Any, k: Any, pos: Any, e: Any, a: Any) -> Any:
    """Write the offset of entity ``e`` from agent ``a``."""
    return put(view, i, k, pos[i, e, 0] - pos[i, a, 0], pos[i, e, 1] - pos[i, a, 1])


@kernel
def put_comm(view: Any, i: Any, k: Any, comm: Any, a: Any) -> Any:
    """Write agent ``a``'s utterance."""
    for c in range(comm.shape[2]):
        view[i, k + c] = comm[i, a, c]
    return k + comm.shape[2]


@kernel
def put_colour(view: Any, i: Any, k: Any, which: Any, size: Any, low: Any, high: Any) -> Any:
    """Write ``size`` numbers: ``high`` at index ``which``, else ``low``."""
    for c in range(size):
        view[i, k + c] = high if c == which else low
    return k + size


@kernel
def share_out(ids: Any, view: Any, obs: Any, starts: Any) -> None:
    """Copy one group's observations from columns ``starts`` (A_g,) of ``view`` to ``obs`` (N, A_g, D)."""
    for k in range(len(ids)):
        i = ids[k]
        for j in range(len(starts)):
            for d in range(obs.shape[2]):
                obs[i, j, d] = view[i, starts[j] + d]


_NO_NEIGHBOUR = -1


class Neighbours:
    """Indices of the entities that each agent sees, nearest first, filled up with -1; no limit: all, in order."""

    def __init__(
        self, num_envs: int, agent_num: int, landmark_num: int, num_agents: int | None, num_landmarks: int | None
    ) -> None:
        for name, number in (("num_agent_neighbors", num_agents), ("num_landmark_neighbors", num_landmarks)):
            if number is not None:
                check_int(name, number, 1)
        self.limited = num_agents is not None or num_landmarks is not None  # some agent may be out of another's sight
        self._limits = num_agents, num_landmarks
        each = range(agent_num)
        others = np.array([[b for b in each if b != a] for a in each], np.int64).reshape(agent_num, agent_num - 1)
        places = np.tile(np.arange(agent_num, agent_num + landmark_num), (agent_num, 1))
        self._all = others, places
        self.agents, self.landmarks = (
            np.tile(found if limit is None else np.full((agent_num, limit), _NO_NEIGHBOUR), (num_envs, 1, 1))
            for found, limit in zip(self._all, self._limits, strict=True)
        )

    def look(self, ids: Ids, pos: NDArray[np.float64]) -> None:
        """Find the nearest agents of each agent in these envs, ``pos`` (N, E, 2)."""
        rows = rows_of(ids)
        for entities, limit, seen in zip(self._all, self._limits, (self.agents, self.landmarks), strict=True):
            if limit is not None and entities.shape[1]:
                here = pos[rows]
                far = norms(here[:, entities] - here[:, : len(entities), None])
                order = np.argsort(far, axis=-1)[..., :limit]  # breaks ties like the reference
                found = np.take_along_axis(np.broadcast_to(entities, far.shape), order, -1)
                seen[rows, :, : found.shape[-1]] = found


@kernel
def put_seen(view: Any, i: Any, k: Any, pos: Any, seen: Any, a: Any) -> Any:
    """Write the offsets of the entities that agent ``a`` sees, ``seen`` (N, A, n); zeros for -1."""
    for m in range(seen.shape[2]):
        e = seen[i, a, m]
        k = put(view, i, k, 0.0, 0.0) if e < 0 else put_offset(view, i, k, pos, e, a)
    return k


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
