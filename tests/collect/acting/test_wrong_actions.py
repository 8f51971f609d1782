"""Actions that are wrong only after a long while are found as the first would be, and the envs never see them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete, Space
from numpy.typing import NDArray

from marlvec.collect import Collector
from marlvec.connectors import Rows
from marlvec.errors import ActionError, ContractError
from marlvec.policies import Policy
from marlvec.testing.scripted import SampledEnv
from marlvec.vector.backends.sync import SyncVectorEnv
from tests.vector.validation.test_actions import Careless

LATE = 1000  # the step in which it goes wrong
NUM_ENVS, AGENTS = 2, 2
OBS, DISCRETE, BOX = Box(-1, 1, (1,), np.float32), Discrete(5), Box(-1, 1, (2,), np.float32)


def third(value: Any) -> Callable[[NDArray[Any]], NDArray[Any]]:
    """Spoils the action of env 1's first agent."""

    def spoil(actions: NDArray[Any]) -> NDArray[Any]:
        actions = actions.copy()
        actions.reshape(NUM_ENVS * AGENTS, -1)[2, -1] = value
        return actions

    return spoil


WHERE = "env 1, agent 'agent_0': "
WRONG: dict[str, tuple[Space[Any], Callable[[NDArray[Any]], Any], type[Exception], str]] = {
    "above": (DISCRETE, third(5), ActionError, rf"{WHERE}5 is not in Discrete\(5\)"),
    "below": (DISCRETE, third(-1), ActionError, f"{WHERE}-1 is not in"),
    "dtype": (DISCRETE, lambda actions: actions + 0.5, ContractError, r"'culprit' gave 'actions' as float64.*int64"),
    "too few": (DISCRETE, lambda actions: actions[:-1], ContractError, "'culprit' was given 4 rows .* shape .3"),
    "too many": (DISCRETE, lambda actions: np.repeat(actions, 2, 0), ContractError, "'culprit' was given 4 rows"),
    "no array": (DISCRETE, lambda actions: None, ContractError, "'culprit' was given 4 rows"),
    "outside": (BOX, third(1.5), ActionError, rf"{WHERE}.* 1\.5.* is not in Box"),
    "NaN": (BOX, third(np.nan), ContractError, "'culprit' gave 'actions_for_env' with NaN, first for env 1, agent 0"),
    "width": (BOX, lambda actions: actions[:, :1], ContractError, r"'culprit' .*\(4, 1\)"),
}


class Slipping(Policy):
    """All zeros, but for what it is to give in its 1000th answer, or from that on."""

    def __init__(self, space: Space[Any], spoil: Callable[[NDArray[Any]], Any], *, once: bool = True) -> None:
        self.space, self.spoil, self.once, self.asked = space, spoil, once, 0

    def act(self, rows: Rows, *, explore: bool = True) -> Any:
        self.asked += 1
        actions = np.zeros((len(rows), *(self.space.shape or ())), self.space.dtype)
        wrong = self.asked == LATE or (self.asked > LATE and not self.once)
        return self.spoil(actions) if wrong else actions


def sampled(space: Space[Any], **options: Any) -> SyncVectorEnv:
    return SyncVectorEnv([lambda i=i: SampledEnv(OBS, space, env_index=i) for i in range(NUM_ENVS)], **options)


@cache
def honest(continuous: bool) -> Any:
    """The rows that a policy brings which never slips, from shortly before the 1000th step on."""
    space = BOX if continuous else DISCRETE
    with sampled(space) as envs:
        collector = Collector(envs, Slipping(space, lambda actions: actions), action_connectors=[], seed=0)
        collector.collect(env_steps=NUM_ENVS * (LATE - 11))
        return collector.collect(env_steps=NUM_ENVS * 20)["main"]


@pytest.mark.fault("E1")
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_action_in_the_1000th_step_is_found_and_reaches_no_env(name: str) -> None:
    """And the next call goes on: its batch holds what came before, too."""
    space, spoil, error, message = WRONG[name]
    with sampled(space, validate="strict") as envs:
        collector = Collector(envs, {"culprit": Slipping(space, spoil)}, action_connectors=[], seed=0)
        collector.collect(env_steps=NUM_ENVS * (LATE - 11))
        with pytest.raises(error, match=message):
            collector.collect(env_steps=NUM_ENVS * 20)
        assert collector.metrics.env_steps == NUM_ENVS * (LATE - 1)
        rows = collector.collect(env_steps=NUM_ENVS * 20)["culprit"]
        assert collector.metrics.env_steps == NUM_ENVS * (LATE + 9)
    expected = honest(space is BOX)
    assert rows.keys() == expected.keys()
    for column, values in rows.items():
        np.testing.assert_array_equal(values, expected[column], err_msg=column)


@pytest.mark.fault("E1")
@pytest.mark.parametrize("name", ["above", "below"])
def test_where_a_sample_of_calls_is_looked_at_it_is_found_within_sixteen(name: str) -> None:
    """As `make(validate=…)` says; what is no matter of values is looked at in every call."""
    space, spoil, error, message = WRONG[name]
    with SyncVectorEnv([lambda i=i: Careless(env_index=i) for i in range(NUM_ENVS)], validate="sample") as envs:
        policy = Slipping(space, spoil, once=False)
        collector = Collector(envs, {"culprit": policy}, action_connectors=[], seed=0)
        with pytest.raises(error, match=message):
            collector.collect(env_steps=NUM_ENVS * (LATE + 50))
        assert LATE <= policy.asked < LATE + 16


@pytest.mark.fault("E1")
@pytest.mark.parametrize("name", WRONG)
def test_a_vectorizer_finds_it_too(name: str) -> None:
    space, spoil, _, _ = WRONG[name]
    with sampled(space, validate="strict") as envs:
        envs.reset(seed=0)
        right = np.zeros((NUM_ENVS, AGENTS, *(space.shape or ())), space.dtype)
        flat = right.reshape(NUM_ENVS * AGENTS, *right.shape[2:])
        wrong = spoil(flat)
        if wrong is not None and len(wrong) == len(flat):
            wrong = wrong.reshape(NUM_ENVS, AGENTS, *wrong.shape[1:])
        for _ in range(LATE - 1):
            envs.step(right)
        with pytest.raises(ActionError, match=WHERE if name in ("above", "below", "outside", "NaN") else "actions: "):
            envs.step(wrong)
        envs.step(right)
