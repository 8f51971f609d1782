"""The three autoreset modes, read off the stamps in the data; final observations; masks; who is in the episode."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from marlvec import AsyncVectorEnv, SyncVectorEnv, VectorEnv, infos_to_list
from marlvec.errors import ArgumentError, ContractError, EnvRaised, NotResetError
from marlvec.testing.scripted import CounterEnv, Script, ScriptedParallelEnv, decode, decode_reward
from tests.vector.support.kinds import BACKENDS, HERE_AND_AWAY, vectorize
from tests.vector.support.reference import MODES

N, A = 3, 2
LENGTHS = (2, 3, 5)  # of env 0, 1, 2


def scripted(backend: str, mode: str, **options: Any) -> VectorEnv:
    """Three envs whose episodes have different lengths, and which say in every info when it was."""
    factories = []
    for i, length in enumerate(LENGTHS):
        infos = {(t, a): {"t": t} for t in range(length + 1) for a in range(A)}
        script = Script([0] * A, [length] * A, ["terminated", "truncated"], infos)
        factories.append(partial(ScriptedParallelEnv, script, agent_num=A, env_index=i, **options))
    return vectorize(backend, factories, autoreset_mode=mode)


def acts(envs: VectorEnv) -> Any:
    return np.ones((envs.num_envs, envs.agent_num), np.int64)


@pytest.mark.slow("plays whole episodes in worker processes")
@pytest.mark.checklist(43)
def test_the_mode_is_the_instances_and_nothing_else_is_one() -> None:
    for backend in BACKENDS:
        vectorizers = [vectorize(backend, [CounterEnv], autoreset_mode=mode) for mode in MODES]
        for mode, envs in zip(MODES, vectorizers, strict=True):
            with envs:
                assert envs.metadata["autoreset_mode"] == envs.autoreset_mode == mode
                assert envs.metadata["name"] == "scripted_parallel", "the envs' own stays"
        for cls in (VectorEnv, SyncVectorEnv, AsyncVectorEnv):
            assert "autoreset_mode" not in getattr(cls, "metadata", {})
        with vectorize(backend, [CounterEnv]) as envs:
            assert envs.autoreset_mode == "same_step"
        with pytest.raises(ArgumentError, match="autoreset_mode must be one of"):
            vectorize(backend, [CounterEnv], autoreset_mode="later")


@pytest.mark.checklist(45)
@pytest.mark.checklist(46)
@pytest.mark.fault("C13")
@pytest.mark.parametrize("reuse_buffer", [False, True])
@pytest.mark.parametrize("backend", HERE_AND_AWAY)
def test_same_step(backend: str, reuse_buffer: bool) -> None:
    with scripted(backend, "same_step", reuse_buffer=reuse_buffer) as envs:
        _, infos = envs.reset(seed=1)
        assert "final_info" not in infos
        assert "final_observation" not in infos
        for step in range(1, 31):
            obs, rewards, terminated, truncated, infos = envs.step(acts(envs))
            over = [step % length == 0 for length in LENGTHS]
            assert terminated.tolist() == [[end, False] for end in over]
            assert truncated.tolist() == [[False, end] for end in over]
            assert infos["alive"].all(), "the next episode runs already"
            assert ("final_observation" in infos) == ("final_info" in infos) == any(over)
            own = infos_to_list(infos, envs.agents, N)
            if any(over):
                assert infos["final_observation"].shape == (N, A, 7)
                assert infos["_final_observation"].tolist() == infos["_final_info"].tolist() == over
                final_own = infos_to_list(infos["final_info"], envs.agents, N)
            for i, length in enumerate(LENGTHS):
                episode, t = (step - 1) // length, (step - 1) % length + 1
                for a in range(A):
                    assert decode_reward(rewards[i, a]) == (episode, t, a, 1)
                    if over[i]:
                        assert decode(infos["final_observation"][i, a]) == (i, 0, episode, t, a)
                        assert decode(obs[i, a]) == (i, 0, episode + 1, 0, a)
                    else:
                        assert decode(obs[i, a]) == (i, 0, episode, t, a)
                told = {f"agent_{a}": {"t": 0 if over[i] else t} for a in range(A)}
                assert own[i] == told, "of the reset, where there was one"
                if any(over):
                    assert final_own[i] == ({f"agent_{a}": {"t": length} for a in range(A)} if over[i] else {})


@pytest.mark.checklist(46)
@pytest.mark.checklist(49)
@pytest.mark.parametrize("reuse_buffer", [False, True])
@pytest.mark.parametrize("backend", HERE_AND_AWAY)
def test_next_step(backend: str, reuse_buffer: bool) -> None:
    """The vectorizer's half of line 49; that the collector drops the row is shown in tests/collect."""
    with scripted(backend, "next_step", reuse_buffer=reuse_buffer) as envs:
        envs.reset(seed=1)
        for step in range(1, 37):
            places = [(step % (length + 1), step // (length + 1)) for length in LENGTHS]  # 0: the autoreset
            wild = acts(envs)
            wild[[t == 0 for t, _ in places]] = 99  # is ignored, so may be anything
            obs, rewards, terminated, truncated, infos = envs.step(wild)
            assert infos["reset_mask"].tolist() == [t == 0 for t, _ in places]
            for i, (t, episode) in enumerate(places):
                over = t == LENGTHS[i]
                assert terminated[i].tolist() == [over, False]
                assert truncated[i].tolist() == [False, over]
                assert infos["alive"][i].all() == infos["acting"][i].all() == (not over)
                assert infos["alive"][i].any() == infos["acting"][i].any() == (not over)
                for a in range(A):
                    assert decode(obs[i, a]) == (i, 0, episode, t, a)
                    if t == 0:
                        assert rewards[i, a] == 0
                    else:
                        assert decode_reward(rewards[i, a]) == (episode, t, a, 1)
                    if over:
                        assert decode(infos["final_observation"][i, a]) == (i, 0, episode, t, a)


@pytest.mark.checklist(46)
@pytest.mark.checklist(50)
@pytest.mark.fault("B9")
@pytest.mark.parametrize("reuse_buffer", [False, True])
@pytest.mark.parametrize("backend", HERE_AND_AWAY)
def test_disabled(backend: str, reuse_buffer: bool) -> None:
    with scripted(backend, "disabled", reuse_buffer=reuse_buffer) as envs:
        envs.reset(seed=1)
        t, episodes = [0] * N, [0] * N
        ended: list[int] = []
        while min(episodes) < 3:
            if ended:
                for call in (envs.step, envs.step_send, envs.send):
                    with pytest.raises(NotResetError, match=rf"envs \[{', '.join(map(str, ended))}\]"):
                        call(acts(envs))
                with pytest.raises(NotResetError, match=rf"envs \[{ended[0]}\]"):
                    envs.send(acts(envs)[:1], ended[:1])
                obs, infos = envs.reset(env_ids=ended)
                for i in ended:
                    t[i], episodes[i] = 0, episodes[i] + 1
                assert infos["alive"].all()
                assert [decode(row[0])[2:4] for row in obs] == list(zip(episodes, t, strict=True))
            obs, _, terminated, truncated, infos = envs.step(acts(envs))
            t = [x + 1 for x in t]
            ended = [i for i, length in enumerate(LENGTHS) if t[i] == length]
            for i in range(N):
                assert [decode(row) for row in obs[i]] == [(i, 0, episodes[i], t[i], a) for a in range(A)]
                assert (terminated | truncated)[i].all() == (i in ended)
                assert infos["alive"][i].any() == (i not in ended)
            if ended:
                assert infos["_final_observation"].tolist() == [i in ended for i in range(N)]
                assert infos["final_observation"][ended].tobytes() == obs[ended].tobytes()


class Stillborn(CounterEnv):
    """Has nobody in it after its second reset."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        obs, infos = super().reset(seed, options)
        if self.world.episode == 1 and self.world.env_index == 1:
            self.agents = []
            return {}, {}
        return obs, infos


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick="each")
@pytest.mark.checklist(53)
@pytest.mark.fault("D5")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", HERE_AND_AWAY)
def test_an_env_that_is_over_right_after_its_reset(backend: str, mode: str) -> None:
    factories = [partial(Stillborn, 2, agent_num=A, env_index=i) for i in range(N)]
    with vectorize(backend, factories, autoreset_mode=mode) as envs:
        envs.reset(seed=0)
        envs.step(acts(envs))
        with pytest.raises(ContractError, match="env 1.*at least one live agent") as caught:
            envs.step(acts(envs))
            envs.step(acts(envs)) if mode == "next_step" else envs.reset(env_ids=[0, 1, 2])
        assert isinstance(caught.value, EnvRaised)
        assert caught.value.env_ids == (1,)
        with pytest.raises(NotResetError, match=r"envs \[1\]"):
            envs.step(acts(envs))
        envs.reset(env_ids=[1])
        for _ in range(6 if mode != "disabled" else 1):
            envs.step(acts(envs))
