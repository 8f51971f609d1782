"""Global states: with every reset and step where they are asked for, the state in which an episode ended included."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from mpe2 import simple_spread_v3

from marlvec import env_seeds
from marlvec.errors import ArgumentError, EnvRaised
from marlvec.testing.scripted import ScriptedParallelEnv
from tests.vector.support.kinds import BACKENDS, vectorize
from tests.vector.support.reference import MODES

N, A, STEPS = 3, 3, 80


def spread(length: int) -> Any:
    return simple_spread_v3.parallel_env(max_cycles=length)


def by_hand(lengths: list[int], seed: int, actions: Any, mode: str) -> list[list[tuple[Any, Any]]]:
    """Per env, per step: its state, and the one in which an episode ended (or None)."""
    told = []
    for i, (length, own) in enumerate(zip(lengths, env_seeds(seed, N), strict=True)):
        env = spread(length)
        env.reset(seed=own)
        states = [(env.state(), None)]
        for step in actions[:, i]:
            if not env.agents and mode == "next_step":
                env.reset()
                states.append((env.state(), None))
                continue
            env.step(dict(zip(env.possible_agents, step.tolist(), strict=True)))
            final = None if env.agents else env.state()
            if not env.agents and mode != "next_step":
                env.reset()
            states.append((env.state(), final))
        told.append(states)
        env.close()
    return told


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=6)
@pytest.mark.checklist(13)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_states_are_those_of_the_envs_themselves(backend: str, mode: str) -> None:
    """In whole episodes of different lengths, and as `state()` has them."""
    lengths = [25, 7, 10]
    actions = np.random.default_rng(0).integers(5, size=(STEPS, N, A))
    expected = by_hand(lengths, 5, actions, mode)
    seen_ends = 0
    with vectorize(backend, [partial(spread, k) for k in lengths], autoreset_mode=mode, state=True) as envs:
        _, infos = envs.reset(seed=5)
        assert envs.state_space is not None
        assert infos["state"].shape == (N, *envs.state_space.shape) == (N, 54)
        for t in range(STEPS + 1):
            if t:
                *_, infos = envs.step(actions[t - 1])
            ends = [k for k in range(N) if expected[k][t][1] is not None]
            seen_ends += len(ends)
            assert ("final_state" in infos) == bool(ends)
            for k in ends:
                assert infos["_final_state"][k]
                np.testing.assert_array_equal(infos["final_state"][k], expected[k][t][1])
            if mode == "disabled" and ends:
                for k in ends:  # nothing begins by itself: the state is still the last one
                    np.testing.assert_array_equal(infos["state"][k], expected[k][t][1])
                _, infos = envs.reset(env_ids=ends)
            np.testing.assert_array_equal(infos["state"], [expected[k][t][0] for k in range(N)])
            if t % 10 == 0 and not (mode == "next_step" and ends):
                np.testing.assert_array_equal(envs.state(), infos["state"])
    assert seen_ends >= 3 * N


def test_without_being_asked_for_no_state_is_written() -> None:
    with vectorize("sync", [partial(spread, 5)] * 2) as envs:
        _, infos = envs.reset(seed=0)
        assert "state" not in infos
        *_, infos = envs.step(envs.random_action())
        assert "state" not in infos
        assert envs.state().shape == (2, 54)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_env_without_a_state_is_refused(backend: str) -> None:
    words = r"env 0, __init__\(\): state=True: scripted_parallel has no global state"
    with pytest.raises(ArgumentError, match=words):
        vectorize(backend, [ScriptedParallelEnv] * 2, state=True)
    with vectorize(backend, [ScriptedParallelEnv] * 2) as envs:
        envs.reset(seed=0)
        with pytest.raises(ArgumentError, match="has no global state"):
            envs.state()


class Fails(ScriptedParallelEnv):
    """Its state cannot be had at times."""

    calls = 0

    def state(self) -> Any:
        self.calls += 1
        if self.calls == 4:
            raise RuntimeError("no state today")
        return super().state()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_that_fails_is_a_fault_of_that_env(backend: str) -> None:
    factories = [partial(ScriptedParallelEnv, state=True), partial(Fails, state=True)]
    with vectorize(backend, factories, state=True) as envs:
        envs.reset(seed=0)
        with pytest.raises(EnvRaised, match=r"env 1 raised in state\(\): RuntimeError: no state today") as caught:
            for _ in range(4):
                envs.step(envs.random_action())
        assert caught.value.env_ids == (1,)
        assert caught.value.result.env_ids.tolist() == [0]
        envs.reset(env_ids=[1])
        envs.step(envs.random_action())
