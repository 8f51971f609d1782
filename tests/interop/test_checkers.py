"""Both views, and all that Gymnasium and PettingZoo have to look at an env with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils.performance import benchmark_vector_step
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import vector as wrappers
from pettingzoo.utils.conversions import parallel_to_aec

import marlvec
from marlvec.interop.gymnasium import GymnasiumVectorEnv
from marlvec.interop.pettingzoo import ParallelView
from tests.interop import checkers
from tests.vector.support.reference import MODES


def vector_entry_point(num_envs: int, env: str, **options: Any) -> GymnasiumVectorEnv:
    return GymnasiumVectorEnv(marlvec.make(env, num_envs, backend="sync", **options))


def check_gymnasium_view(env: str, agent_num: int, mode: str) -> None:
    """``make_vec`` looks at the metadata, the wrappers at what they build on, the benchmark at resets and flags."""
    spec = EnvSpec("Marlvec-v0", vector_entry_point=vector_entry_point)
    view = gymnasium.make_vec(spec, num_envs=4, env=env, autoreset_mode=mode)
    assert view.num_envs == 4 * agent_num
    assert benchmark_vector_step(view, target_duration=0.02, seed=1) > 0  # type: ignore[arg-type]  # any number does
    envs: Any = wrappers.ClipReward(wrappers.NormalizeReward(view), -5.0, 5.0)
    if mode == "next_step":
        envs = wrappers.NormalizeObservation(envs)
    if mode != "same_step":
        envs = wrappers.FlattenObservation(envs)
    envs = wrappers.DictInfoToList(wrappers.RecordEpisodeStatistics(envs))
    envs.reset(seed=2)
    episodes = 0
    for _ in range(80):
        obs, _, terminated, truncated, infos = envs.step(envs.action_space.sample())
        assert obs in envs.observation_space
        over = terminated | truncated
        assert ["episode" in info for info in infos] == over.tolist()
        episodes += int(over.sum())
        if mode == "disabled" and over.any() and not over.all():
            view.reset(options={"reset_mask": over})
        elif mode == "disabled" and over.any():
            envs.reset()
    assert episodes >= 2 * view.num_envs
    envs.close()


def check_parallel_view() -> None:
    views: list[ParallelView] = []

    def parallel_env(**kwargs: Any) -> ParallelView:
        views.append(ParallelView.make("simple_spread", **kwargs))
        return views[-1]

    def env(**kwargs: Any) -> Any:
        return parallel_to_aec(parallel_env(**kwargs))

    checkers.parallel_api_test(parallel_env(), 100)
    checkers.parallel_seed_test(parallel_env, 60)
    checkers.max_cycles_test(SimpleNamespace(parallel_env=parallel_env, env=env))
    checkers.state_test(env(), parallel_env())
    checkers.render_test(env)
    checkers.api_test(env(), 60)
    checkers.seed_test(env, 60)
    for view in views:
        view.close()


@pytest.mark.slow("steps or trains with another library")
@pytest.mark.checklist(127)
def test_both_views_pass_the_checkers_of_their_libraries() -> None:
    """Gymnasium has none of its own for vector envs, so its own vector env is the measure."""
    for mode in MODES:
        check_gymnasium_view("CartPole-v1", 1, mode)
        check_gymnasium_view("simple_spread", 3, mode)
        view = vector_entry_point(3, "CartPole-v1", autoreset_mode=mode)
        theirs = SyncVectorEnv(
            [lambda: gymnasium.make("CartPole-v1")] * 3, autoreset_mode=view.metadata["autoreset_mode"]
        )
        pair = wrappers.RecordEpisodeStatistics(view), wrappers.RecordEpisodeStatistics(theirs)
        steps = [[envs.reset(seed=[5, 6, 7])[0]] for envs in pair]
        for step in range(120):
            actions = np.full(3, step % 2)
            for envs, told in zip(pair, steps, strict=True):
                told += envs.step(actions)[:4]
                if mode == "disabled" and (told[-1] | told[-2]).any():
                    told.append(envs.reset(seed=[1, 2, 3])[0])
        assert [array.tobytes() for array in steps[0]] == [array.tobytes() for array in steps[1]]
        assert list(pair[0].return_queue) == list(pair[1].return_queue)
        assert list(pair[0].length_queue) == list(pair[1].length_queue)
        assert len(pair[0].length_queue) > 3
        for envs in pair:
            envs.close()
    check_parallel_view()
