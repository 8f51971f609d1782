"""simple_line and simple_formation: N agents spread evenly between two landmarks, or on a circle round one."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from marlvec.arguments import check_int
from marlvec.env_ids import rows_of
from marlvec.native.kernels import kernel, uniform
from marlvec.native.mpe.world import Body, Options, Scenario, norms, put_offset, put_own, scatter
from marlvec.native.native_env import Ids


def match(costs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return each agent's cost in the cheapest assignment, (n, A); ``costs`` (n, A, A) are by agent and place.

    Repeats scipy's ``linear_sum_assignment`` step by step, so that ties are broken alike.
    """
    cheapest = np.empty(costs.shape[:2])
    if costs.shape[1]:
        _match(np.ascontiguousarray(costs), cheapest)
    return cheapest


@kernel
def _match(costs: Any, cheapest: Any) -> None:
    size = costs.shape[1]
    u, v, shortest = np.empty(size), np.empty(size), np.empty(size)
    path, row_of, column_of = np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size, np.int64)
    remaining = np.empty(size, np.int64)
    rows, columns = np.empty(size, np.bool_), np.empty(size, np.bool_)
    for i in range(len(costs)):
        u[:], v[:] = 0.0, 0.0
        row_of[:], column_of[:] = -1, -1
        for row in range(size):
            sink, least = _find_path(row, costs[i], u, v, path, row_of, shortest, rows, columns, remaining)
            u[row] += least
            for r in range(size):
                if rows[r] and r != row:
                    u[r] += least - shortest[column_of[r]]
            for c in range(size):
                if columns[c]:
                    v[c] -= least - shortest[c]
            c = sink
            while True:
                r = path[c]
                row_of[c] = r
                column_of[r], c = c, column_of[r]
                if r == row:
                    break
        for row in range(size):
            cheapest[i, row] = costs[i, row, column_of[row]]


@kernel
def _find_path(
    row: Any, costs: Any, u: Any, v: Any, path: Any, row_of: Any, shortest: Any, rows: Any, columns: Any, remaining: Any
) -> Any:
    """Find the shortest augmenting path from an unassigned row; return its last column and its length."""
    size = len(u)
    left, least, sink = size, 0.0, -1
    for k in range(size):
        remaining[k] = size - k - 1
    rows[:], columns[:] = False, False
    shortest[:] = math.inf
    while sink == -1:
        index, lowest = -1, math.inf
        rows[row] = True
        for k in range(left):
            c = remaining[k]
            reach = least + costs[row, c] - u[row] - v[c]
            if reach < shortest[c]:
                path[c] = row
                shortest[c] = reach
            if shortest[c] < lowest or (shortest[c] == lowest and row_of[c] == -1):
                lowest = shortest[c]
                index = k
        if index < 0:  # NaNs: the reference raises, too
            raise ValueError("matrix contains invalid numeric entries")
        least = lowest
        c = remaining[index]
        if row_of[c] == -1:
            sink = c
        else:
            row = row_of[c]
        columns[c] = True
        left -= 1
        remaining[index] = remaining[left]
    return sink, least


_NEAR = 0.05


class AssignmentScenario(Scenario):
    """Rewards all agents for the distances of the cheapest assignment of agents to places."""

    def __init__(
        self,
        num_envs: int,
        agents: Sequence[Body],
        landmarks: Sequence[Body],
        terminate_on_success: bool,  # once every place is taken
        **options: Unpack[Options],
    ) -> None:
        super().__init__(
            num_envs,
            agents=agents,
            landmarks=landmarks,
            obs_sizes=[4 + 2 * len(landmarks)] * len(agents),
            dim_c=0,
            options=options,
            own={"N": len(agents), "terminate_on_success": terminate_on_success},
        )
        self._reached = np.zeros(num_envs, np.bool_) if terminate_on_success else None

    @abstractmethod
    def places(self, rows: slice | Ids) -> NDArray[np.float64]:
        """Return the target places, (n, A, 2)."""

    def score(self, ids: Ids) -> None:
        rows, agent_num = rows_of(ids), len(self.agents)
        offsets = self.pos[rows, :agent_num, None] - self.places(rows)[:, None]
        distances = match(norms(offsets))
        joint = -np.mean(np.clip(distances, 0, 2), axis=-1)
        self.rows.reward[rows] = (joint + 0.0)[:, None]
        if self._reached is not None:
            self._reached[rows] = (distances < _NEAR).all(axis=-1)

    def reached(self, ids: Ids) -> NDArray[np.bool_] | None:
        return self._reached

    def observe(self, ids: Ids) -> None:
        _observe(ids, self.pos, self.vel, self.view)


@kernel
def _observe(ids: Any, pos: Any, vel: Any, view: Any) -> None:
    agent_num = vel.shape[1]
    for i in ids:
        k = 0
        for a in range(agent_num):
            k = put_own(view, i, k, vel, a)
            k = put_own(view, i, k, pos, a)
            for landmark in range(agent_num, pos.shape[1]):
                k = put_offset(view, i, k, pos, landmark, a)


_LENGTH = 1.25


class SimpleLine(AssignmentScenario):
    """mpe2's ``simple_line_v1`` with N agents."""

    name = "simple_line_v1"
    state_names = ("_places",)

    def __init__(
        self, num_envs: int, N: int = 4, terminate_on_success: bool = False, **options: Unpack[Options]
    ) -> None:
        size = check_int("N", N, 1)
        agents = [Body(f"agent_{a}", 0.03) for a in range(size)]
        landmarks = [Body(f"landmark_{j}", 0.02, collide=False) for j in range(2)]
        super().__init__(num_envs, agents, landmarks, terminate_on_success, **options)
        self._places = np.zeros((num_envs, size, 2))
        self._angle = np.zeros(num_envs)

    def place(self, ids: Ids) -> None:
        rows, agent_num = rows_of(ids), len(self.agents)
        _place_line(ids, self.rng, self.pos, agent_num, self._angle)
        start = self.pos[rows, agent_num]
        angle = self._angle[rows].copy()
        along = _direction(angle)
        outside = ~_is_inside(start + _LENGTH * along)
        while outside.any():  # turn the line until it ends within the screen
            angle[outside] += np.radians(5)
            along[outside] = _direction(angle[outside])
            outside = ~_is_inside(start + _LENGTH * along)
        self.pos[rows, agent_num + 1] = start + _LENGTH * along
        apart = _LENGTH / (agent_num - 1) if agent_num > 1 else 0.0
        far = np.array([a * apart for a in range(agent_num)])
        self._places[rows] = start[:, None] + far[:, None] * along[:, None]

    def places(self, rows: slice | Ids) -> NDArray[np.float64]:
        return self._places[rows]


def _direction(angle: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.stack([np.cos(angle), np.sin(angle)], axis=-1)


def _is_inside(end: NDArray[np.float64]) -> NDArray[np.bool_]:
    return np.asarray((np.abs(end) < 1.0).all(axis=-1))


@kernel
def _place_line(ids: Any, rng: Any, pos: Any, agent_num: Any, angle: Any) -> None:
    for i in ids:
        scatter(i, rng, pos, 0, agent_num, 1.0)
        scatter(i, rng, pos, agent_num, agent_num + 1, 0.25)
        angle[i] = uniform(rng, i, 0.0, 2 * np.pi)


_RADIUS = 0.5


class SimpleFormation(AssignmentScenario):
    """mpe2's ``simple_formation_v1`` with N agents."""

    name = "simple_formation_v1"
    state_names = ()

    def __init__(
        self, num_envs: int, N: int = 4, terminate_on_success: bool = False, **options: Unpack[Options]
    ) -> None:
        agents = [Body(f"agent_{a}") for a in range(check_int("N", N, 1))]
        landmarks = [Body("landmark_0", 0.03, collide=False)]
        super().__init__(num_envs, agents, landmarks, terminate_on_success, **options)

    def place(self, ids: Ids) -> None:
        _place_circle(ids, self.rng, self.pos)

    def places(self, rows: slice | Ids) -> NDArray[np.float64]:
        """Return places on the circle, the first one in the direction of the agent with the least angle."""
        agent_num = len(self.agents)
        middle = self.pos[rows, agent_num]
        x, y = np.moveaxis(self.pos[rows, :agent_num] - middle[:, None], -1, 0)
        angle = np.arctan2(y, x)
        angle = np.where(angle < 0, angle + 2 * np.pi, angle)
        apart = (2 * np.pi) / agent_num
        angles = angle.min(axis=-1)[:, None] + np.array([a * apart for a in range(agent_num)])
        return np.asarray(middle[:, None] + _RADIUS * np.stack([np.cos(angles), np.sin(angles)], axis=-1))


@kernel
def _place_circle(ids: Any, rng: Any, pos: Any) -> None:
    landmark = pos.shape[1] - 1
    for i in ids:
        scatter(i, rng, pos, 0, landmark, 1.0)
        scatter(i, rng, pos, landmark, landmark + 1, 0.5)
