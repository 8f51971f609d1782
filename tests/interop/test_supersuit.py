"""SuperSuit's calls on marlvec's vectorizer."""

from __future__ import annotations

import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from mpe2 import simple_spread_v3, simple_tag_v3

from marlvec import AsyncVectorEnv, SyncVectorEnv
from marlvec.errors import ArgumentError
from marlvec.interop.supersuit import SuperSuitVecEnv, concat_vec_envs_v1, pettingzoo_env_to_vec_env_v1
from marlvec.testing import Script, ScriptedParallelEnv

ROOT = Path(__file__).resolve().parents[2]


def test_the_calls_give_rows_of_copies() -> None:
    env = simple_spread_v3.parallel_env(max_cycles=5)
    one = pettingzoo_env_to_vec_env_v1(env)
    assert (one.num_envs, one.par_env) == (3, env)
    assert one.observation_space == one.single_observation_space == env.observation_space("agent_0")
    obs, infos = one.reset(seed=3)
    assert obs.tobytes() == b"".join(part.tobytes() for part in env.reset(seed=3)[0].values())
    assert len(infos) == 3

    for num_cpus, kind in ((0, SyncVectorEnv), (2, AsyncVectorEnv), (9, AsyncVectorEnv)):
        envs = concat_vec_envs_v1(one, 4, num_cpus=num_cpus)
        assert isinstance(envs, SuperSuitVecEnv)
        assert isinstance(envs.envs, kind)
        assert envs.num_envs == 12
        assert envs.env_is_wrapped(ScriptedParallelEnv) == [False] * 12
        obs, infos = envs.reset(seed=7)
        for i in range(4):
            raw, _ = env.reset(seed=7 + i)
            assert obs[3 * i : 3 * i + 3].tobytes() == b"".join(part.tobytes() for part in raw.values())
        for _ in range(5):
            obs, rewards, terminations, truncations, infos = envs.step(np.zeros(12, np.int64))
        flag = np.bool_ if num_cpus else np.uint8
        assert (rewards.dtype, terminations.dtype, truncations.dtype) == (np.float32, flag, flag)
        assert truncations.tolist() == [1] * 12
        assert all(info["terminal_observation"].shape == (18,) for info in infos)
        envs.close()
    one.close()


def test_stable_baselines_gets_its_own_kind() -> None:
    pytest.importorskip("stable_baselines3")
    from marlvec.interop.sb3 import SB3VecEnv

    one = pettingzoo_env_to_vec_env_v1(simple_spread_v3.parallel_env())
    envs = concat_vec_envs_v1(one, 2, base_class="stable_baselines3")
    assert isinstance(envs, SB3VecEnv)
    assert envs.reset().shape == (6, 18)
    envs.close()
    with pytest.raises(ArgumentError, match="'gymnasium' or 'stable_baselines3', got 'stable_baselines'"):
        concat_vec_envs_v1(one, 2, base_class="stable_baselines")
    one.close()


@pytest.mark.parametrize("num_cpus", [0, 2])
def test_a_gymnasium_env_is_one_row(num_cpus: int) -> None:
    """Beside plain loops, over ends of episodes."""
    envs = concat_vec_envs_v1(gymnasium.make("CartPole-v1", max_episode_steps=20), 3, num_cpus=num_cpus)
    plain = [gymnasium.make("CartPole-v1", max_episode_steps=20) for _ in range(3)]
    assert (envs.num_envs, envs.observation_space) == (3, plain[0].observation_space)
    obs, _ = envs.reset(seed=3)
    assert obs.tobytes() == b"".join(env.reset(seed=3 + i)[0].tobytes() for i, env in enumerate(plain))
    rng = np.random.default_rng(0)
    ends = 0
    for _ in range(60):
        actions = rng.integers(2, size=3)
        obs, rewards, terminations, truncations, infos = envs.step(actions)
        for i, env in enumerate(plain):
            seen, reward, terminated, truncated, _ = env.step(actions[i])
            assert (rewards[i], bool(terminations[i]), bool(truncations[i])) == (reward, terminated, truncated)
            assert ("terminal_observation" in infos[i]) == (terminated or truncated)
            if terminated or truncated:
                ends += 1
                assert infos[i]["terminal_observation"].tobytes() == seen.tobytes()
                seen, _ = env.reset()
            assert obs[i].tobytes() == seen.tobytes()
    assert ends > 6
    assert envs.env_is_wrapped(gymnasium.wrappers.TimeLimit) == [True] * 3
    envs.close()


def test_what_else_is_copied_says_what_to_call() -> None:
    with pytest.raises(ArgumentError, match=r"got .*: call pettingzoo_env_to_vec_env_v1\(env\) first"):
        concat_vec_envs_v1(simple_spread_v3.parallel_env(), 2)  # type: ignore[arg-type]  # on purpose
    with (
        SyncVectorEnv([partial(ScriptedParallelEnv, [Script.together(2, 3)], agent_num=2)]) as envs,
        pytest.raises(ArgumentError, match="got a view without an env"),
    ):
        concat_vec_envs_v1(SuperSuitVecEnv(envs), 2)
    vector = gymnasium.make_vec("CartPole-v1", 2)
    with pytest.raises(ArgumentError, match=r"many envs already: use marlvec.make\(env, n\)"):
        concat_vec_envs_v1(vector, 2)
    vector.close()


@pytest.mark.mostly_slow("steps or trains with another library", quick=2)
@pytest.mark.parametrize(("num_envs", "num_cpus", "dtype"), [(3, 0, "u1"), (3, 1, "u1"), (3, 2, "?"), (1, 2, "u1")])
def test_flags_have_supersuits_dtypes(num_envs: int, num_cpus: int, dtype: str) -> None:
    one = pettingzoo_env_to_vec_env_v1(simple_spread_v3.parallel_env(max_cycles=2))
    envs = concat_vec_envs_v1(one, num_envs, num_cpus=num_cpus)
    envs.reset(seed=0)
    for end in (0, 1, 0, 1):
        _, _, terminations, truncations, _ = envs.step(np.zeros(envs.num_envs, np.int64))
        assert terminations.dtype == truncations.dtype == np.dtype(dtype)
        assert truncations.tolist() == [end] * envs.num_envs
    envs.close()
    one.close()


def test_different_spaces_are_refused_as_supersuit_does() -> None:
    with pytest.raises(ArgumentError, match=r"one group; .* has 2"):
        pettingzoo_env_to_vec_env_v1(simple_tag_v3.parallel_env())


def test_what_a_reset_says_is_among_the_infos_of_the_step_before() -> None:
    script = Script.together(2, 2)
    envs = SuperSuitVecEnv(SyncVectorEnv([partial(Talks, [script], agent_num=2)]))
    envs.reset()
    envs.step(np.zeros(2, np.int64))
    infos = envs.step(np.zeros(2, np.int64))[4]
    assert [(info["begun"], info["stepped"]) for info in infos] == [(2, 2)] * 2
    envs.close()


class Talks(ScriptedParallelEnv):
    """Says how often it was begun and stepped."""

    begun = stepped = 0

    def reset(self, *args: Any, **kwargs: Any) -> Any:
        self.begun += 1
        obs, _ = super().reset(*args, **kwargs)
        return obs, {agent: {"begun": self.begun} for agent in obs}

    def step(self, actions: Any) -> Any:
        self.stepped += 1
        *rest, infos = super().step(actions)
        return *rest, {agent: {"stepped": self.stepped} for agent in infos}


@pytest.mark.parametrize(("num_envs", "num_cpus"), [(3, 0), (2, 1), (2, 2)])
def test_the_numbers_are_supersuits_own(num_envs: int, num_cpus: int) -> None:
    """From processes with one env each: those with more begin each other's seeds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("supersuit")
        if num_cpus < 2:
            compare(num_envs, num_cpus)
            return
    # It never gives back its shared memory, so its processes are those of a program that ends.
    code = f"from tests.interop.test_supersuit import compare; compare({num_envs}, {num_cpus})"
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def compare(num_envs: int, num_cpus: int) -> None:
    """Two calls replaced, and not one bit of four episodes of simple_spread is different."""
    supersuit = pytest.importorskip("supersuit")
    theirs = supersuit.concat_vec_envs_v1(
        supersuit.pettingzoo_env_to_vec_env_v1(simple_spread_v3.parallel_env()), num_envs, num_cpus
    )
    one = pettingzoo_env_to_vec_env_v1(simple_spread_v3.parallel_env())
    mine = concat_vec_envs_v1(one, num_envs, num_cpus)
    assert isinstance(mine, SuperSuitVecEnv)
    assert mine.observation_space == theirs.observation_space
    assert mine.num_envs == theirs.num_envs
    rng = np.random.default_rng(0)
    assert mine.reset(seed=5)[0].tobytes() == theirs.reset(seed=5)[0].tobytes()
    for _ in range(100):
        actions = rng.integers(5, size=mine.num_envs)
        got, want = mine.step(actions), theirs.step(actions)
        for ours, other in zip(got[:4], want[:4], strict=True):
            assert (ours.dtype, ours.tobytes()) == (other.dtype, other.tobytes())
        for ours, other in zip(got[4], want[4], strict=True):
            assert other.keys() <= ours.keys()
            if "terminal_observation" in other:
                assert ours["terminal_observation"].tobytes() == other["terminal_observation"].tobytes()
    for envs in (one, mine, theirs):
        envs.close()
