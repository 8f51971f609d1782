"""The physics that all particle envs share: mpe2's, operation by operation.

State by env, all float64: ``pos`` (N, E, 2) of entities (agents, then landmarks), ``vel`` and ``force`` (N, A, 2),
``comm`` (N, A, C). Constants by entity: ``size``, ``collide`` (E,); by agent: ``gain``, ``limit``, ``mass``,
``movable``, ``speaks`` (A,). Landmarks never move.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.native.jit import end_episode, kernel
from marlvec.native.rng_kernels import uniform

__all__ = [
    "act_continuously",
    "act_discretely",
    "distance",
    "end_where",
    "move",
    "nearer",
    "norms",
    "put",
    "put_colour",
    "put_comm",
    "put_offset",
    "put_own",
    "scatter",
    "share_out",
    "still",
    "touching",
]

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
