"""Pools as a backend, one with EnvPool's face and one over any envs: every call against a plain loop, bit for bit."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

import marlvec
from marlvec import SyncVectorEnv, VectorEnv
from marlvec.errors import ArgumentError, BrokenError, BusyError, ContractError, FetchTimeout
from marlvec.testing import CounterEnv, SampledEnv, Script, ScriptedParallelEnv, SingleEnv, TurnEnv, decode, draw_script
from marlvec.testing.check_vector_env import CHECKS, VectorPlace
from marlvec.vector.calls import CallPhase
from marlvec.vector.pool_env import PoolVectorEnv
from marlvec.vector.pools.envpool import EnvPoolAdapter, form_of
from tests.tracer import Tracer
from tests.vector.support.kinds import factories_of, recorded
from tests.vector.support.pools import MirrorPool, PoolShop, tell_elapsed
from tests.vector.support.reference import MODES, Call, record, refused, replay

pytestmark = pytest.mark.checklist(125)

# Pools as a backend: every call against a plain loop over the same worlds, bit for bit, whole episodes.


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


def worlds_of(kind: str, n: int) -> list[Callable[[], Any]]:
    return [partial(KINDS[kind], env_index=i) for i in range(n)]


def pooled(shop: PoolShop, num_envs: int, **options: Any) -> VectorEnv:
    """What `make` makes of a function that makes pools; its spare envs are left over."""
    first = shop(num_envs)
    duck = EnvPoolAdapter(form_of(first), pool=first, num_envs=num_envs)
    duck.made_by(lambda seeds: shop(num_envs, seeds))
    return PoolVectorEnv(duck, **options)


def played(kind: str, n: int, mode: str, **options: Any) -> list[Call]:
    return tell_elapsed(record(worlds_of(kind, n), mode, reseed=0.0, **options), mode)


@pytest.mark.mostly_slow("plays whole pools", quick=6)
@pytest.mark.parametrize("copy", [True, False], ids=["copies", "views"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_plain_loop(kind: str, mode: str, copy: bool) -> None:
    """A pool that answers all at once; one of several players waits for all of its envs, so it has spare ones."""
    calls = played(kind, 4, mode, interrupt=0.15)
    several = not kind.startswith("single") and kind != "nested, alone"
    shop = PoolShop(worlds_of(kind, 4), num_spares=3 if several else 0, batch_size=4 if several else None)
    with pooled(shop, 4, autoreset_mode=mode, copy=copy) as envs:
        replay(envs, calls)
    assert all(pool.closed for pool in shop.made)


@pytest.mark.mostly_slow("plays whole pools", quick="each")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["single, masked", "coming and going", "turns, masked", "nested"])
@pytest.mark.parametrize(("n", "batch"), [(5, 2), (4, 1), (4, 3)])
def test_it_is_the_plain_loop_in_batches_out_of_order(kind: str, mode: str, n: int, batch: int) -> None:
    calls = played(kind, n, mode, interrupt=0.15)
    shop = PoolShop(worlds_of(kind, n), num_spares=batch - 1, batch_size=batch, shuffle=7)
    with pooled(shop, n, autoreset_mode=mode) as envs:
        replay(envs, calls)


def by_env(envs: VectorEnv, ticks: int, *, stream: bool) -> list[list[Any]]:
    """What each env said, step by step, under a policy that looks at the observation alone."""
    told: list[list[Any]] = [[] for _ in range(envs.num_envs)]

    def note(step: Any) -> None:
        for k, i in enumerate(step.env_ids.tolist()):
            final = [leaf[k].tobytes() for leaves in step.final_leaves for leaf in leaves] if step.done[k] else []
            seen = [leaf[k].tobytes() for leaves in step.obs_leaves for leaf in leaves]
            flags = [getattr(step, name)[k].tolist() for name in ("terminated", "truncated", "alive", "acting")]
            told[i].append((seen, step.rewards[k].tolist(), flags, final, bool(step.reset_mask[k])))

    def actions(obs: Any, mask: Any) -> Any:
        wanted = np.asarray(obs).sum(axis=-1).astype(np.int64) % 5
        allowed = np.ones((*wanted.shape, 5), bool) if mask is None else mask
        return np.argmax(np.roll(allowed, 1) & (np.arange(5) >= wanted[..., None]) & allowed | allowed, axis=-1)

    envs.async_reset(seed=3)
    waiting = 0
    while min(map(len, told)) < ticks:
        step = envs.recv(min_envs=2 if stream else None)
        note(step)
        envs.send(actions(step.obs, step.action_mask), step.env_ids)
        waiting += 1
    envs.drain()
    return [one[:ticks] for one in told]


@pytest.mark.mostly_slow("plays whole pools", quick=2)
@pytest.mark.parametrize("mode", ["same_step", "next_step"])
@pytest.mark.parametrize("kind", ["single", "coming and going", "turns, coming and going"])
def test_a_stream_brings_every_env_what_sync_brings_it(kind: str, mode: str) -> None:
    shop = PoolShop(worlds_of(kind, 6), num_spares=2, batch_size=3, shuffle=1)
    with pooled(shop, 6, autoreset_mode=mode) as envs:
        got = by_env(envs, 30, stream=True)
        assert envs.reset(seed=3)[0].shape[0] == 6  # whole calls work again
    with marlvec.make(worlds_of(kind, 6), backend="sync", autoreset_mode=mode) as envs:
        assert got == by_env(envs, 30, stream=False)


@pytest.mark.mostly_slow("plays whole pools", quick="each")
@pytest.mark.parametrize("kind", ["single", "turns, masked"])
@pytest.mark.parametrize("check", [check for check in CHECKS if check != "partial reset"])
def test_it_keeps_the_contract(check: str, kind: str) -> None:
    """All of it but for seeds of some envs alone, which a pool cannot give."""

    def maker(**options: Any) -> VectorEnv:
        spares = 0 if kind == "single" else 2
        shop = PoolShop(worlds_of(kind, 3), num_spares=spares, batch_size=None if kind == "single" else 3)
        return pooled(shop, 3, **options)

    CHECKS[check](VectorPlace("check_vector_env", check), maker, 0)


# --- seeds


def test_seeds_make_the_pool_anew_and_close_the_old_one() -> None:
    shop = PoolShop(worlds_of("single", 3))
    with marlvec.make(shop, 3, backend="pool") as envs:
        assert len(shop.made) == 1
        assert shop.seeds[0] is not None  # seeds that nobody had before
        assert len(set(shop.seeds[0])) == 3
        first = envs.reset(seed=5)[0]
        assert shop.seeds[1] == marlvec.env_seeds(5, 3)
        envs.step(envs.random_action())
        envs.reset(seed=[7, 8, 9])
        assert shop.seeds[2] == [7, 8, 9]
        assert [pool.closed for pool in shop.made] == [True, True, False]
        envs.reset()
        envs.reset(env_ids=[1])
        assert len(shop.made) == 3
        assert envs.reset(seed=5)[0][0, 0, -1] == first[0, 0, -1]  # what the env drew
    assert all(pool.closed for pool in shop.made)


def test_seeds_while_batches_are_under_way() -> None:
    shop = PoolShop(worlds_of("single", 4), num_spares=2, batch_size=3, shuffle=0)
    with pooled(shop, 4) as envs:
        envs.reset(seed=1)
        envs.send(envs.random_action(env_ids=[2]), [2])
        envs.recv()
        obs, _ = envs.reset(seed=1)
        again, _ = envs.reset(seed=1)
        assert obs[:, 0, -1].tolist() == again[:, 0, -1].tolist()


def test_seeds_that_cannot_be_given_raise_and_cost_no_episode() -> None:
    shop = PoolShop(worlds_of("single", 3))
    with pooled(shop, 3) as envs:
        envs.reset(seed=1)
        for wrong in ({"seed": [1, None, 2]}, {"seed": [4], "env_ids": [1]}, {"seed": [1, 2, 2**31]}):
            refused(ArgumentError, "seed", envs.reset, **wrong)
        refused(ArgumentError, "options", envs.reset, options={"a": 1})
        envs.step(envs.random_action())
    with PoolVectorEnv(shop(3)) as envs, pytest.raises(ArgumentError, match="cannot be rebuilt with others"):
        envs.reset(seed=1)


# --- batches


def test_a_pool_without_spares_does_what_it_can() -> None:
    """Numbers of envs that divide; what would wait for ever raises, and nothing is lost."""
    shop = PoolShop(worlds_of("single", 6), batch_size=2)
    with PoolVectorEnv(shop(6), autoreset_mode="next_step") as envs:
        envs.reset()
        envs.step(envs.random_action())
        envs.reset(env_ids=[1, 4])
        refused(ArgumentError, "hands out 2 rows at a time", envs.reset, env_ids=[1, 4, 5])
        envs.send(envs.random_action(env_ids=[3]), [3])
        refused(BusyError, "would wait for ever", envs.recv)
        envs.send(np.zeros((1, 1), np.int64), [0])
        assert sorted(envs.recv().env_ids) == [0, 3]
        envs.step(envs.random_action())
    refused(ArgumentError, "1 more envs are needed as spares", PoolVectorEnv, shop(6), autoreset_mode="same_step")
    with pytest.raises(ArgumentError, match="2 more envs"):
        PoolVectorEnv(PoolShop(worlds_of("single", 4), batch_size=3)(4), autoreset_mode="next_step")
    with pytest.raises(ArgumentError, match="expected no spare envs or at least 2"):
        PoolVectorEnv(PoolShop(worlds_of("single", 4), batch_size=3)(4), num_envs=3)
    with PoolVectorEnv(shop(6), num_envs=5) as envs:  # one env left over is enough
        envs.reset()
        for _ in range(9):
            envs.step(envs.random_action())


def test_a_pool_that_cannot_reset_some_while_others_are_busy() -> None:
    shop = PoolShop(worlds_of("single", 4), batch_size=2, private=False)
    with PoolVectorEnv(shop(4), autoreset_mode="disabled") as envs:
        envs.reset()
        envs.reset(env_ids=[0, 3])
        envs.send(envs.random_action(env_ids=[1, 2]), [1, 2])
        refused(BusyError, "resets no envs while others are busy", envs.async_reset, env_ids=[0, 3])
        envs.recv()
        envs.async_reset(env_ids=[0, 3])
        assert sorted(envs.recv().env_ids) == [0, 3]
    refused(ArgumentError, "can have no spares", PoolVectorEnv, shop(4), num_envs=3)


def test_timeouts_lose_nothing() -> None:
    gate = threading.Event()
    shop = PoolShop(worlds_of("single", 3))
    with pooled(shop, 3) as envs:
        envs.reset(seed=0)
        wait = shop.made[-1].recv
        shop.made[-1].recv = lambda: (gate.wait(), wait())[1]
        actions = envs.random_action()
        envs.step_send(actions)
        for _ in range(2):
            refused(FetchTimeout, "", envs.step_fetch, timeout=0.01)
        gate.set()
        _, rewards, *_ = envs.step_fetch(timeout=60)
        assert rewards.any()
        envs.step(envs.random_action())
        assert envs.get_attr("render_mode") == ("rgb_array",) * 3


def test_closing_waits_for_an_answer_that_is_under_way() -> None:
    gate = threading.Event()
    shop = PoolShop(worlds_of("single", 3))
    envs = pooled(shop, 3)
    envs.reset(seed=0)
    wait = shop.made[-1].recv
    shop.made[-1].recv = lambda: (gate.wait(), wait())[1]
    envs.step_send(envs.random_action())
    refused(FetchTimeout, "", envs.step_fetch, timeout=0.01)
    threading.Timer(0.1, gate.set).start()
    envs.close()
    assert shop.made[-1].closed


# --- what a pool says


@pytest.mark.parametrize("style", ["done", "elapsed"])
@pytest.mark.parametrize("mode", MODES)
def test_one_flag_for_all_ends_is_taken_apart(style: str, mode: str) -> None:
    """Whose time was up is truncated, not terminated: the infos say so, or the limit and the count do."""
    ends = ("terminated", "truncated") if style == "done" else ("truncated",)
    for end in ends:
        factories = [partial(SingleEnv, 4, end=end, env_index=i) for i in range(2)]
        calls = tell_elapsed(record(factories, mode, reseed=0.0), mode)
        with pooled(PoolShop(factories, style=style), 2, autoreset_mode=mode) as envs:
            replay(envs, calls)


def lives(i: int, elapsed: int) -> dict[str, Any]:
    return {
        "lives": np.int32(10 * i + elapsed),
        "alive": np.float32(i),
        "deep": {"er": {"still": np.array([i, elapsed])}, "flat": np.bool_(elapsed % 2)},
    }


@pytest.mark.parametrize("copy", [True, False])
def test_infos_are_arrays_over_all_envs(copy: bool) -> None:
    with pooled(PoolShop([partial(SingleEnv, 2, env_index=i) for i in range(3)], extra=lives), 3, copy=copy) as envs:
        _, infos = envs.reset()
        assert infos["lives"].tolist() == [0, 10, 20]
        assert infos["__common__"]["alive"][0].tolist() == [0.0, 1.0, 2.0]  # marlvec's own word stands at the top
        assert infos["deep"]["er"]["still"].tolist() == [[0, 0], [1, 0], [2, 0]]
        assert infos["deep"]["_flat"].all()
        envs.step(np.zeros((3, 1), np.int64))
        *_, infos = envs.step(np.zeros((3, 1), np.int64))
        assert infos["final_info"]["lives"].tolist() == [2, 12, 22]
        assert infos["final_info"]["_lives"].all()
        assert infos["_final_info"].all()
        assert infos["lives"].tolist() == [0, 10, 20]
        _, infos = envs.reset(env_ids=[1])
        assert infos["_lives"].tolist() == [False, True, False]
        assert "final_info" not in infos
        told = marlvec.infos_to_list(infos, envs.agents, 3)
        assert told[0] == {}
        assert told[1]["__common__"]["deep"]["flat"] is False


def test_masks_that_are_declared_are_there_from_the_start() -> None:
    shop = PoolShop(worlds_of("turns, masked", 2), num_spares=1, batch_size=2, declare_mask=True)
    with pooled(shop, 2) as envs:
        assert envs.spec.mask_sizes == (5, 5, 5)
        envs.reset()
        for _ in range(8):
            envs.step(envs.random_action())  # the worlds refuse what their masks forbid


@pytest.mark.parametrize("space", [MultiBinary(5), Tuple([Discrete(5)]), Dict(a=Discrete(5))])
def test_a_mask_that_the_actions_cannot_have_is_refused(space: Any) -> None:
    """A Box has no choices, so an entry of that name is an info like others."""
    mask = set_info("action_mask", np.ones((2, 5), np.int8))
    for actions in (space, Box(0, 1, (2,))):
        shop = PoolShop([partial(SampledEnv, Box(0, 1, (2,)), actions, length=3)] * 2)
        with pooled(shop, 2, autoreset_mode="next_step") as envs:
            recv = shop.made[0].recv
            shop.made[0].recv = lambda recv=recv: spoil(recv(), mask)
            if actions is not space:
                assert envs.reset()[1]["__common__"]["action_mask"][0].shape == (2, 5)
                continue
            refused(ContractError, f"action masks: expected none, got one for {type(space).__name__}", envs.reset)


@pytest.mark.parametrize("space", [MultiBinary(5), Tuple([Discrete(5)]), Discrete(5)])
def test_a_mask_of_players_in_infos_is_refused(space: Any) -> None:
    """It would forbid nothing: masks are in the observation or in infos of the whole env."""
    players = {"env_id": np.array([0, 0, 1, 1]), "id": np.array([0, 1, 0, 1]), "action_mask": np.ones((4, 5), np.int8)}
    for actions in (space, Box(0, 1, (2,))):
        shop = PoolShop([partial(SampledEnv, Box(0, 1, (2,)), actions, agent_num=2, length=3)] * 2)
        with pooled(shop, 2, autoreset_mode="next_step") as envs:
            recv = shop.made[0].recv
            shop.made[0].recv = lambda recv=recv: spoil(recv(), set_info("players", players))
            if actions is not space:
                assert envs.reset()[1]["__agents__"]["action_mask"][0].shape == (2, 2, 5)
                continue
            with pytest.raises(
                ContractError, match=f"info of agent 'player_0': 'action_mask': expected none.*{type(space).__name__}"
            ):
                envs.reset()


def test_frames() -> None:
    with pooled(PoolShop(worlds_of("single", 3)), 3) as envs:
        envs.reset()
        assert [int(frame[0, 0, 0]) for frame in envs.render([2, 0])] == [2, 0]
        refused(marlvec.errors.EnvRaised, "no layer of the env has an attribute", envs.get_attr, "lives")


def spoil(answer: Any, change: Callable[[Any, Any], None]) -> Any:
    parts = list(answer)
    change(parts, parts[-1])
    return tuple(parts)


def set_part(k: int, value: Any) -> Callable[[Any, Any], None]:
    return lambda parts, info: parts.__setitem__(k, value)


def set_info(key: str, value: Any) -> Callable[[Any, Any], None]:
    return lambda parts, info: info.__setitem__(key, value)


WRONG = {
    "env 1 was stepped, and says that 0 steps": set_info("elapsed_step", np.array([1, 0])),
    "expected float64 of shape \\(7,\\)": set_part(0, np.zeros((4, 8))),
    "reward: expected 4 rows of players": set_part(1, np.zeros(3)),
    "obs '': expected float64": set_part(0, np.zeros((4, 7), np.complex128)),
    "a player has two rows": set_info("players", {"env_id": np.array([0, 0, 1, 1]), "id": np.array([0, 0, 0, 1])}),
    "expected players 0 to 1": set_info("players", {"env_id": np.array([0, 0, 1, 1]), "id": np.array([0, 2, 0, 1])}),
    "rows of players in envs \\[0, 0, 3, 3\\], expected": set_info("players", {"env_id": np.array([0, 0, 3, 3])}),
    "info 'odd': expected one entry for each of 2": set_info("odd", np.zeros(7)),
    "agent 'player_1' of env 0 is gone": lambda parts, info: (
        parts.__setitem__(0, parts[0][[0, 2, 3]]),
        *[parts.__setitem__(k, parts[k][[0, 2, 3]]) for k in (1, 2, 3)],
        info.__setitem__("players", {"env_id": np.array([0, 1, 1]), "id": np.array([0, 0, 1])}),
    ),
    "answered for 1 envs more": lambda parts, info: (
        info.__setitem__("env_id", np.array([0, 1, 2])),
        info.__setitem__("players", {"env_id": np.repeat([0, 1, 2], 2)}),
        info.__setitem__("elapsed_step", np.ones(3)),
        *[parts.__setitem__(k, np.concatenate([parts[k], parts[k][:2]])) for k in range(4)],
    ),
    "should return \\(obs, reward": lambda parts, info: parts.__setitem__(-1, None),
}


@pytest.mark.parametrize("problem", WRONG)
def test_a_pool_that_breaks_its_contract_is_told_so_and_broken(problem: str) -> None:
    shop = PoolShop([partial(CounterEnv, 9, agent_num=2, env_index=i) for i in range(2)], num_spares=1, batch_size=2)
    with pooled(shop, 2) as envs:
        envs.reset(seed=0)
        recv = shop.made[-1].recv
        shop.made[-1].recv = lambda: spoil(recv(), WRONG[problem])
        refused(ContractError, problem, envs.step, np.zeros((2, 2), np.int64))
        refused(BrokenError, "in the middle of a call", envs.step, np.zeros((2, 2), np.int64))
    assert shop.made[-1].closed


@pytest.mark.parametrize(
    ("problem", "change"),
    [
        ("env 1 was reset, and says that 2 steps have passed", set_info("elapsed_step", np.array([0, 2]))),
        ("over right after its reset", set_part(2, np.array([True, False]))),
        ("give a reward for a reset", set_part(1, np.array([0.0, 1.0]))),
    ],
)
def test_resets_are_looked_at_too(problem: str, change: Any) -> None:
    shop = PoolShop(worlds_of("single", 2))
    with pooled(shop, 2) as envs:
        recv = shop.made[0].recv
        shop.made[0].recv = lambda: spoil(recv(), change)
        refused(ContractError, problem, envs.reset)


def test_who_was_asked_for_nothing_cannot_answer() -> None:
    shop = PoolShop(worlds_of("single", 2), batch_size=1)
    with pooled(shop, 2, autoreset_mode="next_step") as envs:
        envs.async_reset()
        envs.drain()
        recv = shop.made[0].recv
        shop.made[0].recv = lambda: spoil(recv(), set_info("env_id", np.array([1])))
        envs.send(np.zeros((1, 1), np.int64), [0])
        refused(ContractError, r"answers for envs \[1\].*REPLY of envs that are BEGUN", envs.recv)


def test_an_exception_out_of_the_pool_breaks_it() -> None:
    shop = PoolShop(worlds_of("single", 2))
    with pooled(shop, 2) as envs:
        envs.reset(seed=0)
        shop.made[-1].recv = lambda: 1 / 0
        refused(ZeroDivisionError, "", envs.step, envs.random_action())
        refused(BrokenError, "ZeroDivisionError", envs.reset)


def test_wrong_actions_never_reach_the_pool() -> None:
    with pooled(PoolShop(worlds_of("single", 2)), 2, validate="off") as envs:
        envs.reset(seed=0)
        refused(marlvec.errors.ActionError, "", envs.step, np.array([[0], [5]]))
        envs.step(np.array([[0], [4]]))


# --- make


def test_make_says_what_a_pool_cannot_do() -> None:
    shop = PoolShop(worlds_of("single", 2))
    for wrong in (
        {"wrappers": [lambda env: env]},
        {"num_workers": 2},
        {"step_timeout": 1.0},
        {"state": True},
        {"render_mode": "single_rgb_array"},
        {"env_kwargs": [{"seed": 1}, {"seed": 2}]},
    ):
        refused(ArgumentError, "", marlvec.make, shop, 2, backend="pool", **wrong)
    refused(marlvec.errors.EnvArgumentError, "nonsense", marlvec.make, shop, 2, backend="pool", nonsense=1)
    refused(ContractError, "expected a pool of num_envs=1, got one of 2", marlvec.make, shop, 1, backend="pool")
    refused(ContractError, "expected a pool", marlvec.make, lambda: object(), 2, backend="pool")
    with pytest.raises(ContractError, match="got CounterEnv, which is a single env; backend='async' runs those"):
        marlvec.make(CounterEnv, 2, backend="pool")
    refused(ArgumentError, "no env but a pool|expected something that builds", marlvec.make, shop(2), 2, backend="pool")
    turns = PoolShop(worlds_of("turns", 2), num_spares=1, batch_size=2)
    with pytest.raises(ArgumentError, match="decides by itself when an episode is over"):
        PoolVectorEnv(turns(2), num_envs=2, done_on="any")


@pytest.mark.parametrize("mode", MODES)
def test_a_pool_that_ignores_its_time_limit_raises_in_the_step_of_the_limit(mode: str) -> None:
    def limited(num_envs: int, max_episode_steps: int) -> Any:
        assert max_episode_steps in (2, 4)
        return PoolShop(worlds_of("single, truncated", 2))(num_envs)

    with marlvec.make(limited, 2, backend="pool", autoreset_mode=mode, max_episode_steps=4) as envs:
        envs.reset()
        for _ in range(4):
            _, _, _, truncated, _ = envs.step(np.zeros((2, 1), np.int64))
            if mode == "disabled" and truncated.any():
                envs.reset(env_ids=truncated[:, 0])
    with marlvec.make(limited, 2, backend="pool", autoreset_mode=mode, max_episode_steps=2) as envs:
        envs.reset()
        envs.step(np.zeros((2, 1), np.int64))
        with pytest.raises(ContractError, match=r"max_episode_steps=2: .* the pool ignores this argument"):
            envs.step(np.zeros((2, 1), np.int64))


def test_envpool_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "envpool", None)
    monkeypatch.delitem(sys.modules, "marlvec.vector.pools.envpool_tasks", raising=False)
    refused(marlvec.errors.MissingExtraError, r"marlvec\[envpool\]", marlvec.make, "envpool/CartPole-v1", 2)
    refused(ArgumentError, "'sync'.*threads of its own", marlvec.make, "envpool/CartPole-v1", 2, backend="sync")


# --- Ctrl-C


def streamed(envs: VectorEnv) -> None:
    envs.send(np.ones((4, 1), np.int64))
    envs.recv(min_envs=1)
    envs.drain()


HERE = str(Path(marlvec.__file__).parent / "vector")
LONG = [partial(SingleEnv, 9, env_index=i) for i in range(4)]
POOLS: dict[str, Callable[[], VectorEnv]] = {
    "at once": lambda: pooled(PoolShop(LONG), 4),
    "in batches": lambda: pooled(PoolShop(LONG, num_spares=1, batch_size=2, shuffle=7), 4),
    "Gymnasium's": lambda: PoolVectorEnv(gymnasium.vector.SyncVectorEnv(LONG), autoreset_mode="next_step"),
}
INTERRUPTED: dict[str, Callable[[VectorEnv], Any]] = {
    "step": lambda envs: envs.step(np.ones((4, 1), np.int64)),
    "reset": lambda envs: envs.reset(seed=2),
    "stream": streamed,
}


@pytest.mark.mostly_slow("plays whole pools", quick=8)
@pytest.mark.fault("A25")
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("call", INTERRUPTED)
@pytest.mark.parametrize("kind", POOLS)
def test_after_ctrl_c_at_any_line_the_next_reset_works(kind: str, call: str, every: int) -> None:
    if (kind, call) == ("Gymnasium's", "stream"):
        pytest.skip("it steps all its envs at once")
    with POOLS[kind]() as envs:
        count, place = 0, ""
        while place is not None:
            count += every
            envs.reset()
            try:
                with Tracer((HERE,), count, everywhere=True) as tracer:
                    INTERRUPTED[call](envs)
            except KeyboardInterrupt:
                pass
            place = tracer.place
            if envs._call_state.pending == "send" and envs._call_state.phase is CallPhase.PENDING:
                envs.drain()  # a stream goes on where it was
            obs, _ = envs.reset(seed=5)
            for steps in range(3):
                told = [decode(row[0]) for row in obs]
                assert [row[0] for row in told] == list(range(4)), "its own rows"
                assert [row[3] for row in told] == [steps] * 4, "of this step"
                obs, *_ = envs.step(np.ones((4, 1), np.int64))
    assert count > 100, "lines"


def test_a_pool_that_nobody_can_make_anew_is_left_broken_by_ctrl_c() -> None:
    pool = PoolShop(worlds_of("single", 2))(2)
    with PoolVectorEnv(EnvPoolAdapter(form_of(pool), pool=pool)) as envs:
        envs.reset()

        def interrupted() -> Any:
            raise KeyboardInterrupt

        pool.recv = interrupted
        refused(KeyboardInterrupt, "", envs.step, np.zeros((2, 1), np.int64))
        refused(BrokenError, "in the middle of a call", envs.reset)


# The whole of `Pool`'s contract, by a pool over any envs: every call against a plain loop over them, bit for bit.


MIRRORED = ("parallel", "masked", "turns, masked", "simple_tag", "pettingzoo/classic/tictactoe")
N = 4


@pytest.mark.mostly_slow("plays whole pools", quick="each")
@pytest.mark.parametrize("own", ["its own", "disabled"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", MIRRORED)
def test_a_mirror_of_sync_is_the_plain_loop(kind: str, mode: str, own: str) -> None:
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
        refused(ArgumentError, "phase", envs.set_state, broken)
        refused(ArgumentError, "expected .*'had_rows'", envs.set_state, {**saved, "envs": {}})


def test_a_pool_that_keeps_its_states_says_so() -> None:
    class Closed(MirrorPool):
        state_obstacle = marlvec.vector.pools.pool.Pool.state_obstacle

    with PoolVectorEnv(Closed(factories_of("masked", 2))) as envs:
        assert list(envs.state_obstacles()) == [0, 1]
        refused(ArgumentError, "keeps the states of its envs to itself", envs.get_state)
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
