"""Global states: where they are asked for, who has none, and what fails.

That they are those of the envs themselves is held by tests/properties.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from mpe2 import simple_spread_v3

from marlvec.errors import ArgumentError, EnvRaised
from marlvec.testing.scripted import ScriptedParallelEnv
from tests.vector.support.kinds import BACKENDS, vectorize


def spread(length: int) -> Any:
    return simple_spread_v3.parallel_env(max_cycles=length)


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
