"""Policies and envs whose rows can be predicted."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from marlvec.connectors import LearnerConnector, Rows
from marlvec.making import make
from marlvec.policies import FunctionPolicy, Policy
from marlvec.registry import resolve
from marlvec.testing.scripted import KeyedEnv, ScriptedParallelEnv, TurnEnv
from marlvec.vector import VectorEnv
from marlvec.vector.async_env import AsyncVectorEnv
from marlvec.vector.in_process import SyncVectorEnv
from tests.vector.support.pools import PoolShop
from tests.vector.test_pools import pooled
from tests.vector.test_pools import worlds_of as factories_of

MODES = ("same_step", "next_step", "disabled")

KINDS: dict[str, Callable[..., Any]] = {
    "parallel": ScriptedParallelEnv,
    "buffer": partial(ScriptedParallelEnv, reuse_buffer=True),
    "masked": partial(ScriptedParallelEnv, masked=True),
    "turns": TurnEnv,
    "masked turns": partial(TurnEnv, masked=True),
    "late turns": partial(TurnEnv, dead_first=False),
    "keyed": partial(KeyedEnv, waits=lambda t, a: (t + a) % 3 == 0),
    "keyed, no last obs": partial(KeyedEnv, waits=lambda t, a: (t + a) % 3 == 0, last_obs=False),
}
"""Scripted envs: agents come, go, wait for their turn, also for that in which they end, are left out; one has all
observations in one buffer."""


GAMES: dict[str, dict[str, Any]] = {
    "connect_four": {},
    "tictactoe": {},
    "leduc_holdem": {},
    "hanabi": {"colors": 3, "ranks": 3, "players": 3, "hand_size": 2, "max_life_tokens": 3},
}
"""PettingZoo's own turn-based games. In hanabi all share what each move earns or costs; in the others players pay each
other when the game ends, on whoever's move."""


def build(kind: str, env_index: int, agent_num: int, longest: int = 6) -> Any:
    """One env of a kind."""
    if kind in GAMES:
        return resolve(kind).with_kwargs(**GAMES[kind])()
    return KINDS[kind](agent_num=agent_num, env_index=env_index, longest=longest)


def factories(kind: str, num_envs: int, agent_num: int) -> list[Callable[[], Any]]:
    return [partial(build, kind, i, agent_num) for i in range(num_envs)]


def sync(kind: str, num_envs: int, agent_num: int, mode: str = "same_step", **options: Any) -> SyncVectorEnv:
    return SyncVectorEnv(factories(kind, num_envs, agent_num), autoreset_mode=mode, validate="strict", **options)


def asynchronous(kind: str, num_envs: int, agent_num: int, mode: str = "same_step", **options: Any) -> AsyncVectorEnv:
    return AsyncVectorEnv(factories(kind, num_envs, agent_num), autoreset_mode=mode, **options)


def envs_on(backend: str, makes: list[Callable[[], Any]], mode: str = "same_step") -> VectorEnv:
    """Envs on a backend; a native one and a pool have envs of their own, as many."""
    n = len(makes)
    if backend == "native":
        pytest.importorskip("numba")
        return make("simple_spread", num_envs=n, backend="native", autoreset_mode=mode, max_cycles=4)
    if backend == "pool":
        return pooled(PoolShop(factories_of("single", n), num_spares=1), n, autoreset_mode=mode)
    options: dict[str, Any] = {"num_workers": 2} if backend in ("thread", "async") else {}
    return make(makes, backend=backend, autoreset_mode=mode, **options)


class Scattered(SyncVectorEnv):
    """Envs whose replies come one at a time, in any order.

    Args:
        factories: The envs.
        order: Seed of that order.
        settings: As `SyncVectorEnv`'s.
    """

    def __init__(self, factories: Any, order: int, **settings: Any) -> None:
        self.order = random.Random(order)
        super().__init__(factories, **settings)

    def _send_request(self, operation: str, env_ids: NDArray[np.int64], arguments: tuple[Sequence[Any], ...]) -> None:
        if operation not in ("send", "reset"):
            super()._send_request(operation, env_ids, arguments)
            return
        self._is_sending = True
        for k in range(len(env_ids)):
            own = tuple([argument[k]] for argument in arguments)
            self._requests.insert(self.order.randint(0, len(self._requests)), (operation, env_ids[k : k + 1], own))


def choose(salt: int, obs: NDArray[Any], mask: NDArray[Any] | None) -> int:
    """Decide on one action by what is seen alone: an action computed for another row would be another one."""
    number = int(obs.ravel().astype(np.float64) @ np.arange(1.0, obs.size + 1)) * 31 + salt * 7
    if mask is None:
        return number % 5
    allowed = np.flatnonzero(mask)
    return int(allowed[number % len(allowed)])


def noop() -> FunctionPolicy:
    """Does nothing, wherever zero is nothing."""
    return FunctionPolicy(lambda rows: np.zeros(len(rows), int))


class EchoPolicy(Policy):
    """Acts by `choose`, says in a column of its own what it saw, and notes each call.

    Args:
        salt: The `choose` salt.
        trouble: Called with the number of each call, from 1 on, before it is answered; it may raise.

    Attributes:
        calls: Per call that was answered, the (env, agent) pairs it was asked about.
        explored: Per call, whether it was to explore.
    """

    def __init__(self, salt: int = 0, trouble: Callable[[int], object] | None = None) -> None:
        self.salt, self.trouble = salt, trouble
        self.calls: list[list[tuple[int, int]]] = []
        self.explored: list[bool] = []

    def act(self, rows: Rows, *, explore: bool = True) -> Any:
        self.explored.append(explore)
        if self.trouble is not None:
            self.trouble(len(self.explored))
        masks = rows["action_mask"] if "action_mask" in rows else [None] * len(rows)
        actions = [choose(self.salt, obs, mask) for obs, mask in zip(rows["obs"], masks, strict=True)]
        self.calls.append(list(zip(rows["env_id"].tolist(), rows["agent_index"].tolist(), strict=True)))
        return np.array(actions), {
            "seen": rows["obs"].reshape(len(rows), -1).sum(axis=1),
            "salt": np.full(len(rows), self.salt),
        }


class Looking(LearnerConnector):
    """Changes nothing; keeps the batch of all policies that it was shown last, and whose rows it has ever seen."""

    def __init__(self) -> None:
        super().__init__()
        self.batch: dict[str, Rows] = {}
        self.shown: set[str] = set()

    def see_batch(self, batch: Any) -> None:
        self.batch = dict(batch)
        self.shown |= set(batch)

    def __call__(self, rows: Rows) -> Rows:
        return rows
