"""The collector's own calls: amounts, seeds, resets, iteration, evaluation, any envs and spaces."""

from __future__ import annotations

import os
import tracemalloc
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple
from hypothesis import given, settings
from hypothesis import strategies as st
from pettingzoo import ParallelEnv

import marlvec
from marlvec.collect import Collector, MultiAgentBatch
from marlvec.connectors import (
    AgentPipeline,
    FrameStack,
    GeneralAdvantageEstimation,
    NormalizeObs,
    Rows,
    agent_connector,
)
from marlvec.errors import ArgumentError, ClosedError, ContractError, EnvRaised, StateError
from marlvec.policies import FunctionPolicy, Policy, PolicyMap, RandomPolicy
from marlvec.testing import CounterEnv, NoOpEnv
from marlvec.testing.scripted import RaisingEnv, SampledEnv, Script, ScriptedParallelEnv
from marlvec.trees import tree_leaves
from marlvec.vector import SyncVectorEnv
from marlvec.vector.vector_step import VectorStep
from tests.collect.plans import LAST_STREAM
from tests.collect.players import MODES, EchoPolicy, asynchronous, noop, sync
from tests.collect.reference import same_batch

# --- the collector's own behaviour: amounts, seeds, resets, failing envs, real envs, any spaces


def equal(a: MultiAgentBatch, b: MultiAgentBatch) -> bool:
    """Whether two batches are equal, bit for bit, ids included."""
    try:
        same_batch(a, b)
    except AssertionError:
        return False
    return True


# --- amounts


def test_count_by_sets_the_unit_of_a_bare_number() -> None:
    with sync("parallel", 3, 3) as envs:
        assert Collector(envs, EchoPolicy(), seed=0).collect(25).env_steps == 25
        assert Collector(envs, EchoPolicy(), seed=0, count_by="agent_steps").collect(25).agent_steps == 25


@pytest.mark.parametrize(
    "arguments",
    [{}, {"env_steps": 1, "episodes": 1}, {"steps": 1, "env_steps": 1}, {"steps": 1, "agent_steps": 1}]
    + [{"env_steps": wrong} for wrong in (0, -1, 1.5, True, "3")],
)
def test_invalid_amount_raises_before_any_step(arguments: dict[str, Any]) -> None:
    with sync("parallel", 1, 1) as envs:
        collector = Collector(envs, EchoPolicy())
        with pytest.raises(ArgumentError):
            collector.collect(**arguments)
        assert collector.metrics.env_steps == 0


def test_wrong_constructor_arguments_are_refused() -> None:
    policy = RandomPolicy()
    with sync("parallel", 1, 1) as envs:
        wrong: list[tuple[Any, dict[str, Any], str]] = [
            (policy, {"batch_mode": "both"}, "batch_mode"),
            (policy, {"count_by": "steps"}, "count_by"),
            (policy, {"seed": -1}, "seed"),
            (policy, {"seed": 0.5}, "seed"),
            (policy, {"window": 0}, "window"),
            ({}, {}, "policies must be"),
            ("random", {}, "policies must be"),
            ({"main": RandomPolicy}, {}, r"got the class RandomPolicy: give an instance of it, RandomPolicy\(\.\.\.\)"),
            ({"main": lambda: policy}, {}, "call it, if it builds a policy"),
            ({3: policy}, {}, "must be a string"),
            ({"a": policy, "b": policy}, {"policy_mapping": "a"}, "two ids"),
        ]
        for policies, options, message in wrong:
            with pytest.raises(ArgumentError, match=message):
                Collector(envs, policies, **options)


# --- rows


def test_rewards_come_in_the_dtype_asked_for() -> None:
    with sync("parallel", 2, 2) as envs:
        assert Collector(envs, EchoPolicy(), seed=0).collect(env_steps=4)["main"].rewards.dtype == np.float64
        collector = Collector(envs, EchoPolicy(), seed=0, reward_dtype=np.float32)
        assert collector.collect(env_steps=4)["main"].rewards.dtype == np.float32
        assert collector.metrics.summary()["return"]["count"] >= 0


def test_policies_are_told_whether_to_explore() -> None:
    with sync("parallel", 1, 1) as envs:
        policy = EchoPolicy()
        collector = Collector(envs, policy, explore=False)
        collector.collect(env_steps=2)
        assert collector.explore is False
        collector.explore = True
        collector.collect(env_steps=1)
        assert policy.explored == [False, False, True]


# --- seeds and resets


@pytest.mark.mostly_slow("collects whole runs on several backends", quick=3)
@pytest.mark.parametrize("kind", ["masked", "turns", "keyed"])
def test_one_seed_fixes_everything_and_leaves_the_global_stream_alone(kind: str) -> None:
    def run(seed: int | None, mode: str = "same_step") -> MultiAgentBatch:
        with sync(kind, 3, 2, mode) as envs:
            policies = {"left": RandomPolicy(), "right": RandomPolicy()}
            mapping = lambda name, episode: ["left", "right"][int(episode.rng.integers(2))]  # noqa: E731  (short)
            return Collector(envs, policies, mapping, seed=seed).collect(env_steps=70)

    before = np.random.get_state()[1].copy()  # noqa: NPY002  (to see that nobody touches it)
    first = run(5)
    for mode in MODES:
        same_batch(first, run(5, mode))
    assert not equal(first, run(6))
    assert not equal(run(None), run(None))
    np.testing.assert_array_equal(before, np.random.get_state()[1])  # noqa: NPY002


def test_policies_have_streams_of_their_own() -> None:
    with sync("parallel", 2, 2) as envs:
        seeds: dict[str, int] = {}

        class Seeded(RandomPolicy):
            def setup(self, observation_space: Space[Any], action_space: Space[Any], *, seed: int) -> None:
                seeds[repr(id(self))] = seed
                super().setup(observation_space, action_space, seed=seed)

        for _ in range(2):
            Collector(envs, {"a": Seeded(), "b": Seeded()}, "a", seed=1)
        assert len(set(seeds.values())) == 2 * 2 / 2


# --- failing envs, interruptions


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_an_env_that_raises_ends_the_call_and_the_next_one_goes_on(backend: str) -> None:
    from marlvec.vector.async_env import AsyncVectorEnv

    factories = [lambda i=i: RaisingEnv(3, where="step", at=4, only_env=1, env_index=i) for i in range(2)]
    with (SyncVectorEnv if backend == "sync" else AsyncVectorEnv)(factories) as envs:
        collector = Collector(envs, noop(), seed=0)
        assert collector.collect(env_steps=6)["main"].truncated.sum() == 6
        with pytest.raises(EnvRaised, match="env 1"):
            collector.collect(env_steps=6)
        rows = collector.collect(env_steps=6)["main"]
        assert collector.metrics.episodes_interrupted == 2
        assert len(rows) == 18
        assert (rows["t"].reshape(6, 3) == np.arange(3)).all()


class Interrupted(SyncVectorEnv):
    """Ctrl-C, while waiting for the third result and whenever else it is set to come."""

    calls_left = 3

    def recv(self, min_envs: int | None = None, timeout: float | None = None) -> VectorStep:
        self.calls_left -= 1
        if self.calls_left == 0:
            raise KeyboardInterrupt
        return super().recv(min_envs, timeout)


@pytest.mark.fault("E11")
def test_an_interrupted_wait_loses_nothing() -> None:
    factories = [lambda i=i: CounterEnv([2, 3], env_index=i) for i in range(3)]
    with SyncVectorEnv(factories) as envs:
        expected = Collector(envs, RandomPolicy(), seed=0).collect(env_steps=30)
    with Interrupted(factories) as envs:
        collector = Collector(envs, RandomPolicy(), seed=0)
        for calls in (3, 4):
            envs.calls_left = calls
            with pytest.raises(KeyboardInterrupt):
                collector.collect(env_steps=30)
        same_batch(collector.collect(env_steps=30), expected)
        envs.calls_left = 3
        with pytest.raises(KeyboardInterrupt):
            collector.collect(env_steps=30)
        collector.reset()
        assert collector.collect(env_steps=30).env_steps == 30


def test_closed_envs_are_an_error_and_the_collector_closes_none() -> None:
    envs = sync("parallel", 1, 1)
    collector = Collector(envs, EchoPolicy())
    collector.collect(env_steps=3)
    assert not envs.closed
    envs.close()
    with pytest.raises(ClosedError):
        collector.collect(env_steps=3)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [("terminated", False, "neither terminated nor truncated"), ("acting", True, "has ended already")],
)
def test_envs_that_contradict_themselves_are_found_out(field: str, value: bool, message: str) -> None:
    class Liar(SyncVectorEnv):
        def recv(self, min_envs: int | None = None, timeout: float | None = None) -> VectorStep:
            step = super().recv(min_envs, timeout)
            getattr(step, field)[:, 0] = value
            return step

    script = Script([0, 0], [2, 4], ["terminated", "terminated"])
    with Liar([lambda: ScriptedParallelEnv(script, agent_num=2)]) as envs:
        with pytest.raises(ContractError, match=message) as caught:
            Collector(envs, noop()).collect(env_steps=10)
        assert "agent_0" in str(caught.value)


# --- any spaces, real envs

SPACES: list[tuple[Space[Any], Space[Any]]] = [
    (Discrete(7, start=-3), MultiDiscrete([3, 4])),
    (MultiBinary(3), MultiDiscrete([[3, 4], [2, 2]])),
    (Box(0, 255, (4, 4, 3), np.uint8), MultiBinary(4)),
    (Box(-1, 1, (), np.float16), Box(0, 9, (2, 2), np.int16)),
    (Dict(a=Box(-1, 1, (0,)), b=Tuple((Discrete(3), Box(-1, 1, (2,))))), Tuple((Discrete(3), Dict(x=Discrete(2))))),
    (Box(-1, 1, (3,)), Dict(move=Box(-2, 3, (2,)), say=Tuple((Discrete(4, start=1), MultiBinary(2))))),
]


@pytest.mark.parametrize(("observation_space", "action_space"), SPACES)
def test_any_space_goes_through(observation_space: Space[Any], action_space: Space[Any]) -> None:
    """`SampledEnv` refuses an action that its space does not contain, and pays a checksum of the right ones."""
    factories = [lambda i=i: SampledEnv(observation_space, action_space, env_index=i) for i in range(3)]
    for grouped in (False, True):
        with SyncVectorEnv(factories, grouped=grouped, validate="strict") as envs:
            rows = Collector(envs, RandomPolicy(), seed=0).collect(env_steps=31)["main"]
            assert len(rows) == 62
            for name, space in (
                ("obs", observation_space),
                ("next_obs", observation_space),
                ("actions_for_env", action_space),
            ):
                for i in (0, 30, 61):
                    assert space.contains(_row(space, rows[name], i)), name


def _row(space: Space[Any], tree: Any, i: int) -> Any:
    if isinstance(space, Dict):
        return {key: _row(sub, tree[key], i) for key, sub in space.spaces.items()}
    if isinstance(space, Tuple):
        return tuple(_row(sub, part, i) for sub, part in zip(space.spaces, tree, strict=True))
    return tree[i] if isinstance(space, Discrete) else np.asarray(tree[i])


def test_a_tuple_of_actions_may_come_with_columns_or_without() -> None:
    space = Tuple((Discrete(2), Dict(x=Discrete(2))))
    with SyncVectorEnv([lambda: SampledEnv(Discrete(3), space)]) as envs:

        def plain(rows: Rows) -> Any:
            return np.ones(len(rows), int), {"x": np.zeros(len(rows), int)}

        rows = Collector(envs, FunctionPolicy(plain)).collect(env_steps=4)["main"]
        assert rows.actions[0].all()
        policy = FunctionPolicy(lambda rows: (plain(rows), {"x": np.arange(len(rows))}))
        rows = Collector(envs, policy).collect(env_steps=4)["main"]
        assert rows["x"].tolist() == [0] * 4 + [1] * 4
        assert not rows.actions[1]["x"].any()


@pytest.mark.slow("collects whole runs on several backends")
def test_simple_spread_and_simple_tag_and_tictactoe() -> None:
    import pettingzoo
    from mpe2 import simple_spread_v3, simple_tag_v3

    with SyncVectorEnv([simple_spread_v3.parallel_env] * 3) as envs:
        collector = Collector(envs, RandomPolicy(), agent_connectors=AgentPipeline(), seed=0)
        rows = collector.collect(env_steps=3 * 60)["main"]
        assert rows.obs.shape == (540, 18)
        assert rows.truncated.sum() == 3 * 3 * 2
        assert not rows.terminated.any()
        assert collector.metrics.lengths.mean == 25
        going = ~rows.truncated[:-1] & (np.diff(rows["unroll_id"]) == 0)
        np.testing.assert_array_equal(rows.next_obs[:-1][going], rows.obs[1:][going])
        assert not (rows.next_obs[:-1][rows.truncated[:-1]] == rows.obs[1:][rows.truncated[:-1]]).all()

    with SyncVectorEnv([simple_tag_v3.parallel_env] * 2) as envs:
        mapping = {name: name.split("_")[0] for name in envs.agents}
        policies = {"adversary": RandomPolicy(), "agent": RandomPolicy()}
        batch = Collector(envs, policies, mapping, seed=0).collect(env_steps=100)
        assert (batch["adversary"].obs.shape, batch["agent"].obs.shape) == ((300, 16), (100, 14))

    with SyncVectorEnv([lambda: pettingzoo.make("aec", "classic/tictactoe-v3")] * 4) as envs:
        collector = Collector(envs, RandomPolicy(), batch_mode="complete", seed=0)
        rows = collector.collect(episodes=30)["main"]
        assert rows["action_mask"][np.arange(len(rows)), rows.actions].all()
        for record in collector.metrics.episodes:
            assert 5 <= record.length == record.lengths_A.sum() <= 9
            own = rows.take(rows["eps_id"] == record.eps_id)
            assert (own.terminated.sum(), own.rewards.sum()) == ((2, 0.0) if len(own) else (0, 0.0))


def test_repr() -> None:
    with sync("parallel", 2, 2) as envs:
        collector = Collector(envs, EchoPolicy(), seed=0)
        collector.collect(env_steps=20)
        assert repr(collector).startswith("<Collector of ['main'] in <SyncVectorEnv of scripted_parallel")
        assert "20 env steps" in repr(collector)
        assert (collector.batch_mode, collector.count_by) == ("truncate", "env_steps")


def test_policy_mapping_fn_is_policy_mapping() -> None:
    """RLlib's word, with a function as RLlib calls it, and with all else that a mapping may be."""

    def mapping(agent: str, episode: Any, **kwargs: Any) -> str:
        return "b" if agent == "agent_1" or episode.number % 2 else "a"

    for who in (mapping, {"agent_0": "a", "agent_1": "b", "agent_2": "a"}, "b"):
        batches = []
        for argument in ("policy_mapping", "policy_mapping_fn"):
            with sync("parallel", 3, 3) as envs:
                policies = {"a": RandomPolicy(), "b": RandomPolicy()}
                collector = Collector(envs, policies, seed=4, **{argument: who})  # type: ignore[arg-type]
                batches.append(collector.collect(env_steps=90))
        same_batch(*batches)
    with sync("parallel", 3, 3) as envs:
        for given in ("a", mapping):
            with pytest.raises(
                ArgumentError, match="^policy_mapping and policy_mapping_fn are two names of one argument"
            ):
                Collector(envs, {"a": noop()}, "a", policy_mapping_fn=given)


def test_a_stream_that_has_no_ids_is_refused() -> None:
    with sync("parallel", 1, 1) as envs:
        for stream in (-1, LAST_STREAM + 1, 0.5, True, None):
            with pytest.raises(ArgumentError, match=r"stream must be an integer from 0 to 2\*\*20 - 1"):
                Collector(envs, EchoPolicy(), stream=stream)  # type: ignore[arg-type]


def test_a_stream_is_set_before_anything_was_collected() -> None:
    with sync("parallel", 1, 1) as envs:
        collector = Collector(envs, EchoPolicy())
        collector.stream = 3
        assert collector.collect(env_steps=2)["main"].eps_id[0] == 3 << 43
        with pytest.raises(StateError, match=r"has collected with stream=3; give Collector\(stream=4\)"):
            collector.stream = 4
        assert collector.stream == 3


# --- batch after batch: `for batch in collector`, and any amount up to a total


@pytest.mark.checklist(112)
def test_a_collector_is_iterated_over_in_batches_of_its_size() -> None:
    with sync("keyed", 3, 2) as envs, sync("keyed", 3, 2) as others:
        collector = Collector(envs, EchoPolicy(), batch_size=7, seed=0)
        plain = Collector(others, EchoPolicy(), seed=0)
        for batch in islice(collector, 5):
            same_batch(batch, plain.collect(env_steps=7))
        same_batch(next(iter(collector)), plain.collect(env_steps=7))  # another iteration goes on


def test_a_batch_is_counted_as_the_collector_counts() -> None:
    with sync("parallel", 3, 2) as envs:
        collector = Collector(envs, EchoPolicy(), batch_size=11, count_by="agent_steps", seed=0)
        assert [batch.agent_steps for batch in islice(collector, 3)] == [11, 11, 11]


def test_without_a_batch_size_it_says_what_to_do() -> None:
    with sync("parallel", 1, 1) as envs:
        collector = Collector(envs, EchoPolicy())
        with pytest.raises(StateError, match=r"batch_size.*batches\(env_steps"):
            iter(collector)
        for size in (0, -1, 1.5, True, "4"):
            with pytest.raises(ArgumentError, match="batch_size=.*an integer of at least 1"):
                Collector(envs, EchoPolicy(), batch_size=size)  # type: ignore[arg-type]


@pytest.mark.slow("collects whole runs on several backends")
@settings(max_examples=40)
@given(
    amount=st.integers(1, 20),
    total=st.integers(1, 60),
    unit=st.sampled_from(["env_steps", "agent_steps"]),
    batch_mode=st.sampled_from(["truncate", "complete"]),
)
def test_a_total_is_met_and_no_more_is_collected(amount: int, total: int, unit: Any, batch_mode: Any) -> None:
    with sync("parallel", 3, 2) as envs:
        collector = Collector(envs, EchoPolicy(), batch_mode=batch_mode, seed=0)
        sizes = [getattr(batch, unit) for batch in collector.batches(**{unit: amount}, total=total)]
    if batch_mode == "truncate":
        assert sizes == [amount] * (total // amount) + ([total % amount] if total % amount else [])
    else:
        assert sum(sizes) >= total > sum(sizes[:-1])
        assert all(size >= amount for size in sizes[:-1])


def test_episodes_are_counted_as_asked() -> None:
    with sync("parallel", 2, 2) as envs:
        collector = Collector(envs, EchoPolicy(), batch_mode="complete", seed=0)
        counts = [len(set(batch["main"]["eps_id"].tolist())) for batch in collector.batches(episodes=3, total=7)]
        assert counts == [3, 3, 1]


@pytest.mark.parametrize("total", [0, -3, 2.5])
def test_a_wrong_total_is_refused_at_once(total: Any) -> None:
    with sync("parallel", 1, 1) as envs:
        collector = Collector(envs, EchoPolicy())
        with pytest.raises(ArgumentError, match=r"batches\(total="):
            collector.batches(env_steps=3, total=total)
        with pytest.raises(ArgumentError, match=r"batches\(\): expected exactly one"):
            collector.batches(total=3)


@pytest.mark.fault("E11")
def test_batch_error_is_raised_and_loses_no_rows() -> None:
    failing = [False]

    def act(rows: Any) -> Any:
        if failing[0]:
            raise ValueError("scripted")
        return [0] * len(rows)

    with sync("parallel", 2, 2) as envs:
        collector = Collector(envs, FunctionPolicy(act), seed=0)
        seen = 0
        for batch in collector.batches(env_steps=5, total=10):
            seen += batch.env_steps
            failing[0] = True
            with pytest.raises(ValueError, match="scripted"):
                next(collector.batches(env_steps=5))
            failing[0] = False
        assert seen == 10 == collector.metrics.env_steps


def test_a_bar_shows_how_far_it_has_come(capsys: pytest.CaptureFixture[str]) -> None:
    with sync("parallel", 2, 2) as envs:
        collector = Collector(envs, EchoPolicy(), seed=0)
        for _ in collector.batches(env_steps=20, total=50, progress=True):
            pass
        list(islice(collector.batches(episodes=1, progress=True), 2))
    shown = capsys.readouterr().err
    assert "env steps" in shown
    assert "50/50" in shown
    assert "mean return" in shown
    assert "…" not in shown


# --- evaluation: whole episodes elsewhere, an unbiased choice of them, and no trace in what is trained with


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
        found = Collector(envs, noop(), seed=0).evaluate(episodes, others)
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
        found = Collector(envs, noop()).evaluate(6, others)
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
        uncopied = Collector(envs, noop(), seed=0)
        uncopied.policies["main"].generator = (i for i in range(3))  # type: ignore[attr-defined]
        with pytest.raises(TypeError, match="generator") as caught, sync("parallel", 2, 2) as same:
            uncopied.evaluate(1, same)
        assert "policy 'main' was copied" in caught.value.__notes__[0]


# --- rows that a connector or a policy keeps stay as they were


class Keeper:
    """Keeps rows as they are, and copies of them."""

    def __init__(self) -> None:
        self.kept: list[tuple[Any, Any]] = []

    def keep(self, rows: Rows) -> Rows:
        for _, column in rows.items():
            self.kept += [(leaf, leaf.copy()) for _, leaf in tree_leaves(column)]
        return rows

    def check(self) -> None:
        assert len(self.kept) > 200
        for leaf, then in self.kept:
            np.testing.assert_array_equal(leaf, then)


@pytest.mark.mostly_slow("collects whole runs on several backends", quick=2)
@pytest.mark.parametrize("num_envs", [1, 4])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("backend", ["sync", "async"])
def test_rows_stay_as_they_were(backend: str, overlap: bool, num_envs: int) -> None:
    seen, asked = Keeper(), Keeper()
    policy = FunctionPolicy(lambda rows: asked.keep(rows).t % 5)
    with marlvec.make(CounterEnv, num_envs, backend=backend) as envs:
        chain = [agent_connector(seen.keep)]
        collector = marlvec.Collector(envs, policy, agent_connectors=chain, seed=0, overlap=overlap)
        for _ in range(3):
            collector.collect(env_steps=40)
        seen.check()
        asked.check()


# --- long runs need no more memory than short ones


def resident() -> float:
    """MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


@pytest.mark.slow("collects whole runs on several backends")
@pytest.mark.time_limit(600)
@pytest.mark.parametrize("batch_mode", ["truncate", "complete"])
def test_half_a_million_agent_rows_leave_memory_flat(batch_mode: str) -> None:
    with marlvec.make(NoOpEnv, num_envs=64, backend="sync", length=25) as envs:
        collector = marlvec.Collector(envs, marlvec.RandomPolicy(), seed=0, batch_mode=batch_mode)  # type: ignore[arg-type]
        while collector.metrics.agent_steps < 120_000:  # caches and tables have grown to what a batch needs
            collector.collect(env_steps=4096)
        before = resident()
        while collector.metrics.agent_steps < 500_000:
            collector.collect(env_steps=4096)
        assert resident() - before < 4.0
        assert collector.metrics.episodes_total > 6_000


class Pictures(ParallelEnv[str, Any, Any]):
    """Two agents that see pictures."""

    metadata: dict[str, Any] = {"name": "pictures"}  # PettingZoo's
    possible_agents = ["a", "b"]

    def observation_space(self, agent: str) -> Box:
        return Box(0, 255, (32, 32, 3), np.uint8)

    def action_space(self, agent: str) -> Discrete:
        return Discrete(2)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self.t = self.possible_agents[:], 0
        return self._told(), {agent: {} for agent in self.agents}

    def step(self, actions: Any) -> Any:
        self.t += 1
        told, agents, over = self._told(), self.agents, self.t == 20
        self.agents = [] if over else agents
        flags = dict.fromkeys(agents, over)
        return told, dict.fromkeys(agents, 1.0), dict.fromkeys(agents, False), flags, {agent: {} for agent in agents}

    def _told(self) -> Any:
        return {agent: np.full((32, 32, 3), 7 * self.t + k, np.uint8) for k, agent in enumerate(self.agents)}


def test_a_batch_of_pictures_holds_each_once_until_its_successors_are_read() -> None:
    class Values(marlvec.Policy):
        def act(self, rows: Any, *, explore: bool = True) -> Any:
            return np.zeros(len(rows), np.int64), {"values": rows["obs"].mean(axis=(1, 2, 3))}

    advantages = GeneralAdvantageEstimation(value_function=lambda rows: rows["obs"].mean(axis=(1, 2, 3)))
    with marlvec.make(Pictures, num_envs=4, backend="sync") as envs:
        collector = marlvec.Collector(envs, Values(), seed=0, learner_connectors=[advantages])
        collector.collect(env_steps=4)
        tracemalloc.start()
        try:
            rows = collector.collect(env_steps=4 * 64)["main"]
            minibatches = list(rows.minibatches(64, seed=0))
            peak = tracemalloc.get_traced_memory()[1] / rows["obs"].nbytes
        finally:
            tracemalloc.stop()
    assert len(minibatches) == 8
    assert peak < 2.5  # of which the minibatches hold one; with all successors it were more than four
    assert (rows["next_obs"][:-1][~rows["truncated"][:-1]][:60].max(axis=(1, 2, 3)) > 0).all()
