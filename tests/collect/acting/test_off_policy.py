"""Actions that an env gives: they are in the batch, and the policy is asked only for columns that connectors need."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete

from marlvec.collect import Collector, SampleBatch
from marlvec.connectors import PrevActions, RnnState, Rows, View
from marlvec.errors import ContractError
from marlvec.policies import FunctionPolicy, Policy
from marlvec.testing.scripted import CounterEnv, SampledEnv
from marlvec.vector.async_env import AsyncVectorEnv
from marlvec.vector.in_process import SyncVectorEnv
from tests.collect.helpers.players import MODES

CLOCK = 3  # of a stamp: the step of the episode


def taken(env: Any, agent: Any, clock: Any, *, rule: str) -> Any:
    if rule == "all":
        return env == env
    return (clock + agent + env) % 3 == 0 if rule == "some" else clock < 0


def human(env: Any, agent: Any, clock: Any) -> Any:
    return (5 * clock + agent + 2 * env) % 5


class Played(CounterEnv):
    """Somebody else plays some of its turns, and it says so with the observation at which they do."""

    def __init__(self, length: Any, env_index: int, rule: str = "some", action: Any = None) -> None:
        super().__init__(length, env_index=env_index)
        self.index, self.rule, self.action, self.clock = env_index, rule, action, 0

    def reset(self, **options: Any) -> Any:
        obs, _ = super().reset(**options)
        self.clock = 0
        return obs, self.says()

    def step(self, actions: dict[str, Any]) -> Any:
        obs, rewards, terminated, truncated, _ = super().step(actions)
        self.clock += 1
        return obs, rewards, terminated, truncated, self.says()

    def says(self) -> dict[str, dict[str, Any]]:
        out: dict[str, dict[str, Any]] = {agent: {} for agent in self.agents}
        for a, agent in enumerate(self.agents):
            if taken(self.index, a, self.clock, rule=self.rule):
                action = human(self.index, a, self.clock) if self.action is None else self.action
                out[agent]["off_policy_action"] = action
        return out


class Machine(Policy):
    """Never does what a human does; notes what it is asked about."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, int]] = []

    def act(self, rows: Rows, *, explore: bool = True) -> Any:
        clock = rows.obs[:, CLOCK].astype(int)
        self.asked += zip(rows.env_id.tolist(), rows.agent_index.tolist(), clock.tolist(), strict=True)
        actions = (human(rows.env_id, rows.agent_index, clock) + 1) % 5
        return actions, {"logp": -np.ones(len(rows), np.float32), "asks": np.ones(len(rows), np.int64)}


def envs_of(rule: str, mode: str, backend: str = "sync", **options: Any) -> Any:
    kind = SyncVectorEnv if backend == "sync" else partial(AsyncVectorEnv, num_workers=2)
    return kind([partial(Played, [5, 1, 3], i, rule, **options) for i in range(3)], autoreset_mode=mode)


@pytest.mark.mostly_slow("collects whole runs on several backends", quick="each")
@pytest.mark.checklist(99)
@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rule", ["some", "all"])
def test_the_action_that_was_taken_is_in_the_batch_and_the_policy_is_not_asked(
    rule: str, mode: str, backend: str
) -> None:
    policy = Machine()
    with envs_of(rule, mode, backend) as envs:
        collector = Collector(envs, policy, seed=0)
        for amount in (30, 7, 40):
            rows = collector.collect(env_steps=amount)["main"]
            where = rows["env_id"], rows["agent_index"], rows["obs"][:, CLOCK].astype(int)
            given = np.broadcast_to(taken(*where, rule=rule), len(rows))
            np.testing.assert_array_equal(rows["off_policy"], given)
            expected = np.where(given, human(*where), (human(*where) + 1) % 5)
            np.testing.assert_array_equal(rows["actions"], expected)
            np.testing.assert_array_equal(rows["actions_for_env"], expected)
            if rule == "some":
                assert 0 < given.sum() < len(rows)
                np.testing.assert_array_equal(np.isnan(rows["logp"]), given)
                np.testing.assert_array_equal(rows["asks"], ~given)
    assert not any(taken(*key, rule=rule) for key in policy.asked)
    assert (len(policy.asked) > 0) == (rule == "some")


def test_who_never_says_anything_has_no_such_column() -> None:
    with envs_of("none", "same_step") as envs:
        assert "off_policy" not in Collector(envs, Machine(), seed=0).collect(env_steps=20)["main"]


def test_it_may_begin_at_any_time_and_columns_come_when_the_policy_is_first_asked() -> None:
    """First nobody asks the policy, then all do: what it adds says nothing for the rows before; and the other way."""

    class Early(Played):
        def says(self) -> dict[str, dict[str, Any]]:
            self.rule = "all" if self.first_half == (self.clock < 10) else "none"
            return super().says()

    for first_half in (True, False):
        kind = type("Half", (Early,), {"first_half": first_half})
        with SyncVectorEnv([partial(kind, 30, i) for i in range(3)]) as envs:
            collector = Collector(envs, Machine(), seed=0, batch_mode="complete")
            rows = collector.collect(episodes=3)["main"]
            given = (rows["t"] < 10) == first_half
            np.testing.assert_array_equal(rows["off_policy"], given)
            np.testing.assert_array_equal(np.isnan(rows["logp"]), given)
            np.testing.assert_array_equal(rows["asks"], ~given)


def sum_of_obs(rows: Rows) -> Any:
    """A recurrent policy: its state is the sum of all observations of the episode."""
    n = len(rows)
    columns = {"logp": -np.ones(n, np.float32), "asks": np.ones(n, np.bool_)}
    return np.full(n, 4), {"state_out": rows["state_in"] + rows["obs"], **columns}


WIDTH = 7


def check_states(rows: Any) -> None:
    """Add up the observations of each agent's episode by hand, whoever chose the actions."""
    sums: dict[tuple[int, ...], Any] = {}
    for i in range(len(rows)):
        who = int(rows["eps_id"][i]), int(rows["agent_index"][i])
        before = sums.get(who, np.zeros(WIDTH))
        assert (int(rows["t"][i]) == 0) == (who not in sums)
        np.testing.assert_array_equal(rows["state_in"][i], before)
        sums[who] = before + rows["obs"][i]
        np.testing.assert_array_equal(rows["state_out"][i], sums[who])


@pytest.mark.parametrize("rule", ["some", "all", "none"])
@pytest.mark.parametrize("random_steps", [0, 20])
def test_recurrent_policy_is_asked_for_its_state_and_the_given_action_replaces_its_action(
    rule: str, random_steps: int
) -> None:
    with envs_of(rule, "same_step") as envs:
        chain = [RnnState(np.zeros(WIDTH)), PrevActions()]
        options: dict[str, Any] = {"agent_connectors": chain, "random_steps": random_steps, "seed": 0}
        collector = Collector(envs, FunctionPolicy(sum_of_obs), **options)
        parts = [collector.collect(env_steps=amount)["main"] for amount in (6, 1, 40)]
    rows = SampleBatch.concat(parts)
    rows = rows.take(np.lexsort((rows["t"], rows["agent_index"], rows["eps_id"])))
    check_states(rows)
    given, env = rows["off_policy"] if "off_policy" in rows else np.zeros(len(rows), np.bool_), rows["env_id"]
    clock = rows["obs"][:, CLOCK].astype(int)
    by_env = np.broadcast_to(taken(env, rows["agent_index"], clock, rule=rule), len(rows))
    np.testing.assert_array_equal(rows["actions"][by_env], human(env, rows["agent_index"], clock)[by_env])
    np.testing.assert_array_equal(rows["actions"][~given], 4)
    assert not (by_env & ~given).any()
    assert (given & ~by_env).any() == (random_steps > 0 and rule != "all")
    follows = rows["t"] > 0
    np.testing.assert_array_equal(rows["prev_actions"][follows], rows["actions"][:-1][follows[1:]])
    if "off_policy" in rows:
        np.testing.assert_array_equal(np.isnan(rows["logp"]), given)  # the policy's other columns stay blank
        np.testing.assert_array_equal(rows["asks"], ~given)


def test_view_of_a_policys_column_from_the_first_random_step_on() -> None:
    with envs_of("none", "same_step") as envs:
        chain = [View("heard", "asks", -1, fill=7)]
        rows = Collector(envs, Machine(), agent_connectors=chain, random_steps=20, seed=0).collect(env_steps=40)["main"]
    assert 0 < rows["off_policy"].sum() < len(rows)
    np.testing.assert_array_equal(rows["heard"], np.where(rows["t"] == 0, 7, 1))


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int64])
@pytest.mark.parametrize("random_steps", [1, 5, 6])
def test_given_actions_and_a_policy_with_another_dtype(random_steps: int, dtype: Any) -> None:
    """The first actions of a batch settle the dtype of all that follow."""

    def act(rows: Rows) -> Any:
        return np.ones((len(rows), 2), dtype)

    with SyncVectorEnv([lambda: SampledEnv(Box(-1, 1, (1,)), Box(-2, 2, (2,)))] * 2) as envs:
        collector = Collector(envs, FunctionPolicy(act), random_steps=random_steps, seed=0)
        if random_steps == 1 and dtype == np.int64:  # asked first: ints cannot hold what is drawn next
            with pytest.raises(ContractError, match=r"int64, which cannot hold the given action .*: return float32"):
                collector.collect(env_steps=4)
            return
        for _ in range(4):
            rows = collector.collect(env_steps=4)["main"]
            assert rows["actions"].dtype == (np.float32 if random_steps > 1 else dtype)
            assert (rows["actions"][~rows["off_policy"]] == 1).all()
            assert (np.abs(rows["actions"][rows["off_policy"]]) < 2).all()
            again = Collector(envs, FunctionPolicy(act), random_steps=random_steps, seed=0)
            again.set_state(collector.get_state())
            collector = again


def test_actions_are_the_policys_and_go_through_the_action_connectors() -> None:
    space = Dict({"arm": Box(np.float32(2), np.float32(6), (2,)), "gear": Discrete(3)})

    class Shown(SampledEnv):
        def reset(self, **options: Any) -> Any:
            obs, infos = super().reset(**options)
            infos["agent_1"]["off_policy_action"] = {"arm": [-1.0, 0.5], "gear": 2}
            return obs, infos

    def act(rows: Rows) -> Any:
        return {"arm": np.zeros((len(rows), 2), np.float32), "gear": np.zeros(len(rows), np.int64)}

    with SyncVectorEnv([lambda: Shown(Box(-1, 1, (1,)), space)] * 2, validate="strict") as envs:
        rows = Collector(envs, FunctionPolicy(act), seed=0).collect(env_steps=20)["main"]
        given = rows["off_policy"]
        np.testing.assert_array_equal(given, (rows["t"] == 0) & (rows["agent_index"] == 1))
        assert rows["actions"]["arm"].dtype == np.float32
        np.testing.assert_allclose(rows["actions"]["arm"][given], [[-1, 0.5]] * given.sum())
        np.testing.assert_allclose(rows["actions_for_env"]["arm"][given], [[2, 5]] * given.sum())
        assert set(rows["actions"]["gear"][given].tolist()) == {2}


@pytest.mark.parametrize("action", [7, 1.5, [1, 2], "left", None])
def test_invalid_off_policy_action_is_named(action: Any) -> None:
    with SyncVectorEnv([partial(Refused, action)] * 2) as envs:
        collector = Collector(envs, Machine(), seed=0)
        with pytest.raises(ContractError, match=r"env 0: agent 'agent_0' says that it does .* of policy 'main'"):
            collector.collect(env_steps=5)


class Refused(CounterEnv):
    def __init__(self, action: Any) -> None:
        super().__init__(5)
        self.action = action

    def reset(self, **options: Any) -> Any:
        obs, _ = super().reset(**options)
        return obs, {agent: {"off_policy_action": self.action} for agent in obs}
