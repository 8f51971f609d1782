"""collect_treasure: collectors pick up treasures and bring each to the deposit of its kind."""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np

from marlvec.arguments import check_int
from marlvec.env_ids import rows_of
from marlvec.errors import ArgumentError
from marlvec.native.kernels import bounded, double, kernel, uniform
from marlvec.native.mpe.world import (
    Body,
    Options,
    Scenario,
    distance,
    nearer,
    norms,
    put,
    put_colour,
    put_offset,
    put_own,
    scatter,
    touching,
)
from marlvec.native.native_env import Ids, own_arguments
from marlvec.native.rng_streams import as_generator

_MOST_KINDS = 6
_AWAY = -999.0
_NOTHING = -1


class CollectTreasure(Scenario):
    """mpe2's ``collect_treasure_v1``, with as many kinds of treasure as deposits."""

    name = "collect_treasure_v1"
    state_names = ("holding", "kind", "lies", "_respawns")

    def __init__(
        self,
        num_envs: int,
        num_collectors: int = 6,
        num_deposits: int = 2,
        num_treasures: int = 6,
        **options: Unpack[Options],
    ) -> None:
        own = own_arguments(locals())
        collectors = check_int("num_collectors", num_collectors, 1)
        kinds = check_int("num_deposits", num_deposits, 1)
        treasures = check_int("num_treasures", num_treasures, 1)
        if kinds > _MOST_KINDS:
            raise ArgumentError(f"num_deposits: expected at most {_MOST_KINDS}, got {kinds}")
        agent_num = collectors + kinds
        common = 4 + (agent_num - 1) * (4 + 2 * kinds) + treasures * (2 + kinds)
        super().__init__(
            num_envs,
            agents=[
                *(_agent(f"collector_{a}", 0.05, 1.0) for a in range(collectors)),
                *(_agent(f"deposit_{a}", 0.075, 2.25) for a in range(kinds)),
            ],
            landmarks=[Body(f"treasure_{j}", 0.025, collide=False) for j in range(treasures)],
            obs_sizes=[common + kinds] * collectors + [common] * kinds,
            options=options,
            own=own,
        )
        self._collectors, self._kinds = collectors, kinds
        self.holding = np.full((num_envs, collectors), _NOTHING)  # (N, C) kind of treasure that each collector holds
        self.kind = np.zeros((num_envs, treasures), np.int64)  # (N, T), of each treasure
        self.lies = np.ones((num_envs, treasures), np.bool_)  # (N, T), on the ground
        self._respawns = self.rng.copy()  # the reference draws these from a copy of the stream, taken at the reset
        self._shared = np.zeros(num_envs)  # shared reward of this step's pickups and deliveries
        self._stray = np.zeros((num_envs, kinds))  # distance of each deposit to the collectors' centre
        self._order = np.zeros((num_envs, max(agent_num, treasures)), np.int64)
        self._key = np.zeros(self._order.shape)

    def state_limits(self) -> dict[str, tuple[int, int]]:
        return {**super().state_limits(), "holding": (_NOTHING, self._kinds - 1), "kind": (0, self._kinds - 1)}

    def place(self, ids: Ids) -> None:
        self._respawns[ids] = self.rng[ids]
        _place(ids, self.rng, self.pos, len(self.agents), self._kinds, self.holding, self.kind, self.lies)

    def score(self, ids: Ids) -> None:
        things = (self.holding, self.kind, self.lies)
        _trade(ids, self._respawns, self.pos, self.size, len(self.agents), self._collectors, *things, self._shared)
        rows, first, agent_num = rows_of(ids), self._collectors, len(self.agents)
        middle = np.mean(self.pos[rows, :first], axis=1)
        self._stray[rows] = norms(middle[:, None] - self.pos[rows, first:agent_num])
        reward = self.rows.reward
        _score(ids, self.pos, self.size, first, *things, self._shared, self._stray, reward)

    def observe(self, ids: Ids) -> None:
        things = (self.holding, self.kind, self.lies)
        _observe(ids, self.pos, self.vel, self._collectors, *things, self._order, self._key, self.view)

    def dress(self, world: Any, i: int) -> None:
        for agent, held in zip(world.agents, self.holding[i].tolist(), strict=False):
            agent.holding = None if held == _NOTHING else held
            agent.color = np.array([0.85] * 3) if held == _NOTHING else 0.85 * world.treasure_colors[held]
        for j, treasure in enumerate(world.landmarks):
            treasure.type, treasure.alive = int(self.kind[i, j]), bool(self.lies[i, j])
            treasure.color = world.treasure_colors[treasure.type].copy()
        world.np_random = as_generator(self._respawns[i])


def _agent(name: str, size: float, mass: float) -> Body:
    return Body(name, size, collide=False, accel=1.5, max_speed=1.0, mass=mass)


@kernel
def _place(ids: Any, rng: Any, pos: Any, agent_num: Any, kinds: Any, holding: Any, kind: Any, lies: Any) -> None:
    for i in ids:
        scatter(i, rng, pos, 0, agent_num, 1.0)
        holding[i] = _NOTHING
        for j in range(kind.shape[1]):
            kind[i, j] = bounded(rng, i, kinds)
            scatter(i, rng, pos, agent_num + j, agent_num + j + 1, 0.95)
            lies[i, j] = True


@kernel
def _trade(
    ids: Any,
    rng: Any,
    pos: Any,
    size: Any,
    agent_num: Any,
    collectors: Any,
    holding: Any,
    kind: Any,
    lies: Any,
    shared: Any,
) -> None:
    """Pick up and deliver treasures; treasures picked up earlier appear at a new place."""
    for i in ids:
        found = delivered = 0.0
        for j in range(kind.shape[1]):
            e = agent_num + j
            if lies[i, j]:
                for a in range(collectors):
                    if holding[i, a] == _NOTHING and touching(pos, size, i, e, a):
                        found += 5.0
                        lies[i, j] = False
                        holding[i, a] = kind[i, j]
                        pos[i, e, 0] = pos[i, e, 1] = _AWAY
                        break
            else:
                double(rng, i)  # the reference draws a number here, and always respawns
                pos[i, e, 0] = uniform(rng, i, -0.95, 0.95)
                pos[i, e, 1] = uniform(rng, i, -0.95, 0.95)
                kind[i, j] = bounded(rng, i, agent_num - collectors)
                lies[i, j] = True
        for a in range(collectors):
            held = holding[i, a]
            if held != _NOTHING and touching(pos, size, i, a, collectors + held):
                delivered += 5.0
                holding[i, a] = _NOTHING
        shared[i] = found + delivered


@kernel
def _score(
    ids: Any,
    pos: Any,
    size: Any,
    collectors: Any,
    holding: Any,
    kind: Any,
    lies: Any,
    shared: Any,
    stray: Any,
    reward: Any,
) -> None:
    agent_num = reward.shape[1]
    for i in ids:
        for a in range(collectors):
            own = 0.0
            for b in range(collectors):
                if b != a and touching(pos, size, i, a, b):
                    own -= 5.0
            if holding[i, a] == _NOTHING:
                least = np.inf
                for j in range(kind.shape[1]):
                    if lies[i, j]:
                        least = nearer(distance(pos, i, agent_num + j, a), least)
            else:
                least = distance(pos, i, collectors + holding[i, a], a)
            if least < np.inf:
                own -= 0.1 * least
            reward[i, a] = own + shared[i] + 0.0
        for b in range(collectors, agent_num):
            least = np.inf
            for a in range(collectors):
                if holding[i, a] == b - collectors:
                    least = nearer(distance(pos, i, a, b), least)
            if least == np.inf:
                least = stray[i, b - collectors]
            reward[i, b] = 0.0 - 0.1 * least + shared[i] + 0.0


@kernel
def _sort(order: Any, key: Any, i: Any, size: Any) -> None:
    """Sort the first ``size`` entries by their keys, stably."""
    for k in range(1, size):
        who, far, m = order[i, k], key[i, k], k
        while m > 0 and far < key[i, m - 1]:
            order[i, m], key[i, m] = order[i, m - 1], key[i, m - 1]
            m -= 1
        order[i, m], key[i, m] = who, far


@kernel
def _observe(
    ids: Any, pos: Any, vel: Any, collectors: Any, holding: Any, kind: Any, lies: Any, order: Any, key: Any, view: Any
) -> None:
    agent_num = vel.shape[1]
    kinds = agent_num - collectors
    for i in ids:
        k = 0
        for a in range(agent_num):
            k = put_own(view, i, k, pos, a)
            k = put_own(view, i, k, vel, a)
            if a < collectors:
                k = put_colour(view, i, k, holding[i, a], kinds, 0.0, 1.0)
            size = 0
            for b in range(agent_num):
                if b != a:
                    order[i, size], key[i, size] = b, distance(pos, i, b, a)
                    size += 1
            _sort(order, key, i, size)
            for m in range(size):
                b = order[i, m]
                k = put_offset(view, i, k, pos, b, a)
                k = put_own(view, i, k, vel, b)
                k = put_colour(view, i, k, b - collectors, kinds, 0.0, 1.0)
                k = put_colour(view, i, k, holding[i, b] if b < collectors else _NOTHING, kinds, 0.0, 1.0)
            for j in range(kind.shape[1]):
                order[i, j], key[i, j] = j, distance(pos, i, agent_num + j, a) if lies[i, j] else 1e6
            _sort(order, key, i, kind.shape[1])
            for m in range(kind.shape[1]):
                j = order[i, m]
                if lies[i, j]:
                    k = put_offset(view, i, k, pos, agent_num + j, a)
                    k = put_colour(view, i, k, kind[i, j], kinds, 0.0, 1.0)
                else:
                    k = put(view, i, k, 0.0, 0.0)
                    k = put_colour(view, i, k, _NOTHING, kinds, 0.0, 1.0)
