"""Ctrl-C, or an error, wherever it comes.

The next call goes on as if nothing had been, or what ran is lost and counted; rows are true, none comes twice, and none
is missing that was not declared lost; every env goes on; and nothing waits for ever.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import marlvec
from marlvec.collect import Collector
from marlvec.collect.callbacks import Callback, LossReason, RunningEpisode
from marlvec.collect.metrics.episode_table import EpisodeRecord
from marlvec.collect.rollout import RolloutLoop
from marlvec.connectors import ActionConnector, AgentConnector, FilterRows, LearnerConnector, Rows
from marlvec.errors import BrokenError
from marlvec.policies import FunctionPolicy, Policy
from marlvec.vector import VectorEnv
from tests.collect.rollout.test_driven_by_others import check_rows
from tests.tracer import Tracer
from tests.vector.pools.test_pool import factories_of, pooled
from tests.vector.support.world_pool import PoolShop

N = 3


class Clock:
    """Two agents see (step, episode); the reward says what they did in which step.

    Args:
        interrupt_at: In which of its steps it is interrupted, from 1; 0: never.
    """

    def __init__(self, interrupt_at: int = 0) -> None:
        self.metadata: dict[str, Any] = {}
        self.possible_agents = ["a", "b"]
        self.agents = self.possible_agents[:]
        self.t = self.episode = self.steps = 0
        self.interrupt_at = interrupt_at

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(0, 1e9, (2,), np.float64)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(5)

    def obs(self) -> dict[str, Any]:
        return {agent: np.array([self.t, self.episode], np.float64) for agent in self.possible_agents}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.t, self.episode, self.agents = 0, self.episode + 1, self.possible_agents[:]
        return self.obs(), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        self.steps += 1
        if self.steps == self.interrupt_at:
            raise KeyboardInterrupt
        self.t += 1
        over = self.t >= 4
        rewards = {agent: float(100 * self.t + actions[agent]) for agent in self.possible_agents}
        flags = dict.fromkeys(self.possible_agents, over)
        if over:
            self.agents = []
        none = dict.fromkeys(self.possible_agents, False)
        return self.obs(), rewards, none, flags, {agent: {} for agent in self.possible_agents}

    def close(self) -> None:
        pass


def decide(rows: Rows) -> Any:
    return (rows["obs"][:, 0] * 7 + rows["obs"][:, 1]).astype(np.int64) % 5


def noop(rows: Rows) -> Any:
    return np.zeros(len(rows), np.int64)


def check(batch: Any) -> None:
    """Rows are those that the envs gave, each with its own decision and what came of it."""
    check_rows(batch)
    rows = batch["main"]
    if rows["obs"].shape[1] != 2:  # another env
        return
    np.testing.assert_array_equal(rows["obs"][:, 0], rows["env_t"])
    np.testing.assert_array_equal(rows["next_obs"][:, 0], rows["next_env_t"])
    np.testing.assert_array_equal(rows["t"], rows["env_t"])
    np.testing.assert_array_equal(rows["actions"], decide(rows))
    np.testing.assert_array_equal(rows["rewards"], 100 * rows["next_obs"][:, 0] + rows["actions"])
    np.testing.assert_array_equal(rows["obs"][:, 1], rows["next_obs"][:, 1])


class Books:
    """Holds what a collector delivers against what it counts.

    Args:
        collector: The collector.
    """

    def __init__(self, collector: Collector) -> None:
        self.collector = collector
        self.env_steps = self.agent_steps = 0
        self.seen: dict[tuple[int, int], set[int]] = {}
        self._grown: set[tuple[int, int]] = set()  # of those, whose rows came since the last look for gaps

    def take(self, batch: Any) -> None:
        """A batch was delivered: its rows are true, and new."""
        check(batch)
        self.env_steps += batch.env_steps
        self.agent_steps += batch.agent_steps
        if "main" in batch:
            self._note(batch["main"])

    def _note(self, rows: Any) -> None:
        """None of these rows has come before."""
        for eps_id, agent, t in zip(*(rows[name].tolist() for name in ("eps_id", "agent_index", "t")), strict=True):
            known = self.seen.setdefault((eps_id, agent), set())
            assert t not in known, f"{(eps_id, agent, t)} came twice"
            known.add(t)
            self._grown.add((eps_id, agent))

    def settle(self) -> None:
        """Nothing is missing: what envs answered was delivered, or is lost, or waits."""
        metrics = self.collector.metrics
        counters = self.collector._current.state.counters
        assert metrics.env_steps == self.env_steps + metrics.env_steps_lost + counters.waiting_env_steps
        assert self.agent_steps + metrics.agent_steps_lost <= metrics.agent_steps
        assert counters.env_steps_delivered == self.env_steps
        assert counters.agent_steps_delivered == self.agent_steps
        assert (metrics.env_steps_lost > 0) <= (metrics.episodes_interrupted > 0 or self.resets > 0)
        for key in self._grown:
            found = self.seen[key]
            assert found == set(range(len(found))), f"{key} has a gap: {sorted(found)}"
        self._grown.clear()
        assert len({record.eps_id for record in metrics.episodes}) == len(metrics.episodes)

    resets = 0

    def go_on(self, *, complete: bool = False) -> None:
        """Two more batches, of all envs."""
        amounts = [{"env_steps": 2 * N}, {"env_steps": 3 * N - 1}]
        if complete:
            amounts = [{"episodes": N}, {"episodes": N + 1}]
        envs: set[int] = set()
        for amount in amounts:
            batch = self.collector.collect(**amount)
            self.take(batch)
            envs |= set(batch["main"]["env_id"].tolist())
        assert complete or envs == set(range(N))
        self.settle()


def healed(collector: Collector, *, in_background: bool = True) -> None:
    """After a reset whole episodes are collected, also by another thread, and weights can be changed."""
    collector.reset()
    before, lost = collector.metrics.env_steps, collector.metrics.env_steps_lost
    batches = [collector.collect(env_steps=k) for k in (4 * N, 2 * N + 1, 3 * N)]
    with collector.updating():
        pass
    if in_background:
        with collector.background(env_steps=2 * N, total=2 * N) as more:
            batches += list(more)
    else:
        batches.append(collector.collect(env_steps=2 * N))
    for batch in batches:
        check(batch)
    keys = [
        key
        for batch in batches
        for key in zip(*(batch["main"][name].tolist() for name in ("eps_id", "agent_index", "t")), strict=True)
    ]
    assert len(set(keys)) == len(keys)
    assert collector.metrics.env_steps - before == sum(batch.env_steps for batch in batches) == 11 * N + 1
    assert collector.metrics.env_steps_lost == lost


# --- in somebody else's code


class Interrupting:
    """Counts calls, and is interrupted in one of them."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def in_env(at: int, **options: Any) -> tuple[VectorEnv, dict[str, Any]]:
    makes = [lambda i=i: Clock(at if i == 1 else 0) for i in range(N)]
    return marlvec.make(makes, backend="sync", **options), {}


def in_policy(at: int, **options: Any) -> tuple[VectorEnv, dict[str, Any]]:
    interrupt = Interrupting(at)

    class Stopped(Policy):
        def act(self, rows: Rows, *, explore: bool = True) -> Any:
            interrupt()
            return decide(rows)

    return marlvec.make(Clock, num_envs=N, backend="sync", **options), {"policies": Stopped()}


def in_agent_connector(at: int, **options: Any) -> tuple[VectorEnv, dict[str, Any]]:
    interrupt = Interrupting(at)

    class Stopped(AgentConnector):
        def __call__(self, rows: Rows) -> Rows:
            interrupt()
            return rows

    return marlvec.make(Clock, num_envs=N, backend="sync", **options), {"agent_connectors": [Stopped()]}


def in_action_connector(at: int, **options: Any) -> tuple[VectorEnv, dict[str, Any]]:
    interrupt = Interrupting(at)

    class Stopped(ActionConnector):
        def __call__(self, rows: Rows) -> Rows:
            interrupt()
            return rows

    return marlvec.make(Clock, num_envs=N, backend="sync", **options), {"action_connectors": [Stopped()]}


def in_learner_connector(at: int, **options: Any) -> tuple[VectorEnv, dict[str, Any]]:
    interrupt = Interrupting(at)

    class Stopped(LearnerConnector):
        def __call__(self, rows: Rows) -> Rows:
            interrupt()
            return rows

    return marlvec.make(Clock, num_envs=N, backend="sync", **options), {"learner_connectors": [Stopped()]}


@pytest.mark.fault("A25")
@pytest.mark.parametrize("mode", ["same_step", "next_step", "disabled"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("at", [1, 2, 5, 9])
@pytest.mark.parametrize(
    "where",
    [in_env, in_policy, in_agent_connector, in_action_connector, in_learner_connector],
    ids=lambda f: f.__name__,
)
def test_in_code_of_others(where: Callable[..., Any], at: int, overlap: bool, mode: str) -> None:
    envs, parts = where(at, autoreset_mode=mode)
    with envs:
        policies = parts.pop("policies", FunctionPolicy(decide))
        collector = Collector(envs, policies, seed=0, overlap=overlap, **parts)
        books = Books(collector)
        with pytest.raises(KeyboardInterrupt):
            for _ in range(12):
                books.take(collector.collect(env_steps=2 * N))
        books.go_on()
        if where in (in_policy, in_action_connector, in_learner_connector):  # nothing was lost
            assert collector.metrics.env_steps_lost == 0
            assert collector.metrics.episodes_interrupted == 0
        else:
            assert collector.metrics.episodes_interrupted == (0 if at == 1 and where is in_agent_connector else N)
        healed(collector)


# --- at any line


COLLECT = ("/marlvec/collect/",)
ALL = pytest.param(1, id="all", marks=[pytest.mark.soak, pytest.mark.time_limit(7200)])
EVERY_LINE = [pytest.param(7, id="some"), ALL]


def made(backend: str, mode: str) -> VectorEnv:
    options: dict[str, Any] = {"num_workers": 2} if backend in ("thread", "async") else {}
    if backend == "native":
        pytest.importorskip("numba")
        return marlvec.make("simple_spread", num_envs=N, backend="native", autoreset_mode=mode, max_cycles=4)
    if backend == "pool":
        return pooled(PoolShop(factories_of("single", N), num_spares=1), N, autoreset_mode=mode)
    return marlvec.make(Clock, num_envs=N, backend=backend, autoreset_mode=mode, **options)


def sweep(books: Books, call: Callable[[], Any], *, step: int, first: int = 1, complete: bool = False) -> Counter[str]:
    """Interrupt a call at one line after the other, and hold what comes after each to what is promised.

    Args:
        books: Of the collector.
        call: Gives batches.
        step: Every how manieth line.
        first: The first.
        complete: Whether batches are of whole episodes.

    Returns:
        How often nothing was lost, and how often what ran was.
    """
    found: Counter[str] = Counter()
    metrics, line = books.collector.metrics, first
    while True:
        interrupted = metrics.episodes_interrupted
        batches: list[Any] = []
        try:
            with Tracer(COLLECT, line) as tracer:
                for batch in call():
                    batches.append(batch)  # what has come is there, whatever comes then
        except KeyboardInterrupt:
            pass
        try:
            for batch in batches:
                books.take(batch)
            books.go_on(complete=complete)
        except BaseException as error:
            error.add_note(f"after Ctrl-C at {tracer.place}, line {line} of the call")
            raise
        if tracer.place is None:
            return found
        lost = metrics.episodes_interrupted - interrupted
        assert lost <= N
        found["lost" if lost else "fine"] += 1
        line += step


def collector_of(envs: VectorEnv, **options: Any) -> Collector:
    policy = FunctionPolicy(noop if envs.backend in ("native", "pool") else decide)
    return Collector(envs, policy, seed=0, callbacks=[Teller()], **options)


class Teller(Callback):
    """Is told of everything once, and of every episode's end or loss, but not of both."""

    def __init__(self) -> None:
        self.running: set[int] = set()

    def on_episode_created(self, episode: RunningEpisode) -> None:
        assert episode.eps_id not in self.running
        self.running.add(episode.eps_id)

    def on_episode_end(self, episode: RunningEpisode, record: EpisodeRecord) -> None:
        self.running.remove(episode.eps_id)

    def on_episode_lost(self, episode: RunningEpisode, why: LossReason) -> None:
        self.running.remove(episode.eps_id)


@pytest.mark.fault("A25")
@pytest.mark.parametrize("step", EVERY_LINE)
@pytest.mark.parametrize("batch_mode", ["truncate", "complete"])
@pytest.mark.parametrize(
    ("backend", "mode", "overlap"),
    [
        ("sync", "same_step", False),
        ("sync", "next_step", True),
        ("sync", "disabled", False),
        ("thread", "same_step", True),
        ("async", "same_step", False),
        ("async", "next_step", True),
        ("native", "same_step", False),
        ("pool", "same_step", False),
    ],
)
def test_at_any_line_of_a_collect(backend: str, mode: str, overlap: bool, batch_mode: Any, step: int) -> None:
    complete = batch_mode == "complete"
    if step > 1:  # each of them other lines
        step *= {"sync": 1, "thread": 5, "async": 7, "native": 5, "pool": 3}[backend] * (2 if overlap else 1)
    with made(backend, mode) as envs:
        collector = collector_of(envs, overlap=overlap, batch_mode=batch_mode)
        books = Books(collector)
        books.go_on(complete=complete)
        amount = {"episodes": N} if complete else {"env_steps": 4 * N}
        found = sweep(books, lambda: [collector.collect(**amount)], step=step, complete=complete)
        assert found.total() > 15
        assert found["fine"] > 0
        healed_counts = books.collector.metrics.episodes_interrupted
        assert healed_counts <= found["lost"] * N
        if not complete:
            healed(collector)


@pytest.mark.fault("A25")
@pytest.mark.parametrize("step", EVERY_LINE)
@pytest.mark.parametrize(
    "what", ["agent_steps", "two_policies", "frozen", "frozen_agent_steps", "noops", "random_steps", "batches"]
)
def test_at_any_line_of_other_collects(what: str, step: int) -> None:
    options: dict[str, Any] = {}
    with made("sync", "same_step") as envs:
        if what == "noops":
            options["agent_connectors"] = [FilterRows(lambda rows: (rows["obs"][:, 0] != 2) | rows["last"], noop=0)]
        if what == "random_steps":
            options["random_steps"] = 10**6
        if what == "two_policies":
            policies = {"main": FunctionPolicy(decide), "other": FunctionPolicy(decide)}
            mapping = lambda agent, episode: "main" if (episode.number % 2) == (agent == "a") else "other"  # noqa: E731
            collector = Collector(envs, policies, mapping, seed=0)
        elif what.startswith("frozen"):
            mapping = lambda agent, episode: ("main", "old", "older")[(episode.number + (agent == "a")) % 3]  # noqa: E731
            collector = Collector(envs, {"main": FunctionPolicy(decide)}, mapping, seed=0)
            for policy_id in ("old", "older"):
                collector.add_policy(policy_id, FunctionPolicy(decide), frozen=True)
        else:
            collector = Collector(envs, FunctionPolicy(decide), seed=0, **options)
        is_loose = what in ("noops", "random_steps", "two_policies", "frozen", "frozen_agent_steps")
        books = Loose(collector) if is_loose else Books(collector)
        books.go_on()
        amount = {"agent_steps": 7} if what.endswith("agent_steps") else {"env_steps": 3 * N + 1}
        if what == "batches":
            found = sweep(books, lambda: collector.batches(env_steps=2 * N, total=2 * N), step=step)
        else:
            found = sweep(books, lambda: [collector.collect(**amount)], step=step)
        assert found["fine"] > 0
        collector._batch_builder.drop_delivered()
        stored = collector._batch_builder.all_closed().values()
        assert collector._current.state.counters.closed_steps == sum(map(len, stored))


class Loose(Books):
    """Where rows are not all agents', or not as the policy decided."""

    def take(self, batch: Any) -> None:
        self.env_steps += batch.env_steps
        self.agent_steps += batch.agent_steps
        for name in batch:
            rows = batch[name]
            np.testing.assert_array_equal(rows["obs"][:, 0], rows["env_t"])
            np.testing.assert_array_equal(rows["next_obs"][:, 0], rows["next_env_t"])
            self._note(rows)

    def go_on(self, *, complete: bool = False) -> None:
        for amount in (2 * N, 3 * N - 1):
            self.take(self.collector.collect(env_steps=amount))
        self.settle()


@pytest.mark.fault("A25")
@pytest.mark.parametrize("step", EVERY_LINE)
def test_at_any_line_of_the_recovery(step: int) -> None:
    """Ctrl-C, and once more while the next call declares lost what ran."""
    with made("sync", "same_step") as envs:
        collector = collector_of(envs)
        books = Books(collector)
        books.go_on()
        take_in = collector._loop._take_in

        def interrupted(env_step: Any) -> None:
            take_in(env_step)
            raise KeyboardInterrupt

        def call() -> list[Any]:
            return [collector.collect(env_steps=2 * N)]

        line, found = 1, Counter[str]()
        while True:
            sys.settrace(None)
            collector._loop._take_in = interrupted  # type: ignore[method-assign]
            before = collector.metrics.episodes_interrupted
            with pytest.raises(KeyboardInterrupt):
                collector.collect(env_steps=5)
            collector._loop._take_in = take_in  # type: ignore[method-assign]
            try:
                with Tracer(COLLECT, line) as tracer:
                    batches = call()
            except KeyboardInterrupt:
                batches = []
            for batch in batches:
                books.take(batch)
            books.go_on()
            lost = collector.metrics.episodes_interrupted - before
            assert lost in (N, 2 * N), tracer.place
            found[str(lost)] += 1
            if tracer.place is None:
                break
            line += step
        assert found.total() > 15


@pytest.mark.fault("A25")
@pytest.mark.parametrize("step", EVERY_LINE)
def test_at_any_line_of_a_reset(step: int) -> None:
    with made("sync", "same_step") as envs:
        collector = collector_of(envs)
        books = Books(collector)
        books.resets = 1

        def call() -> list[Any]:
            collector.reset()
            return []

        books.go_on()
        sweep(books, call, step=step)
        healed(collector)


@pytest.mark.fault("A25")
@pytest.mark.parametrize("is_saved", [False, True])
@pytest.mark.parametrize("batch_mode", ["truncate", "complete"])
def test_a_reset_interrupted_as_it_begins_delivers_no_row_twice(
    batch_mode: Any, is_saved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of the last batch are still stored then."""
    begin = RolloutLoop._begin_state

    def interrupted(loop: RolloutLoop) -> Any:
        begin(loop)
        raise KeyboardInterrupt

    with made("sync", "same_step") as envs:
        collector = collector_of(envs, batch_mode=batch_mode)
        books = Books(collector)
        books.resets = 1
        for _ in range(3):
            books.take(collector.collect(env_steps=5 * N))
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(RolloutLoop, "_begin_state", interrupted)
                collector.reset()
            if is_saved:
                collector.get_state()
        books.go_on(complete=batch_mode == "complete")


@pytest.mark.fault("A25")
@pytest.mark.parametrize("step", EVERY_LINE)
def test_at_any_line_of_the_first_collect(step: int) -> None:
    """Where policies and connectors first learn their spaces, and columns their form."""
    line = 1
    while True:
        with made("sync", "same_step") as envs:
            collector = collector_of(envs)
            books = Books(collector)
            try:
                with Tracer(COLLECT, line) as tracer:
                    batches = [collector.collect(env_steps=4 * N)]
            except KeyboardInterrupt:
                batches = []
            for batch in batches:
                books.take(batch)
            books.go_on()
            if line % 5 == 0:
                healed(collector)
        if tracer.place is None:
            break
        line += 3 * step if step > 1 else 1


@pytest.mark.fault("A25")
@pytest.mark.parametrize("step", EVERY_LINE)
@pytest.mark.parametrize("backend", ["sync", "async"])
def test_at_any_line_of_who_takes_batches_from_the_background(backend: str, step: int) -> None:
    """The thread goes on, or has ended: in any case `reset` and `collect` work, and no batch is lost or comes twice."""
    with made(backend, "same_step") as envs:
        collector = collector_of(envs)
        books = Books(collector)
        books.go_on()

        def call() -> list[Any]:
            got: list[Any] = []
            background = collector.background(env_steps=2 * N, total=4 * N)
            try:
                with background:
                    for batch in background:
                        got.append(batch)
            finally:
                sys.settrace(None)
                background.close()
                taken.extend(got)
                taken.extend(list(background))
            return []

        line = 1
        while True:
            taken: list[Any] = []
            try:
                with Tracer(COLLECT, line) as tracer:
                    call()
            except KeyboardInterrupt:
                pass
            for batch in taken:
                books.take(batch)
            books.go_on()
            with collector.updating():
                pass
            if tracer.place is None:
                break
            line += step
        assert line > 50
        healed(collector)


@pytest.mark.fault("A25")
@pytest.mark.parametrize("step", EVERY_LINE)
def test_at_any_line_of_an_evaluation_the_collector_is_not_concerned(step: int) -> None:
    with made("sync", "same_step") as envs, made("sync", "same_step") as others, made("sync", "same_step") as plain:
        collector, undisturbed = collector_of(envs), collector_of(plain)
        line = 1
        while True:
            try:
                with Tracer(COLLECT, line) as tracer:
                    collector.evaluate(N, others)
            except KeyboardInterrupt:
                pass
            got, want = collector.collect(env_steps=5), undisturbed.collect(env_steps=5)
            for name, column in want["main"].items():
                np.testing.assert_array_equal(got["main"][name], column)
            if tracer.place is None:
                break
            line += step * (11 if step > 1 else 1)


@pytest.mark.fault("A25")
def test_at_any_line_of_updating_the_next_call_goes_on() -> None:
    with made("sync", "same_step") as envs:
        collector = collector_of(envs)
        books = Books(collector)
        place, line = "", 0
        while place is not None:
            line += 1
            try:
                with Tracer(COLLECT, line) as tracer, collector.updating():
                    pass
            except KeyboardInterrupt:
                pass
            place = tracer.place
            books.take(collector.collect(env_steps=2 * N))
            books.settle()
            with collector.updating():
                pass
        assert line > 10
        assert collector.metrics.episodes_interrupted == 0


@pytest.mark.fault("A25")
@pytest.mark.parametrize("step", [pytest.param(53, id="some"), ALL])
@pytest.mark.parametrize("backend", ["sync", "thread", "native", "async"])
def test_at_any_line_of_the_vectorizer(backend: str, step: int) -> None:
    """In the middle of a message only closing is left, and it says so; everywhere else the next call goes on."""
    line, broken, count = 1, 0, 0
    envs = made(backend, "same_step")
    try:
        collector = collector_of(envs)
        books = Books(collector)
        while True:
            try:
                books.go_on()
            except BrokenError as error:
                said = str(error)
                assert "was interrupted" in said
                broken += 1
                envs.close()
                envs = made(backend, "same_step")
                collector = collector_of(envs)
                books = Books(collector)
                books.go_on()
            try:
                with Tracer(("/marlvec/vector/",), line) as tracer:
                    books.take(collector.collect(env_steps=4 * N))
            except KeyboardInterrupt:
                count += 1
            if tracer.place is None:
                break
            line += step
    finally:
        envs.close()
    assert count > 10
    assert broken < count / 2


# --- errors


@pytest.mark.parametrize("where", ["policy", "agent", "action", "learner", "on_policy_output", "mapping", "callback"])
@pytest.mark.parametrize("at", [2, 3, 5, 8, 13])
def test_an_error_in_code_of_others_costs_as_little(where: str, at: int) -> None:
    """Whatever raises raises once; the next call goes on, or what ran is lost and counted."""
    fail = Failing(at)

    class Agents(AgentConnector):
        def __call__(self, rows: Rows) -> Rows:
            fail("agent", where)
            return rows

        def on_policy_output(self, rows: Rows) -> None:
            fail("on_policy_output", where)

    class Actions(ActionConnector):
        def __call__(self, rows: Rows) -> Rows:
            fail("action", where)
            return rows

    class Learner(LearnerConnector):
        def __call__(self, rows: Rows) -> Rows:
            fail("learner", where)
            return rows

    class Decider(Policy):
        def act(self, rows: Rows, *, explore: bool = True) -> Any:
            fail("policy", where)
            return decide(rows)

    def mapping(agent: str, episode: Any) -> str:
        fail("mapping", where)
        return "main"

    def on_sample_end(*_: Any) -> None:
        fail("callback", where)

    with made("sync", "same_step") as envs:
        collector = Collector(
            envs,
            {"main": Decider()},
            mapping,
            agent_connectors=[Agents()],
            action_connectors=[Actions()],
            learner_connectors=[Learner()],
            callbacks=[on_sample_end],
            seed=0,
        )
        books, raised = Books(collector), 0
        for _ in range(14):
            try:
                books.take(collector.collect(env_steps=N + 1))
            except ZeroDivisionError:
                raised += 1
        assert raised == 1
        books.go_on()
        lost = where in ("agent", "on_policy_output", "mapping")
        assert (collector.metrics.episodes_interrupted > 0) == (lost and not (where == "mapping" and at < 2 * N))


class Failing:
    """Raises at one of its calls."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, here: str, where: str) -> None:
        if here == where:
            self.left -= 1
            if self.left == 0:
                raise ZeroDivisionError("scripted")
