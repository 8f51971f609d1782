"""Agents whose rows a connector takes out: the env gets their declared no-op, and nothing is misaligned or lost."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete

from marlvec.collect import Collector
from marlvec.connectors import AgentConnector, FilterRows, FrameSkip, FrameStack, RowFilter, Rows
from marlvec.errors import ArgumentError, ContractError
from marlvec.policies import FunctionPolicy
from marlvec.testing.scripted import CounterEnv, SampledEnv
from marlvec.vector.in_process import SyncVectorEnv
from tests.collect.helpers.players import MODES

NOOP = 4
CLOCK = 3  # of a stamp: the step of the episode


class Noting(CounterEnv):
    """Notes what each agent did and was paid: (episode, step, agent) to (action, reward)."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.episode, self.clock = -1, 0
        self.did: dict[tuple[int, int, int], tuple[int, float]] = {}

    def reset(self, **options: Any) -> Any:
        self.episode, self.clock = self.episode + 1, 0
        return super().reset(**options)

    def step(self, actions: dict[str, Any]) -> Any:
        out = super().step(actions)
        for agent, action in actions.items():
            self.did[self.episode, self.clock, int(agent[-1])] = int(action), float(out[1][agent])
        self.clock += 1
        return out


def decide(env: Any, agent: Any, clock: Any) -> Any:
    """An action that tells whose it is, and is never the no-op."""
    return (7 * clock + 3 * agent + env) % 4


def stays(env: Any, agent: Any, clock: Any) -> Any:
    return (clock + 2 * agent + env) % 3 != 0


def keep(rows: Rows) -> Any:
    return stays(rows.env_id, rows.agent_index, rows.obs[:, CLOCK].astype(int))


def by_clock(rows: Rows) -> Any:
    return decide(rows.env_id, rows.agent_index, rows.obs[:, CLOCK].astype(int))


@pytest.mark.checklist(92)
@pytest.mark.parametrize("batch_mode", ["truncate", "complete"])
@pytest.mark.parametrize("mode", MODES)
def test_a_removed_row_is_a_no_op_of_its_own_agent(mode: str, batch_mode: Any) -> None:
    """Whole episodes of several lengths, stepped all together and a few at a time."""
    made = [Noting([5, 1, 8], env_index=i) for i in range(4)]
    with SyncVectorEnv([lambda env=env: env for env in made], autoreset_mode=mode) as envs:
        chain = [FilterRows(keep, noop=NOOP)]
        collector = Collector(envs, FunctionPolicy(by_clock), agent_connectors=chain, batch_mode=batch_mode, seed=0)
        batches = [collector.collect(env_steps=n) for n in (40, 7, 3, 50, 1, 39)]
        sent = noops = 0
        for i, env in enumerate(made):
            for (_, clock, agent), (action, _) in env.did.items():
                expected = decide(i, agent, clock) if stays(i, agent, clock) else NOOP
                assert action == expected
                sent, noops = sent + 1, noops + (expected == NOOP)
        metrics = collector.metrics
        assert (metrics.noop_steps, metrics.agent_steps) == (noops, sent - noops)
        assert metrics.summary()["noop_steps"] == noops > 50
        rows = [batch["main"] for batch in batches]
        assert not any((part["actions"] == NOOP).any() for part in rows)
        for part in rows:
            np.testing.assert_array_equal(part["actions"], by_clock(part))
            after = np.where(part["terminated"] | part["truncated"], 0, part["next_obs"][:, CLOCK])
            assert stays(part["env_id"], part["agent_index"], after.astype(int))[after > 0].all()


@pytest.mark.parametrize("mode", MODES)
def test_rewards_of_filtered_steps_go_to_the_next_decision(mode: str) -> None:
    """Of each agent that decides in an episode at all, the batch has every reward, those before its first row too."""
    made = [Noting([5, 1, 8], env_index=i) for i in range(4)]
    with SyncVectorEnv([lambda env=env: env for env in made], autoreset_mode=mode) as envs:
        chain = [FilterRows(keep, noop=NOOP)]
        collector = Collector(envs, FunctionPolicy(by_clock), agent_connectors=chain, batch_mode="complete", seed=0)
        rows = collector.collect(episodes=40)["main"]
        found: dict[tuple[int, int, int], float] = defaultdict(float)
        for env, episode, agent, reward in zip(
            rows["env_id"].tolist(),
            rows["obs"][:, 2].tolist(),
            rows["agent_index"].tolist(),
            rows["rewards"].tolist(),
            strict=True,
        ):
            found[env, int(episode), agent] += reward
        assert len(found) > 100
        for (i, episode, agent), total in found.items():
            paid = [pay for (e, _, a), (_, pay) in made[i].did.items() if (e, a) == (episode, agent)]
            assert total == pytest.approx(sum(paid))
        goes_on = np.diff(rows["unroll_id"]) == 0
        np.testing.assert_array_equal(rows["t"][1:], np.where(goes_on, rows["t"][:-1] + 1, 0))


@pytest.mark.parametrize("mode", MODES)
def test_connectors_before_a_row_filter_see_every_row(mode: str) -> None:
    def obs_of(*more: AgentConnector) -> Any:
        with SyncVectorEnv([partial(CounterEnv, [5, 3], env_index=i) for i in range(2)], autoreset_mode=mode) as envs:
            chain = [FrameStack(3, new_axis=True, axis=0), *more]
            collector = Collector(envs, FunctionPolicy(lambda rows: rows.env_id), agent_connectors=chain, seed=0)
            rows = collector.collect(env_steps=80)["main"]
            stamps = rows["obs"][:, -1]
            return {
                (*map(int, stamp[[0, 1, 2, 3]]),): frames for stamp, frames in zip(stamps, rows["obs"], strict=True)
            }

    def odd(rows: Rows) -> Any:
        return rows.obs[:, -1, CLOCK] % 2 == 1

    everything, some = obs_of(), obs_of(FilterRows(odd, noop=0))
    assert 20 < len(some) < len(everything)
    for key, frames in some.items():  # in step 1 of an episode the frame of step 0 is there, and nothing before it
        np.testing.assert_array_equal(frames[:, :4], everything[key][:, :4])


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_skipped_frames_repeat_the_agents_own_last_action(mode: str, k: int) -> None:
    made = [Noting([7, 2], env_index=i) for i in range(3)]
    with SyncVectorEnv([lambda env=env: env for env in made], autoreset_mode=mode) as envs:
        collector = Collector(envs, FunctionPolicy(by_clock), agent_connectors=[FrameSkip(k)], seed=0)
        for n in (30, 4, 26):
            collector.collect(env_steps=n)
        for i, env in enumerate(made):
            for (_, clock, agent), (action, _) in env.did.items():
                assert action == decide(i, agent, clock - clock % k)
        assert (collector.metrics.noop_steps > 0) == (k > 1)


def test_a_no_op_is_the_policys_action_and_goes_through_the_action_connectors() -> None:
    """The middle of what the policy can say is the middle of what the env takes, leaf by leaf."""
    space = Dict({"arm": Box(np.float32(2), np.float32(6), (2,)), "gear": Discrete(3, start=5)})
    got: list[Any] = []

    class Watched(SampledEnv):
        def step(self, actions: dict[str, Any]) -> Any:
            got.append(actions["agent_1"])
            return super().step(actions)

    def act(rows: Rows) -> Any:
        assert not rows.agent_index.any()
        return {"arm": np.ones((len(rows), 2), np.float32), "gear": np.full(len(rows), 5)}

    chain = [FilterRows(lambda rows: rows.agent_index == 0, noop={"arm": np.zeros(2, np.float32), "gear": 7})]
    with SyncVectorEnv([lambda: Watched(Box(-1, 1, (2,)), space)] * 2) as envs:
        Collector(envs, FunctionPolicy(act), agent_connectors=chain, seed=0).collect(env_steps=30)
    assert len(got) == 30
    for action in got:
        assert (action["arm"].tolist(), int(action["gear"])) == ([4, 4], 7)


class Undeclared(AgentConnector):
    """Takes rows out and does not say what is to be done."""

    changes_length = True

    def __init__(self, *, last: bool = False, double: bool = False) -> None:
        self.last, self.double = last, double
        self.noop = 0 if last else None

    def __call__(self, rows: Rows) -> Rows:
        if self.double:
            return Rows.concat([rows, rows])
        return rows.take(~rows.last if self.last else rows.agent_index != 1)


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        (Undeclared(), r"got 6 rows and returned 4, and none declares an action .* set noop"),
        (Undeclared(last=True), "the last row of an agent must stay"),
        (Undeclared(double=True), "they may remove rows, but not add rows"),
    ],
)
def test_what_may_not_be_taken_out(piece: Any, message: str) -> None:
    with SyncVectorEnv([partial(CounterEnv, 3, env_index=i) for i in range(2)]) as envs:
        collector = Collector(envs, FunctionPolicy(by_clock), agent_connectors=[piece], seed=0)
        with pytest.raises(ContractError, match=message):
            collector.collect(env_steps=20)


class Naps(RowFilter):
    """A filter of a user's own."""

    def keep_rows(self, rows: Rows) -> Any:
        return rows.agent_index != 1


def test_two_filters_must_agree() -> None:
    with SyncVectorEnv([partial(CounterEnv, 3, env_index=i) for i in range(2)]) as envs:
        for one, two in ((0, 1), (0, "repeat")):
            with pytest.raises(ContractError, match="declare different no-ops"):
                Collector(envs, FunctionPolicy(by_clock), agent_connectors=[Naps(one), Naps(two)])
        same = Collector(envs, FunctionPolicy(by_clock), agent_connectors=[Naps(2), Naps(2)], seed=0)
        assert set(same.collect(env_steps=12)["main"]["agent_index"].tolist()) == {0, 2}
        with pytest.raises(ArgumentError, match="noop"):
            Collector(envs, FunctionPolicy(by_clock), agent_connectors=[Naps(99)])
