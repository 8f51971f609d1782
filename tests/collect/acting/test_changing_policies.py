"""Policies that come and go while a collector runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marlvec.collect import Collector
from marlvec.connectors import AgentPipeline, FilterRows, FrameStack, MapActions, NormalizeObs, Rows
from marlvec.errors import ArgumentError, ContractError, StateError
from marlvec.policies import FunctionPolicy, Policy, RandomPolicy
from marlvec.testing.scripted import CounterEnv
from marlvec.vector.backends.sync import SyncVectorEnv
from tests.collect.acting.test_mapping import mixed
from tests.collect.acting.test_off_policy import CLOCK, Machine, envs_of, human, taken
from tests.collect.helpers.players import KINDS, MODES, EchoPolicy, sync

pytestmark = pytest.mark.many_processes

Key = tuple[int, int, int]  # episode, agent, number of its decision


class Player(EchoPolicy):
    """Acts alike whoever it is, so that all runs go alike; notes when it was asked, and does not forgive it later."""

    def __init__(self, name: str) -> None:
        super().__init__(0)
        self.name, self.gone = name, False
        self.asked: list[Key] = []

    def act(self, rows: Rows, *, explore: bool = True) -> Any:
        assert not self.gone, f"{self.name} was asked after it was removed"
        self.asked += zip(rows["eps_id"].tolist(), rows["agent_index"].tolist(), rows["t"].tolist(), strict=True)
        actions, columns = super().act(rows, explore=explore)
        return actions, columns


def keyed(batch: Any) -> dict[Key, tuple[str, dict[str, Any]]]:
    """A batch's rows by who did what when."""
    found = {}
    for policy, rows in batch.items():
        for i in range(len(rows)):
            key = int(rows["eps_id"][i]), int(rows["agent_index"][i]), int(rows["t"][i])
            assert key not in found
            found[key] = policy, {name: column[i] for name, column in rows.items() if name != "unroll_id"}
    return found


def all_of(collector: Collector, amounts: list[int]) -> dict[Key, tuple[str, dict[str, Any]]]:
    found: dict[Key, tuple[str, dict[str, Any]]] = {}
    for amount in amounts:
        new = keyed(collector.collect(env_steps=amount))
        assert not found.keys() & new.keys()
        found |= new
    return found


def whole(kind: str, seats: tuple[int, int], amounts: list[int], **options: Any) -> dict[Key, Any]:
    """Rows of a run of these amounts in which one policy played all along."""
    with sync(kind, *seats) as envs:
        return all_of(Collector(envs, EchoPolicy(0), seed=0, **options), amounts)


def same_rows(mine: dict[Key, Any], other: dict[Key, Any]) -> None:
    assert mine.keys() == other.keys()
    for key, (_, columns) in mine.items():
        assert columns.keys() == other[key][1].keys()
        for name, value in columns.items():
            np.testing.assert_array_equal(value, other[key][1][name], err_msg=f"{key} {name}")


@pytest.mark.checklist(107)
@pytest.mark.time_limit(600)  # ten seconds, as a rule; beside fifteen busy processes 180 were not enough
@settings(max_examples=40)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    mode=st.sampled_from(MODES),
    batch_mode=st.sampled_from(["truncate", "complete"]),
    static=st.booleans(),
    amounts=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    copy=st.booleans(),
)
def test_a_policy_that_is_removed_is_not_asked_again_and_no_row_differs(
    kind: str, mode: str, batch_mode: Any, static: bool, amounts: list[int], copy: bool
) -> None:
    """Removed in the middle of episodes, twice in a row; its agents go on as if one policy had played all along."""
    after = [13, 25, 9, 30]

    def run(*, remove: bool) -> tuple[dict[Key, Any], list[Player], list[int], Any]:
        players = [Player(name) for name in "abc"]
        removed = []

        def mapping(name: str, episode: Any) -> str:
            return [p.name for p in players if not p.gone][(int(name[-1]) + episode.number) % (3 - len(removed))]

        with sync(kind, 3, 3, mode, copy=copy) as envs:
            fixed = dict(zip(envs.agents, "abc", strict=True))
            collector = Collector(
                envs, {p.name: p for p in players}, fixed if static else mapping, batch_mode=batch_mode, seed=2
            )
            rows = all_of(collector, amounts)
            for k, old, new in ((0, 0, "b"), (1, 1, "c")):
                if remove:
                    collector.remove_policy("ab"[old], remap_to=new)
                    players[old].gone = True
                    removed.append(old)
                rows |= all_of(collector, after[2 * k : 2 * k + 2])
            # Everything that is still open, so that both runs have the same rows.
            rows |= all_of(collector, [60])
            return rows, players, removed, collector

    mine, players, removed, collector = run(remove=True)
    other, *_ = run(remove=False)
    assert removed == [0, 1]
    same_rows(mine, other)
    asked = {key: player.name for player in players for key in player.asked}
    assert sum(len(player.asked) for player in players) == len(asked) == collector.metrics.agent_steps
    for key, (policy, columns) in mine.items():
        assert policy == asked[key]  # rows come under the id of who decided
        assert columns["seen"] == columns["obs"].sum()
    assert list(collector.policies) == ["c"]


@pytest.mark.checklist(107)
@pytest.mark.fault("E5")
@pytest.mark.parametrize("kind", ["parallel", "turns", "keyed"])
def test_removing_a_policy_that_plays_raises_where_nobody_takes_its_place(kind: str) -> None:
    players = {name: Player(name) for name in "ab"}
    with sync(kind, 2, 2) as envs:
        collector = Collector(envs, players, dict(zip(envs.agents, "ab", strict=True)), seed=0)
        with pytest.raises(
            StateError, match=rf"'a' cannot be removed: by the policy_mapping it plays \['{envs.agents[0]}'"
        ):
            collector.remove_policy("a")
        first = all_of(collector, [9])
        with pytest.raises(StateError, match="remap_to="):
            collector.remove_policy("a")
        with pytest.raises(ArgumentError, match="its own place"):
            collector.remove_policy("a", remap_to="a")
        with pytest.raises(KeyError, match=r"'x'.*\['a', 'b'\]"):
            collector.remove_policy("x")
        with pytest.raises(KeyError, match=r"'x'.*\['a', 'b'\]"):
            collector.remove_policy("a", remap_to="x")
        same_rows(first | all_of(collector, [20]), whole(kind, (2, 2), [9, 20]))

        function = Collector(envs, players, lambda name, episode: "ab"[episode.number % 2], seed=0)
        function.collect(env_steps=2)
        with pytest.raises(StateError, match=r"'a' cannot be removed: it plays \d+ agents in running .*of env 0 first"):
            function.remove_policy("a")
        function.collect(env_steps=30)


def test_who_plays_nobody_needs_nobody_in_its_place() -> None:
    with sync("parallel", 2, 2) as envs:
        collector = Collector(envs, {name: Player(name) for name in "abc"}, lambda *_: who[0], seed=0)
        who = ["b"]
        collector.remove_policy("a")  # before anything runs
        collector.collect(env_steps=20)
        collector.remove_policy("c")
        assert list(collector.policies) == ["b"]
        assert list(collector.agent_connectors) == ["b"]
        assert list(collector.collect(env_steps=20)) == ["b"]
        who[0] = "c"
        with pytest.raises(KeyError, match=r"'c'.*\['b'\]"):
            collector.collect(episodes=9)
        who[0] = "b"
        collector.add_policy("d", Player("d"))
        collector.remove_policy("b", remap_to="d")  # while all is lost
        who[0] = "d"
        collector.reset(seed=1)
        assert list(collector.collect(env_steps=9)) == ["d"]


def test_rows_of_a_removed_policy_still_come_and_then_it_is_gone() -> None:
    def run(*, remove: bool) -> dict[Key, Any]:
        with sync("parallel", 3, 2) as envs:
            collector = Collector(envs, {n: Player(n) for n in "ab"}, "a", batch_mode="complete", seed=0)
            collector.collect(episodes=1)
            if not remove:
                return keyed(collector.collect(episodes=6))
            collector.remove_policy("a", remap_to="b")
            with pytest.raises(StateError, match="rows that are still to come"):
                collector.add_policy("a", Player("a"))
            assert collector.metrics.policies == ("a", "b")
            rows = keyed(collector.collect(episodes=6))
            assert {policy for policy, _ in rows.values()} == {"a", "b"}
            collector.collect(episodes=120)
            collector.add_policy("a", Player("a"))  # its last rows have come
            assert collector.metrics.policies == ("b", "a")
            return rows

    same_rows(run(remove=True), run(remove=False))


def test_a_removed_policy_takes_no_memory_however_many_come_and_go() -> None:
    with sync("turns", 2, 2) as envs:
        collector = Collector(envs, {"p0": Player("p0")}, "p0", seed=0)
        for i in range(30):
            collector.collect(env_steps=11)
            collector.add_policy(f"p{i + 1}", Player("next"))
            collector.remove_policy(f"p{i}", remap_to=f"p{i + 1}")
        collector.collect(env_steps=40)
        assert list(collector.policies) == ["p30"]
        assert len(collector._policy_set.runners) == 1  # nothing public counts them


class Stacked(Policy):
    """Says what its observation was, to the last number."""

    def act(self, rows: Rows, *, explore: bool = True) -> Any:
        return np.zeros(len(rows), int), {"saw": np.array(rows["obs"], np.float64), "began": rows["first"]}


def test_the_new_policy_sees_through_its_own_connectors_from_its_first_row_on() -> None:
    def envs() -> SyncVectorEnv:
        return SyncVectorEnv([lambda i=i: CounterEnv([12, 12], env_index=i) for i in range(2)])

    with envs() as these:
        bare = Collector(these, Stacked(), seed=0).collect(env_steps=20)["main"]
    with envs() as these:
        chains = {"old": [FrameStack(2)], "new": [FrameStack(3)]}
        collector = Collector(these, {"old": Stacked(), "new": Stacked()}, "old", agent_connectors=chains, seed=0)
        width = bare["obs"].shape[1]
        old = collector.collect(env_steps=10)["old"]
        collector.remove_policy("old", remap_to="new")
        new = collector.collect(env_steps=10)["new"]
    assert (old["obs"].shape[1], new["obs"].shape[1]) == (2 * width, 3 * width)
    assert new["t"][new["began"]].tolist() == [5] * 6  # five steps were the old one's
    frames = {
        (int(env), int(agent), int(t)): obs
        for env, agent, t, obs in zip(bare["env_id"], bare["agent_index"], bare["t"], bare["obs"], strict=True)
    }
    for env, agent, t, saw in zip(new["env_id"], new["agent_index"], new["t"], new["saw"], strict=True):
        # What it had not seen itself is not in its stack, though the agent was there before.
        seen = [frames[int(env), int(agent), int(t) - back] * (int(t) - back >= 5) for back in (2, 1, 0)]
        np.testing.assert_array_equal(saw.reshape(3, width), seen)


def test_agents_that_idle_go_over_when_they_act_again() -> None:
    """A no-op stays what the old connectors declared, and the decision before it keeps its outcome."""

    def keep(rows: Rows) -> Any:
        return (rows["obs"].sum(axis=1).astype(int) % 3 != 0) | rows["last"]

    with sync("parallel", 3, 2) as envs:
        chains = {name: [FilterRows(keep, noop=1)] for name in "ab"}
        collector = Collector(envs, {n: Player(n) for n in "ab"}, "a", agent_connectors=chains, seed=0)
        rows = all_of(collector, [14])
        collector.policies["a"].gone = True  # type: ignore[attr-defined]  # a Player
        collector.remove_policy("a", remap_to="b")
        rows |= all_of(collector, [7, 40])
        assert collector.metrics.noop_steps > 0
    same_rows(rows, whole("parallel", (3, 2), [14, 7, 40], agent_connectors=[FilterRows(keep, noop=1)]))


def test_a_policy_may_be_replaced_between_two_rows() -> None:
    class Versed(EchoPolicy):
        def act(self, rows: Rows, *, explore: bool = True) -> Any:
            actions, columns = super().act(rows, explore=explore)
            return actions, {**columns, "logp": np.zeros(len(rows))}

    with sync("turns", 3, 2) as envs:
        collector = Collector(envs, EchoPolicy(0), seed=0)
        first = all_of(collector, [25])
        later = EchoPolicy(0)
        later.version = 7
        collector.replace_policy("main", later)
        rows = all_of(collector, [30])
        assert collector.policies["main"] is later
        versions = {int(columns["policy_version"]) for _, columns in rows.values()}
        assert versions == {0, 7}  # some were open at the change
        for _, columns in rows.values():
            columns["policy_version"] = np.int64(0)
        same_rows(first | rows, whole("turns", (3, 2), [25, 30]))
        collector.replace_policy("main", Versed())
        with pytest.raises(ContractError, match="until now"):
            collector.collect(env_steps=5)  # rows of the old one, without logp, are still to come
    with sync("parallel", 3, 2) as envs:
        collector = Collector(envs, EchoPolicy(0), seed=0)
        collector.collect(env_steps=12)
        collector.replace_policy("main", Versed())
        assert "logp" in collector.collect(env_steps=12)["main"]  # none are
        with pytest.raises(KeyError, match="'nobody'"):
            collector.replace_policy("nobody", EchoPolicy())
        with pytest.raises(ArgumentError, match="has the id 'main' already"):
            collector.replace_policy("main", collector.policies["main"])
        with pytest.raises(ArgumentError, match="must be a marlvec Policy"):
            collector.replace_policy("main", EchoPolicy)


def test_an_answer_that_a_failed_call_has_left_behind_is_not_the_new_policys() -> None:
    """The action connectors of "b" fail when those of "a" have seen its answers."""

    class Doubled(EchoPolicy):
        def act(self, rows: Rows, *, explore: bool = True) -> Any:
            actions, columns = super().act(rows, explore=explore)
            return actions, {**columns, "double": np.asarray(actions) * 2}

    def strict(actions: Any) -> Any:
        if fail[0]:
            raise ValueError("not today")
        return actions

    fail = [True]
    with sync("parallel", 3, 2) as envs:
        chains = {"b": [MapActions(strict)]}
        policies = {"a": EchoPolicy(0), "b": EchoPolicy(0)}
        seats = {"agent_0": "a", "agent_1": "b"}
        collector = Collector(envs, policies, seats, action_connectors=chains, seed=0)
        with pytest.raises(ValueError, match="not today"):
            collector.collect(env_steps=9)
        collector.replace_policy("a", Doubled(0))
        fail[0] = False
        rows = collector.collect(env_steps=9)
        np.testing.assert_array_equal(rows["a"]["double"], rows["a"]["actions"] * 2)
        assert "double" not in rows["b"]


def test_each_policy_that_comes_has_a_seed_of_its_own() -> None:
    def actions(replace: bool) -> list[int]:
        with sync("parallel", 2, 2) as envs:
            collector = Collector(envs, RandomPolicy(), seed=0)
            collector.collect(env_steps=1)
            if replace:
                collector.replace_policy("main", RandomPolicy())
            collector.reset(seed=0)
            return collector.collect(env_steps=40)["main"]["actions_for_env"].tolist()

    assert actions(replace=True) == actions(replace=True)
    assert actions(replace=True) != actions(replace=False)


def test_an_added_policy_plays_whom_the_mapping_gives_it() -> None:
    latest = ["a"]
    with sync("keyed", 3, 3) as envs:
        collector = Collector(envs, {"a": Player("a")}, lambda *_: latest[0], seed=0)
        collector.collect(env_steps=20)
        collector.add_policy("b", Player("b"))
        assert list(collector.policies) == ["a", "b"]
        latest[0] = "b"
        batch = collector.collect(episodes=9)
        assert set(batch) == {"a", "b"}  # episodes that ran stayed with "a"
        assert "b" in collector.metrics.summary()["policies"]
        for given, error, message in (
            (("a", Player("x")), ArgumentError, "there is a policy 'a' already"),
            ((3, Player("x")), ArgumentError, "must be a string"),
            (("c", collector.policies["a"]), ArgumentError, "has the id 'a' already"),
            (("c", Player), ArgumentError, "must be a marlvec Policy.* got the class Player: give an instance"),
        ):
            with pytest.raises(error, match=message):
                collector.add_policy(*given)  # type: ignore[arg-type]  # on purpose
        with pytest.raises(KeyError, match="'nobody'"):
            collector.add_policy("c", Player("c"), like="nobody")
        assert list(collector.policies) == list(collector.agent_connectors) == ["a", "b"]


def test_an_added_policy_may_have_copies_of_anothers_connectors() -> None:
    with sync("parallel", 2, 2) as envs:
        collector = Collector(envs, {"a": Stacked()}, lambda *_: who[0], agent_connectors=[NormalizeObs()], seed=0)
        who = ["a"]
        collector.collect(env_steps=40)
        with pytest.raises(ArgumentError, match="one chain of connectors was given for all policies"):
            collector.add_policy("b", Stacked())
        collector.add_policy("b", Stacked(), like="a")
        collector.add_policy("c", Stacked(), agent_connectors=[])
        mine, other = collector.agent_connectors["a"], collector.agent_connectors["b"]
        assert mine is not other
        np.testing.assert_equal(other.state_dict(), mine.state_dict())
        assert len(collector.agent_connectors["c"]) == 0
        with pytest.raises(ArgumentError, match="is another policy's"):
            collector.add_policy("d", Stacked(), agent_connectors=mine)
        who[0] = "b"
        assert "b" in collector.collect(episodes=6)
    with sync("parallel", 2, 2) as envs:
        collector = Collector(envs, {"a": Stacked()}, agent_connectors={"a": AgentPipeline([FrameStack(2)])}, seed=0)
        collector.add_policy("b", Stacked())  # like one that was left out of the dict
        assert repr(collector.agent_connectors["b"]) == repr(AgentPipeline.default())


def test_a_place_is_taken_by_a_policy_of_the_same_spaces_only() -> None:
    with mixed(2) as envs:
        policies = {"left": RandomPolicy(), "right": RandomPolicy(), "spare": RandomPolicy()}
        collector = Collector(envs, policies, {"agent_0": "left", "agent_1": "right"}, seed=0)
        collector.collect(env_steps=5)
        with pytest.raises(ContractError, match="spaces differ"):
            collector.remove_policy("left", remap_to="right")
        assert set(collector.collect(env_steps=6)) == {"left", "right"}
        collector.remove_policy("left", remap_to="spare")
        collector.collect(env_steps=6)
        assert set(collector.collect(env_steps=6)) == {"spare", "right"}


def test_faults_in_the_middle_of_a_change_lose_what_they_lose_and_no_more() -> None:
    """Every decision is in a batch, lost, or still open: whatever happens to envs while somebody leaves."""
    calls = [0]

    class Shaky(CounterEnv):
        def step(self, actions: Any) -> Any:
            calls[0] += 1
            if calls[0] % 7 == 0:
                raise RuntimeError("no")
            return super().step(actions)

    with SyncVectorEnv(
        [lambda i=i: Shaky([5, 9], env_index=i) for i in range(3)], on_fault="restart", max_restarts=10**6
    ) as envs:
        collector = Collector(envs, {"p0": Player("p0")}, "p0", seed=0)
        got = 0
        for i in range(12):
            got += collector.collect(env_steps=10).agent_steps
            collector.add_policy(f"p{i + 1}", Player("next"))
            collector.remove_policy(f"p{i}", remap_to=f"p{i + 1}")
        got += collector.collect(env_steps=10).agent_steps
        metrics = collector.metrics
        assert metrics.episodes_faulty > 5
        assert got + metrics.agent_steps_lost == metrics.agent_steps


def test_new_connectors_that_fail_leave_a_collector_that_can_be_reset() -> None:
    def fail(rows: Rows) -> Any:
        raise ValueError("not today")

    with sync("parallel", 2, 2) as envs:
        chains = {"b": [FilterRows(fail, noop=0)]}
        collector = Collector(envs, {"a": Player("a"), "b": Player("b")}, "a", agent_connectors=chains, seed=0)
        collector.collect(env_steps=8)
        with pytest.raises(ValueError, match="not today") as caught:
            collector.remove_policy("a", remap_to="b")
        assert any("policy 'b'" in note for note in caught.value.__notes__)
        with pytest.raises(StateError, match=r"reset\(\)"):
            collector.collect(env_steps=1)


def test_actions_that_were_given_go_over_with_their_agents() -> None:
    with envs_of("some", "same_step") as envs:
        collector = Collector(envs, {"a": Machine(), "b": Machine()}, "a", seed=0)
        parts = [collector.collect(env_steps=5)]
        collector.remove_policy("a", remap_to="b")
        parts.append(collector.collect(env_steps=25))
        for rows in (batch[name] for batch in parts for name in batch):
            where = rows["env_id"], rows["agent_index"], rows["obs"][:, CLOCK].astype(int)
            np.testing.assert_array_equal(rows["off_policy"], taken(*where, rule="some"))
            expected = np.where(taken(*where, rule="some"), human(*where), (human(*where) + 1) % 5)
            np.testing.assert_array_equal(rows["actions"], expected)


def test_a_function_of_rows_can_be_removed_like_any_other() -> None:
    with sync("parallel", 2, 2) as envs:
        policies: dict[str, Policy] = {"f": FunctionPolicy(lambda rows: np.zeros(len(rows), int)), "r": RandomPolicy()}
        collector = Collector(envs, policies, "f", seed=0)
        collector.collect(env_steps=6)
        collector.remove_policy("f", remap_to="r")
        assert set(collector.collect(env_steps=6)) == {"r"}
