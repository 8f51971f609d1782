"""Collectors drawn at random, each beside the reference: envs that die, calls made of both, and states that go on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marlvec.collect import Collector, Episode
from marlvec.collect.episodes import _EPISODE_STREAM
from marlvec.errors import RestartQuietly
from marlvec.testing.scripted import CounterEnv
from marlvec.testing.scripted.script import count_incarnation
from marlvec.vector import VectorEnv
from marlvec.vector.in_process import SyncVectorEnv
from marlvec.vector.settings import RestartLimit, restart_seed
from tests.collect.players import MODES, EchoPolicy, Scattered, build, factories
from tests.collect.reference import Mapping, Reference, Spy, World, check_batch
from tests.vector.support.drivers import driver_of
from tests.vector.support.kinds import vectorize

# --- envs that die at moments drawn beforehand, and the reference for them


class Died(Exception):
    """What a mortal env raises."""


Death = tuple[str, int, bool]  # the operation, which call of it, and whether it asks for a restart
Deaths = dict[tuple[int, int], Death]  # by env and incarnation

DEATHS = st.dictionaries(
    st.tuples(st.integers(0, 3), st.integers(0, 3)),
    st.tuples(st.sampled_from(["step", "step", "reset"]), st.integers(0, 12), st.booleans()),
    min_size=1,
)


def mortal(env: Any, death: Death | None) -> Any:
    """Let an env raise in one call."""
    if death is not None:
        operation, at, quiet = death
        method, calls = getattr(env, operation), count()

        def call(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == at:
                raise RestartQuietly if quiet else Died
            return method(*args, **kwargs)

        setattr(env, operation, call)
    return env


def bear(kind: str, env_index: int, agent_num: int, deaths: Deaths, marks: Path) -> Any:
    """One env; a folder of marks tells, in any process, which incarnation it is."""
    incarnation = count_incarnation(marks, env_index)
    return mortal(build(kind, env_index, agent_num), deaths.get((env_index, incarnation)))


def mortals(kind: str, num_envs: int, agent_num: int, deaths: Deaths, marks: Path) -> list[Callable[[], Any]]:
    """Factories of mortal envs."""
    return [partial(bear, kind, i, agent_num, deaths, marks) for i in range(num_envs)]


def dying_counters(
    deaths: Deaths, num_envs: int = 2, *, length: Any = 5, agent_num: int = 2, **settings: Any
) -> SyncVectorEnv:
    """Counter envs that die, in this process; by default they are built anew at once."""
    births: Counter[int] = Counter()

    def bear_counter(i: int) -> Any:
        births[i] += 1
        return mortal(CounterEnv(length, agent_num=agent_num, env_index=i), deaths.get((i, births[i] - 1)))

    return SyncVectorEnv([partial(bear_counter, i) for i in range(num_envs)], **{"on_fault": "restart"} | settings)


class MortalReference(Reference):
    """The reference, for envs that die and are built anew or masked.

    Args:
        deaths: Who dies when.
        masks: Whether those that do not ask for a restart are masked.
        options: As `Reference`'s.
    """

    def __init__(self, kind: str, *args: Any, deaths: Deaths, masks: bool, **options: Any) -> None:
        self.kind, self.deaths, self.masks = kind, deaths, masks
        self.incarnations: dict[int, int] = {}
        self.seeds: dict[int, int] = {}
        self.restarts: dict[int, int] = {}  # since the env was seeded
        super().__init__(kind, *args, **options)

    def _begin(self, world: World, seed: int | None) -> None:
        i = world.env
        if i not in self.incarnations:
            self.incarnations[i] = 0
            mortal(world.driver.env, self.deaths.get((i, 0)))
        if seed is not None:
            self.seeds[i], self.restarts[i] = seed, 0
        self._try_to_begin(world, seed)

    def _try_to_begin(self, world: World, seed: int | None) -> None:
        try:
            super()._begin(world, seed)
        except (Died, RestartQuietly) as death:
            self._go_on(world, death)

    def _go_on(self, world: World, death: Exception) -> None:
        if self.masks and isinstance(death, Died):
            self.worlds.remove(world)
            return
        i = world.env
        self.incarnations[i] += 1
        self.restarts[i] += 1
        env = mortal(build(self.kind, i, len(world.names)), self.deaths.get((i, self.incarnations[i])))
        world.driver = driver_of(env)
        self._try_to_begin(world, restart_seed(self.seeds[i], self.restarts[i]))

    def _step(self, world: World) -> bool:
        try:
            return super()._step(world)
        except (Died, RestartQuietly) as death:
            world.steps += 1
            self.lost_steps += world.length + 1 - world.counted
            dropped = [item for item in self.closed if item[1].eps_id == world.eps_id]
            self.closed = [item for item in self.closed if item[1].eps_id != world.eps_id]
            self.lost_rows += len(dropped) + len(world.open)
            self.lost[world.eps_id] = "fault" if isinstance(death, Died) else "restart"
            self.faulty += isinstance(death, Died)
            self.restarted += not isinstance(death, Died)
            self._go_on(world, death)
            return False


# --- collectors drawn at random, each beside the reference: the same calls of both, and all they return compared


SALTS = {"first": 0, "second": 1, "third": 2}
IDS = tuple(SALTS)
BATCH_MODES = ("truncate", "complete")
LAST_STREAM = 2**20 - 1


# --- who plays


def one(name: str, env: int, number: int) -> str:
    return "first"


def by_agent(name: str, env: int, number: int) -> str:
    return IDS[int(name[-1]) % 3]


def by_episode(name: str, env: int, number: int) -> str:
    return IDS[(int(name[-1]) + env + number) % 3]


def by_lot(name: str, episode: Episode) -> str:
    """Drawn from the episode's own stream."""
    return IDS[int(episode.rng.integers(3))]


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


# --- a collector and its reference


@dataclass
class Plan:
    """A collector and its envs, as the reference can predict them.

    Attributes:
        order: Seed of the order in which single envs reply; None: all at once.
        overlap: Whether policies act for one half of the envs while the other half steps.
        watched: Whether a callback is told of every step.
        deaths: Which env dies when; None: none does.
        masks: Whether envs that die are masked, not built anew.
    """

    kind: str = "parallel"
    mode: str = "same_step"
    num_envs: int = 3
    agent_num: int = 3
    seed: int = 0
    mapping: Any = by_episode
    learners: set[str] | None = None
    batch_mode: str = "truncate"
    copy: bool = True
    order: int | None = None
    overlap: bool = False
    stream: int = 0
    watched: bool = False
    deaths: Deaths | None = None
    masks: bool = False

    def __post_init__(self) -> None:
        if self.masks and self.deaths:  # env 0 lives on: where all are masked there are no more batches
            self.deaths = {(i, k): (*death[:2], death[2] or i == 0) for (i, k), death in self.deaths.items()}

    @contextmanager
    def envs(self, backend: str, **options: Any) -> Any:
        options |= {"autoreset_mode": self.mode, "copy": self.copy}
        with TemporaryDirectory() as marks:
            makes = factories(self.kind, self.num_envs, self.agent_num)
            if self.deaths is not None:
                makes = mortals(self.kind, self.num_envs, self.agent_num, self.deaths, Path(marks))
                options["on_fault"] = "mask" if self.masks else "restart"
                options["max_restarts"] = RestartLimit(count=100, backoff=0.0)
            if backend == "sync":
                options["validate"] = "strict"
            if backend == "sync" and self.order is not None:
                envs: VectorEnv = Scattered(makes, self.order, **options)
            else:
                envs = vectorize(backend, makes, **options)
            with envs:
                yield envs

    def reference(self, **options: Any) -> Reference:
        options |= {"mapping": plain_mapping(self.mapping, self.seed), "salts": SALTS, "stream": self.stream}
        options["learns"] = lambda name: self.learners is None or name in self.learners
        seats = self.kind, self.num_envs, self.agent_num, self.seed
        if self.deaths is None:
            return Reference(*seats, **options)
        return MortalReference(*seats, deaths=self.deaths, masks=self.masks, **options)

    def collector(self, envs: VectorEnv, spy: Spy, **options: Any) -> Collector:
        return Collector(
            envs,
            {name: EchoPolicy(salt) for name, salt in SALTS.items()},
            given_mapping(self.mapping, envs.agents),
            batch_mode=self.batch_mode,  # type: ignore[arg-type]  # one of the two
            seed=self.seed,
            policies_to_train=self.learners,
            overlap=self.overlap,
            window=10_000 if self.overlap else 100,
            stream=self.stream,
            callbacks=[spy] if self.watched else (),
            **options,
        )


def play(
    plan: Plan,
    calls: Sequence[tuple[str, Any]],
    backend: str = "sync",
    *,
    connectors: dict[str, Any] | None = None,
    **options: Any,
) -> Collector:
    """Make the same calls of collector and reference, and compare all they return and count.

    Args:
        plan: How both are made.
        calls: What is collected, in which unit; ("reset", seed) between.
        backend: Where the envs run.
        connectors: The collector's.
        options: What the reference makes of those.
    """
    workers = {"num_workers": min(options.pop("num_workers"), plan.num_envs)} if "num_workers" in options else {}
    spy, reference = Spy(), plan.reference(**options)
    with plan.envs(backend, **workers) as envs:
        collector = plan.collector(envs, spy, **(connectors or {}))
        for unit, amount in calls:
            if unit == "reset":
                seed = None if plan.mapping is by_lot else amount  # which would begin other streams
                reference.reset(seed)
                collector.reset(seed)
            else:
                expected = getattr(reference, plan.batch_mode)(unit, amount)
                check_batch(reference, collector.collect(**{unit: amount}), expected)
            check_counts(collector, reference)
        check_episodes(collector, reference, overlap=plan.overlap)
        if plan.watched:
            spy.check(collector)
            spy.check_against(reference)
            assert spy.calls["on_sample_end"] == sum(unit != "reset" for unit, _ in calls)
        if not plan.overlap:
            policies = collector.policies
            assert {name: policies[name].calls for name in IDS} == reference.calls, "one call per policy and step"
        if plan.watched and not plan.overlap:
            assert spy.calls["on_episode_step"] == reference.told, "one call for all envs of a step"
        assert not envs._call_state.pending, "nothing is on the way between two calls"
    return collector


def check_counts(collector: Collector, reference: Reference) -> None:
    metrics = collector.metrics
    assert (metrics.env_steps, metrics.agent_steps) == (reference.made, reference.decided)
    assert (metrics.env_steps_lost, metrics.agent_steps_lost) == (reference.lost_steps, reference.lost_rows)
    assert (metrics.episodes_faulty, metrics.episodes_restarted) == (reference.faulty, reference.restarted)
    assert metrics.episodes_total == len(reference.records)


def check_episodes(collector: Collector, reference: Reference, *, overlap: bool) -> None:
    """Compare records of finished episodes, and the statistics over them."""
    metrics, last, episodes = collector.metrics, reference.records[-100:], collector.metrics.episodes
    if overlap:  # envs of the other half may have ended first
        last, episodes = (sorted(all_, key=lambda record: record.eps_id) for all_ in (reference.records, episodes))
    for got, want in zip(episodes, last, strict=True):
        assert (got.eps_id, got.env_id, got.number, got.length) == (want.eps_id, want.env, want.number, want.length)
        assert got.returns_A.tolist() == want.returns
        assert got.lengths_A.tolist() == want.decisions
        assert got.present_A.tolist() == want.present
        assert got.truncated_A.tolist() == want.truncated
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


# --- what is drawn

UNITS = st.sampled_from(["env_steps", "agent_steps", "episodes"])
COLLECTS = UNITS.flatmap(lambda unit: st.tuples(st.just(unit), st.integers(1, 4 if unit == "episodes" else 25)))
RESETS = st.tuples(st.just("reset"), st.none() | st.integers(0, 2**32))
CALLS = st.lists(COLLECTS, min_size=1, max_size=5)
PROGRAMS = st.lists(st.one_of(COLLECTS, COLLECTS, RESETS), min_size=1, max_size=5)
"""Calls as in `CALLS`, and resets between them: half-way, all at once, with a new seed or without."""

LONG = [("env_steps", 25), ("agent_steps", 17), ("episodes", 3), ("reset", 5), ("agent_steps", 24), ("env_steps", 31)]
"""Whole and partial steps of all envs, rows left over, a reset half-way."""

DRAWN: dict[str, st.SearchStrategy[Any]] = {
    "mode": st.sampled_from(MODES),
    "num_envs": st.integers(1, 4),
    "agent_num": st.integers(1, 4),
    "seed": st.integers(0, 2**32),
    "mapping": st.sampled_from([one, by_agent, by_episode, by_lot]),
    "learners": st.none() | st.none() | st.sets(st.sampled_from(IDS)),
    "batch_mode": st.sampled_from(BATCH_MODES),
    "copy": st.booleans(),
    "order": st.none() | st.integers(0, 2**32),
    "overlap": st.booleans(),
    "stream": st.sampled_from([0, 0, LAST_STREAM]),
    "watched": st.booleans(),
}
"""What may be drawn of any plan; the rest is the test's."""

FEW_OR_MANY = pytest.mark.parametrize(
    "examples",
    [
        pytest.param(4, id="few"),
        pytest.param(40, id="many", marks=pytest.mark.slow("many runs beside the reference")),
        pytest.param(400, id="most", marks=[pytest.mark.soak, pytest.mark.time_limit(3600)]),
    ],
)


def for_examples(examples: int, check: Callable[..., None], **drawn: st.SearchStrategy[Any]) -> None:
    """Call a check with drawn arguments.

    Args:
        examples: How often.
        check: The check.
        drawn: Its arguments.
    """

    @settings(max_examples=examples, deadline=None)
    @given(**drawn)
    def check_drawn(**found: Any) -> None:
        check(**found)

    check_drawn()
