"""The envs that the vectorizers are tried on, all picklable by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from marlvec import AsyncVectorEnv, SyncVectorEnv, ThreadVectorEnv, VectorEnv
from marlvec.registry import resolve_all
from marlvec.testing.scripted import KeyedEnv, Script, ScriptedParallelEnv, SingleEnv, TurnEnv
from tests.vector.support.reference import Call, record

Factories = list[Callable[[], Any]]


def waits(t: int, a: int) -> bool:
    return (t + a) % 3 == 0


SCRIPTED: dict[str, Callable[..., Any]] = {
    "parallel": partial(ScriptedParallelEnv, state=True),
    "reused buffer": partial(ScriptedParallelEnv, reuse_buffer=True),
    "masked": partial(ScriptedParallelEnv, masked=True),
    "float32": partial(ScriptedParallelEnv, dtype="float32"),
    "turns": partial(TurnEnv, state=True),
    "turns, masked": partial(TurnEnv, masked=True, dead_first=False),
    "turns, reused buffer": partial(TurnEnv, reuse_buffer=True),
    "keyed": partial(KeyedEnv, waits=waits),
    "keyed, no last obs": partial(KeyedEnv, waits=waits, last_obs=False, int_ids=True),
}
"""Agents come and go by scripts drawn anew for each episode: births, deaths, flags and infos of every kind."""

REAL = ("simple_spread", "simple_tag", "pettingzoo/classic/tictactoe")


def build(kind: str, env_index: int, agent_num: int = 3, longest: int = 7) -> Any:
    """One env of a kind."""
    if kind == "single":
        return SingleEnv([3, 1, 5], info_every=2, env_index=env_index)
    return SCRIPTED[kind](agent_num=agent_num, env_index=env_index, longest=longest)


def factories_of(kind: str, n: int, **options: Any) -> Factories:
    """One factory per env: of a kind, or of a registered id."""
    if kind in SCRIPTED or kind == "single":
        return [partial(build, kind, i, **options) for i in range(n)]
    return list(resolve_all(kind, n))


@cache
def recorded(kind: str, n: int, mode: str, seed: int = 0) -> list[Call]:
    """What the reference does on such envs in three episodes each."""
    return record(factories_of(kind, n), mode, seed=seed)


def sync(kind: str, n: int, mode: str = "same_step", **options: Any) -> SyncVectorEnv:
    return SyncVectorEnv(factories_of(kind, n), autoreset_mode=mode, **options)


def asynchronous(kind: str, n: int, mode: str = "same_step", **options: Any) -> AsyncVectorEnv:
    return AsyncVectorEnv(factories_of(kind, n), autoreset_mode=mode, **options)


def vectorize(backend: str, factories: Factories, **options: Any) -> VectorEnv:
    """On the sync backend, or in two workers (one, if there is one env): threads, or processes that share memory, or a
    file.
    """
    if backend == "sync":
        return SyncVectorEnv(factories, **options)
    options = {"num_workers": min(2, len(factories))} | options
    if backend == "thread":
        options.pop("context", None)
        return ThreadVectorEnv(factories, **options)
    return AsyncVectorEnv(factories, shared_memory=backend != "file", **options)


BACKENDS = ("sync", "thread", "async")
HERE_AND_AWAY = ("sync", "async")
"""For what a shard does, which is the same code wherever it runs; tests/properties draws all backends."""


def together(agent_num: int, *lengths: int) -> list[Script]:
    """Scripts of these lengths in which everyone lives all the time."""
    return [Script.together(agent_num, length) for length in lengths]
