"""The collector against a slow reference, row for row, over whole runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marlvec.collect import Collector, Episode
from marlvec.collect.episodes import _EPISODE_STREAM
from marlvec.connectors import Rows, action_connector, agent_connector
from tests.collect.helpers.players import KINDS, MODES, EchoPolicy, sync
from tests.collect.helpers.reference import Mapping, Reference, check_batch

SALTS = {"first": 0, "second": 1, "third": 2}
IDS = tuple(SALTS)
BATCH_MODES = ("truncate", "complete")


def one(name: str, env: int, number: int) -> str:
    return "first"


def by_agent(name: str, env: int, number: int) -> str:
    return IDS[int(name[-1]) % 3]


def by_episode(name: str, env: int, number: int) -> str:
    return IDS[(int(name[-1]) + env + number) % 3]


def by_lot(name: str, episode: Episode) -> str:
    """Drawn from the episode's own stream."""
    return IDS[int(episode.rng.integers(3))]


MAPPINGS = st.sampled_from([one, by_agent, by_episode, by_lot])
LEARNERS = st.none() | st.sets(st.sampled_from(IDS))


def given_mapping(mapping: Any, names: tuple[str, ...]) -> Any:
    """A mapping as the collector takes it: an id, a dict, or a function."""
    if mapping is one:
        return "first"
    if mapping is by_agent:
        return {name: by_agent(name, 0, 0) for name in names}
    if mapping is by_lot:
        return by_lot
    return lambda name, episode: by_episode(name, episode.env_id, episode.number)


def plain_mapping(mapping: Any, seed: int) -> Mapping:
    """The same mapping as the reference takes it; it asks about each agent of each episode once, in order."""
    if mapping is not by_lot:
        return mapping  # type: ignore[no-any-return]  # one of the three above
    streams: dict[tuple[int, int], np.random.Generator] = {}

    def drawn(name: str, env: int, number: int) -> str:
        if (env, number) not in streams:
            key = (_EPISODE_STREAM, env, number)
            streams[env, number] = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))
        return IDS[int(streams[env, number].integers(3))]

    return drawn


def run(
    envs: Any,
    kind: str,
    seed: int,
    mapping: Any,
    batch_mode: str,
    calls: list[tuple[str, Any]],
    *,
    learners: set[str] | None = None,
    reference_class: Callable[..., Reference] = Reference,
    check_sums: Callable[[Collector, list[Any]], None] | None = None,
    **options: Any,
) -> tuple[Collector, Reference]:
    """Make the same calls of both, and compare all they return."""
    policies = {name: EchoPolicy(salt) for name, salt in SALTS.items()}
    connectors = {key: options.pop(key) for key in ("agent_connectors", "action_connectors") if key in options}
    collector: Collector = Collector(
        envs,
        policies,
        given_mapping(mapping, envs.agents),
        batch_mode=batch_mode,  # type: ignore[arg-type]  # one of the two
        seed=seed,
        policies_to_train=learners,
        **connectors,
    )
    reference = reference_class(
        kind,
        envs.num_envs,
        envs.agent_num,
        seed,
        mapping=plain_mapping(mapping, seed),
        salts=SALTS,
        learns=lambda name: learners is None or name in learners,
        **options,
    )
    batches: list[Any] = []
    for unit, amount in calls:
        if unit == "reset":
            new_seed = None if mapping is by_lot else amount  # which would begin other streams
            reference.reset(new_seed)
            collector.reset(new_seed)
            continue
        expected = getattr(reference, batch_mode)(unit, amount)
        batches.append(collector.collect(**{unit: amount}))
        check_batch(reference, batches[-1], expected)
        if check_sums is not None:
            check_sums(collector, batches)
    check_metrics(collector, reference)
    return collector, reference


def check_metrics(collector: Collector, reference: Reference) -> None:
    metrics, records = collector.metrics, reference.records
    assert (metrics.env_steps, metrics.agent_steps) == (reference.made, reference.decided)
    assert (metrics.env_steps_lost, metrics.agent_steps_lost) == (reference.lost_steps, reference.lost_rows)
    assert (metrics.episodes_faulty, metrics.episodes_restarted) == (reference.faulty, reference.restarted)
    assert metrics.episodes_total == len(records)
    last = records[-100:]
    assert len(metrics.episodes) == len(last)
    for got, want in zip(metrics.episodes, last, strict=True):
        assert (got.eps_id, got.env_id, got.number, got.length) == (want.eps_id, want.env, want.number, want.length)
        assert got.returns_A.tolist() == want.returns
        assert got.lengths_A.tolist() == want.decisions
        assert got.present_A.tolist() == want.present
        assert got.policies == want.policies
        assert got.duration > 0
    check_stats(metrics.returns, [sum(record.returns) for record in last])
    check_stats(metrics.lengths, [record.length for record in last])
    for i in range(collector.envs.num_envs):
        check_stats(metrics.env(i)["return"], [sum(record.returns) for record in last if record.env == i])
        check_stats(metrics.env(i)["length"], [record.length for record in last if record.env == i])
    seats = [(record, a) for record in last for a in range(len(record.returns)) if record.present[a]]
    for a, name in enumerate(collector.envs.agents):
        check_stats(metrics.agent(name)["return"], [record.returns[a] for record, b in seats if b == a])
        check_stats(metrics.agent(name)["length"], [record.decisions[a] for record, b in seats if b == a])
    for policy in SALTS:
        own = [(record, a) for record, a in seats if record.policies[a] == policy]
        check_stats(metrics.policy(policy)["return"], [record.returns[a] for record, a in own])
        check_stats(metrics.policy(policy)["length"], [record.decisions[a] for record, a in own])
        assert metrics.policy(policy)["duration"].count == len(own)


def check_stats(stats: Any, values: list[float]) -> None:
    assert stats.count == len(values)
    if values:
        assert (stats.min, stats.max) == (min(values), max(values))
        assert stats.mean == pytest.approx(sum(values) / len(values), rel=1e-12)
    else:
        assert np.isnan([stats.min, stats.mean, stats.max]).all()


UNITS = st.sampled_from(["env_steps", "agent_steps", "episodes"])
CALLS = st.lists(
    UNITS.flatmap(lambda unit: st.tuples(st.just(unit), st.integers(1, 4 if unit == "episodes" else 25))),
    min_size=1,
    max_size=5,
)


RESETS = st.tuples(st.just("reset"), st.none() | st.integers(0, 2**32))
PROGRAMS = st.lists(
    st.one_of(CALLS.map(lambda calls: calls[0]), CALLS.map(lambda calls: calls[0]), RESETS), min_size=1, max_size=5
)
"""Calls as in `CALLS`, and resets between them: half-way, all at once, with a new seed or without."""


@pytest.mark.checklist(49)
@pytest.mark.checklist(100)
@pytest.mark.checklist(106)
@pytest.mark.checklist(112)
@pytest.mark.checklist(114)
@pytest.mark.checklist(115)
@pytest.mark.checklist(117)
@pytest.mark.checklist(119)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=36)
@given(
    num_envs=st.integers(1, 4),
    agent_num=st.integers(1, 4),
    seed=st.integers(0, 2**32),
    mapping=MAPPINGS,
    learners=LEARNERS,
    batch_mode=st.sampled_from(BATCH_MODES),
    calls=PROGRAMS,
    copy=st.booleans(),
)
def test_every_row_is_the_references_in_every_autoreset_mode(
    kind: str,
    num_envs: int,
    agent_num: int,
    seed: int,
    mapping: Any,
    learners: set[str] | None,
    batch_mode: str,
    calls: list[tuple[str, Any]],
    copy: bool,
) -> None:
    for mode in MODES:
        with sync(kind, num_envs, agent_num, mode, copy=copy) as envs:
            run(envs, kind, seed, mapping, batch_mode, calls, learners=learners)


@agent_connector(name="double")
def double(rows: Rows) -> Rows:
    return rows.replace(obs=rows["obs"] * 2.0 + 1.0)


@agent_connector(name="small")
def small(rows: Rows) -> Rows:
    return rows.replace(rewards=np.sign(rows["rewards"]))


@action_connector(name="shift")
def shift(rows: Rows) -> Rows:
    return rows.replace(actions_for_env=(rows["actions_for_env"] + 2) % 5)


@pytest.mark.checklist(96)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["parallel", "turns", "keyed"])
def test_connectors_stand_between_envs_policies_and_batches(kind: str, mode: str) -> None:
    """Batches hold what the policy saw and gave, beside what the env got; metrics count what the env paid."""
    with sync(kind, 3, 3, mode) as envs:
        collector, reference = run(
            envs,
            kind,
            11,
            by_episode,
            "truncate",
            [("env_steps", 100), ("episodes", 4), ("env_steps", 31)],
            agent_connectors=[double, small],
            action_connectors=[shift],
            see=lambda obs: obs * 2.0 + 1.0,
            worth=lambda reward: float(np.sign(reward)),
            send=lambda action: (action + 2) % 5,
        )
        assert collector.metrics.returns.max > 1000  # raw, not the signs in the batches
        assert reference.records
