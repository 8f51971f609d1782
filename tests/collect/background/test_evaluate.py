"""Evaluation: whole episodes elsewhere, an unbiased choice of them, and no trace in what is trained with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marlvec.collect import Collector
from marlvec.connectors import FrameStack, NormalizeObs, Rows
from marlvec.errors import ArgumentError, StateError
from marlvec.policies import FunctionPolicy, Policy, PolicyMap, RandomPolicy
from marlvec.testing.scripted import CounterEnv, RaisingEnv
from marlvec.vector import SyncVectorEnv
from tests.collect.helpers.players import MODES, EchoPolicy, asynchronous, sync
from tests.collect.helpers.reference import same_batch

noop = FunctionPolicy(lambda rows: np.zeros(len(rows), int))


def of_lengths(lengths: list[int], **settings: Any) -> SyncVectorEnv:
    """Envs whose episodes have each a length of their own."""
    makes = [lambda i=i, n=n: CounterEnv(n, agent_num=2, env_index=i) for i, n in enumerate(lengths)]
    return SyncVectorEnv(makes, **settings)


class Remembering(RandomPolicy):
    """Draws from one stream, and remembers every row it was asked about."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def act(self, rows: Rows, *, explore: bool = True) -> Any:
        self.asked += len(rows)
        return super().act(rows, explore=explore), {"asked": np.full(len(rows), self.asked)}


@pytest.mark.mostly_slow("collects whole runs on several backends", quick=2)
@pytest.mark.checklist(112)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("overlap", [False, True])
def test_training_goes_on_as_if_nothing_had_happened(mode: str, overlap: bool) -> None:
    def collected(evaluated: bool) -> tuple[list[Any], dict[str, Any], Any]:
        with asynchronous("parallel", 4, 2, mode, num_workers=2) as envs, sync("parallel", 3, 2, mode) as others:
            told: list[Any] = []
            collector = Collector(
                envs,
                {"a": Remembering(), "b": Remembering()},
                lambda name, episode: "a" if (int(name[-1]) + episode.number) % 2 else "b",
                agent_connectors=[NormalizeObs(), FrameStack(3)],
                callbacks=[{"on_episode_end": lambda episode, record: told.append(record.eps_id)}],
                seed=4,
                evaluation_envs=others,
            )
            batches = []
            for amount in (17, 30, 8):
                batches.append(collector.collect(env_steps=amount))
                if evaluated:
                    assert len(collector.evaluate(5)) == 5
            summary = collector.metrics.summary()
            for name in ("timers", "duration", "agents", "policies", "envs"):
                del summary[name]
            return batches, {**summary, "told": told}, collector.agent_connectors["a"].state_dict()

    plain, with_evaluation = collected(False), collected(True)
    for got, want in zip(with_evaluation[0], plain[0], strict=True):
        same_batch(got, want)
    assert with_evaluation[1] == plain[1]
    np.testing.assert_equal(with_evaluation[2], plain[2])


@pytest.mark.slow("collects whole runs on several backends")
@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    episodes=st.integers(1, 11),
    mode=st.sampled_from(MODES),
)
def test_every_env_plays_its_first_episodes(lengths: list[int], episodes: int, mode: str) -> None:
    with of_lengths([3]) as envs, of_lengths(lengths, autoreset_mode=mode) as others:
        found = Collector(envs, noop, seed=0).evaluate(episodes, others)
        n = len(lengths)
        want = [(k // n, k % n, lengths[k % n]) for k in range(episodes)]
        assert [(record.number, record.env_id, record.length) for record in found.episodes] == want
        assert found.lengths.mean == pytest.approx(np.mean([length for *_, length in want]))


def test_evaluation_connectors_keep_learned_state_in_eval_mode() -> None:
    seen: list[Rows] = []

    def act(rows: Rows) -> Any:
        seen.append(rows)
        return np.zeros(len(rows), int)

    with sync("parallel", 4, 2) as envs, sync("parallel", 7, 2) as others:
        collector = Collector(envs, FunctionPolicy(act), agent_connectors=[NormalizeObs(), FrameStack(2)], seed=0)
        collector.collect(env_steps=80)
        seen.clear()
        first = collector.evaluate(7, others, seed=1)
        then = [rows["obs"].copy() for rows in seen]
        assert len(then) > 3
        seen.clear()
        again = collector.evaluate(7, others, seed=1)
        for obs, rows in zip(then, seen, strict=True):  # had they learned, these would differ
            own, other = (np.delete(each, [2, 9], axis=1) for each in (obs, rows["obs"]))  # envs count their resets
            np.testing.assert_array_equal(own, other)
        assert [e.length for e in first.episodes] == [e.length for e in again.episodes]
        assert collector.agent_connectors["main"].training


def test_policies_do_not_explore_unless_told_so() -> None:
    class Explorer(Policy):
        told: list[bool] = []

        def act(self, rows: Rows, *, explore: bool = True) -> Any:
            self.told.append(explore)
            return np.zeros(len(rows), int)

    with sync("parallel", 2, 2) as envs, sync("parallel", 2, 2) as others:
        collector = Collector(envs, Explorer())
        collector.evaluate(1, others)
        assert Explorer.told
        assert not any(Explorer.told)
        Explorer.told.clear()
        collector.evaluate(1, others, explore=True)
        assert all(Explorer.told)


def test_seeds_make_it_repeatable_and_none_makes_another_one_each_time() -> None:
    def returns(collector: Collector, envs: Any, seed: int | None) -> list[float]:
        return [record.episode_return for record in collector.evaluate(6, envs, seed=seed).episodes]

    with sync("parallel", 2, 2) as envs, sync("parallel", 3, 2) as others, sync("parallel", 3, 2) as more:
        one, two = Collector(envs, RandomPolicy(), seed=1), Collector(envs, RandomPolicy(), seed=1)
        assert returns(one, others, 5) == returns(one, more, 5)
        first, second = returns(one, others, None), returns(one, others, None)
        assert first != second
        returns(two, more, None)
        assert [returns(two, more, None)] == [second]


def test_who_plays_whom_and_statistics_by_agent_and_policy() -> None:
    with sync("parallel", 2, 3) as envs, sync("parallel", 2, 3) as others:
        policies = {"a": EchoPolicy(0), "b": EchoPolicy(1), "unused": EchoPolicy(2)}
        policies["a"].version = 12
        names = envs.agents
        collector = Collector(envs, policies, {names[0]: "a", names[1]: "b", names[2]: "b"}, seed=0)
        found = collector.evaluate(5, others)
        assert found.versions == {"a": 12, "b": 0}
        assert found.returns.mean == pytest.approx(np.mean([e.returns_A.sum() for e in found.episodes]))
        assert found.returns.std == pytest.approx(np.std([e.returns_A.sum() for e in found.episodes]))
        for a, name in enumerate(names):
            own = [e.returns_A[a] for e in found.episodes if e.present_A[a]]
            stats = found.agent_returns[name]
            assert (stats.count, stats.min, stats.max) == (len(own), min(own), max(own))
        own = [e.returns_A[a] for e in found.episodes for a in (1, 2) if e.present_A[a]]
        assert found.policy_returns["b"].mean == pytest.approx(np.mean(own))
        text = repr(found)
        for part in (
            "5 episodes",
            "team return (sum over agents): ",
            "length",
            f"return of agent {names[0]!r}",
            "return per agent of policy 'b'",
            "±",
        ):
            assert part in text
        other = collector.evaluate(2, others, policy_mapping="unused")
        assert list(other.versions) == ["unused"]


def test_added_and_removed_policies_play_as_in_training() -> None:
    with sync("parallel", 2, 2) as envs, sync("parallel", 2, 2) as others:
        who = ["a"]
        collector = Collector(envs, {"a": EchoPolicy(0), "b": EchoPolicy(1)}, lambda *_: who[0], seed=0)
        collector.collect(env_steps=5)
        who[0] = "b"
        collector.reset()
        collector.remove_policy("a")
        assert list(collector.evaluate(2, others).versions) == ["b"]
        collector.collect(env_steps=50)
        collector.add_policy("c", EchoPolicy(2), like="b")
        assert list(collector.evaluate(2, others, policy_mapping="c").versions) == ["c"]


def test_a_policy_maps_policies_are_copied_when_they_play() -> None:
    with sync("parallel", 2, 2) as envs, sync("parallel", 2, 2) as others:
        policies = PolicyMap({f"p{i}": lambda i=i: EchoPolicy(i) for i in range(6)}, capacity=2)
        collector = Collector(envs, policies, "p0", seed=0)
        collector.collect(env_steps=4)
        found = collector.evaluate(3, others, policy_mapping="p5")
        assert list(found.versions) == ["p5"]
        assert len(policies.in_memory) <= 2


def test_lost_episodes_are_played_again_and_counted() -> None:
    makes = [lambda i=i: RaisingEnv(4, at=2, only_env=1, env_index=i, agent_num=2) for i in range(2)]
    with of_lengths([4]) as envs, SyncVectorEnv(makes, on_fault="mask") as others:
        found = Collector(envs, noop).evaluate(6, others)
        assert len(found) == 6
        assert found.lost == 1
        assert {record.env_id for record in found.episodes} == {0}  # env 1 is out for good
        assert "1 lost" in repr(found)


def test_it_may_be_called_while_batches_are_collected_in_the_background() -> None:
    with sync("parallel", 2, 2) as envs, sync("parallel", 2, 2) as others:
        collector = Collector(envs, EchoPolicy(), seed=0, evaluation_envs=others)
        with collector.background(env_steps=20, total=200) as batches:
            for batch in batches:
                assert batch.env_steps == 20
                assert len(collector.evaluate(2)) == 2


def test_wrong_calls_say_what_to_do() -> None:
    with sync("parallel", 2, 2) as envs, sync("parallel", 2, 3) as others:
        collector = Collector(envs, EchoPolicy(), seed=0)
        with pytest.raises(StateError, match="evaluation_envs"):
            collector.evaluate(3)
        with pytest.raises(ArgumentError, match="make\\(\\) others"):
            collector.evaluate(3, envs)
        with pytest.raises(ArgumentError, match="agents"):
            collector.evaluate(3, others)
        with pytest.raises(ArgumentError, match="evaluate\\(0\\)"):
            collector.evaluate(0, others)
        uncopied = Collector(envs, FunctionPolicy(noop.function), seed=0)
        uncopied.policies["main"].generator = (i for i in range(3))  # type: ignore[attr-defined]
        with pytest.raises(TypeError, match="generator") as caught, sync("parallel", 2, 2) as same:
            uncopied.evaluate(1, same)
        assert "policy 'main' was copied" in caught.value.__notes__[0]
