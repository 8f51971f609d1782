"""Envs that others wrote, of every kind: whole episodes are those of a plain loop, bit for bit, sync and async."""

from __future__ import annotations

import importlib.util
import re
import sys
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest

import marlvec
from marlvec.errors import EnvContractError
from tests.families.others import EVERY, ROWS, Every, Row, momaland, single
from tests.vector.support.reference import record, replay

# What these libraries warn of when they are imported and used is for those who write them.
pytestmark = pytest.mark.filterwarnings("ignore")

EPISODES = 2


def params() -> list[Any]:
    return [
        pytest.param(row, id=f"{row.package}-{row.name}", marks=[pytest.mark.soak] if row.is_long else [])
        for row in ROWS
    ]


def need(package: str) -> None:
    """Skip where it is not installed. Not importing it here: some start threads, or draw random numbers."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; `make families` does it")


@pytest.mark.parametrize("row", params())
def test_whole_episodes_are_those_of_a_plain_loop(row: Row) -> None:
    need(row.package)
    plain = row.factory if row.plainly is None else lambda: row.plainly(row.factory())  # type: ignore[misc]  # it is
    calls = record([plain] * row.num_envs, "same_step", episodes=EPISODES, interrupt=0.05, reseed=1.0)
    for place in ({"backend": "sync"}, {"backend": "async", "num_workers": row.num_envs}):
        with marlvec.make(row.factory, row.num_envs, **place, **row.kwargs) as envs:
            replay(envs, calls)


@pytest.mark.soak
@pytest.mark.time_limit(1800)
@pytest.mark.parametrize("every", EVERY, ids=lambda every: every.package)
def test_every_env_that_runs_by_itself_does_so_here(every: Every) -> None:
    """One of each, in short episodes; which do not is known, for docs/envs.md names them."""
    need(every.package)
    single(every.package, every.one).close()
    specs = [spec for spec in gymnasium.registry.values() if str(spec.entry_point).startswith(every.package)]
    newest = {spec.name: max(other.version or 0 for other in specs if other.name == spec.name) for spec in specs}
    if every.package == "gymnasium_robotics":  # whose older versions are for older simulators
        specs = [spec for spec in specs if spec.version == newest[spec.name]]
    failed = {}
    for spec in specs:
        factory = partial(single, every.package, spec.id, *every.wrappers, max_episode_steps=5)
        try:
            calls = record([factory], "same_step", episodes=2)
            with marlvec.make(factory, 1, backend="sync") as envs:
                replay(envs, calls)
        except Exception as error:  # by AssertionErrors of theirs and of ours, and whatever else
            failed[spec.id] = f"{type(error).__name__}: {error}"[:300]
    if "pygame" in sys.modules:  # some that draw leave what SDL opens
        sys.modules["pygame"].quit()
    known = {spec.id for spec in specs if re.fullmatch(every.not_these, spec.id)}
    assert {name: said for name, said in failed.items() if name not in known} == {}
    assert known <= failed.keys(), "these run now: docs/envs.md should say so"


def test_rewards_of_several_objectives_are_refused_with_the_wrapper_that_makes_one_of_them() -> None:
    need("mo_gymnasium")
    with marlvec.make(partial(single, "mo_gymnasium", "deep-sea-treasure-v0"), backend="sync") as envs:
        envs.reset(seed=0)
        with pytest.raises(
            EnvContractError, match=r"combine them: mo_gymnasium\.wrappers\.LinearReward\(env, weight=…\)"
        ):
            envs.step(envs.random_action())
    need("momaland")
    with marlvec.make(
        partial(momaland, "item_gathering.moitem_gathering_v0", "parallel_env", one_number=False), backend="sync"
    ) as envs:
        envs.reset(seed=0)
        with pytest.raises(
            EnvContractError, match=r"momaland\.utils\.parallel_wrappers\.LinearizeReward\(env, weights\)"
        ):
            envs.step(envs.random_action())
    with marlvec.make(partial(momaland, "connect4.moconnect4_v0", "env", one_number=False), backend="sync") as envs:
        envs.reset(seed=0)
        with pytest.raises(EnvContractError, match="combine them by a wrapper whose `rewards` are numbers"):
            envs.step(envs.random_action())


def test_agents_that_have_arrived_and_go_on_being_rewarded() -> None:
    """In highway-env's v1 and v2: refused, for such a reward has no decision; an env may end with its first agent."""
    need("highway_env")
    config = {"duration": 20, "initial_vehicle_count": 1, "spawn_probability": 0.0}
    factory = partial(single, "highway_env", "intersection-multi-agent-v2", config=config)
    faster, arrivals = np.full((2, 2), 2), 0
    with marlvec.make(factory, 2, backend="sync", agents="tuple", done_on="any") as envs:
        envs.reset(seed=0)
        for _ in range(20):
            _, _, terminated, truncated, _ = envs.step(faster)
            arrivals += int((terminated.any(axis=1) & truncated.any(axis=1)).sum())
    assert arrivals
    with marlvec.make(factory, 2, backend="sync", agents="tuple") as envs:
        envs.reset(seed=0)
        with pytest.raises(EnvContractError, match=r"reward of agent 'agent_\d': expected 0, for it has ended"):
            for _ in range(20):
                envs.step(faster)
