"""simple_formation: agents spread evenly on a circle round a landmark."""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from marlvec.arguments import check_int
from marlvec.native.jit import kernel
from marlvec.native.mpe.assignment_scenario import AssignmentScenario
from marlvec.native.mpe.physics import scatter
from marlvec.native.mpe.scenario import Body, Options
from marlvec.native.native_env import Ids

__all__ = ["SimpleFormation"]

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
        _place(ids, self.rng, self.pos)

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
def _place(ids: Any, rng: Any, pos: Any) -> None:
    landmark = pos.shape[1] - 1
    for i in ids:
        scatter(i, rng, pos, 0, landmark, 1.0)
        scatter(i, rng, pos, landmark, landmark + 1, 0.5)
