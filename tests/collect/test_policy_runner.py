"""How a policy is asked and what its answer becomes: faults, agents without a row, actions that an env gives."""

from __future__ import annotations

import signal
import threading
import time
from collections import defaultdict
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Tuple

from marlvec.collect import Collector, SampleBatch
from marlvec.connectors import (
    AgentConnector,
    FilterRows,
    FrameSkip,
    FrameStack,
    PrevActions,
    RnnState,
    RowFilter,
    Rows,
    View,
)
from marlvec.errors import ActionError, ArgumentError, ContractError
from marlvec.policies import FunctionPolicy, Policy
from marlvec.testing.scripted import CounterEnv, SampledEnv
from marlvec.vector.async_env import AsyncVectorEnv
from marlvec.vector.in_process import SyncVectorEnv
from tests.collect.players import MODES, EchoPolicy, sync
from tests.collect.reference import Reference, check_batch, same_batch
from tests.vector.test_actions import Careless

# --- policies that answer wrongly, late or not at all: nothing reaches an env, and the collector goes on from there


NUM_ENVS, AGENTS, ROWS = 2, 2, 4
OBS, DISCRETE, BOX = Box(-1, 1, (3,), np.float32), Discrete(5), Box(-1, 1, (2,), np.float32)
PAIR = Dict(a=Discrete(2), b=Discrete(2))


def sampled(action_space: Any, **options: Any) -> SyncVectorEnv:
    factories = [lambda i=i: SampledEnv(OBS, action_space, env_index=i) for i in range(NUM_ENVS)]
    return SyncVectorEnv(factories, validate="strict", **options)


def zeros(space: Any, n: int = ROWS) -> Any:
    if isinstance(space, Dict):
        return {key: zeros(sub, n) for key, sub in space.spaces.items()}
    if isinstance(space, Tuple):
        return tuple(zeros(sub, n) for sub in space.spaces)
    return np.zeros((n, *space.shape), space.dtype)


class OnDevice:
    """A tensor that numpy cannot read where it lives."""

    def __init__(self, array: Any) -> None:
        self._array = array
        self.shape = array.shape

    def __len__(self) -> int:
        return len(self._array)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert a tensor on another device to numpy")

    def detach(self) -> OnDevice:
        return self

    def cpu(self) -> OnDevice:
        return self

    def numpy(self) -> Any:
        return self._array


ENV_1 = "env 1, agent 'agent_0': "
INT = zeros(DISCRETE)
WRONG: dict[str, tuple[Any, Any, str]] = {
    "above": (DISCRETE, np.array([0, 0, 5, 0]), rf"{ENV_1}5 is not in Discrete\(5\)"),
    "below": (DISCRETE, np.array([0, 0, -1, 0]), f"{ENV_1}-1 is not in"),
    "outside": (BOX, np.array([[0, 0]] * 2 + [[0, 1.5], [0, 0]], np.float32), rf"{ENV_1}.* 1\.5.* is not in Box"),
    "NaN": (BOX, np.full((4, 2), np.nan, np.float32), "NaN, first for env 0, agent 0"),
    "one NaN": (
        BOX,
        np.array([[0, 0]] * 3 + [[0, np.nan]]),
        "gave 'actions_for_env' with NaN, first for env 1, agent 1",
    ),
    "dtype": (DISCRETE, INT + 0.5, "gave 'actions' as float64.*int64"),
    "too few": (DISCRETE, INT[1:], r"was given 4 rows.*shape \(3,\); expected 4 on the"),
    "too many": (DISCRETE, np.repeat(INT, 2), "was given 4 rows"),
    "turned": (DISCRETE, INT[None], r"was given 4 rows.*shape \(1, 4\)"),
    "two choices": (DISCRETE, np.zeros((4, 2), int), r"shape \(4, 2\)"),
    "none": (DISCRETE, None, "returned None; act.. must return the actions"),
    "ragged": (DISCRETE, [[0], [0, 1], [0], [0]], "was given 4 rows"),
    "generator": (DISCRETE, iter([0] * 4), "was given 4 rows"),
    "tuple of 3": (DISCRETE, (INT, {}, {}), "tuple of 3"),
    "short column": (DISCRETE, (INT, {"logp": np.zeros(3)}), r"'logp' of shape \(3,\)"),
    "one number": (DISCRETE, (INT, {"logp": 0.0}), r"'logp' of shape \(\)"),
    "column t": (DISCRETE, (INT, {"t": np.zeros(4)}), r"columns named \['t'\]"),
    "column rewards": (DISCRETE, (INT, {"rewards": np.zeros(4)}), r"columns named \['rewards'\]"),
    "narrow": (BOX, np.zeros((4, 1), np.float32), r"\(4, 1\)"),
    "wide": (BOX, np.zeros((4, 3), np.float32), r"shape \(4, 3\)"),
    "key missing": (PAIR, {"a": INT}, r"expected a dict with keys \['a', 'b'\]"),
    "no tuple": (Tuple((Discrete(2), Discrete(2))), INT, "expected a tuple of length 2"),
}
"""Space, answer, and what is said of it; where the action is in no space, the policy is not named."""
OF_ENVS = ("above", "below", "outside")


class Slipping(Policy):
    """All zeros, but for what it is to give in some of its answers."""

    def __init__(self, space: Any, answer: Any, wrong: range) -> None:
        self.space, self.answer, self.wrong, self.asked = space, answer, wrong, 0

    def act(self, rows: Rows, *, explore: bool = True) -> Any:
        self.asked += 1
        return self.answer if self.asked in self.wrong else zeros(self.space, len(rows))


LATE = 1000


@pytest.mark.mostly_slow("a thousand steps", quick=3)
@pytest.mark.fault("E1")
@pytest.mark.fault("E3")
@pytest.mark.parametrize(
    ("name", "at"),
    [(name, 3) for name in WRONG]
    + [
        pytest.param(name, LATE, marks=pytest.mark.slow("a thousand steps"))
        for name in [*OF_ENVS, "NaN", "dtype", "too few"]
    ],
)
def test_a_wrong_answer_is_named_and_reaches_no_env_however_late_it_comes(name: str, at: int) -> None:
    """And the next call goes on: its batch holds what came before, too."""
    space, answer, message = WRONG[name]
    chain = {"action_connectors": []} if name in (*OF_ENVS, "one NaN") else {}  # else they were clipped
    found = []
    for wrong in (range(at, at + 2), range(0)):
        with sampled(space) as envs:
            collector = Collector(envs, {"culprit": Slipping(space, answer, wrong)}, seed=0, **chain)
            collector.collect(env_steps=NUM_ENVS * (at - 2))
            for _ in wrong:
                with pytest.raises(ActionError if name in OF_ENVS else ContractError, match=message) as caught:
                    collector.collect(env_steps=NUM_ENVS * 20)
                assert name in OF_ENVS or "'culprit'" in str(caught.value)
                assert collector.metrics.env_steps == NUM_ENVS * (at - 1)
            found.append(collector.collect(env_steps=NUM_ENVS * 20))
            assert collector.metrics.env_steps == NUM_ENVS * (at + 18)
    same_batch(*found)


@pytest.mark.mostly_slow("collects whole runs on several backends", quick=2)
@pytest.mark.fault("E1")
@pytest.mark.parametrize("name", ["above", "below"])
def test_where_a_sample_of_calls_is_looked_at_it_is_found_within_sixteen(name: str) -> None:
    """As `make(validate=…)` says; what is no matter of values is looked at in every call."""
    space, answer, message = WRONG[name]
    with SyncVectorEnv([lambda i=i: Careless(env_index=i) for i in range(NUM_ENVS)], validate="sample") as envs:
        policy = Slipping(space, answer, range(LATE, 10**9))
        collector = Collector(envs, {"culprit": policy}, action_connectors=[], seed=0)
        with pytest.raises(ActionError, match=message):
            collector.collect(env_steps=NUM_ENVS * (LATE + 50))
        assert LATE <= policy.asked < LATE + 16


@pytest.mark.fault("E3")
def test_tensors_are_brought_from_where_they_live() -> None:
    with sampled(Box(-1, 1, (2,))) as envs:
        column = np.arange(4.0)
        policy = FunctionPolicy(lambda rows: (OnDevice(np.full((4, 2), 0.25, np.float32)), {"logp": OnDevice(column)}))
        rows = Collector(envs, policy, seed=0).collect(env_steps=6)["main"]
        assert rows.actions.dtype == np.float32
        assert (rows.actions == 0.25).all()
        assert rows["logp"].tolist() == [0.0] * 3 + [1.0] * 3 + [2.0] * 3 + [3.0] * 3


def test_actions_that_wrap_around_are_refused() -> None:
    """By default ClipActions sees to it; without it nobody would notice."""
    with sampled(Box(0, 9, (1,), np.int8)) as envs:
        policy = FunctionPolicy(lambda rows: np.full((len(rows), 1), 257))
        with pytest.raises(ContractError, match="'main'.*do not fit int8"):
            Collector(envs, policy, action_connectors=[]).collect(env_steps=4)
        rows = Collector(envs, policy).collect(env_steps=4)["main"]
        assert (rows["actions"] == 257).all()
        assert (rows["actions_for_env"] == 9).all()


def test_columns_may_not_change_on_the_way() -> None:
    for later in ({}, {"logp": np.zeros(4, np.float32)}, {"logp": np.zeros((4, 1))}, {"value": np.zeros(4)}):
        with sampled(Discrete(5)) as envs:
            columns: list[dict[str, Any]] = [{"logp": np.zeros(4)}]
            policy = FunctionPolicy(lambda rows, columns=columns: (np.zeros(4, int), columns[0]))
            collector = Collector(envs, {"fickle": policy}, seed=0)
            collector.collect(env_steps=4)
            columns[0] = later
            with pytest.raises(ContractError, match="'fickle'.*until now"):
                collector.collect(env_steps=4)
            columns[0] = {"logp": np.ones(4)}
            assert collector.collect(env_steps=4)["fickle"]["logp"].tolist() == [1.0] * 8


@pytest.mark.mostly_slow("collects whole runs on several backends", quick="each")
@pytest.mark.fault("E4")
@pytest.mark.fault("E11")
@pytest.mark.parametrize("error", [ValueError("no idea"), SystemExit(3), KeyboardInterrupt()])
@pytest.mark.parametrize("kind", ["parallel", "turns", "keyed"])
def test_policy_error_names_it_and_collecting_continues(kind: str, error: BaseException) -> None:
    def trouble(call: int) -> None:
        if call % 5 == 0:
            raise error

    with sync(kind, 3, 2) as envs:
        names = {name: ("first", "moody")[a % 2] for a, name in enumerate(envs.agents)}
        collector = Collector(envs, {"first": EchoPolicy(0), "moody": EchoPolicy(1, trouble)}, names, seed=4)
        reference = Reference(
            kind, 3, 2, 4, mapping=lambda name, env, number: names[name], salts={"first": 0, "moody": 1}
        )
        failures = 0
        for _ in range(4):
            batch = None
            while batch is None:
                try:
                    batch = collector.collect(env_steps=40)
                except type(error):
                    failures += 1
            check_batch(reference, batch, reference.truncate("env_steps", 40))
        assert failures >= 4
        assert all("in policy 'moody'; nothing was sent" in note for note in error.__notes__[-failures:])


@pytest.mark.fault("E4")
@pytest.mark.fault("E11")
def test_a_policy_that_hangs_is_named_when_someone_ends_the_wait_and_nothing_is_lost() -> None:
    """Nobody can tell a slow policy from one that hangs; Ctrl-C ends both."""
    main = threading.get_ident()

    def hang(call: int) -> None:
        if call == 5:
            threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT)).start()
            time.sleep(60)

    with sync("turns", 3, 2) as envs:
        collector = Collector(envs, {"stuck": EchoPolicy(3, hang)}, seed=4)
        reference = Reference("turns", 3, 2, 4, mapping=lambda name, env, number: "stuck", salts={"stuck": 3})
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt) as caught:
            collector.collect(env_steps=40)
        assert time.monotonic() - began < 30  # a tenth of a second, as a rule; and sixty that it hangs
        assert caught.value.__notes__[0].startswith("in policy 'stuck'; nothing was sent")
        assert collector.metrics.env_steps == 3 * 4
        check_batch(reference, collector.collect(env_steps=40), reference.truncate("env_steps", 40))


@pytest.mark.fault("E14")
def test_every_row_carries_the_version_it_was_decided_with() -> None:
    class Learner(Policy):
        def act(self, rows: Rows, *, explore: bool = True) -> Any:
            used = self.version
            self.version += 1  # as another thread might, at the worst moment
            return np.zeros(len(rows), int), {"used": np.full(len(rows), used)}

    with sync("turns", 3, 2) as envs:
        policy = Learner()
        collector = Collector(envs, policy, seed=0)
        for _ in range(5):
            policy.version += 100
            rows = collector.collect(env_steps=20)["main"]
            np.testing.assert_array_equal(rows["policy_version"], rows["used"])


@pytest.mark.fault("E1")
@pytest.mark.slow("a thousand steps")
@pytest.mark.parametrize("name", [*OF_ENVS, "NaN", "dtype", "too few"])
def test_a_vectorizer_finds_a_wrong_action_however_late_it_comes(name: str) -> None:
    space, answer, _ = WRONG[name]
    wrong = answer.reshape(NUM_ENVS, AGENTS, *answer.shape[1:]) if len(answer) == ROWS else answer
    right = zeros(space).reshape(NUM_ENVS, AGENTS, *(space.shape or ()))
    with sampled(space) as envs:
        envs.reset(seed=0)
        for _ in range(LATE - 1):
            envs.step(right)
        with pytest.raises(ActionError, match="actions: "):
            envs.step(wrong)
        envs.step(right)


# --- agents whose rows a connector takes out: the env gets their declared no-op, and nothing is misaligned or lost


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


# --- actions that an env gives: they are in the batch, and the policy is asked only for columns that connectors need


def taken(env: Any, agent: Any, clock: Any, *, rule: str) -> Any:
    if rule == "all":
        return env == env
    return (clock + agent + env) % 3 == 0 if rule == "some" else clock < 0


def human(env: Any, agent: Any, clock: Any) -> Any:
    return (5 * clock + agent + 2 * env) % 5


class Played(CounterEnv):
    """Somebody else plays some of its turns, and it says so with the observation at which they do."""

    def __init__(self, length: Any, env_index: int, rule: str = "some", action: Any = human) -> None:
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
                action = self.action(self.index, a, self.clock) if callable(self.action) else self.action
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
    with envs_of("all", "same_step", action=action) as envs:
        collector = Collector(envs, Machine(), seed=0)
        with pytest.raises(ContractError, match=r"env 0: agent 'agent_0' says that it does .* of policy 'main'"):
            collector.collect(env_steps=5)
