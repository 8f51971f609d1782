"""A native env with rows of its own and no vectorizer around it, and what its rows are held against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.native.kernels import seed_envs
from marlvec.native.native_env import NativeEnv
from marlvec.vector.buffers import Buffers

NONSENSE = 77  # what agents that are not acting are made to say


class Table:
    """Does for a native env what its runner does before each call, and nothing after it."""

    def __init__(self, env: NativeEnv) -> None:
        self.env = env
        self.rows = Buffers(env.spec(), env.num_envs)
        env.attach(self.rows)

    def reset(self, ids: NDArray[np.int64], seeds: Sequence[int] | None = None) -> None:
        if seeds is not None:
            seed_envs(self.env.rng, ids, seeds)
        self.rows.alive[ids] = self.rows.acting[ids] = False
        self.rows.clear_masks(ids)
        self.env.reset(ids)

    def step(self, ids: NDArray[np.int64], actions: NDArray[np.int64]) -> None:
        """``actions`` are (N, A), or (N,) those of the agents whose turn it is."""
        self.rows.reward[ids] = 0
        self.rows.events[ids] = False
        self.rows.actions[0][0][:] = np.where(
            self.rows.acting, actions if actions.ndim == 2 else actions[:, None], NONSENSE
        )
        self.env.step(ids)


class Shown:
    """What the rows of turn-based games for two are to show; a reference writes here, world by world."""

    def __init__(self, env: NativeEnv) -> None:
        n = env.num_envs
        (obs,) = {(space.shape, space.dtype) for space in env.observation_spaces}
        self.obs = np.zeros((n, 2, *obs[0]), obs[1])
        self.masks = np.ones((n, 2, env.action_spaces[0].n), np.bool_)
        self.reward = np.zeros((n, 2))
        self.terminated, self.truncated, self.alive, self.acting = np.zeros((4, n, 2), np.bool_)

    def turn(self, i: int, mover: int, mask: Any) -> None:
        """It is this agent's turn in world ``i``."""
        self.alive[i] = True
        self.acting[i] = [a == mover for a in range(2)]
        self.masks[i] = True
        self.masks[i, mover] = np.asarray(mask, np.bool_)

    def end(self, i: int, reward: Any, terminated: Any, truncated: Any) -> None:
        """The game in world ``i`` is over."""
        self.reward[i], self.terminated[i], self.truncated[i] = reward, terminated, truncated
        self.alive[i] = self.acting[i] = False
        self.masks[i] = True

    def hold(self, table: Table, ids: NDArray[np.int64]) -> None:
        """Compare every array of these worlds."""
        rows = table.rows
        for what, got, expected in (
            ("obs", rows.obs[0][0], self.obs),
            ("masks", rows.action_masks[0], self.masks),
            ("reward", rows.reward, self.reward),
            ("terminated", rows.terminated, self.terminated),
            ("truncated", rows.truncated, self.truncated),
            ("alive", rows.alive, self.alive),
            ("acting", rows.acting, self.acting),
            ("done", rows.done, ~self.alive.any(axis=1)),
        ):
            assert got.dtype == expected.dtype
            np.testing.assert_array_equal(got[ids], expected[ids], what)
