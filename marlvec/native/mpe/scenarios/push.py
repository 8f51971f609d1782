"""simple_push: an agent goes to its goal, and an adversary pushes it away."""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np

from marlvec.native.kernels import bounded, kernel
from marlvec.native.mpe.world import Body, Options, Scenario, distance, put_colour, put_offset, put_own, scatter
from marlvec.native.native_env import Ids


class SimplePush(Scenario):
    """mpe2's ``simple_push_v3``."""

    name = "simple_push_v3"
    state_names = ("goal",)

    def __init__(self, num_envs: int, **options: Unpack[Options]) -> None:
        self.goal = np.zeros(num_envs, np.int64)  # the landmark that is the goal
        super().__init__(
            num_envs,
            agents=[Body("adversary_0"), Body("agent_0")],
            landmarks=[Body("landmark 0", collide=False), Body("landmark 1", collide=False)],
            obs_sizes=[8, 19],
            options=options,
        )

    def state_limits(self) -> dict[str, tuple[int, int]]:
        return {**super().state_limits(), "goal": (0, 1)}

    def place(self, ids: Ids) -> None:
        _place(ids, self.rng, self.pos, self.goal)

    def score(self, ids: Ids) -> None:
        _score(ids, self.pos, self.goal, self.rows.reward)

    def observe(self, ids: Ids) -> None:
        _observe(ids, self.pos, self.vel, self.goal, self.view)


@kernel
def _place(ids: Any, rng: Any, pos: Any, goal: Any) -> None:
    for i in ids:
        goal[i] = bounded(rng, i, 2)
        scatter(i, rng, pos, 0, 4, 1.0)


@kernel
def _score(ids: Any, pos: Any, goal: Any, reward: Any) -> None:
    for i in ids:
        rival, own = distance(pos, i, 0, 2 + goal[i]), distance(pos, i, 1, 2 + goal[i])
        reward[i, 0] = own - rival
        reward[i, 1] = -own + 0.0


@kernel
def _observe(ids: Any, pos: Any, vel: Any, goal: Any, view: Any) -> None:
    for i in ids:
        k = put_own(view, i, 0, vel, 0)
        k = put_offset(view, i, k, pos, 2, 0)
        k = put_offset(view, i, k, pos, 3, 0)
        k = put_offset(view, i, k, pos, 1, 0)
        k = put_own(view, i, k, vel, 1)
        k = put_offset(view, i, k, pos, 2 + goal[i], 1)
        k = put_colour(view, i, k, 1 + goal[i], 3, 0.25, 0.75)
        k = put_offset(view, i, k, pos, 2, 1)
        k = put_offset(view, i, k, pos, 3, 1)
        k = put_colour(view, i, k, 1, 3, 0.1, 0.9)
        k = put_colour(view, i, k, 2, 3, 0.1, 0.9)
        k = put_offset(view, i, k, pos, 0, 1)
