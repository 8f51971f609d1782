"""Envs and policies that the collector's tests use, and that the reference can predict."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.connectors import Rows
from marlvec.policies import Policy
from marlvec.testing.scripted import KeyedEnv, ScriptedParallelEnv, TurnEnv
from marlvec.vector.backends.process import AsyncVectorEnv
from marlvec.vector.backends.sync import SyncVectorEnv

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


def build(kind: str, env_index: int, agent_num: int, longest: int = 6) -> Any:
    """One env of a kind."""
    return KINDS[kind](agent_num=agent_num, env_index=env_index, longest=longest)


def factories(kind: str, num_envs: int, agent_num: int) -> list[Callable[[], Any]]:
    return [partial(build, kind, i, agent_num) for i in range(num_envs)]


def sync(kind: str, num_envs: int, agent_num: int, mode: str = "same_step", **options: Any) -> SyncVectorEnv:
    return SyncVectorEnv(factories(kind, num_envs, agent_num), autoreset_mode=mode, validate="strict", **options)


def asynchronous(kind: str, num_envs: int, agent_num: int, mode: str = "same_step", **options: Any) -> AsyncVectorEnv:
    return AsyncVectorEnv(factories(kind, num_envs, agent_num), autoreset_mode=mode, **options)


def choose(salt: int, obs: NDArray[Any], mask: NDArray[Any] | None) -> int:
    """Decide on one action by what is seen alone: an action computed for another row would be another one."""
    number = int(obs.sum()) * 31 + salt * 7
    if mask is None:
        return number % 5
    allowed = np.flatnonzero(mask)
    return int(allowed[number % len(allowed)])


class EchoPolicy(Policy):
    """Acts by `choose`, says in a column of its own what it saw, and notes each call.

    Attributes:
        calls: Per call, the (env, agent) pairs it was asked about.
    """

    def __init__(self, salt: int = 0) -> None:
        self.salt = salt
        self.calls: list[list[tuple[int, int]]] = []

    def act(self, rows: Rows, *, explore: bool = True) -> Any:
        masks = rows["action_mask"] if "action_mask" in rows else [None] * len(rows)
        actions = [choose(self.salt, obs, mask) for obs, mask in zip(rows["obs"], masks, strict=True)]
        self.calls.append(list(zip(rows["env_id"].tolist(), rows["agent_index"].tolist(), strict=True)))
        return np.array(actions), {"seen": rows["obs"].sum(axis=1), "salt": np.full(len(rows), self.salt)}
