"""Pools as a backend: every call against a plain loop over the same worlds, bit for bit, whole episodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

import marlvec
from marlvec import VectorEnv
from marlvec.envs.testing import CounterEnv, SampledEnv, Script, ScriptedParallelEnv, SingleEnv, TurnEnv, draw_script
from tests.vector.reference import MODES, Call, record, replay
from tests.vector.world_pool import PoolShop, tell_elapsed

pytestmark = pytest.mark.checklist(125)

NESTED = Dict(
    {
        "camera": Dict({"left": Box(0, 255, (2, 3), np.uint8), "right": Dict({"deep": Box(-1, 1, (), np.float32)})}),
        "buttons": Tuple((Discrete(5, start=2), MultiBinary(3), MultiDiscrete([2, 4]))),
    }
)
COMMANDS = Dict({"turn": Dict({"by": Box(-1, 1, (2,), np.float32)}), "shoot": Discrete(3, start=1)})


def silent(env_index: int, agent_num: int, episode: int) -> Script:
    """A script of births and deaths, without infos: a pool's are always there."""
    rng = np.random.default_rng([env_index, episode])
    return replace(draw_script(rng, agent_num, 6), infos={}, common={})


def coming_and_going(kind: Callable[..., Any], agent_num: int, env_index: int, **options: Any) -> Any:
    return kind(partial(silent, env_index, agent_num), agent_num=agent_num, env_index=env_index, **options)


KINDS: dict[str, Callable[..., Any]] = {
    "single": partial(SingleEnv, [3, 1, 5]),
    "single, truncated": partial(SingleEnv, [4, 2], end="truncated"),
    "single, masked": partial(SingleEnv, [3, 1, 5], masked=True),
    "together": partial(CounterEnv, [3, 5], agent_num=2, end="both"),
    "coming and going": partial(coming_and_going, ScriptedParallelEnv, 3),
    "coming and going, masked": partial(coming_and_going, ScriptedParallelEnv, 3, masked=True),
    "turns": partial(TurnEnv, [Script.together(2, 5), Script.together(2, 3, "terminated")]),
    "turns, masked": partial(TurnEnv, [Script.together(3, n) for n in (4, 1, 6)], agent_num=3, masked=True),
    "turns, coming and going": partial(coming_and_going, TurnEnv, 3, masked=True),
    "nested": partial(SampledEnv, NESTED, COMMANDS, agent_num=2, length=3),
    "nested, alone": partial(SampledEnv, NESTED, COMMANDS, agent_num=1, length=3),
}


def factories_of(kind: str, n: int) -> list[Callable[[], Any]]:
    return [partial(KINDS[kind], env_index=i) for i in range(n)]


def pooled(shop: PoolShop, num_envs: int, **options: Any) -> VectorEnv:
    """What `make` makes of a function that makes pools; its spare envs are left over."""
    from marlvec.vector.pool import PoolVectorEnv
    from marlvec.vector.pools.duck import DuckPool, form_of

    first = shop(num_envs)
    duck = DuckPool(form_of(first), pool=first, num_envs=num_envs)
    duck.made_by(lambda seeds: shop(num_envs, seeds))
    return PoolVectorEnv(duck, **options)


def played(kind: str, n: int, mode: str, **options: Any) -> list[Call]:
    return tell_elapsed(record(factories_of(kind, n), mode, reseed=0.0, **options), mode)


@pytest.mark.parametrize("copy", [True, False], ids=["copies", "views"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_plain_loop(kind: str, mode: str, copy: bool) -> None:
    """A pool that answers all at once; one of several players waits for all of its envs, so it has spare ones."""
    calls = played(kind, 4, mode, interrupt=0.15)
    several = not kind.startswith("single") and kind != "nested, alone"
    shop = PoolShop(factories_of(kind, 4), num_spares=3 if several else 0, batch_size=4 if several else None)
    with pooled(shop, 4, autoreset_mode=mode, copy=copy) as envs:
        replay(envs, calls)
    assert all(pool.closed for pool in shop.made)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["single, masked", "coming and going", "turns, masked", "nested"])
@pytest.mark.parametrize(("n", "batch"), [(5, 2), (4, 1), (4, 3)])
def test_it_is_the_plain_loop_in_batches_out_of_order(kind: str, mode: str, n: int, batch: int) -> None:
    calls = played(kind, n, mode, interrupt=0.15)
    shop = PoolShop(factories_of(kind, n), num_spares=batch - 1, batch_size=batch, shuffle=7)
    with pooled(shop, n, autoreset_mode=mode) as envs:
        replay(envs, calls)
