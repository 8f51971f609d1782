"""simple_reference: each of two agents knows the other's goal landmark, and communicates it."""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np

from marlvec.native.kernels import bounded, kernel
from marlvec.native.mpe.world import (
    Body,
    Options,
    Scenario,
    check_ratio,
    distance,
    put_colour,
    put_comm,
    put_offset,
    put_own,
    scatter,
)
from marlvec.native.native_env import Ids


class SimpleReference(Scenario):
    """mpe2's ``simple_reference_v3``."""

    name = "simple_reference_v3"
    state_names = ("goal",)

    def __init__(self, num_envs: int, local_ratio: float = 0.5, **options: Unpack[Options]) -> None:
        self._local = check_ratio(local_ratio)
        self.goal = np.zeros((num_envs, 2), np.int64)  # by the agent that knows it: the other's goal landmark
        super().__init__(
            num_envs,
            agents=[Body(f"agent_{a}", collide=False, silent=False) for a in range(2)],
            landmarks=[Body(f"landmark {j}", collide=False) for j in range(3)],
            obs_sizes=[21, 21],
            dim_c=10,
            options=options,
            own={"local_ratio": local_ratio},
        )

    def state_limits(self) -> dict[str, tuple[int, int]]:
        return {**super().state_limits(), "goal": (0, 2)}

    def place(self, ids: Ids) -> None:
        _place(ids, self.rng, self.pos, self.goal)

    def score(self, ids: Ids) -> None:
        _score(ids, self.pos, self.goal, self._local, self.rows.reward)

    def observe(self, ids: Ids) -> None:
        _observe(ids, self.pos, self.vel, self.comm, self.goal, self.view)


@kernel
def _place(ids: Any, rng: Any, pos: Any, goal: Any) -> None:
    for i in ids:
        goal[i, 0] = bounded(rng, i, 3)
        goal[i, 1] = bounded(rng, i, 3)
        scatter(i, rng, pos, 0, 5, 1.0)


@kernel
def _score(ids: Any, pos: Any, goal: Any, local: Any, reward: Any) -> None:
    for i in ids:
        first, second = -distance(pos, i, 1, 2 + goal[i, 0]), -distance(pos, i, 0, 2 + goal[i, 1])
        both = (0.0 + first + second) / 2
        reward[i, 0] = both * (1 - local) + first * local + 0.0
        reward[i, 1] = both * (1 - local) + second * local + 0.0


@kernel
def _observe(ids: Any, pos: Any, vel: Any, comm: Any, goal: Any, view: Any) -> None:
    for i in ids:
        k = 0
        for a in range(2):
            k = put_own(view, i, k, vel, a)
            for landmark in range(2, 5):
                k = put_offset(view, i, k, pos, landmark, a)
            k = put_colour(view, i, k, goal[i, a], 3, 0.25, 0.75)
            k = put_comm(view, i, k, comm, 1 - a)
