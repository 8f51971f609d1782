"""simple_speaker_listener: a speaker, which cannot move, sends a goal to a listener, which cannot speak."""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np

from marlvec.native.kernels import bounded, kernel
from marlvec.native.mpe.world import Body, Options, Scenario, put_colour, put_comm, put_offset, put_own, scatter
from marlvec.native.native_env import Ids


class SimpleSpeakerListener(Scenario):
    """mpe2's ``simple_speaker_listener_v4``."""

    name = "simple_speaker_listener_v4"
    state_names = ("goal",)

    def __init__(self, num_envs: int, **options: Unpack[Options]) -> None:
        self.goal = np.zeros(num_envs, np.int64)  # the landmark that is the goal
        super().__init__(
            num_envs,
            agents=[
                Body("speaker_0", 0.075, collide=False, movable=False, silent=False),
                Body("listener_0", 0.075, collide=False),
            ],
            landmarks=[Body(f"landmark {j}", 0.04, collide=False) for j in range(3)],
            obs_sizes=[3, 11],
            dim_c=3,
            options=options,
        )

    def state_limits(self) -> dict[str, tuple[int, int]]:
        return {**super().state_limits(), "goal": (0, 2)}

    def place(self, ids: Ids) -> None:
        _place(ids, self.rng, self.pos, self.goal)

    def score(self, ids: Ids) -> None:
        _score(ids, self.pos, self.goal, self.rows.reward)

    def observe(self, ids: Ids) -> None:
        _observe(ids, self.pos, self.vel, self.comm, self.goal, self.view)


@kernel
def _place(ids: Any, rng: Any, pos: Any, goal: Any) -> None:
    for i in ids:
        goal[i] = bounded(rng, i, 3)
        scatter(i, rng, pos, 0, 5, 1.0)


@kernel
def _score(ids: Any, pos: Any, goal: Any, reward: Any) -> None:
    for i in ids:
        landmark = 2 + goal[i]
        x, y = pos[i, 1, 0] - pos[i, landmark, 0], pos[i, 1, 1] - pos[i, landmark, 1]
        reward[i, 0] = reward[i, 1] = -(x * x + y * y) + 0.0


@kernel
def _observe(ids: Any, pos: Any, vel: Any, comm: Any, goal: Any, view: Any) -> None:
    for i in ids:
        k = put_colour(view, i, 0, goal[i], 3, 0.15, 0.65)
        k = put_own(view, i, k, vel, 1)
        for landmark in range(2, 5):
            k = put_offset(view, i, k, pos, landmark, 1)
        put_comm(view, i, k, comm, 0)
