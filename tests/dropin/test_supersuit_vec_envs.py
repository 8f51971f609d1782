"""What SuperSuit 3.11.0 expects of its vector envs (test/test_vector), asked of `marlvec.interop.supersuit`.

SuperSuit itself is not needed; tests/interop/test_supersuit.py compares the numbers where it is installed.

Different on purpose, each beside its test: envs whose agents leave early need no ``black_death``; agents with unlike
spaces are refused by an `ArgumentError` (a ValueError), theirs by an AssertionError; infos say more
(`marlvec.interop.rows.RowDriver`).
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Tuple
from mpe2 import simple_spread_v3, simple_world_comm_v3

from marlvec.interop.supersuit import concat_vec_envs_v1, pettingzoo_env_to_vec_env_v1
from marlvec.testing import SampledEnv, Script, ScriptedParallelEnv
from tests.vector.support.reference import flatten


class Wrapped(ScriptedParallelEnv):
    """An env, and its own wrapper."""


def spread(**options: Any) -> Any:
    return pettingzoo_env_to_vec_env_v1(simple_spread_v3.parallel_env(max_cycles=10, **options))


@pytest.mark.mostly_slow("steps or trains with another library", quick=3)
@pytest.mark.parametrize(("copies", "num_cpus"), [(0, 0), (2, 0), (2, 2)])
def test_rows_of_copies(copies: int, num_cpus: int) -> None:
    one = spread()
    envs = concat_vec_envs_v1(one, copies, num_cpus=num_cpus) if copies else one
    rows = 3 * max(1, copies)
    assert envs.num_envs == rows
    obs, infos = envs.reset()
    assert len(infos) == rows
    ends = 0
    for _ in range(33):
        before = deepcopy(obs)
        new, rewards, terminations, truncations, infos = envs.step(
            [envs.action_space.sample() for _ in range(envs.num_envs)]
        )
        assert (obs == before).all(), "what was given stays as it is"
        assert {len(part) for part in (new, rewards, terminations, truncations, infos)} == {rows}
        assert truncations.any() == truncations.all(), "no agent ends before its env"
        ends += int(truncations.all())
        obs = new
    assert ends == 3
    envs.close()
    one.close()


def test_copies_in_this_process_and_in_others_give_the_same() -> None:
    one = spread()
    here, away = concat_vec_envs_v1(one, 3), concat_vec_envs_v1(one, 3, num_cpus=2)
    assert (here.reset(seed=51)[0] == away.reset(seed=51)[0]).all()
    for _ in range(25):
        actions = [here.action_space.sample() for _ in range(9)]
        mine, other = here.step(actions), away.step(actions)
        for ours, theirs in zip(mine[:4], other[:4], strict=True):
            assert (ours == theirs).all()
        assert [info.keys() for info in mine[4]] == [info.keys() for info in other[4]]
    for envs in (one, here, away):
        envs.close()


def test_copies_begin_unlike() -> None:
    one = spread()
    envs = concat_vec_envs_v1(one, 2)
    obs, _ = envs.reset()
    assert (obs[:3] != obs[3:]).any()
    envs.close()
    one.close()


def test_unlike_spaces() -> None:
    with pytest.raises(ValueError, match="one group"):  # theirs: an AssertionError
        pettingzoo_env_to_vec_env_v1(simple_world_comm_v3.parallel_env())


def test_here_agents_that_die_need_no_wrapper() -> None:
    """Theirs asserts that no agent leaves before the env ends, and asks for ``black_death``."""
    script = Script([0, 0], [2, 4], ["terminated", "truncated"])
    envs = pettingzoo_env_to_vec_env_v1(ScriptedParallelEnv([script], agent_num=2))
    envs.reset(seed=42)
    flags = []
    for _ in range(8):
        _, _, terminations, truncations, infos = envs.step([0, 0])
        flags.append((terminations.tolist(), truncations.tolist()))
        for row in range(2):
            assert ("terminal_observation" in infos[row]) == bool(terminations[row] or truncations[row])
    assert flags == 2 * [([0, 0], [0, 0]), ([1, 0], [0, 0]), ([0, 0], [0, 0]), ([0, 0], [0, 1])]
    envs.close()


def test_env_is_wrapped() -> None:
    one = spread()
    envs = concat_vec_envs_v1(one, 3)
    kind = type(one.par_env)
    assert envs.env_is_wrapped(Wrapped) == [False] * 9
    assert envs.env_is_wrapped(kind) == [True] * 9
    envs.close()
    one.close()


@pytest.mark.parametrize("num_cpus", [0, 2])
def test_observations_and_actions_that_are_trees(num_cpus: int) -> None:
    space = Dict({"feature": Box(0, 10, (5,)), "id": Tuple([Box(0, 10, (7,)), Box(0, 10, (8,))])})
    actions = Dict({"obs": Box(0, 10, (5,)), "mask": Discrete(10)})
    one = pettingzoo_env_to_vec_env_v1(SampledEnv(space, actions, agent_num=5))
    envs = concat_vec_envs_v1(one, 2, num_cpus=num_cpus)
    assert envs.observation_space == space
    obs, _ = envs.reset()
    for _ in range(12):
        assert [part.shape for part in flatten(obs)] == [(10, 5), (10, 7), (10, 8)]
        singles = [envs.action_space.sample() for _ in range(10)]
        batch = {key: np.stack([single[key] for single in singles]) for key in ("obs", "mask")}
        obs, _, terminations, truncations, _ = envs.step(batch)
        assert truncations.any() == truncations.all()
        assert not terminations.any()
    envs.close()
    one.close()


def test_render() -> None:
    one = spread(render_mode="rgb_array")
    one.reset()
    frame = one.render()
    assert (frame.ndim, frame.shape[2]) == (3, 3)
    one.close()


def test_stable_baselines_base_class() -> None:
    pytest.importorskip("stable_baselines3")
    one = spread(render_mode="rgb_array")
    envs = concat_vec_envs_v1(one, 1, base_class="stable_baselines3")
    envs.reset()
    assert envs.render().ndim == 3
    assert envs.step([envs.action_space.sample() for _ in range(3)])[1].shape == (3,)
    envs.close()
    one.close()
