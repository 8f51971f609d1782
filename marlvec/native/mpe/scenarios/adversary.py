"""simple_adversary: good agents know which landmark is the goal, and hide it from an adversary."""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np

from marlvec.arguments import check_int
from marlvec.native.kernels import bounded, kernel
from marlvec.native.mpe.world import (
    Body,
    Neighbours,
    Options,
    Scenario,
    distance,
    nearer,
    put_offset,
    put_seen,
    scatter,
)
from marlvec.native.native_env import Ids, own_arguments


class SimpleAdversary(Scenario):
    """mpe2's ``simple_adversary_v3``."""

    name = "simple_adversary_v3"
    state_names = ("goal",)

    def __init__(
        self,
        num_envs: int,
        N: int = 2,  # good agents, and landmarks
        num_agent_neighbors: int | None = None,  # how many an agent sees; None: all
        num_landmark_neighbors: int | None = None,
        **options: Unpack[Options],
    ) -> None:
        own = own_arguments(locals())
        good = check_int("N", N, 1)
        self.goal = np.zeros(num_envs, np.int64)  # the landmark that is the goal
        self._seen = Neighbours(num_envs, good + 1, good, num_agent_neighbors, num_landmark_neighbors)
        seen = 2 * (self._seen.agents.shape[2] + self._seen.landmarks.shape[2])
        super().__init__(
            num_envs,
            agents=[
                Body("adversary_0", 0.15, collide=False),
                *(Body(f"agent_{a}", 0.15, collide=False) for a in range(good)),
            ],
            landmarks=[Body(f"landmark {j}", 0.08, collide=False) for j in range(good)],
            obs_sizes=[seen, *[seen + 2] * good],
            options=options,
            own=own,
        )

    def state_limits(self) -> dict[str, tuple[int, int]]:
        return {**super().state_limits(), "goal": (0, len(self.agents) - 2)}

    def place(self, ids: Ids) -> None:
        _place(ids, self.rng, self.pos, self.goal, len(self.agents))

    def score(self, ids: Ids) -> None:
        _score(ids, self.pos, self.goal, self.rows.reward)

    def observe(self, ids: Ids) -> None:
        if self._seen.limited:
            self._seen.look(ids, self.pos)
            _observe_near(ids, self.pos, self.goal, self._seen.agents, self._seen.landmarks, self.view)
            return
        _observe(ids, self.pos, self.goal, len(self.agents), self.view)


@kernel
def _place(ids: Any, rng: Any, pos: Any, goal: Any, agent_num: Any) -> None:
    for i in ids:
        goal[i] = bounded(rng, i, agent_num - 1)
        scatter(i, rng, pos, 0, pos.shape[1], 1.0)


@kernel
def _score(ids: Any, pos: Any, goal: Any, reward: Any) -> None:
    agent_num = reward.shape[1]
    for i in ids:
        landmark = agent_num + goal[i]
        rival = distance(pos, i, 0, landmark)
        least = distance(pos, i, 1, landmark)
        for a in range(2, agent_num):
            least = nearer(distance(pos, i, a, landmark), least)
        reward[i, 0] = -rival + 0.0
        for a in range(1, agent_num):
            reward[i, a] = -least + rival


@kernel
def _observe(ids: Any, pos: Any, goal: Any, agent_num: Any, view: Any) -> None:
    for i in ids:
        k = 0
        for a in range(agent_num):
            if a > 0:
                k = put_offset(view, i, k, pos, agent_num + goal[i], a)
            for landmark in range(agent_num, pos.shape[1]):
                k = put_offset(view, i, k, pos, landmark, a)
            for b in range(agent_num):
                if b != a:
                    k = put_offset(view, i, k, pos, b, a)


@kernel
def _observe_near(ids: Any, pos: Any, goal: Any, others: Any, landmarks: Any, view: Any) -> None:
    agent_num = others.shape[1]
    for i in ids:
        k = 0
        for a in range(agent_num):
            if a > 0:
                k = put_offset(view, i, k, pos, agent_num + goal[i], a)
            k = put_seen(view, i, k, pos, landmarks, a)
            k = put_seen(view, i, k, pos, others, a)
