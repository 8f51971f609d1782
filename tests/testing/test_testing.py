"""The scripted envs themselves: good citizens by PettingZoo's own tests, and readable."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from gymnasium.wrappers import PassiveEnvChecker
from hypothesis import given
from hypothesis import strategies as st

import marlvec.testing
import marlvec.testing.scripted
from marlvec.envs import adapt
from marlvec.testing.scripted import (
    CounterEnv,
    ExitingEnv,
    HangingEnv,
    KeyedEnv,
    NoOpEnv,
    RaisingEnv,
    SampledEnv,
    Script,
    ScriptedParallelEnv,
    SingleEnv,
    SlowEnv,
    TurnEnv,
    checksum,
    decode,
    decode_reward,
    draw,
    draw_script,
    next_checksum,
    reward_of,
)
from tests.envs.support import Rig


@pytest.fixture
def pettingzoo_tests() -> Any:
    """PettingZoo's tests; importing and running them warns of what is no concern of ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pettingzoo.test

        yield pettingzoo.test


@pytest.mark.parametrize("agent_num", [1, 3])
@pytest.mark.parametrize("masked", [False, True])
def test_pettingzoos_parallel_test(pettingzoo_tests: Any, agent_num: int, masked: bool) -> None:
    pettingzoo_tests.parallel_api_test(ScriptedParallelEnv(agent_num=agent_num, masked=masked), num_cycles=40)
    pettingzoo_tests.parallel_api_test(CounterEnv(agent_num=agent_num, masked=masked), num_cycles=40)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dead_first", [False, True])
def test_pettingzoos_turn_test(pettingzoo_tests: Any, masked: bool, dead_first: bool) -> None:
    rng = np.random.default_rng(0)
    scripts = [draw_script(rng, 3, 30) for _ in range(5)]
    together = [Script(script.births, script.deaths, script.ends) for script in scripts if script.births.count(0) > 1]
    env = TurnEnv(together, agent_num=3, masked=masked, dead_first=dead_first)
    pettingzoo_tests.api_test(env, num_cycles=40)


def test_pettingzoos_test_of_any_spaces(pettingzoo_tests: Any) -> None:
    space = Dict(pos=Box(-1, 1, (2,)), kind=Discrete(3))
    pettingzoo_tests.parallel_api_test(SampledEnv(space, MultiDiscrete([2, 3])), num_cycles=20)
    pettingzoo_tests.parallel_api_test(NoOpEnvWithUnwrapped(length=5), num_cycles=20)


class NoOpEnvWithUnwrapped(NoOpEnv):
    @property
    def unwrapped(self) -> NoOpEnv:
        return self


def test_gymnasiums_checker() -> None:
    env = PassiveEnvChecker(SingleEnv([3, 1, 5], info_every=2))  # it warns, and warnings are errors here
    for seed in range(3):
        env.reset(seed=seed)
        over = False
        while not over:
            _, _, terminated, truncated, _ = env.step(0)
            over = terminated or truncated


@given(st.integers(0, 99), st.integers(0, 999), st.integers(0, 999), st.integers(0, 4095))
def test_rewards_read_back(episode: int, t: int, agent: int, action: int) -> None:
    assert decode_reward(reward_of(episode, t, agent, action)) == (episode, t, agent, action)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_observations_read_back(dtype: Any) -> None:
    env = CounterEnv(4, env_index=7, dtype=dtype)
    for episode in range(3):
        obs, _ = env.reset(seed=3)
        draws = {draw(row) for row in obs.values()}
        assert len(draws) == 1
        sums = dict.fromkeys(obs, 1)
        for t in range(1, 5):
            actions = {agent: (t + a) % 5 for a, agent in enumerate(obs)}
            obs, rewards, *_ = env.step(actions)
            for a, (agent, row) in enumerate(obs.items()):
                sums[agent] = next_checksum(sums[agent], actions[agent])
                assert row.dtype == dtype
                assert decode(row) == (7, 0, episode, t, a)
                assert (checksum(row), {draw(row)}) == (sums[agent], draws)
                assert decode_reward(rewards[agent]) == (episode, t, a, actions[agent])


def test_what_is_no_stamp() -> None:
    with pytest.raises(ValueError, match="shape"):
        decode(np.zeros(5))
    with pytest.raises(ValueError, match="not a stamped"):
        decode(np.full(7, 0.5))


def test_incarnations_are_counted_over_processes(tmp_path: Path) -> None:
    marks = str(tmp_path)
    assert [CounterEnv(env_index=2, marks=marks).world.incarnation for _ in range(3)] == [0, 1, 2]
    assert CounterEnv(env_index=0, marks=marks).world.incarnation == 0
    env = pickle.loads(pickle.dumps(CounterEnv(env_index=2, marks=marks)))
    obs, _ = env.reset(seed=0)
    assert decode(obs["agent_0"]).incarnation == 3


def test_drawn_scripts_follow_the_seed() -> None:
    def story(seed: int) -> list[Any]:
        env, lines = ScriptedParallelEnv(agent_num=4), []
        env.reset(seed=seed)
        for _ in range(3):
            while env.agents:
                _, *rest = env.step(dict.fromkeys(env.agents, 0))
                lines.append(rest[:3])
            env.reset()
        return lines

    assert story(1) == story(1)
    assert story(1) != story(2)


@pytest.mark.parametrize(
    ("births", "deaths", "words"),
    [
        ([0, 5], [2, 9], "no agent is alive"),
        ([1, 1], [2, 3], "expected an agent at the reset \\(0\\)"),
        ([0, 4], [5, 3], "expected no step before the birth in step 4"),
        ([0], [3, 3], "differ in length"),
    ],
)
def test_impossible_scripts(births: list[int], deaths: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Script(births, deaths, ["terminated"] * len(births))


@pytest.mark.parametrize("kind", [ScriptedParallelEnv, TurnEnv, KeyedEnv, SingleEnv, SampledEnv])
def test_actions_are_checked(kind: Any) -> None:
    options: dict[str, Any] = {} if kind is SingleEnv else {"agent_num": 1}
    arguments = (Discrete(3), Discrete(5)) if kind is SampledEnv else ()
    rig = Rig(adapt(kind(*arguments, **options)))
    rig.reset(seed=0)
    with pytest.raises(ValueError, match="action 5"):
        rig.step([5])


def test_any_spaces_reach_the_buffers_and_come_back() -> None:
    observation = Dict(
        a=Tuple([Box(-1, 1, (2, 3), np.float16), Discrete(4, start=2)]), b=MultiBinary(3), c=Box(0, 1, ())
    )
    action = Tuple([Discrete(3, start=-1), Dict(x=Box(-1, 1, (2,)), y=MultiDiscrete([2, 4]))])
    plain, rig = (SampledEnv(observation, action, length=4) for _ in range(2))
    rig = Rig(adapt(rig))
    action.seed(0)
    for episode in range(3):
        obs, _ = plain.reset(seed=episode)
        rig.reset(seed=episode)
        while not rig.done:
            for a in range(2):
                np.testing.assert_equal(rig.row(a), obs[f"agent_{a}"])
            actions = [action.sample(), action.sample()]
            obs, rewards, *_ = plain.step({f"agent_{a}": actions[a] for a in range(2)})
            rig.step(actions)
            assert rig.reward_A.tolist() == list(rewards.values())


@pytest.mark.parametrize("where", ["init", "reset", "step", "close"])
def test_raising(where: Any) -> None:
    def life() -> None:
        env = RaisingEnv(length=2, where=where, at=0, only_env=1, env_index=1, error=lambda: KeyError(where))
        for _ in range(2):
            env.reset(seed=0)
            while env.agents:
                env.step(dict.fromkeys(env.agents, 0))
        env.close()

    with pytest.raises(KeyError, match=where):
        life()
    RaisingEnv(where=where, only_env=1, env_index=0).close()


def test_raising_only_in_one_call_and_one_incarnation(tmp_path: Path) -> None:
    for incarnation in range(2):
        env = RaisingEnv(length=2, at=3, only_incarnation=0, marks=str(tmp_path))
        steps = 0
        strikes = pytest.raises(ValueError, match="scripted failure") if incarnation == 0 else nullcontext()
        with strikes:
            for _ in range(3):
                env.reset(seed=0)
                while env.agents:
                    env.step(dict.fromkeys(env.agents, 0))
                    steps += 1
        assert steps == (3 if incarnation == 0 else 6)


def test_slow() -> None:
    env = SlowEnv(seconds=0.02, length=3)
    env.reset(seed=0)
    begin = time.monotonic()
    while env.agents:
        env.step(dict.fromkeys(env.agents, 0))
    assert time.monotonic() - begin >= 0.06


def _live(kind: Any, options: dict[str, Any]) -> None:
    env = kind(**options)
    env.reset(seed=0)
    while env.agents:
        env.step(dict.fromkeys(env.agents, 0))


@pytest.mark.mostly_slow("checks whole envs or connectors many times", quick=2)
@pytest.mark.parametrize(
    ("kind", "options", "exitcode"),
    [
        (ExitingEnv, {"at": 2}, 3),
        (ExitingEnv, {"code": 0, "where": "init"}, 0),
        (ExitingEnv, {"signal": int(signal.SIGKILL), "where": "reset"}, -9),
        (HangingEnv, {"at": 1}, None),
    ],
)
def test_envs_that_take_their_process_along(kind: Any, options: dict[str, Any], exitcode: int | None) -> None:
    process = multiprocessing.get_context("fork").Process(target=_live, args=(kind, options))
    process.start()
    process.join(0.5 if exitcode is None else 30.0)
    assert process.exitcode == exitcode
    process.kill()
    process.join()
    process.close()


def test_the_public_module_has_the_same_names() -> None:
    assert marlvec.testing.__all__ == [
        "Finding",
        "NativeMatch",
        "check_connector",
        "check_env",
        "check_native_env",
        "check_vector_env",
        *marlvec.testing.scripted.__all__,
    ]
    for name in marlvec.testing.scripted.__all__:
        assert getattr(marlvec.testing, name) is getattr(marlvec.testing.scripted, name)
