"""Whether an env runs inside or drives from outside: the batches are the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest

import marlvec
from marlvec import external
from marlvec.collect import Collector, MultiAgentBatch
from marlvec.connectors import FlattenObs, FrameStack, NormalizeObs
from marlvec.external import ExternalVectorEnv
from marlvec.registry import resolve
from marlvec.testing.scripted import ScriptedParallelEnv
from marlvec.trees import tree_leaves
from tests.external.helpers.drivers import Play, by_sight, play_parallel, play_turns


def simple_tag() -> Any:
    return resolve("simple_tag")(max_cycles=12)


def connect_four() -> Any:
    return resolve("connect_four")()


def leavers(env_index: int) -> ScriptedParallelEnv:
    """Agents leave one by one, some before others; lengths differ."""
    return ScriptedParallelEnv(agent_num=4, env_index=env_index, longest=7)


CASES: dict[str, tuple[Callable[..., Any], Callable[..., None]]] = {
    "simple_tag": (simple_tag, play_parallel),
    "connect_four": (connect_four, play_turns),
    "leaving early": (leavers, play_parallel),
}
NUM_ENVS, SEED = 3, 11


def factory(kind: str, i: int) -> Any:
    build = CASES[kind][0]
    return build(i) if build is leavers else build()


@contextmanager
def outside(kind: str, *, lockstep: bool, **options: Any) -> Iterator[ExternalVectorEnv]:
    """A vectorizer, and as many threads that drive their own env each."""
    with ExitStack() as stack:
        envs = stack.enter_context(external.make(partial(factory, kind, 0), NUM_ENVS, lockstep=lockstep, **options))
        for i, seed in enumerate(marlvec.env_seeds(SEED, NUM_ENVS)):
            driver = Play(envs, factory(kind, i), CASES[kind][1], env_id=i, seed=seed, timeout=60)
            stack.enter_context(driver)
        yield envs


def collector(envs: Any, kind: str, **options: Any) -> Collector:
    """With connectors that remember and that learn, and two policies where there are two sides."""
    policies = {"a": by_sight(1), "b": by_sight(2)}
    mapping: Any = lambda agent, episode: "a" if agent == envs.agents[0] else "b"  # noqa: E731
    if kind == "simple_tag":
        mapping = {agent: "a" if agent.startswith("adversary") else "b" for agent in envs.agents}
    chain = [FlattenObs(), NormalizeObs(), FrameStack(2)]
    return Collector(envs, policies, mapping, agent_connectors=chain, seed=SEED, **options)


def leaves(batch: MultiAgentBatch) -> dict[str, Any]:
    return {
        f"{policy_id}/{name}/{path}": np.asarray(leaf)
        for policy_id, own in sorted(batch.items())
        for name, column in own.items()
        for path, leaf in tree_leaves(column)
    }


def assert_same(one: MultiAgentBatch, other: MultiAgentBatch) -> None:
    found, wanted = leaves(one), leaves(other)
    assert found.keys() == wanted.keys()
    for name, leaf in wanted.items():
        assert leaf.dtype == found[name].dtype, name
        np.testing.assert_array_equal(found[name], leaf, err_msg=name)
    assert (one.env_steps, one.agent_steps) == (other.env_steps, other.agent_steps)


@pytest.mark.mostly_slow("many clients and connections", quick=8)
@pytest.mark.checklist(123)
@pytest.mark.parametrize("batch_mode", ["truncate", "complete"])
@pytest.mark.parametrize("kind", CASES)
def test_in_rounds_batches_are_the_same_bit_for_bit(kind: str, batch_mode: Any) -> None:
    inside = [partial(factory, kind, i) for i in range(NUM_ENVS)]
    with marlvec.make(inside, backend="sync") as envs, outside(kind, lockstep=True) as others:
        one = collector(envs, kind, batch_mode=batch_mode)
        other = collector(others, kind, batch_mode=batch_mode)
        for amount in (70, 41, 90):
            assert_same(one.collect(amount), other.collect(amount))
        records = [
            [
                (e.env_id, e.number, e.length, e.returns_A.tolist(), e.lengths_A.tolist(), e.truncated_A.tolist())
                for e in c.metrics.episodes
            ]
            for c in (one, other)
        ]
        assert records[0] == records[1]
        assert len(records[0]) > 5


def test_a_time_limit_cuts_as_it_does_inside() -> None:
    kind, inside = "leaving early", [partial(leavers, i) for i in range(NUM_ENVS)]
    with (
        marlvec.make(inside, backend="sync", max_episode_steps=3) as envs,
        outside(kind, lockstep=True, max_episode_steps=3) as others,
    ):
        one, other = collector(envs, kind), collector(others, kind)
        for amount in (40, 25):
            assert_same(one.collect(amount), other.collect(amount))


@pytest.mark.parametrize("kind", ["connect_four", "leaving early"])
def test_out_of_step_every_episode_is_the_same(kind: str) -> None:
    """Who is faster plays more episodes; what happens in each does not depend on it."""
    inside = [partial(factory, kind, i) for i in range(NUM_ENVS)]
    chain = [FlattenObs(), FrameStack(2)]
    with marlvec.make(inside, backend="sync") as envs, outside(kind, lockstep=False, copy=False) as others:
        one, other = (
            Collector(each, {"a": by_sight()}, agent_connectors=chain, batch_mode="complete", seed=SEED)
            for each in (envs, others)
        )
        wanted, found = (by_episode(c, c.collect(episodes=30)["a"]) for c in (one, other))
        assert len(wanted) == len(found) == 30  # one more may have ended with the last one, and comes next time
        common = wanted.keys() & found.keys()
        assert len(common) >= 10
        for key in common:
            for name, column in wanted[key].items():
                np.testing.assert_array_equal(found[key][name], column, err_msg=f"{key} {name}")


def by_episode(owner: Collector, rows: Any) -> dict[tuple[int, int], dict[str, Any]]:
    """(env, n-th episode there) → its rows, of the episodes that are in the batch."""
    names = (
        "obs",
        "actions",
        "rewards",
        "next_obs",
        "terminated",
        "truncated",
        "t",
        "env_t",
        "next_env_t",
        "agent_index",
    )
    out = {}
    for record in owner.metrics.episodes:
        mine = rows["eps_id"] == record.eps_id
        if not mine.any():
            continue
        out[record.env_id, record.number] = {name: rows[name][mine] for name in names}
    return out
