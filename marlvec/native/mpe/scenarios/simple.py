"""simple: one agent goes to one landmark."""

from __future__ import annotations

from typing import Any, Unpack

from marlvec.native.kernels import kernel
from marlvec.native.mpe.world import Body, Options, Scenario, put_offset, put_own, scatter
from marlvec.native.native_env import Ids


class Simple(Scenario):
    """mpe2's ``simple_v3``."""

    name = "simple_v3"
    state_names = ()

    def __init__(self, num_envs: int, **options: Unpack[Options]) -> None:
        super().__init__(
            num_envs,
            agents=[Body("agent_0", collide=False)],
            landmarks=[Body("landmark 0", collide=False)],
            obs_sizes=[4],
            dim_c=0,
            options=options,
        )

    def place(self, ids: Ids) -> None:
        _place(ids, self.rng, self.pos)

    def score(self, ids: Ids) -> None:
        _score(ids, self.pos, self.rows.reward)

    def observe(self, ids: Ids) -> None:
        _observe(ids, self.pos, self.vel, self.view)


@kernel
def _place(ids: Any, rng: Any, pos: Any) -> None:
    for i in ids:
        scatter(i, rng, pos, 0, 2, 1.0)


@kernel
def _score(ids: Any, pos: Any, reward: Any) -> None:
    for i in ids:
        x, y = pos[i, 0, 0] - pos[i, 1, 0], pos[i, 0, 1] - pos[i, 1, 1]
        reward[i, 0] = -(x * x + y * y) + 0.0


@kernel
def _observe(ids: Any, pos: Any, vel: Any, view: Any) -> None:
    for i in ids:
        k = put_own(view, i, 0, vel, 0)
        put_offset(view, i, k, pos, 1, 0)
