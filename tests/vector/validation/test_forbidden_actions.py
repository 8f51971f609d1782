"""Actions that an action mask forbids: what `validate` makes of them, and what an env's own error says."""

from __future__ import annotations

import re
import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Discrete, MultiDiscrete

import marlvec
from marlvec.errors import ActionError, ContractWarning, EnvRaised
from tests.envs.support.forgetful import Forgetful
from tests.vector.support.kinds import BACKENDS, vectorize

N, LENGTH, STEPS = 3, 4, 40


def gives(t: int, a: int, i: int) -> bool:
    return (t + a + i) % 3 != 1


class Unforgiving(Forgetful):
    """Raises at what its masks forbid."""

    def step(self, actions: dict[str, Any]) -> Any:
        for a, agent in enumerate(self.agents):
            if self.gives(self.t, a) and actions[agent] != self.t % 3:
                raise ValueError("an illegal move")
        return super().step(actions)


def envs_of(backend: str, validate: str, kind: type[Forgetful] = Forgetful, space: Any = None) -> marlvec.VectorEnv:
    return vectorize(backend, [partial(kind, partial(gives, i=i), LENGTH, space) for i in range(N)], validate=validate)


def forbidden_at(t: int, actions: np.ndarray[Any, Any]) -> int:
    """How many of the actions are forbidden at an env's step ``t``."""
    given = np.array([[gives(t, a, i) for a in range(2)] for i in range(N)])
    return int((given & (actions.reshape(N, 2) != t % 3)).sum())


def plan(seed: int = 0) -> list[np.ndarray[Any, Any]]:
    """Actions of whole episodes: half of them legal, and in some calls all of them."""
    rng = np.random.default_rng(seed)
    return [
        np.where(rng.random((N, 2)) < rng.choice([0.5, 2]), t % LENGTH % 3, rng.integers(0, 3, (N, 2)))
        for t in range(STEPS)
    ]


@pytest.mark.parametrize("space", [Discrete(3), MultiDiscrete([3])])
@pytest.mark.parametrize("validate", ["warn", "sample", "off"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_they_are_sent_with_a_warning(backend: str, validate: str, space: Any) -> None:
    """In each call that has some, in the first one that is looked at, or in none; the line of the call is named."""
    told: list[tuple[int, int]] = []
    expected: list[tuple[int, int]] = []
    with envs_of(backend, validate, space=space) as envs:
        envs.reset(seed=0)
        for call, actions in enumerate(plan()):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                obs, *_ = envs.step(actions.reshape(N, 2, *space.shape))
            assert (obs == (call + 1) % LENGTH).all()  # it was sent
            told += [(call, 1 + int(*re.findall(r"\((\d+) more", str(found.message)))) for found in caught]
            assert all(found.category is ContractWarning and found.filename == __file__ for found in caught)
            if n := forbidden_at(call % LENGTH, actions):
                expected.append((call, n))
    assert told == {"warn": expected, "sample": expected[:1], "off": []}[validate]


@pytest.mark.parametrize("backend", BACKENDS)
def test_strict_refuses_them_and_nothing_is_sent(backend: str) -> None:
    with envs_of(backend, "strict", Unforgiving) as envs:
        envs.reset(seed=0)
        for call, actions in enumerate(plan()):
            t = call % LENGTH
            if forbidden_at(t, actions):
                i, a = next((i, a) for i in range(N) for a in range(2) if gives(t, a, i) and actions[i, a] != t % 3)
                what = "expected an action that its action mask allows, got"
                with pytest.raises(ActionError, match=f"env {i}, agent '{envs.agents[a]}': {what} {actions[i, a]}"):
                    envs.step(actions)
                actions = np.full((N, 2), t % 3)
            obs, *_ = envs.step(actions)
            assert (obs == (t + 1) % LENGTH).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_error_of_the_env_says_that_a_mask_forbade_the_action(backend: str) -> None:
    with envs_of(backend, "off", Unforgiving) as envs:
        envs.reset(seed=0)
        for t in range(3):
            envs.step(np.full((N, 2), t))
        with pytest.raises(
            EnvRaised
        ) as caught:  # action 0 is allowed, and without a mask all are: bob's in env 0, ann's in env 1
            envs.step([[1, 1], [1, 0], [2, 2]])
    said = {failure.env_id: failure.summary.partition("an illegal move ")[2] for failure in caught.value.failures}
    assert said == {
        0: "(the action mask of agent 'ann' forbids its action 1)",
        2: "(the action mask of agent 'ann' forbids its action 2; the action mask of agent 'bob' forbids its action 2)",
    }


def test_an_error_that_has_another_reason_does_not() -> None:
    class Broken(Forgetful):
        def step(self, actions: dict[str, Any]) -> Any:
            raise ValueError("broken")

    with envs_of("sync", "strict", Broken) as envs:
        envs.reset(seed=0)
        with pytest.raises(EnvRaised, match="broken") as caught:
            envs.step(np.zeros((N, 2), np.int64))
        assert "mask" not in str(caught.value)


@pytest.mark.parametrize("backend", ["native", "sync"])
def test_a_board_game_warns_once_and_refuses_with_strict(backend: str) -> None:
    """A native env looks at the values of actions in every call, and at masks as all do."""
    with marlvec.make("tictactoe_v3", 2, backend=backend) as envs:
        envs.reset(seed=0)
        envs.step(np.full((2, 2), 4))
        with pytest.warns(ContractWarning, match="env 0, agent 'player_2': .* got 4 .1 more."):
            envs.step(np.full((2, 2), 4))
        envs.step(np.full((2, 2), 4))  # player_2 has lost, the next game has begun
        envs.step(np.full((2, 2), 4))
    with marlvec.make("tictactoe_v3", 2, backend=backend, validate="strict") as envs:
        envs.reset(seed=0)
        envs.step(np.full((2, 2), 4))
        with pytest.raises(ActionError, match="got 4"):
            envs.step(np.full((2, 2), 4))
