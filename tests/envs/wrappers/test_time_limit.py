"""`max_episode_steps`: time is up for whoever is left, and for nobody else."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import marlvec
from marlvec.envs import AECAdapter, TimeLimit
from marlvec.errors import ArgumentError, ContractError
from marlvec.testing.scripted import KeyedEnv, Script, ScriptedParallelEnv, SingleEnv, TurnEnv, decode, draw_script
from tests.envs.support.rig import Rig

MODES = ("same_step", "next_step", "disabled")


def scripts_of(seed: int, agent_num: int, count: int, longest: int = 9) -> list[Script]:
    rng = np.random.default_rng(seed)
    return [draw_script(rng, agent_num, longest) for _ in range(count)]


def factory(kind: str, scripts: list[Script], agent_num: int) -> Any:
    if kind == "keyed":
        return partial(KeyedEnv, scripts, agent_num=agent_num, waits=waits)
    return partial({"parallel": ScriptedParallelEnv, "turns": TurnEnv}[kind], scripts, agent_num=agent_num)


def waits(t: int, a: int) -> bool:
    return (t + a) % 3 == 0


def check_episodes(envs: marlvec.VectorEnv, scripts: list[Script], limit: int, count: int, kind: str) -> None:
    """Hold every flag of every step of ``count`` episodes against the scripts, cut off at the limit."""
    _, infos = envs.reset(seed=0)
    for number in range(count):
        script = scripts[number % len(scripts)]
        looked = np.zeros(envs.agent_num, bool)  # in a turn-based env: was selected
        for t in range(1, min(script.length, limit) + 1):
            looked |= infos["acting"][0]
            mover = int(infos["acting"][0].argmax())
            _, _, terminated, truncated, infos = envs.step(np.ones((1, envs.agent_num), np.int64))
            alive = np.array(script.alive(t))
            late = alive & (t == limit)
            assert terminated[0].tolist() == script.terminated(t)
            assert truncated[0].tolist() == (np.array(script.truncated(t)) | late).tolist()
            over = bool(late.any() or not alive.any())
            assert not (late & terminated[0]).any()
            if over:
                following = [a % envs.agent_num for a in range(mover + 1, mover + 1 + envs.agent_num)]
                looked |= np.arange(envs.agent_num) == next((a for a in following if alive[a]), mover)
                final = infos["final_observation"][0]
                assert infos["_final_observation"].tolist() == [True]
                for a in np.flatnonzero(late).tolist():
                    if kind == "turns" and not looked[a]:
                        assert not final[a].any()
                        assert infos["final_observation_missing"][0, a]
                        continue
                    # Who waits in a keyed env keeps the last thing it saw; in a turn-based one it looks once more.
                    seen = t - 1 if kind == "keyed" and waits(t, a) and script.births[a] != t else t
                    assert (decode(final[a]).episode, decode(final[a]).t) == (number, seen)
            assert over is (t == min(script.length, limit))
        if envs.autoreset_mode == "disabled":
            assert not infos["alive"].any()
            _, infos = envs.reset(env_ids=[0])
        elif envs.autoreset_mode == "next_step":
            assert not infos["alive"].any()
            _, rewards, terminated, truncated, infos = envs.step(np.ones((1, envs.agent_num), np.int64))
            assert infos["reset_mask"].all()
            assert not any(array.any() for array in (rewards, terminated, truncated))


@pytest.mark.slow("films whole episodes")
@pytest.mark.checklist(11)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["parallel", "turns", "keyed"])
@given(seed=st.integers(0, 10_000), limit=st.integers(1, 10), agent_num=st.integers(1, 4))
def test_living_agents_are_truncated_at_the_limit(kind: str, mode: str, seed: int, limit: int, agent_num: int) -> None:
    scripts = scripts_of(seed, agent_num, 3)
    with marlvec.make(
        factory(kind, scripts, agent_num), 1, backend="sync", autoreset_mode=mode, max_episode_steps=limit
    ) as envs:
        check_episodes(envs, scripts, limit, 4, kind)


@pytest.mark.checklist(11)
@pytest.mark.parametrize("mode", MODES)
def test_the_limit_holds_in_worker_processes(mode: str) -> None:
    scripts = scripts_of(5, 3, 3)
    with marlvec.make(factory("parallel", scripts, 3), 1, autoreset_mode=mode, max_episode_steps=4) as envs:
        check_episodes(envs, scripts, 4, 6, "parallel")


def test_an_agent_that_ends_in_the_last_step_keeps_its_own_flags() -> None:
    script = Script(births=[0, 0, 0, 2], deaths=[3, 3, 9, 9], ends=["terminated", "both", "truncated", "truncated"])
    for env in (ScriptedParallelEnv, TurnEnv, KeyedEnv):
        with marlvec.make(partial(env, script, agent_num=4), 1, backend="sync", max_episode_steps=3) as envs:
            envs.reset(seed=0)
            for _ in range(3):
                _, _, terminated, truncated, infos = envs.step(np.ones((1, 4), np.int64))
            assert terminated.tolist() == [[True, True, False, False]]
            assert truncated.tolist() == [[False, True, True, True]]
            assert infos["_final_observation"].all()
            assert infos["alive"].tolist() == [[True, True, True, False]]


def test_an_agent_before_its_dead_step_keeps_its_flag() -> None:
    """Player 0 dies in move 2, is not selected before move 4, and time is up in move 3."""
    script = Script(births=[0, 0, 0], deaths=[2, 9, 9], ends=["terminated", "truncated", "truncated"])
    env = partial(TurnEnv, script, agent_num=3, order=[1, 2, 1, 0], dead_first=False)
    with marlvec.make(env, 1, backend="sync", max_episode_steps=3) as envs:
        envs.reset(seed=0)
        flags = [envs.step(np.ones((1, 3), np.int64))[2:4] for _ in range(3)]
        assert flags[1][0].tolist() == [[False] * 3]
        assert [flag.tolist() for flag in flags[2]] == [[[True, False, False]], [[False, True, True]]]


def test_a_game_that_was_cut_short_cannot_go_on_without_a_reset() -> None:
    rig = Rig(TimeLimit(AECAdapter(TurnEnv(Script.together(2, 9), agent_num=2)), 2))
    rig.reset(seed=0)
    rig.step([1, 1])
    assert not rig.done
    rig.step([1, 1])
    assert rig.done
    assert rig.flags() == {
        "terminated": [False, False],
        "truncated": [True, True],
        "alive": [False, False],
        "acting": [False, False],
    }
    with pytest.raises(ContractError, match="the game is over"):
        rig.step([1, 1])


def test_single_agents_are_cut_too_and_an_explicit_reset_counts_anew() -> None:
    with marlvec.make(partial(SingleEnv, 50), 2, backend="sync", max_episode_steps=4) as envs:
        envs.reset(seed=0)
        ones = np.ones((2, 1), np.int64)
        for _ in range(3):
            assert not envs.step(ones)[3].any()
        envs.reset(env_ids=[1])
        assert [envs.step(ones)[3][:, 0].tolist() for _ in range(5)] == [
            [True, False],
            [False, False],
            [False, False],
            [False, True],
            [True, False],
        ]


def test_the_limit_takes_the_place_of_gymnasiums_own() -> None:
    for limit in (30, 230):  # the registered one is 200
        with marlvec.make("MountainCar-v0", 1, backend="sync", max_episode_steps=limit) as envs:
            envs.reset(seed=0)
            ends = [bool(envs.step(np.ones((1, 1), np.int64))[3].all()) for _ in range(limit)]
            assert np.flatnonzero(ends).tolist() == [limit - 1]
    with marlvec.make("MountainCar-v0", 1, backend="sync", env_kwargs={"max_episode_steps": 7}) as envs:
        envs.reset(seed=0)
        ends = [bool(envs.step(np.ones((1, 1), np.int64))[3].all()) for _ in range(7)]
        assert np.flatnonzero(ends).tolist() == [6]


@pytest.mark.parametrize("limit", [0, -1, 2.5, "7", True])
def test_a_limit_is_a_whole_number_of_steps(limit: Any) -> None:
    with pytest.raises(ArgumentError, match=re.escape(f"expected an int of at least 1, got {limit!r}")):
        marlvec.make(SingleEnv, 2, max_episode_steps=limit)


def test_users_reach_their_own_env() -> None:
    with marlvec.make(partial(SingleEnv, 50), 2, backend="sync", max_episode_steps=np.int64(4)) as envs:
        assert envs.get_attr("closed") == (False, False)
        assert envs.exec_func(lambda env: type(env).__name__) == ("SingleEnv", "SingleEnv")
