"""The collector's own behaviour: amounts, seeds, resets, failing envs, real envs, any spaces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple

from marlvec.collect import Collector, MultiAgentBatch
from marlvec.connectors import AgentPipeline, Rows
from marlvec.errors import ArgumentError, ClosedError, ContractError, EnvRaised, StateError
from marlvec.policies import FunctionPolicy, Policy, RandomPolicy
from marlvec.testing.scripted import CounterEnv, RaisingEnv, SampledEnv, Script, ScriptedParallelEnv
from marlvec.vector.in_process import SyncVectorEnv
from marlvec.vector.vector_step import VectorStep
from tests.collect.helpers.plans import LAST_STREAM
from tests.collect.helpers.players import MODES, EchoPolicy, sync

noop = FunctionPolicy(lambda rows: np.zeros(len(rows), int))


def same(a: MultiAgentBatch, b: MultiAgentBatch) -> bool:
    """Whether two batches are equal, bit for bit, ids included."""
    if list(a) != list(b) or a.env_steps != b.env_steps:
        return False
    pairs = [(a[name], b[name]) for name in a]
    return all(x.keys() == y.keys() and all(np.array_equal(x[key], y[key]) for key, _ in x.items()) for x, y in pairs)


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
    told: list[bool] = []

    class Asked(Policy):
        def act(self, rows: Rows, *, explore: bool = True) -> Any:
            told.append(explore)
            return np.zeros(len(rows), int)

    with sync("parallel", 1, 1) as envs:
        collector = Collector(envs, Asked(), explore=False)
        collector.collect(env_steps=2)
        assert collector.explore is False
        collector.explore = True
        collector.collect(env_steps=1)
        assert told == [False, False, True]


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
    assert all(same(first, run(5, mode)) for mode in MODES)
    assert not same(first, run(6))
    assert not same(run(None), run(None))
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
        collector = Collector(envs, FunctionPolicy(noop.function), seed=0)
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
        assert same(collector.collect(env_steps=30), expected)
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
            Collector(envs, noop).collect(env_steps=10)
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
        assert same(*batches)
    with sync("parallel", 3, 3) as envs:
        for given in ("a", mapping):
            with pytest.raises(
                ArgumentError, match="^policy_mapping and policy_mapping_fn are two names of one argument"
            ):
                Collector(envs, {"a": noop}, "a", policy_mapping_fn=given)


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
