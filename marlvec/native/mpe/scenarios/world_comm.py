"""simple_world_comm: simple_tag with food, forests to hide in, and an adversary (the leader) that sees everything."""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np

from marlvec.arguments import check_int
from marlvec.native.kernels import kernel
from marlvec.native.mpe.scenarios.tag import boundary, exponentials
from marlvec.native.mpe.world import (
    Body,
    Options,
    Scenario,
    distance,
    nearer,
    put,
    put_comm,
    put_offset,
    put_own,
    scatter,
    touching,
)
from marlvec.native.native_env import Ids, own_arguments, refuse


class SimpleWorldComm(Scenario):
    """mpe2's ``simple_world_comm_v3``."""

    name = "simple_world_comm_v3"
    state_names = ()

    def __init__(
        self,
        num_envs: int,
        num_good: int = 2,
        num_adversaries: int = 4,
        num_obstacles: int = 1,
        num_food: int = 2,
        num_forests: int = 2,
        **options: Unpack[Options],
    ) -> None:
        own = own_arguments(locals())
        if num_adversaries == 0:
            raise refuse(self.name, "num_adversaries=0")
        good = check_int("num_good", num_good, 1)
        self._hunters = hunters = check_int("num_adversaries", num_adversaries, 1)
        obstacles = check_int("num_obstacles", num_obstacles, 0)
        food = check_int("num_food", num_food, 1)
        forests = check_int("num_forests", num_forests, 0)
        self._first_food = good + hunters + obstacles
        self._first_forest = self._first_food + food
        self._exp = np.zeros((num_envs, good, 2))
        self._inside = np.zeros((num_envs, good + hunters, forests), np.bool_)
        common = 4 + 2 * (obstacles + food + forests) + 2 * (good + hunters - 1) + forests
        names = ["leadadversary_0", *(f"adversary_{a}" for a in range(hunters - 1))]
        super().__init__(
            num_envs,
            agents=[
                *(Body(name, 0.075, silent=a > 0, accel=3.0, max_speed=1.0) for a, name in enumerate(names)),
                *(Body(f"agent_{a}", 0.045, accel=4.0, max_speed=1.3) for a in range(good)),
            ],
            landmarks=[
                *(Body(f"landmark {j}", 0.2) for j in range(obstacles)),
                *(Body(f"food {j}", 0.03, collide=False) for j in range(food)),
                *(Body(f"forest {j}", 0.3, collide=False) for j in range(forests)),
            ],
            obs_sizes=[common + 2 * good + 4] * hunters + [common + 2 * (good - 1)] * good,
            dim_c=4,
            options=options,
            own=own,
        )

    def place(self, ids: Ids) -> None:
        _place(ids, self.rng, self.pos, len(self.agents), self._first_food)

    def score(self, ids: Ids) -> None:
        exponentials(ids, self.pos, self._hunters, self._exp)
        food = (self._first_food, self._first_forest)
        _score(ids, self.pos, self.size, self._hunters, *food, self._exp, self.rows.reward)

    def observe(self, ids: Ids) -> None:
        _look_around(ids, self.pos, self.size, self._first_forest, self._inside)
        _observe(ids, self.pos, self.vel, self.comm, self._hunters, self._inside, self.view)


@kernel
def _place(ids: Any, rng: Any, pos: Any, agent_num: Any, first_food: Any) -> None:
    for i in ids:
        scatter(i, rng, pos, 0, agent_num, 1.0)
        scatter(i, rng, pos, agent_num, pos.shape[1], 0.9)
        scatter(i, rng, pos, first_food, pos.shape[1], 0.9)  # the reference draws these twice


@kernel
def _score(ids: Any, pos: Any, size: Any, hunters: Any, first_food: Any, last_food: Any, exp: Any, reward: Any) -> None:
    agent_num = reward.shape[1]
    for i in ids:
        for a in range(hunters):
            least = distance(pos, i, hunters, a)
            for b in range(hunters + 1, agent_num):
                least = nearer(distance(pos, i, b, a), least)
            own = 0.0 - 0.1 * least
            for b in range(hunters, agent_num):
                for c in range(hunters):
                    if touching(pos, size, i, b, c):
                        own += 5.0
            reward[i, a] = own + 0.0
        for a in range(hunters, agent_num):
            own = 0.0
            for b in range(hunters):
                if touching(pos, size, i, b, a):
                    own -= 5.0
            for axis in range(2):
                own -= 2 * boundary(abs(pos[i, a, axis]), exp[i, a - hunters, axis])
            for food in range(first_food, last_food):
                if touching(pos, size, i, a, food):
                    own += 2.0
            least = distance(pos, i, first_food, a)
            for food in range(first_food + 1, last_food):
                least = nearer(distance(pos, i, food, a), least)
            reward[i, a] = own - 0.05 * least + 0.0


@kernel
def _look_around(ids: Any, pos: Any, size: Any, first_forest: Any, inside: Any) -> None:
    """Compute which agents are in which forest."""
    for i in ids:
        for a in range(inside.shape[1]):
            for f in range(inside.shape[2]):
                inside[i, a, f] = touching(pos, size, i, a, first_forest + f)


@kernel
def _sees(inside: Any, i: Any, a: Any, b: Any) -> Any:
    """Return whether an agent sees another: the leader always; others in the same forest, or if both are outside."""
    hidden = False
    for f in range(inside.shape[2]):
        if inside[i, a, f] and inside[i, b, f]:
            return True
        hidden |= inside[i, a, f] or inside[i, b, f]
    return a == 0 or not hidden


@kernel
def _put_forests(view: Any, i: Any, k: Any, inside: Any, a: Any) -> Any:
    for f in range(inside.shape[2]):
        view[i, k + f] = 1.0 if inside[i, a, f] else -1.0
    return k + inside.shape[2]


@kernel
def _observe(ids: Any, pos: Any, vel: Any, comm: Any, hunters: Any, inside: Any, view: Any) -> None:
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
                    k = put_offset(view, i, k, pos, b, a) if _sees(inside, i, a, b) else put(view, i, k, 0.0, 0.0)
            if a >= hunters:
                k = _put_forests(view, i, k, inside, a)
            for b in range(hunters, agent_num):
                if b != a:
                    k = put_own(view, i, k, vel, b) if _sees(inside, i, a, b) else put(view, i, k, 0.0, 0.0)
            if a < hunters:
                k = _put_forests(view, i, k, inside, a)
                k = put_comm(view, i, k, comm, 0)
