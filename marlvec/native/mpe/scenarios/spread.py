"""simple_spread: N agents cover N landmarks and avoid collisions."""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from marlvec.arguments import check_int
from marlvec.native.kernels import kernel
from marlvec.native.mpe.world import (
    Body,
    Neighbours,
    Options,
    Scenario,
    check_ratio,
    distance,
    nearer,
    put_offset,
    put_own,
    put_seen,
    scatter,
    touching,
)
from marlvec.native.native_env import Ids, own_arguments

_CAPTURE_RADIUS = 0.1


class SimpleSpread(Scenario):
    """mpe2's ``simple_spread_v3``."""

    name = "simple_spread_v3"
    state_names = ()

    def __init__(
        self,
        num_envs: int,
        N: int = 3,  # agents, and landmarks
        local_ratio: float = 0.5,  # weight of an agent's own reward; the shared reward has the rest
        curriculum: bool = False,  # mpe2's first stage, where collisions cost nothing; later stages are not supported
        terminate_on_success: bool = False,  # once every landmark is covered
        num_agent_neighbors: int | None = None,  # how many an agent sees; None: all
        num_landmark_neighbors: int | None = None,
        **options: Unpack[Options],
    ) -> None:
        own = own_arguments(locals())
        size = check_int("N", N, 1)
        self._seen = Neighbours(num_envs, size, size, num_agent_neighbors, num_landmark_neighbors)
        others, landmarks = self._seen.agents.shape[2], self._seen.landmarks.shape[2]
        self._local = check_ratio(local_ratio)
        self._collisions_cost = not curriculum
        self._reached = np.zeros(num_envs, np.bool_) if terminate_on_success else None
        super().__init__(
            num_envs,
            agents=[Body(f"agent_{a}", 0.15) for a in range(size)],
            landmarks=[Body(f"landmark {j}", collide=False) for j in range(size)],
            obs_sizes=[4 + 2 * landmarks + 4 * others] * size,
            options=options,
            own=own,
        )

    def place(self, ids: Ids) -> None:
        _place(ids, self.rng, self.pos)

    def score(self, ids: Ids) -> None:
        _score(ids, self.pos, self.size, self.rows.reward, self._local, self._collisions_cost)

    def reached(self, ids: Ids) -> NDArray[np.bool_] | None:
        if self._reached is not None:
            _find_covered(ids, self.pos, self._reached)
        return self._reached

    def observe(self, ids: Ids) -> None:
        if self._seen.limited:
            self._seen.look(ids, self.pos)
            _observe_near(ids, self.pos, self.vel, self._seen.agents, self._seen.landmarks, self.view)
            return
        _observe(ids, self.pos, self.vel, self.view)


@kernel
def _place(ids: Any, rng: Any, pos: Any) -> None:
    for i in ids:
        scatter(i, rng, pos, 0, pos.shape[1], 1.0)


@kernel
def _least(pos: Any, i: Any, landmark: Any, agent_num: Any) -> Any:
    least = distance(pos, i, 0, landmark)
    for a in range(1, agent_num):
        least = nearer(distance(pos, i, a, landmark), least)
    return least


@kernel
def _score(ids: Any, pos: Any, size: Any, reward: Any, local: Any, collisions_cost: Any) -> None:
    agent_num = reward.shape[1]
    for i in ids:
        shared = 0.0
        for landmark in range(agent_num, len(size)):
            shared -= _least(pos, i, landmark, agent_num)
        for a in range(agent_num):
            reward[i, a] = 0.0
        if collisions_cost:
            for a in range(agent_num):
                for b in range(a + 1, agent_num):
                    if touching(pos, size, i, a, b):
                        reward[i, a] -= 1.0
                        reward[i, b] -= 1.0
        for a in range(agent_num):
            reward[i, a] = shared * (1 - local) + reward[i, a] * local + 0.0


@kernel
def _find_covered(ids: Any, pos: Any, reached: Any) -> None:
    agent_num = pos.shape[1] // 2
    for i in ids:
        reached[i] = True
        for landmark in range(agent_num, pos.shape[1]):
            if _least(pos, i, landmark, agent_num) >= _CAPTURE_RADIUS:
                reached[i] = False


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
            for b in range(agent_num):
                if b != a:
                    k = put_offset(view, i, k, pos, b, a)
            k += 2 * (agent_num - 1)  # utterances of the others, all silent: already zeros


@kernel
def _observe_near(ids: Any, pos: Any, vel: Any, others: Any, landmarks: Any, view: Any) -> None:
    for i in ids:
        k = 0
        for a in range(vel.shape[1]):
            k = put_own(view, i, k, vel, a)
            k = put_own(view, i, k, pos, a)
            k = put_seen(view, i, k, pos, landmarks, a)
            k = put_seen(view, i, k, pos, others, a)
            k += 2 * others.shape[2]  # utterances
