"""simple_crypto: Alice sends Bob a message under a key they share, and Eve listens."""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np

from marlvec.native.kernels import bounded, kernel
from marlvec.native.mpe.world import Body, Options, Scenario, put_colour, put_comm, scatter
from marlvec.native.native_env import Ids


class SimpleCrypto(Scenario):
    """mpe2's ``simple_crypto_v3``."""

    name = "simple_crypto_v3"
    state_names = ("goal",)

    def __init__(self, num_envs: int, **options: Unpack[Options]) -> None:
        self.goal = np.zeros((num_envs, 2), np.int64)  # the message and the key
        super().__init__(
            num_envs,
            agents=[Body(name, collide=False, movable=False, silent=False) for name in ("eve_0", "bob_0", "alice_0")],
            landmarks=[Body(f"landmark {j}", collide=False) for j in range(2)],
            obs_sizes=[4, 8, 8],
            dim_c=4,
            options=options,
        )

    def state_limits(self) -> dict[str, tuple[int, int]]:
        return {**super().state_limits(), "goal": (0, 1)}

    def place(self, ids: Ids) -> None:
        _place(ids, self.rng, self.pos, self.goal)

    def score(self, ids: Ids) -> None:
        _score(ids, self.comm, self.goal, self.rows.reward)

    def observe(self, ids: Ids) -> None:
        _observe(ids, self.comm, self.goal, self.view)


@kernel
def _place(ids: Any, rng: Any, pos: Any, goal: Any) -> None:
    for i in ids:
        goal[i, 0] = bounded(rng, i, 2)
        goal[i, 1] = bounded(rng, i, 2)
        scatter(i, rng, pos, 0, 5, 1.0)


@kernel
def _error(comm: Any, i: Any, a: Any, goal: Any) -> Any:
    """Return the squared distance of an agent's utterance from the message; 0 if it says nothing."""
    silent, total = True, 0.0
    for c in range(4):
        said = comm[i, a, c]
        off = said - (1.0 if c == goal else 0.0)
        total += off * off
        silent &= said == 0.0
    return 0.0 if silent else total


@kernel
def _score(ids: Any, comm: Any, goal: Any, reward: Any) -> None:
    for i in ids:
        eve, bob = _error(comm, i, 0, goal[i, 0]), _error(comm, i, 1, goal[i, 0])
        reward[i, 0] = 0.0 - eve
        reward[i, 1] = reward[i, 2] = eve + (0.0 - bob)


@kernel
def _observe(ids: Any, comm: Any, goal: Any, view: Any) -> None:
    for i in ids:
        k = put_comm(view, i, 0, comm, 2)
        k = put_colour(view, i, k, goal[i, 1], 4, 0.0, 1.0)
        k = put_comm(view, i, k, comm, 2)
        k = put_colour(view, i, k, goal[i, 0], 4, 0.0, 1.0)
        put_colour(view, i, k, goal[i, 1], 4, 0.0, 1.0)
