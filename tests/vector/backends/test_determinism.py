"""One seed, one trace: SHA-256 of 8,000 env steps (100,000 in the soak), whatever runs them, and how many of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from marlvec import AsyncVectorEnv, SyncVectorEnv, ThreadVectorEnv, VectorEnv
from tests.families.trace import Trace
from tests.vector.support.kinds import factories_of

N = 16
STEPS, MANY_STEPS = 500, 6_250
FEW_STEPS = 100  # of an env that takes a hundred times as long

PLACES = ("thread", "fork", "forkserver", "spawn")
WORKERS = (1, 2, 4)
EVERYWHERE = [(place, workers) for place in PLACES for workers in WORKERS]
SOMEWHERE = list(zip(PLACES, (2, 4, 2, 1), strict=True))


def made(place: str, workers: int, factories: list[Callable[[], Any]]) -> VectorEnv:
    if place == "sync":
        return SyncVectorEnv(factories)
    if place == "thread":
        return ThreadVectorEnv(factories, num_workers=workers)
    return AsyncVectorEnv(factories, num_workers=workers, context=place)


def trace_of(place: str, workers: int, factories: list[Callable[[], Any]], steps: int) -> str:
    """Hash of all that a run brings, its random actions included."""
    trace = Trace()
    with made(place, workers, factories) as envs:
        trace.add(envs.reset(seed=2026))
        for _ in range(steps):
            actions = envs.random_action()
            trace.add((actions, envs.step(actions)))
    return str(trace)


@cache
def expected(kind: str, steps: int) -> str:
    return trace_of("sync", 1, factories_of(kind, N), steps)


@pytest.mark.slow("plays whole episodes in worker processes")
@pytest.mark.parametrize(("place", "workers"), SOMEWHERE)
def test_eight_thousand_steps(place: str, workers: int) -> None:
    assert trace_of(place, workers, factories_of("masked", N), STEPS) == expected("masked", STEPS)


@pytest.mark.slow("plays whole episodes in worker processes")
@pytest.mark.parametrize(("place", "workers"), SOMEWHERE)
def test_simple_spread(place: str, workers: int) -> None:
    trace = trace_of(place, workers, factories_of("simple_spread", N), FEW_STEPS)
    assert trace == expected("simple_spread", FEW_STEPS)


@pytest.mark.soak
@pytest.mark.parametrize(("place", "workers"), EVERYWHERE)
@pytest.mark.parametrize("kind", ["masked", "simple_spread", "parallel", "turns", "keyed"])
def test_a_hundred_thousand_steps(kind: str, place: str, workers: int) -> None:
    assert trace_of(place, workers, factories_of(kind, N), MANY_STEPS) == expected(kind, MANY_STEPS)


def test_a_trace_tells_of_the_smallest_change() -> None:
    """The hash is of all there is: another seed, another action, another bit make another one."""
    with made("sync", 1, factories_of("masked", N)) as envs:
        envs.reset(seed=1)
        result = envs.step(envs.random_action(seed=0))
    same, other = Trace(), Trace()
    same.add(result)
    for array in (result[0], result[1], result[3], result[4]["alive"], result[4]["action_mask"]):
        other = Trace()
        before = array.flat[-1]
        array.flat[-1] = not before if array.dtype == bool else np.nextafter(before, np.inf, dtype=array.dtype)
        other.add(result)
        array.flat[-1] = before
        assert str(other) != str(same)
    again = Trace()
    again.add(result)
    assert str(again) == str(same)
