"""simple_line: agents spread evenly between two landmarks."""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from marlvec.arguments import check_int
from marlvec.env_ids import rows_of
from marlvec.native.jit import kernel
from marlvec.native.mpe.assignment_scenario import AssignmentScenario
from marlvec.native.mpe.physics import scatter
from marlvec.native.mpe.scenario import Body, Options
from marlvec.native.native_env import Ids
from marlvec.native.rng_kernels import uniform

__all__ = ["SimpleLine"]

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
        _place(ids, self.rng, self.pos, agent_num, self._angle)
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
def _place(ids: Any, rng: Any, pos: Any, agent_num: Any, angle: Any) -> None:
    for i in ids:
        scatter(i, rng, pos, 0, agent_num, 1.0)
        scatter(i, rng, pos, agent_num, agent_num + 1, 0.25)
        angle[i] = uniform(rng, i, 0.0, 2 * np.pi)
