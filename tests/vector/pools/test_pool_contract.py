"""The whole of `Pool`'s contract, by a pool over any envs: every call against a plain loop over them, bit for bit."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import marlvec
from marlvec import SyncVectorEnv
from marlvec.errors import ArgumentError, ContractError
from marlvec.testing.scripted import CounterEnv
from marlvec.vector.pool_env import PoolVectorEnv
from tests.vector.support.kinds import factories_of, recorded
from tests.vector.support.mirror_pool import MirrorPool
from tests.vector.support.reference import MODES, record, replay

KINDS = ("parallel", "masked", "turns, masked", "simple_tag", "pettingzoo/classic/tictactoe")
N = 4


@pytest.mark.mostly_slow("plays whole pools", quick="each")
@pytest.mark.parametrize("own", ["its own", "disabled"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_plain_loop(kind: str, mode: str, own: str) -> None:
    """Groups, deaths, masks, states, infos; the pool resets by itself, or is asked to."""
    autoreset = "disabled" if own == "disabled" and mode == "same_step" else mode
    pool = MirrorPool(factories_of(kind, N), autoreset)
    with PoolVectorEnv(pool, autoreset_mode=mode) as envs:
        replay(envs, recorded(kind, N, mode))
    assert pool.inner.closed


@pytest.mark.parametrize("gives", [True, False], ids=["gives", "shows"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["parallel", "turns, masked"])
def test_a_pool_that_says_who_is_alive_is_the_plain_loop(kind: str, mode: str, gives: bool) -> None:
    with PoolVectorEnv(MirrorPool(factories_of(kind, N), mode, tells=True, gives=gives), autoreset_mode=mode) as envs:
        replay(envs, recorded(kind, N, mode))


@pytest.mark.parametrize("mode", MODES)
def test_rows_that_only_keep_their_place_are_ignored(mode: str) -> None:
    class Padding(MirrorPool):
        """Goes on to give rows of agents that have left, to the end of the episode."""

        seen: Any = None

        def _ask(self, ids: Any, *rest: Any) -> Any:
            self.seen[ids] = False
            return super()._ask(ids, *rest)

        def recv(self) -> Any:
            reply = super().recv()
            reply.present = self.seen[reply.env_ids] = reply.present | self.seen[reply.env_ids]
            return reply

    pool = Padding(factories_of("parallel", N), "disabled" if mode == "same_step" else mode)
    pool.seen = np.zeros((N, len(pool.spec.agents)), bool)
    with PoolVectorEnv(pool, autoreset_mode=mode) as envs:
        replay(envs, recorded("parallel", N, mode))


def test_who_says_who_is_alive_says_what_is_over() -> None:
    class Silent(MirrorPool):
        def recv(self) -> Any:
            reply = super().recv()
            reply.done = None
            return reply

    told = r"PoolReply.done: expected \(n,\) bool from a pool that sets alive, got None"
    with (
        PoolVectorEnv(Silent(factories_of("parallel", 2), tells=True)) as envs,
        pytest.raises(ContractError, match=told),
    ):
        envs.reset(seed=0)


@pytest.mark.parametrize("copy", [True, False], ids=["copies", "views"])
@pytest.mark.parametrize("mode", MODES)
def test_arrays_that_are_given_are_the_rows(mode: str, copy: bool) -> None:
    factories = [partial(CounterEnv, [3, 5], agent_num=2, env_index=i) for i in range(N)]
    calls = record(factories, mode, interrupt=0.15)
    with PoolVectorEnv(MirrorPool(factories, mode, gives=True), autoreset_mode=mode, copy=copy) as envs:
        replay(envs, calls)
        obs, _ = envs.reset(seed=0)
        if copy:
            obs[...] = 0  # the caller's own
        else:
            with pytest.raises(ValueError, match="read-only"):
                obs[...] = 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("gives", [True, False])
def test_global_states_come_with_every_row(mode: str, gives: bool) -> None:
    def play(envs: Any) -> list[Any]:
        told = [envs.reset(seed=2)[1]["state"], envs.state()]
        for t in range(15):
            *_, infos = envs.step(envs.random_action(seed=t))
            told += [infos["state"], envs.state() if mode != "disabled" else None]
            if "final_state" in infos:
                told.append(infos["final_state"][infos["_final_state"]])
                if mode == "disabled":
                    told.append(envs.reset(env_ids=infos["_final_state"])[1]["state"])
        return told

    factories = factories_of("parallel", N)
    with SyncVectorEnv(factories, autoreset_mode=mode, state=True) as envs:
        expected = play(envs)
    pool = MirrorPool(factories, mode, gives=gives)
    with PoolVectorEnv(pool, autoreset_mode=mode, state=True) as envs:
        assert pool.brings_state
        got = play(envs)
    assert len(got) == len(expected) > 30
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("mode", MODES)
def test_a_saved_state_goes_on_bit_by_bit(mode: str) -> None:
    """All envs from a state, in another vectorizer."""

    def make() -> Any:
        pool = MirrorPool(factories_of("parallel", N), mode, gives=True, env_state="deepcopy")
        return PoolVectorEnv(pool, autoreset_mode=mode)

    def step(envs: Any, t: int) -> list[Any]:
        obs, *rest, infos = envs.step(envs.random_action(seed=t))
        if mode == "disabled" and "final_obs" in infos:
            envs.reset(env_ids=infos["_final_obs"])
        return [obs, *rest, infos["alive"], infos.get("final_obs", 0)]

    with make() as envs, make() as others:
        envs.reset(seed=1)
        for t in range(5):
            step(envs, t)
        saved = envs.get_state()
        others.set_state(saved)
        for t in range(20):
            for a, b in zip(step(envs, t), step(others, t), strict=True):
                np.testing.assert_array_equal(a, b)
        broken = {**saved, "envs": {**saved["envs"], "phase": saved["envs"]["phase"][:1]}}
        with pytest.raises(ArgumentError, match="phase"):
            envs.set_state(broken)
        with pytest.raises(ArgumentError, match="expected .*'had_rows'"):
            envs.set_state({**saved, "envs": {}})


def test_a_pool_that_keeps_its_states_says_so() -> None:
    class Closed(MirrorPool):
        state_obstacle = marlvec.vector.pools.pool.Pool.state_obstacle

    with PoolVectorEnv(Closed(factories_of("masked", 2))) as envs:
        assert list(envs.state_obstacles()) == [0, 1]
        with pytest.raises(ArgumentError, match="keeps the states of its envs to itself"):
            envs.get_state()
    with pytest.raises(ArgumentError, match="state=True: expected envs with a global state, and .* has none"):
        PoolVectorEnv(MirrorPool(factories_of("masked", 2)), state=True)


def test_actions_come_in_the_dtype_of_the_pool() -> None:
    pool = MirrorPool(factories_of("simple_tag", 2))
    with PoolVectorEnv(pool) as envs:
        envs.reset(seed=0)
        envs.step(envs.random_action())
        assert pool.dtypes == [np.dtype(np.int32)] * 2


def test_final_rows_of_other_envs_are_refused() -> None:
    class Wrong(MirrorPool):
        def recv(self) -> Any:
            reply = super().recv()
            if reply.finals is not None:
                reply.finals.rows = reply.finals.rows[:0]
            return reply

    factories = [partial(CounterEnv, [1], agent_num=2, env_index=i) for i in range(2)]
    with PoolVectorEnv(Wrong(factories, "same_step")) as envs:
        envs.reset(seed=0)
        with pytest.raises(ContractError, match=r"the episodes of envs \[0, 1\] are over, and it gives final rows of"):
            envs.step(envs.random_action())
