"""Names by which users of other libraries ask: each is the same thing as marlvec's own."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import marlvec
from marlvec import VectorEnv
from marlvec.errors import BusyError, NothingPendingError
from marlvec.testing import Script, ScriptedParallelEnv
from tests.vector.support.kinds import HERE_AND_AWAY, vectorize

SCRIPTS = [Script([0, 0], [2, 4], ["terminated", "truncated"])]


def envs_of(backend: str, **options: Any) -> VectorEnv:
    return vectorize(backend, [partial(ScriptedParallelEnv, SCRIPTS, agent_num=2)] * 3, **options)


@pytest.mark.parametrize("backend", HERE_AND_AWAY)
def test_agents(backend: str) -> None:
    with envs_of(backend) as envs:
        assert envs.num_agents == envs.agent_num == 2
        assert envs.possible_agents == envs.agents == ("agent_0", "agent_1")
        envs.reset(seed=0)
        for _ in range(3):
            envs.step(np.zeros((3, 2), np.int64))
        assert envs.num_agents == 2, "of all, whoever is alive"


@pytest.mark.parametrize("backend", HERE_AND_AWAY)
def test_step_async_and_step_wait_are_a_step(backend: str) -> None:
    with envs_of(backend) as one, envs_of(backend) as other:
        one.reset(seed=0)
        other.reset(seed=0)
        with pytest.raises(NothingPendingError):
            one.step_wait()
        for k in range(10):
            actions = np.full((3, 2), k % 2)
            one.step_async(actions)
            with pytest.raises(BusyError):
                one.step_async(actions)
            np.testing.assert_equal(one.step_wait(timeout=60), other.step(actions))


@pytest.mark.parametrize("backend", HERE_AND_AWAY)
def test_reset_and_call_have_such_pairs_too(backend: str) -> None:
    with envs_of(backend) as one, envs_of(backend) as other:
        with pytest.raises(NothingPendingError) as nothing:
            one.reset_wait()
        assert nothing.value.name == "reset"
        one.reset_async(seed=3)
        with pytest.raises(BusyError) as busy:
            one.call_async("observation_space", "agent_0")
        assert busy.value.name == "reset"
        np.testing.assert_equal(one.reset_wait(timeout=60), other.reset(seed=3))
        one.call_async("observation_space", "agent_0")
        with pytest.raises(BusyError) as busy:
            one.reset_async()
        assert busy.value.name == "call"
        assert one.call_wait(timeout=60) == other.call("observation_space", "agent_0")


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick="each")
@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("mode", ["same_step", "next_step", "disabled"])
@pytest.mark.parametrize("backend", HERE_AND_AWAY)
def test_final_obs_is_the_array_of_final_observation(backend: str, mode: str, copy: bool) -> None:
    told = 0
    with envs_of(backend, autoreset_mode=mode, copy=copy) as envs:
        _, infos = envs.reset(seed=0)
        for _ in range(9):
            if mode == "disabled" and not infos["alive"].any():
                _, infos = envs.reset()
            *_, infos = envs.step(np.zeros((3, 2), np.int64))
            assert ("final_obs" in infos) is ("_final_obs" in infos) is ("final_observation" in infos)
            if "final_obs" in infos:
                told += 1
                assert infos["final_obs"] is infos["final_observation"]
                assert infos["_final_obs"] is infos["_final_observation"]
            assert not any(key.startswith("final") for own in lists(infos, envs) for key in own)
    assert told >= 3


def lists(infos: dict[str, Any], envs: VectorEnv) -> list[dict[str, Any]]:
    """All infos of agents and envs, as dicts."""
    told = marlvec.infos_to_list(infos, envs.agents, envs.num_envs)
    return [own for info in told for own in info.values()]


def test_an_envs_own_final_obs_is_not_lost() -> None:
    listed = [{"agent_0": {"final_obs": 3, "x": 1.5}, "__common__": {"final_obs": 4}}, {}]
    infos = marlvec.infos_from_list(listed, ["agent_0", "agent_1"])
    assert "final_obs" not in infos
    assert marlvec.infos_to_list(infos, ["agent_0", "agent_1"], 2) == listed
    infos["final_obs"] = infos["final_observation"] = np.zeros((2, 2))
    assert marlvec.infos_to_list(infos, ["agent_0", "agent_1"], 2) == listed
