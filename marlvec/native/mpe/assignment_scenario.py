"""Base of simple_line and simple_formation: N agents, N target places, one shared reward."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from marlvec.env_ids import rows_of
from marlvec.native.jit import kernel
from marlvec.native.mpe.matching import match, norms
from marlvec.native.mpe.physics import put_offset, put_own
from marlvec.native.mpe.scenario import Body, Options, Scenario
from marlvec.native.native_env import Ids

__all__ = ["AssignmentScenario"]

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
