"""simple_tag: slow adversaries chase fast agents round obstacles."""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from marlvec.arguments import check_int
from marlvec.env_ids import rows_of
from marlvec.errors import ArgumentError
from marlvec.native.kernels import kernel
from marlvec.native.mpe.world import (
    Body,
    Neighbours,
    Options,
    Scenario,
    nearer,
    put,
    put_offset,
    put_own,
    put_seen,
    scatter,
    touching,
)
from marlvec.native.native_env import Ids, own_arguments


def exponentials(ids: Ids, pos: NDArray[np.float64], first: int, out: NDArray[np.float64]) -> None:
    """Write ``np.exp(2 * x - 2)`` of distances x from the middle on each axis, for agents from ``first`` on.

    By numpy, for the whole batch: compiled code calls the C library's ``exp``, and, depending on the processor, a
    twentieth of its values differ in the last place.
    """
    rows = rows_of(ids)
    x = np.abs(pos[rows, first : first + out.shape[1]])
    with np.errstate(over="ignore"):  # the penalty is at most 10
        out[rows] = np.exp(2 * x - 2)


@kernel
def boundary(x: Any, exp: Any) -> Any:
    """Return the penalty on one axis for the distance ``x`` from the middle, with ``exp = np.exp(2 * x - 2)``."""
    if x < 0.9:
        return 0.0
    if x < 1.0:
        return (x - 0.9) * 10
    return nearer(10.0, exp)


class SimpleTag(Scenario):
    """mpe2's ``simple_tag_v3``."""

    name = "simple_tag_v3"
    state_names = ()

    def __init__(
        self,
        num_envs: int,
        num_good: int = 1,
        num_adversaries: int = 3,
        num_obstacles: int = 2,
        # mpe2's first stage, where the prey has half its speed; later stages are not supported
        curriculum: bool = False,
        terminate_on_success: bool = False,  # once every good agent is caught
        num_agent_neighbors: int | None = None,  # how many an agent sees; None: all
        num_landmark_neighbors: int | None = None,
        **options: Unpack[Options],
    ) -> None:
        own = own_arguments(locals())
        good = check_int("num_good", num_good, 0)
        self._hunters = hunters = check_int("num_adversaries", num_adversaries, 0)
        obstacles = check_int("num_obstacles", num_obstacles, 0)
        if not good + hunters:
            raise ArgumentError("num_good and num_adversaries: expected at least one agent, got 0 and 0")
        pace = 0.5 if curriculum else 1.0
        self._reached = np.zeros(num_envs, np.bool_) if terminate_on_success else None
        self._exp = np.zeros((num_envs, good, 2))
        self._seen = Neighbours(num_envs, good + hunters, obstacles, num_agent_neighbors, num_landmark_neighbors)
        self._all_seen = num_agent_neighbors is None
        others, landmarks = self._seen.agents.shape[2], self._seen.landmarks.shape[2]
        common = 4 + 2 * landmarks + 2 * others
        moving = (good, good - 1) if self._all_seen else (others, others)  # whose velocity is seen
        super().__init__(
            num_envs,
            agents=[
                *(Body(f"adversary_{a}", 0.075, accel=3.0, max_speed=1.0) for a in range(hunters)),
                *(Body(f"agent_{a}", 0.05, accel=4.0 * pace, max_speed=1.3 * pace) for a in range(good)),
            ],
            landmarks=[Body(f"landmark {j}", 0.2) for j in range(obstacles)],
            obs_sizes=[common + 2 * moving[0]] * hunters + [common + 2 * moving[1]] * good,
            options=options,
            own=own,
        )

    def place(self, ids: Ids) -> None:
        _place(ids, self.rng, self.pos, len(self.agents))

    def score(self, ids: Ids) -> None:
        exponentials(ids, self.pos, self._hunters, self._exp)
        _score(ids, self.pos, self.size, self._hunters, self._exp, self.rows.reward)

    def reached(self, ids: Ids) -> NDArray[np.bool_] | None:
        if self._reached is not None:
            _find_caught(ids, self.pos, self.size, self._hunters, len(self.agents), self._reached)
        return self._reached

    def observe(self, ids: Ids) -> None:
        if self._seen.limited:
            self._seen.look(ids, self.pos)
            seen = (self._seen.agents, self._seen.landmarks, self._all_seen)
            _observe_near(ids, self.pos, self.vel, self._hunters, *seen, self.view)
            return
        _observe(ids, self.pos, self.vel, self._hunters, self.view)


@kernel
def _place(ids: Any, rng: Any, pos: Any, agent_num: Any) -> None:
    for i in ids:
        scatter(i, rng, pos, 0, agent_num, 1.0)
        scatter(i, rng, pos, agent_num, pos.shape[1], 0.9)


@kernel
def _score(ids: Any, pos: Any, size: Any, hunters: Any, exp: Any, reward: Any) -> None:
    agent_num = reward.shape[1]
    for i in ids:
        bounty = 0.0
        for a in range(hunters, agent_num):
            own = 0.0
            for b in range(hunters):
                if touching(pos, size, i, b, a):
                    own -= 10.0
                    bounty += 10.0
            for axis in range(2):
                own -= boundary(abs(pos[i, a, axis]), exp[i, a - hunters, axis])
            reward[i, a] = own + 0.0
        for b in range(hunters):
            reward[i, b] = bounty


@kernel
def _find_caught(ids: Any, pos: Any, size: Any, hunters: Any, agent_num: Any, reached: Any) -> None:
    for i in ids:
        all_caught = True
        for a in range(hunters, agent_num):
            caught = False
            for b in range(hunters):
                caught |= touching(pos, size, i, a, b)
            all_caught &= caught
        reached[i] = all_caught


@kernel
def _observe(ids: Any, pos: Any, vel: Any, hunters: Any, view: Any) -> None:
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
            for b in range(hunters, agent_num):
                if b != a:
                    k = put_own(view, i, k, vel, b)


@kernel
def _observe_near(
    ids: Any, pos: Any, vel: Any, hunters: Any, others: Any, landmarks: Any, all_seen: Any, view: Any
) -> None:
    for i in ids:
        k = 0
        for a in range(vel.shape[1]):
            k = put_own(view, i, k, vel, a)
            k = put_own(view, i, k, pos, a)
            k = put_seen(view, i, k, pos, landmarks, a)
            k = put_seen(view, i, k, pos, others, a)
            for m in range(others.shape[2]):
                b = others[i, a, m]
                if b >= hunters:
                    k = put_own(view, i, k, vel, b)
                elif not all_seen:
                    k = put(view, i, k, 0.0, 0.0)
