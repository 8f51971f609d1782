"""One seed, one trace: SHA-256 of 16,000 env steps (100,000 in the soak), whatever runs them, and how many of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from marlvec import AsyncVectorEnv, SyncVectorEnv, ThreadVectorEnv, VectorEnv
from marlvec.envs.env import MultiAgentEnv
from marlvec.envs.slot import Slot
from marlvec.envs.spec import Info
from tests.families.trace import Trace
from tests.vector.support.kinds import factories_of

N = 16
STEPS, MANY_STEPS = 1_000, 6_250
FEW_STEPS = 100  # of an env that takes a hundred times as long

PLACES = ("thread", "fork", "forkserver", "spawn")
WORKERS = (1, 2, 4)
EVERYWHERE = [(place, workers) for place in PLACES for workers in WORKERS]
SOMEWHERE = list(zip(PLACES, (2, 4, 2, 1), strict=True))

MASK = 2**64 - 1


class DiceEnv(MultiAgentEnv):
    """The cheapest env with a memory: each step folds all actions into one number, from which all else follows.

    The number goes on from episode to episode; only a seed sets it. The second agent leaves early, episodes differ in
    length, masks change from step to step, and now and then there is an info.
    """

    name = "dice"
    agents = ("first", "second")
    observation_spaces = (Box(0, 65_535, (3,), np.float32),) * 2
    action_spaces = (Discrete(5),) * 2
    mask_sizes = (5, 5)

    def __init__(self, env_index: int) -> None:
        self._x = env_index
        self._t = self._length = self._leaves = 0

    def reset(self, slot: Slot, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Info | None:
        if seed is not None:
            self._x = seed
        self._roll(1)
        self._t, self._length = 0, 5 + (self._x >> 40) % 30
        self._leaves = 1 + (self._x >> 20) % self._length
        for a in range(2):
            slot.alive[a] = slot.acting[a] = True
            self._write(slot, a)
        return {"first": {"length": self._length}} if self._x & 7 == 0 else None

    def step(self, slot: Slot) -> Info | None:
        actions = slot.read_actions()
        self._t += 1
        for a in range(2):
            if slot.alive[a]:
                self._roll(actions[a])
                slot.reward[a] = (self._x >> 33) / 7
                self._write(slot, a)
        if self._t == self._leaves and self._t < self._length:
            slot.terminated[1], slot.alive[1], slot.acting[1] = True, False, False
            slot.clear_mask(1)
        if self._t == self._length:
            for a in range(2):
                if slot.alive[a]:
                    slot.truncated[a], slot.alive[a], slot.acting[a] = True, False, False
                    slot.clear_mask(a)
            slot.done = True
        return {"__common__": {"dice": self._x >> 8}} if self._x & 0x3F00 == 0 else None

    def _roll(self, what: int) -> None:
        self._x = ((self._x ^ what) * 6_364_136_223_846_793_005 + 1_442_695_040_888_963_407) & MASK

    def _write(self, slot: Slot, a: int) -> None:
        cell, mask, x = slot.fast_rows[a], slot.action_mask[a], self._x
        assert cell is not None
        assert mask is not None
        cell[0], cell[1], cell[2] = x >> 48, (x >> 32) & 0xFFFF, (x >> 16) & 0xFFFF  # type: ignore[call-overload]  # typeshed knows memoryviews of ints only
        mask[...] = True
        mask[x % 5] = False


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


def dice() -> list[Callable[[], Any]]:
    return [partial(DiceEnv, i) for i in range(N)]


@cache
def expected(kind: str, steps: int) -> str:
    return trace_of("sync", 1, dice() if kind == "dice" else factories_of(kind, N), steps)


@pytest.mark.slow("plays whole episodes in worker processes")
@pytest.mark.parametrize(("place", "workers"), SOMEWHERE)
def test_sixteen_thousand_steps(place: str, workers: int) -> None:
    assert trace_of(place, workers, dice(), STEPS) == expected("dice", STEPS)


@pytest.mark.slow("plays whole episodes in worker processes")
@pytest.mark.parametrize(("place", "workers"), SOMEWHERE)
def test_simple_spread(place: str, workers: int) -> None:
    trace = trace_of(place, workers, factories_of("simple_spread", N), FEW_STEPS)
    assert trace == expected("simple_spread", FEW_STEPS)


@pytest.mark.soak
@pytest.mark.parametrize(("place", "workers"), EVERYWHERE)
@pytest.mark.parametrize("kind", ["dice", "simple_spread", "parallel", "turns", "keyed"])
def test_a_hundred_thousand_steps(kind: str, place: str, workers: int) -> None:
    factories = dice() if kind == "dice" else factories_of(kind, N)
    assert trace_of(place, workers, factories, MANY_STEPS) == expected(kind, MANY_STEPS)


def test_a_trace_tells_of_the_smallest_change() -> None:
    """The hash is of all there is: another seed, another action, another bit make another one."""
    with made("sync", 1, dice()) as envs:
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
