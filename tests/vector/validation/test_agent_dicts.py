"""Actions said agent by agent: some envs alone, what keys mean, and what is wrong in them.

That they do what the same actions do as arrays is held by tests/properties.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Dict, Discrete, Tuple

from marlvec.envs.spec import EnvSpec
from marlvec.errors import ActionError
from marlvec.testing.scripted import CounterEnv, SampledEnv
from marlvec.vector.checks import join_agents
from tests.vector.support.kinds import vectorize

N, A = 3, 2


def sampled(space: Any) -> list[Callable[[], Any]]:
    return [partial(SampledEnv, Discrete(2), space, agent_num=A, length=3, env_index=i) for i in range(N)]


def test_send_to_some_envs() -> None:
    with (
        vectorize("sync", sampled([Discrete(3), Discrete(5)])) as given,
        vectorize("sync", sampled([Discrete(3), Discrete(5)])) as expected,
    ):
        for envs in (given, expected):
            envs.reset(seed=0)
        given.send([{"agent_0": 1, "agent_1": 4}, {"agent_1": 3, "agent_0": 2}], [2, 0])
        (one, other) = expected.spec.groups
        expected.send({one.name: np.array([[1], [2]]), other.name: np.array([[4], [3]])}, [2, 0])
        assert given.recv().rewards.tolist() == expected.recv().rewards.tolist()
        with pytest.raises(
            ActionError, match="env 2, agent 'agent_1': expected an action, since it acts, got None; actions are"
        ):
            given.send([{"agent_0": 1, "agent_1": 4}, {"agent_0": 2}], [0, 2])


def test_a_discrete_action_may_have_a_last_axis_of_one() -> None:
    with vectorize("sync", sampled(Discrete(4))) as envs:
        envs.reset(seed=0)
        envs.step({"agent_0": np.zeros((N, 1), np.int64), "agent_1": np.zeros(N, np.int64)})
        envs.step([{"agent_0": np.zeros(1, np.int64), "agent_1": 3}] * N)


def test_as_many_dicts_as_a_tuple_has_parts_are_one_for_each_env() -> None:
    """A random program found them taken for the parts of one action."""
    with vectorize("sync", sampled(Tuple([Discrete(2), Discrete(3), Discrete(2)]))) as envs:
        envs.reset(seed=0)
        envs.step([dict.fromkeys(envs.agents, (1, 2, 0))] * N)


def test_keys_of_the_action_space_are_not_agents() -> None:
    space = Dict({"agent_0": Discrete(2), "agent_1": Discrete(3)})
    with vectorize("sync", sampled(space), validate="strict") as envs:
        envs.reset(seed=0)
        envs.step({"agent_0": np.ones((N, A), np.int64), "agent_1": np.full((N, A), 2)})
        envs.step([{name: {"agent_0": 1, "agent_1": 2} for name in envs.agents}] * N)


WRONG: list[tuple[Any, str]] = [
    (
        {"agent_0": np.zeros(N, np.int64)},
        r"env 0, agent 'agent_1': expected an action, .* given for \['agent_0'\]",
    ),
    ({"agent_0": [0] * N, "agent_1": None}, "env 0, agent 'agent_1': expected an action, since it acts"),
    ({"agent_0": [0] * N, "agent_1": [0]}, r"actions\['agent_1'\]: expected shape \(3,\), got \(1,\)"),
    ({"agent_0": [0] * N, "agent_1": 1}, r"actions\['agent_1'\]: expected shape \(3,\), got \(\)"),
    ({"agent_0": [0] * N, "agent_1": [0, [1], 2]}, r"actions\['agent_1'\]: .* got list, not an array"),
    ({"agent_0": [0] * N, "agent_1": [0.5] * N}, "expected dtype int64, got float64"),
    ({"agent_0": [0] * N, "agent_1": [9] * N}, r"env 0, agent 'agent_1': 9 is not in Discrete\(5\)"),
    ({"agent_0": [0] * N, "nobody": [0] * N}, r"np\.stack\(\[actions\[agent\] for agent in envs\.agents\], axis=1\)"),
    ([{"agent_0": 0, "agent_1": 1}] * (N - 1), "expected a dict of agents for each of 3 envs, got 2 dicts"),
    ([{"agent_0": 0, "agent_1": 1}, {}, {}], "env 1, agent 'agent_0': expected an action, since it acts"),
    ([{"agent_0": 0, "agent_1": [1, 2]}] * N, r"env 0, agent 'agent_1': expected shape \(\), got \(2,\)"),
    ([{"agent_0": 0, "agent_1": 1.5}] * N, "expected dtype int64, got float64"),
    ([{"agent_0": 0, "agent_1": -1}] * N, "env 0, agent 'agent_1': -1 is not in"),
]


def test_wrong_ones_raise_and_nothing_is_sent() -> None:
    factories = [partial(CounterEnv, 9, env_index=i, agent_num=A) for i in range(N)]
    with vectorize("sync", factories, validate="strict") as envs, vectorize("sync", factories) as others:
        envs.reset(seed=0)
        others.reset(seed=0)
        for wrong, words in WRONG:
            with pytest.raises(ActionError, match=words):
                envs.step(wrong)
        actions = np.ones((N, A), np.int64)
        np.testing.assert_equal(envs.step(actions), others.step(actions))


def test_agents_that_do_not_act_leave_the_dtype_of_others_as_it_is() -> None:
    spec = EnvSpec("turns", ("a", "b"), (Discrete(2),) * 2, (Discrete(4),) * 2, (None, None))
    for acting in ([[True, False]], [[True, True]]):
        joined = join_agents(spec, False, [{"a": np.uint64(3), "b": np.uint64(1)}], np.array(acting), np.arange(1))
        assert joined.dtype == np.uint64, "int64 zeros beside it would make floats of both"
        assert joined.tolist() == [[3, int(acting[0][1])]]
    assert join_agents(spec, False, [{}], np.zeros((1, 2), np.bool_), np.arange(1)).tolist() == [[0, 0]]
