"""Connectors of policies and of learners in the collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from marlvec.collect import Collector
from marlvec.connectors import (
    ActionPipeline,
    AgentConnector,
    AgentIndicator,
    AgentPipeline,
    ClipActions,
    EpsilonGreedy,
    FilterRows,
    FlattenObs,
    FrameStack,
    GeneralAdvantageEstimation,
    LearnerConnector,
    LearnerPipeline,
    NormalizeObs,
    PadSequences,
    RepeatActions,
    ReturnsToGo,
    RnnState,
    Rows,
    Standardize,
    StickyActions,
    ToNumpy,
    UnpadSequences,
    action_connector,
    agent_connector,
    learner_connector,
)
from marlvec.errors import ArgumentError, ContractError, ContractWarning
from marlvec.policies import FunctionPolicy, RandomPolicy, ScriptedPolicy
from marlvec.testing.scripted import WIDTH, CounterEnv, SampledEnv
from marlvec.vector.in_process import SyncVectorEnv
from tests.collect.plans import dying_counters
from tests.collect.players import MODES, EchoPolicy, Looking, sync
from tests.connectors.samples import same_tree

# --- what the collector does with connectors: each row once, last ones included, and a fresh start for each episode


Key = tuple[int, int, int, int, bool]  # eps_id, env, agent, t, last


class Spy(AgentConnector):
    """Notes every row that passes, every reset, and what policies answered."""

    def __init__(self) -> None:
        self.seen: list[Key] = []
        self.first: set[Key] = set()
        self.resets: list[list[int]] = []
        self.answered: list[tuple[int, int, int, int]] = []
        self.running: set[tuple[int, int]] = set()

    def __call__(self, rows: Rows) -> Rows:
        names = ("eps_id", "env_id", "agent_index", "t", "last")
        keys = list(zip(*(rows[name].tolist() for name in names), strict=True))
        self.seen += keys
        for key, first, reward in zip(keys, rows["first"].tolist(), rows["rewards"].tolist(), strict=True):
            lane = key[1], key[2]
            assert first == (lane not in self.running)  # a first row comes once, and after a reset
            assert not (first and reward)
            self.running.add(lane)
            if first:
                self.first.add(key)
        return rows

    def reset(self, env_ids: Any = None) -> None:
        self.resets.append(list(env_ids))
        self.running = {lane for lane in self.running if lane[0] not in set(self.resets[-1])}

    def on_policy_output(self, rows: Rows) -> None:
        assert "actions_for_env" in rows
        names = ("eps_id", "env_id", "agent_index", "actions")
        self.answered += list(zip(*(rows[name].tolist() for name in names), strict=True))


@pytest.mark.mostly_slow("collects whole runs on several backends", quick="each")
@pytest.mark.checklist(48)
@pytest.mark.fault("E8")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["parallel", "turns", "keyed"])
def test_final_observations_pass_the_same_connectors_and_every_row_passes_once(kind: str, mode: str) -> None:
    spy, norm = Spy(), NormalizeObs(clip=None)
    pipeline = AgentPipeline([spy, FlattenObs(), FrameStack(2), norm, AgentIndicator()])
    with sync(kind, 3, 3, mode) as envs:
        collector = Collector(envs, RandomPolicy(), agent_connectors=pipeline, seed=6)
        assert collector.agent_connectors["main"] is pipeline
        batches = [collector.collect(env_steps=n)["main"] for n in (50, 7, 64, 13, 30)]

        assert len(spy.seen) == len(set(spy.seen)) == int(norm.counts[0])  # nothing twice, nothing left out
        rows = {key: np.concatenate([batch[key] for batch in batches]) for key, _ in batches[0].items()}
        ended = rows["terminated"] | rows["truncated"]
        passed = set(spy.seen)
        for i in range(len(ended)):
            name = (int(rows["eps_id"][i]), int(rows["env_id"][i]), int(rows["agent_index"][i]))
            t = int(rows["t"][i])
            assert (*name, t, False) in passed
            assert (*name, t + 1, bool(ended[i])) in passed  # its outcome: the next turn, or the last row
        assert ended.sum() > 20
        assert len(spy.answered) == collector.metrics.agent_steps


@pytest.mark.checklist(48)
@pytest.mark.parametrize("mode", MODES)
def test_a_final_observation_is_stacked_on_those_before_it(mode: str) -> None:
    with SyncVectorEnv([lambda i=i: CounterEnv([1, 2, 5], env_index=i) for i in range(3)], autoreset_mode=mode) as envs:
        chain = [FrameStack(3, new_axis=True, axis=0)]
        rows = Collector(envs, RandomPolicy(), agent_connectors=chain, seed=0).collect(env_steps=90)["main"]
        t, clock = rows["t"], rows["next_obs"][:, :, 3]
        assert rows["obs"].shape == (270, 3, WIDTH)
        for back in range(3):  # the frame `back` steps before the next observation; zeros before the episode
            expected = np.maximum(t + 1 - back, 0)
            np.testing.assert_array_equal(clock[:, 2 - back], expected)
            present = t + 1 - back >= 0
            episode = rows["next_obs"][:, 2 - back, 2]
            np.testing.assert_array_equal(episode[present], rows["obs"][:, 2, 2][present])
            assert not rows["next_obs"][:, 2 - back][~present].any()
        assert rows["truncated"].sum() > 60


@pytest.mark.checklist(93)
@pytest.mark.parametrize("mode", MODES)
def test_an_episodes_end_resets_that_envs_state_in_the_connectors_of_all_policies(mode: str) -> None:
    """Also of a policy that does not play there, which may next time."""
    spies = {"left": Spy(), "right": Spy()}
    with sync("parallel", 3, 3, mode) as envs:
        collector = Collector(
            envs,
            {"left": EchoPolicy(), "right": EchoPolicy()},
            lambda name, episode: ["left", "right"][(episode.number + int(name[-1])) % 2],
            agent_connectors={name: [spy] for name, spy in spies.items()},
            seed=3,
        )
        batch = collector.collect(env_steps=90)
        ended = [record.env_id for record in collector.metrics.episodes]
        for name, spy in spies.items():
            assert spy.resets[0] == [0, 1, 2]
            assert [i for reset in spy.resets[1:] for i in reset] == ended
            assert {key[:3] for key in spy.seen} >= set(
                zip(*(batch[name][k].tolist() for k in ("eps_id", "env_id", "agent_index")), strict=True)
            )
        assert len(ended) > 12
        collector.reset()
        assert all(spy.resets[-1] == [0, 1, 2] for spy in spies.values())


def test_columns_that_connectors_add_reach_policy_and_batch() -> None:
    @agent_connector
    def number(rows: Rows) -> Rows:
        return rows.replace(state={"h": rows["obs"][:, :2] + 0.5}, late=rows["t"] > 2)

    @action_connector
    def temper(rows: Rows) -> Rows:
        return rows.replace(logp=rows["logp"] * 2, noise=rows["obs"][:, 4])

    def act(rows: Rows) -> Any:
        assert rows["state"]["h"].shape == (len(rows), 2)
        return np.zeros(len(rows), int), {"logp": rows["state"]["h"][:, 0]}

    with sync("keyed", 2, 3) as envs:
        collector = Collector(
            envs,
            FunctionPolicy(act),
            agent_connectors=[number],
            action_connectors=ActionPipeline([temper]),
            seed=0,
        )
        rows = collector.collect(env_steps=50)["main"]
        np.testing.assert_array_equal(rows["state"]["h"], rows["obs"][:, :2] + 0.5)
        np.testing.assert_array_equal(rows["late"], rows["t"] > 2)
        np.testing.assert_array_equal(rows["logp"], (rows["env_id"] + 0.5) * 2)
        np.testing.assert_array_equal(rows["noise"], rows["agent_index"])


@pytest.mark.checklist(96)
def test_batches_have_the_policys_and_the_sent_action() -> None:
    space = Box(np.float32([-3, 0]), np.float32([1, 10]))
    with SyncVectorEnv(
        [lambda i=i: SampledEnv(Box(-1, 1, (2,)), space, env_index=i) for i in range(3)], validate="strict"
    ) as envs:
        policy = RandomPolicy()
        rows = Collector(envs, policy, seed=0).collect(env_steps=60)["main"]  # the default: unsquash, clip
        assert policy.action_space == Box(-1, 1, (2,))
        assert np.abs(rows["actions"]).max() <= 1
        np.testing.assert_allclose(rows["actions_for_env"], (rows["actions"] + 1) / 2 * [4, 10] + [-3, 0], atol=1e-5)
        assert rows["actions_for_env"].dtype == np.float32
        with pytest.raises(ContractError, match="'main'"):
            Collector(envs, FunctionPolicy(lambda rows: np.full((len(rows), 2), np.nan))).collect(env_steps=3)


def test_a_chain_is_copied_for_each_policy_and_may_be_given_for_each() -> None:
    with sync("parallel", 2, 2) as envs:
        names = {"agent_0": "left", "agent_1": "right"}

        def collector(agent: Any, action: Any = None) -> Collector:
            policies = {"left": RandomPolicy(), "right": RandomPolicy()}
            return Collector(envs, policies, names, agent_connectors=agent, action_connectors=action, seed=0)

        shared = collector([NormalizeObs()])
        shared.collect(env_steps=40)
        counts = [shared.agent_connectors[name]["NormalizeObs"].counts[0] for name in ("left", "right")]
        assert min(counts) > 10
        assert shared.agent_connectors["left"] is not shared.agent_connectors["right"]
        shared.eval()
        shared.collect(env_steps=40)
        assert [shared.agent_connectors[name]["NormalizeObs"].counts[0] for name in ("left", "right")] == counts
        assert shared.train() is shared
        shared.collect(env_steps=40)
        assert shared.agent_connectors["left"]["NormalizeObs"].counts[0] > counts[0]

        own = collector({"right": [FlattenObs()]}, {"left": []})
        assert (len(own.agent_connectors["left"]), len(own.agent_connectors["right"])) == (0, 1)
        assert len(own.action_connectors["left"]) == 0
        assert own.action_connectors["right"].names == ActionPipeline.default().names

        pipeline = AgentPipeline([FlattenObs()])
        with pytest.raises(ArgumentError, match="unknown policies \\['lefft'\\]"):
            collector({"lefft": [FlattenObs()]})
        with pytest.raises(ArgumentError, match="given to two policies"):
            collector({"left": pipeline, "right": pipeline})
        with pytest.raises(ArgumentError, match="expected an AgentPipeline or a list"):
            collector(FlattenObs())
        with pytest.raises(ArgumentError, match="AgentConnector"):
            collector([lambda rows: rows])


@agent_connector
def doubled(rows: Rows) -> Rows:
    return rows.replace(obs=rows.obs * 2)


def test_stateful_connector_cannot_be_in_two_chains() -> None:
    """In two it would take the rows of one policy's agents for those of the other's."""
    with sync("parallel", 2, 2) as envs:
        names = {"agent_0": "left", "agent_1": "right"}

        def collector(left: Any, right: Any, side: str = "agent") -> Collector:
            policies = {"left": RandomPolicy(), "right": RandomPolicy()}
            chains = {f"{side}_connectors": {"left": left, "right": right}}
            return Collector(envs, policies, names, seed=0, **chains)

        norm, stack = NormalizeObs(), FrameStack(2)
        with pytest.raises(ArgumentError) as caught:
            collector([FlattenObs(), norm], [norm])
        assert str(caught.value).startswith(
            "connectors: expected each policy to have instances of its own, got one NormalizeObs in two chains, at "
            "position 1 for policy 'left' and at position 0 for policy 'right'"
        )
        assert "Make one for each, NormalizeObs(…) in both chains" in str(caught.value)
        with pytest.raises(ArgumentError, match="got one FrameStack in two chains, at position 0 .* at position 1"):
            collector([AgentPipeline([FlattenObs(), stack])], AgentPipeline([FlattenObs(), stack]))
        spy = Spy()
        with pytest.raises(
            ArgumentError, match="got one Spy in two chains"
        ):  # it has no state_dict(), and yet a memory
            collector([spy], [spy])
        repeat = RepeatActions(2)
        with pytest.raises(ArgumentError, match="got one RepeatActions in two chains"):
            collector([repeat], [repeat], "action")

        both = collector([doubled, NormalizeObs()], [doubled, norm])
        both.collect(env_steps=8)
        with pytest.raises(ArgumentError, match="got one NormalizeObs in two chains.*'right'.*'late'"):
            both.add_policy("late", RandomPolicy(), agent_connectors=[norm])
        both.add_policy("late", RandomPolicy(), agent_connectors=[doubled, NormalizeObs()])


@pytest.mark.parametrize("side", ["agent_connectors", "action_connectors", "learner_connectors"])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"x": None}, r"unknown policies \['x'\]; the policies are \['main'\]: name those alone"),
        ({"x": []}, r"unknown policies \['x'\]"),
        ({"main": None}, "for policy 'main', got None; leave it out for the default ones, or give .* for none"),
        ({"main": 3}, "Pipeline or a list of connectors for policy 'main', got 3"),
        (3, "Pipeline or a list of connectors, or a dict of policy id to those, got 3"),
        ([None], "Pipeline takes .*Connectors, got None"),
        ({"main": [None]}, "Pipeline takes .*Connectors, got None"),
    ],
    ids=str,
)
def test_connectors_that_are_none_are_one_class_of_error(side: str, given: Any, message: str) -> None:
    with sync("parallel", 1, 1) as envs:
        with pytest.raises(ArgumentError, match=message):
            Collector(envs, RandomPolicy(), **{side: given})
        for kind in (AgentPipeline, ActionPipeline, LearnerPipeline):
            with pytest.raises(ArgumentError, match="takes a list of connectors, got None"):
                kind(None)  # type: ignore[arg-type]  # on purpose


class Dropping(AgentConnector):
    changes_length = True

    def __call__(self, rows: Rows) -> Rows:
        return rows.take(rows["agent_index"] > 0)


BREACHES: list[tuple[Callable[[], Any], str]] = [
    (Dropping, "got 4 rows and returned 2"),
    (lambda: agent_connector(lambda rows: rows.take(np.arange(len(rows))[::-1]), name="turned"), "keep their order"),
    (lambda: agent_connector(lambda rows: rows.replace(eps_id=rows["eps_id"] + 1), name="renamed"), "'eps_id'"),
    (lambda: agent_connector(lambda rows: rows.drop("t"), name="dropped"), "'t'"),
    (lambda: agent_connector(lambda rows: rows.replace(actions=rows["t"]), name="actions"), "named 'actions'"),
    (
        lambda: agent_connector(lambda rows: rows.replace(obs=rows["obs"][:, :1] if rows["t"].any() else rows["obs"])),
        r"'obs' was float64 of shape \(n, 7,\) until now",
    ),
    (lambda: agent_connector(lambda rows: rows.replace(extra=rows["t"]) if rows["t"].any() else rows), "until now"),
]


@pytest.mark.parametrize(("piece", "message"), BREACHES)
def test_connectors_that_break_their_contract_are_named(piece: Callable[[], Any], message: str) -> None:
    with SyncVectorEnv([lambda i=i: CounterEnv(3, agent_num=2, env_index=i) for i in range(2)]) as envs:
        collector = Collector(envs, {"culprit": RandomPolicy()}, agent_connectors=[piece()], seed=0)
        with pytest.raises(ContractError, match=message) as caught:
            collector.collect(env_steps=20)
        assert "'culprit'" in str(caught.value)
        with pytest.raises(ContractError, match=message):
            collector.collect(env_steps=20)


def test_an_error_in_a_connector_names_piece_and_policy() -> None:
    @agent_connector
    def broken(rows: Rows) -> Rows:
        raise ZeroDivisionError

    @action_connector
    def moody(rows: Rows) -> Rows:
        if len(calls) == 2:
            raise ZeroDivisionError
        return rows

    calls: list[int] = []
    with sync("parallel", 2, 2) as envs:
        with pytest.raises(ZeroDivisionError) as caught:
            Collector(envs, {"it": RandomPolicy()}, agent_connectors=[FlattenObs(), broken]).collect(env_steps=1)
        assert caught.value.__notes__ == [
            "in connector 'broken' of AgentPipeline",
            "in the agent connectors of policy 'it'",
        ]
        policy = FunctionPolicy(lambda rows: calls.append(1) or np.zeros(len(rows), int))
        collector = Collector(envs, {"it": policy}, action_connectors=[moody])
        with pytest.raises(ZeroDivisionError) as caught:
            collector.collect(env_steps=20)
        assert caught.value.__notes__[0] == "in connector 'moody' of ActionPipeline"
        assert caught.value.__notes__[1].startswith("in the action connectors of policy 'it'; nothing was sent")
        assert collector.collect(env_steps=20).env_steps == 20  # nothing was sent, so it goes on


def test_masks_of_choices_reach_the_policy_and_the_batch() -> None:
    @agent_connector
    def check(rows: Rows) -> Rows:
        assert rows["action_mask"][rows["last"]].all()  # nothing is left to choose there, so nothing is forbidden
        return rows

    with sync("masked", 3, 2) as envs:
        rows = Collector(envs, RandomPolicy(), agent_connectors=[check], seed=0).collect(env_steps=200)["main"]
        assert rows["action_mask"].shape == (len(rows), 5)
        assert rows["action_mask"].dtype == np.bool_
        assert rows["action_mask"][np.arange(len(rows)), rows["actions"]].all()
        assert not rows["action_mask"].all(axis=1).any()
        assert Discrete(5) == envs.agent_action_space(0)


class Asks(AgentConnector):
    """Notes of whose rows it was told that they are."""

    def __init__(self) -> None:
        self.told: set[str | None] = set()

    def __call__(self, rows: Rows) -> Rows:
        self.told.add(self.policy_id)
        return rows


@pytest.mark.checklist(79)
def test_connector_rows_name_env_and_agent() -> None:
    """Also one that enters later, and one deep inside."""
    left, late, deep = Asks(), Asks(), Asks()
    with sync("parallel", 2, 2) as envs:
        collector = Collector(
            envs,
            {"left": RandomPolicy(), "right": RandomPolicy()},
            {"agent_0": "left", "agent_1": "right"},
            agent_connectors={"left": [left], "right": [AgentPipeline([deep])]},
            seed=0,
        )
        collector.collect(env_steps=4)
        collector.agent_connectors["right"].append(late)
        collector.collect(env_steps=4)
    assert (left.told, late.told, deep.told) == ({"left"}, {"right"}, {"right"})
    assert collector.action_connectors["right"].policy_id == "right"


@pytest.mark.checklist(98)
def test_action_connectors_see_the_inputs_and_may_change_states_and_extras() -> None:
    """What they make of a state is what comes back in at the agent's next turn, and what the batch has."""

    @action_connector
    def forgetful(rows: Rows) -> Rows:
        return rows.replace(state_out=np.where((rows.t % 2 == 0)[:, None], rows.state_out, -rows.obs[:, :1]))

    def act(rows: Rows) -> Any:
        return np.zeros(len(rows), np.int64), {"state_out": rows.state_in + 1.0}

    with SyncVectorEnv([lambda i=i: CounterEnv(6, env_index=i) for i in range(3)]) as envs:
        rows = Collector(
            envs,
            FunctionPolicy(act),
            agent_connectors=[RnnState(np.zeros(1))],
            action_connectors=[*ActionPipeline.default(), forgetful],
            seed=0,
        ).collect(env_steps=60)["main"]
        even = rows["t"] % 2 == 0
        expected = np.where(even[:, None], rows["state_in"] + 1, -rows["obs"][:, :1])
        np.testing.assert_array_equal(rows["state_out"], expected)
        goes_on = rows["unroll_id"][1:] == rows["unroll_id"][:-1]
        np.testing.assert_array_equal(rows["state_in"][1:][goes_on], rows["state_out"][:-1][goes_on])
        assert not rows["state_in"][rows["t"] == 0].any()


@pytest.mark.checklist(93)
@pytest.mark.parametrize("on_fault", ["restart", "mask"])
@pytest.mark.parametrize("mode", MODES)
def test_a_fault_resets_that_envs_state_in_the_connectors_of_all_policies(mode: str, on_fault: Any) -> None:
    """Of one that does not play in the lost episode, too; and nobody else's."""
    spies = {"left": Spy(), "right": Spy()}
    with dying_counters({(1, 0): ("step", 7, False)}, 3, autoreset_mode=mode, on_fault=on_fault) as envs:
        collector = Collector(
            envs,
            {"left": EchoPolicy(), "right": EchoPolicy()},
            lambda name, episode: ["left", "right"][episode.number % 2],
            agent_connectors={name: [spy] for name, spy in spies.items()},
            seed=3,
        )
        collector.collect(env_steps=3 * 7)
        before = {name: len(spy.resets) for name, spy in spies.items()}
        collector.collect(env_steps=3)
        assert collector.metrics.episodes_faulty == 1
        for name, spy in spies.items():
            assert spy.resets[before[name] :] == [[1]]


@pytest.mark.fault("E8")
def test_a_call_made_again_does_not_show_an_answer_to_action_connectors_twice() -> None:
    """One policy's fail once, in each of several ticks; the other's remember what they sent."""
    fails = [0]

    @action_connector
    def sometimes(rows: Rows) -> Rows:
        fails[0] += 1
        if fails[0] in (2, 5, 6):
            raise ValueError("not now")
        return rows

    def sent(*more: Any) -> Any:
        with SyncVectorEnv([lambda i=i: CounterEnv(6, env_index=i, agent_num=2) for i in range(3)]) as envs:
            collector = Collector(
                envs,
                {"left": FunctionPolicy(lambda rows: rows.obs[:, 3].astype(int) % 5), "right": EchoPolicy()},
                {"agent_0": "left", "agent_1": "right"},
                action_connectors={"left": [RepeatActions(2)], "right": [*ActionPipeline.default(), *more]},
                seed=0,
            )
            failed = 0
            while True:
                try:
                    return collector.collect(env_steps=30)["left"], failed
                except ValueError:
                    failed += 1

    (plain, never), (again, often) = sent(), sent(sometimes)
    assert (never, often) == (0, 3)
    np.testing.assert_array_equal(again["actions_for_env"], plain["actions_for_env"])
    np.testing.assert_array_equal(again["obs"], plain["obs"])


@pytest.mark.parametrize("start", [1, -3])
def test_before_an_agent_has_done_anything_its_repeated_action_is_a_valid_one(start: int) -> None:
    space = Discrete(3, start=start)
    with SyncVectorEnv([lambda: SampledEnv(Box(-1, 1, (2,)), space, length=3)] * 2, validate="strict") as envs:
        chain = [FilterRows(lambda rows: rows.t + rows.obs[:, 0] * 0 > 0, noop="repeat")]
        collector = Collector(envs, RandomPolicy(), agent_connectors=chain, seed=0)
        collector.collect(env_steps=12)
        assert collector.metrics.noop_steps == 24


def test_a_connector_given_to_two_collectors_is_shared_by_neither() -> None:
    """Both begin as the connector was when the first got it, with one policy as with two, and as a pipeline."""

    def batch(chain: Any, ids: tuple[str, ...]) -> Any:
        with sync("parallel", 2, 2) as envs:
            names = {"agent_0": ids[0], "agent_1": ids[-1]}
            policies = {name: RandomPolicy() for name in ids}
            collector = Collector(envs, policies, names, agent_connectors=chain, seed=0)
            first = collector.collect(env_steps=24)[ids[0]]["obs"]
            again = collector.agent_connectors[ids[0]]
            if again is not chain:  # one that the collector has made
                learnt = Collector(envs, policies, names, agent_connectors=dict.fromkeys(ids[:1], again), seed=0)
                assert learnt.agent_connectors[ids[0]] is not again
                np.testing.assert_equal(learnt.agent_connectors[ids[0]].state_dict(), again.state_dict())
            return first

    def parts() -> list[Any]:
        return [NormalizeObs(), FrameStack(2)]

    for ids in (("main",), ("a", "b")):
        for chain in (parts(), AgentPipeline(parts())):
            want = batch(chain, ids)
            np.testing.assert_array_equal(batch(chain, ids), want)


def test_a_collector_ends_with_its_last_reference_whatever_its_connectors_hold() -> None:
    """What later collectors would copy refers to the policy here, and through it to the collector."""

    def collected() -> weakref.ref[Collector]:
        with sync("parallel", 2, 2) as envs:
            policy = FunctionPolicy(
                lambda rows: (np.zeros(len(rows), np.int64), {"values": np.zeros(len(rows), np.float32)})
            )
            chain = GeneralAdvantageEstimation(gamma=0.9, value_function=partial(zeros_of, policy))
            collector = Collector(envs, policy, learner_connectors=[chain], seed=0)
            policy.owner = collector  # type: ignore[attr-defined]  # as a policy's module may, by its globals
            collector.collect(env_steps=8)
            return weakref.ref(collector)

    gone = collected()
    gc.collect()
    assert gone() is None


def zeros_of(policy: FunctionPolicy, rows: Any) -> Any:
    return np.zeros(len(rows), np.float32)


def test_collectors_of_one_connector_run_side_by_side() -> None:
    stack = FrameStack(2)
    with sync("parallel", 2, 2) as one, sync("parallel", 2, 2) as two, sync("parallel", 2, 2) as three:
        alone = Collector(three, RandomPolicy(), agent_connectors=[FrameStack(2)], seed=0)
        pair = [Collector(envs, RandomPolicy(), agent_connectors=[stack], seed=k) for k, envs in enumerate((one, two))]
        for _ in range(5):
            want = alone.collect(env_steps=6)["main"]["obs"]
            np.testing.assert_array_equal(pair[0].collect(env_steps=6)["main"]["obs"], want)
            pair[1].collect(env_steps=6)


@pytest.mark.parametrize("kind", [FunctionPolicy, ScriptedPolicy])
def test_an_answer_in_the_envs_units_is_warned_of_once(kind: Any) -> None:
    def policy(size: float) -> Any:
        if kind is ScriptedPolicy:
            return ScriptedPolicy(lambda obs, agent, t, memory: np.full(1, size, np.float32))
        return FunctionPolicy(lambda rows: np.full((len(rows), 1), size, np.float32))

    with SyncVectorEnv([lambda: SampledEnv(Box(-1, 1, (2,)), Box(-2, 2, (1,)))]) as envs:
        Collector(envs, policy(0.8), seed=0).collect(env_steps=3)  # may be in either unit
        collector = Collector(envs, policy(1.6), seed=0)
        with pytest.warns(ContractWarning, match=r"answered 1.6 .* expected an action in \[-1, 1\]") as caught:
            collector.collect(env_steps=3)
        assert len(caught) == 1
        collector.collect(env_steps=3)
        own = [ToNumpy(), ClipActions()]
        rows = Collector(envs, policy(1.6), action_connectors=own, seed=0).collect(env_steps=3)["main"]
        assert (rows["actions_for_env"] == np.float32(1.6)).all()


TURNS = FunctionPolicy(lambda rows: rows.t % 5)


@pytest.mark.parametrize(
    "make", [lambda seed: StickyActions(0.5, seed=seed), lambda seed: EpsilonGreedy(0.5, seed=seed)]
)
def test_draws_follow_from_the_seeds_of_collector_and_connector(make: Any) -> None:
    def sent(seed: int, own: int = 0, chain: Any = None, later: int | None = None) -> list[int]:
        chain = [make(own)] if chain is None else chain
        with SyncVectorEnv(
            [lambda i=i: SampledEnv(Box(-1, 1, (2,)), Discrete(5), env_index=i) for i in range(2)]
        ) as envs:
            collector = Collector(envs, TURNS, action_connectors=chain, seed=seed)
            if later is not None:
                collector.reset(seed=later)
            actions: list[int] = collector.collect(env_steps=60)["main"]["actions_for_env"].tolist()
            return actions

    assert sent(5) == sent(5)
    assert sent(5) == sent(1, later=5)
    assert sent(5) != sent(6)
    assert sent(5) != sent(5, own=1)
    used = make(0)
    assert sent(6, chain=[used]) == sent(6) != sent(5)
    assert sent(5, chain=ActionPipeline([ActionPipeline([used])])) == sent(5)


def test_evaluations_never_repeat_the_draws_of_training() -> None:
    def envs() -> Any:
        return SyncVectorEnv([lambda i=i: SampledEnv(Box(-1, 1, (2,)), Discrete(5), env_index=i) for i in range(2)])

    with envs() as train, envs() as other:
        collector = Collector(
            train, TURNS, action_connectors=[StickyActions(0.5)], seed=5, batch_mode="complete", window=4
        )

        def returns(seed: int | None) -> list[list[float]]:
            return [record.returns_A.tolist() for record in collector.evaluate(4, other, seed=seed).episodes]

        collector.collect(episodes=4)
        trained = [record.returns_A.tolist() for record in collector.metrics.episodes]
        assert returns(5) == returns(5)
        assert sorted(returns(5)) != sorted(trained)  # the env itself draws nothing that counts
        assert returns(5) != returns(6)
        assert returns(None) != returns(None)


# --- learner connectors in the collector: each policy's own chain, all policies' rows in sight, and nothing lost


def play(mode: str = "same_step", **options: Any) -> Collector:
    envs = SyncVectorEnv([partial(CounterEnv, [5, 2, 9], env_index=i) for i in range(3)], autoreset_mode=mode)
    return Collector(envs, FunctionPolicy(valued), seed=0, **options)


def valued(rows: Rows) -> Any:
    return rows.env_id % 5, {"values": rows.obs[:, 3] / 10}


class Failing(LearnerConnector):
    """Fails a number of times."""

    def __init__(self, times: int) -> None:
        self.times = times

    def __call__(self, rows: Rows) -> Rows:
        self.times -= 1
        if self.times >= 0:
            raise ValueError("not today")
        return rows


class Others(Looking):
    """A critic that sees all: how many rows each policy has, and what they were."""

    def __call__(self, rows: Rows) -> Rows:
        total = sum(float(others["rewards"].sum()) for others in self.batch.values())
        return rows.replace(everyone=np.full(len(rows), total), rewards=rows["rewards"] * 0)


@pytest.mark.parametrize("batch_mode", ["truncate", "complete"])
@pytest.mark.parametrize("mode", MODES)
def test_a_chain_in_the_collector_is_the_chain_on_its_batches(mode: str, batch_mode: Any) -> None:
    chain = LearnerPipeline([GeneralAdvantageEstimation(0.9, 0.8, lambda rows: rows.obs[:, 3]), Standardize()])
    with_chain = play(mode, batch_mode=batch_mode, learner_connectors=chain)
    assert with_chain.learner_connectors["main"] is chain
    without = play(mode, batch_mode=batch_mode)
    for amount in (20, 7, 31):
        learnt, plain = with_chain.collect(env_steps=amount), without.collect(env_steps=amount)
        assert (learnt.env_steps, learnt.agent_steps) == (plain.env_steps, plain.agent_steps)
        expected = chain(plain["main"])
        same_tree(dict(learnt["main"].items()), expected)
        assert abs(learnt["main"]["advantages"].mean()) < 1e-6


def test_what_makes_other_rows_does_not_change_the_count() -> None:
    pads = play(learner_connectors=[PadSequences(4)])
    back = play(learner_connectors=[PadSequences(4), UnpadSequences()])
    plain = play()
    for amount in (20, 9):
        padded, there_and_back, rows = (c.collect(env_steps=amount) for c in (pads, back, plain))
        assert padded.agent_steps == there_and_back.agent_steps == rows.agent_steps == len(rows["main"])
        assert padded["main"]["obs"].shape[1] == 4
        assert padded["main"]["loss_mask"].sum() == len(rows["main"])
        for name, column in rows["main"].items():
            np.testing.assert_array_equal(there_and_back["main"][name], column)


@pytest.mark.checklist(117)
def test_each_piece_sees_all_policies_rows_before_any_is_changed() -> None:
    policies = {"left": EchoPolicy(), "right": EchoPolicy()}
    mapping = {"agent_0": "left", "agent_1": "right", "agent_2": "right"}
    with sync("parallel", 3, 3) as envs:
        one = Collector(envs, policies, mapping, learner_connectors=[Others()], seed=1)
        batch = one.collect(env_steps=40)
    policies = {"left": EchoPolicy(), "right": EchoPolicy()}
    with sync("parallel", 3, 3) as envs:
        plain = Collector(envs, policies, mapping, seed=1).collect(env_steps=40)
    total = sum(float(plain[name]["rewards"].sum()) for name in plain)
    assert total
    for name in batch:
        assert set(batch[name]["everyone"].tolist()) == {total}
        assert not batch[name]["rewards"].any()
    assert len({id(chain) for chain in one.learner_connectors.values()}) == 2


@pytest.mark.fault("E11")
@pytest.mark.parametrize("batch_mode", ["truncate", "complete"])
def test_where_one_fails_nothing_is_lost(batch_mode: Any) -> None:
    collector, plain = play(batch_mode=batch_mode, learner_connectors=[Failing(2)]), play(batch_mode=batch_mode)
    for _ in range(2):
        with pytest.raises(ValueError, match="not today") as caught:
            collector.collect(env_steps=30)
        assert any("no row is lost" in note for note in caught.value.__notes__)
    for _ in range(2):
        batch, expected = collector.collect(env_steps=30), plain.collect(env_steps=30)
        assert (batch.env_steps, batch.agent_steps) == (expected.env_steps, expected.agent_steps)
        same_tree(dict(batch["main"].items()), dict(expected["main"].items()))


def test_chains_by_policy_and_invalid_chains() -> None:
    policies = {"left": RandomPolicy(), "right": RandomPolicy()}
    mapping = {"agent_0": "left", "agent_1": "right", "agent_2": "right"}
    with sync("parallel", 2, 3) as envs:
        batch = Collector(envs, policies, mapping, learner_connectors={"right": [ReturnsToGo(0.5)]}, seed=1).collect(
            env_steps=20
        )
        assert "returns_to_go" in batch["right"]
        assert "returns_to_go" not in batch["left"]
        with pytest.raises(ArgumentError, match="unknown policies"):
            Collector(envs, policies, mapping, learner_connectors={"middle": []})
        with pytest.raises(ArgumentError, match="LearnerConnectors"):
            Collector(envs, RandomPolicy(), learner_connectors=[FlattenObs()])


def test_a_function_is_one_too_and_modes_reach_it() -> None:
    @learner_connector
    def halved(rows: Rows) -> Rows:
        return rows.replace(rewards=rows["rewards"] / 2)

    collector, plain = play(learner_connectors=[halved]), play()
    np.testing.assert_array_equal(
        collector.collect(env_steps=9)["main"]["rewards"], plain.collect(env_steps=9)["main"]["rewards"] / 2
    )
    collector.eval()
    assert not collector.learner_connectors["main"][0].training
    collector.train()
    assert collector.learner_connectors["main"][0].training
