"""Ctrl-C, or an error, wherever it comes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from types import FrameType
from typing import Any

import numpy as np
import pytest

from marlvec.collect import Collector
from marlvec.collect.callbacks import Callback, LossReason, RunningEpisode
from marlvec.collect.metrics import EpisodeRecord
from marlvec.collect.rollout import RolloutLoop
from marlvec.connectors import ActionConnector, AgentConnector, FilterRows, LearnerConnector, Rows
from marlvec.errors import BrokenError
from marlvec.policies import FunctionPolicy, Policy
from marlvec.testing.scripted import WIDTH, CounterEnv, RaisingEnv
from marlvec.vector import VectorEnv
from tests.collect.players import MODES, envs_on
from tests.collect.reference import check_rows
from tests.tracer import Tracer

N = 3


def made(backend: str = "sync", mode: str = "same_step", *, interrupt_at: int = -1) -> VectorEnv:
    """Three envs with episodes of four steps."""
    makes = [
        partial(RaisingEnv, 4, agent_num=2, env_index=i, at=interrupt_at, only_env=1, error=KeyboardInterrupt)
        for i in range(N)
    ]
    return envs_on(backend, makes if interrupt_at >= 0 else counters(), mode)


def counters() -> list[Any]:
    return [partial(CounterEnv, 4, agent_num=2, env_index=i) for i in range(N)]


def decide(rows: Rows) -> Any:
    return (rows["obs"][:, 3] * 7 + rows["obs"][:, 2]).astype(np.int64) % 5


async def decide_row(row: Any) -> int:
    return int(row.obs[3] * 7 + row.obs[2]) % 5


def noop(rows: Rows) -> Any:
    return np.zeros(len(rows), np.int64)


class Books:
    """Holds what a collector delivers against what it counts.

    Args:
        collector: The collector.
        decides: Whether all actions are `decide`'s, and all agents act in all steps.
        complete: Whether its batches are of whole episodes.
    """

    def __init__(self, collector: Collector, *, decides: bool = True, complete: bool = False) -> None:
        self.collector, self.decides, self.complete = collector, decides, complete
        self.env_steps = self.agent_steps = self.resets = 0
        self.seen: dict[tuple[int, int], set[int]] = {}
        self._grown: set[tuple[int, int]] = set()  # of those, whose rows came since the last look for gaps

    def take(self, batch: Any) -> None:
        """A batch was delivered: its rows are true, and new."""
        check_rows(batch)
        self.env_steps += batch.env_steps
        self.agent_steps += batch.agent_steps
        for rows in batch.values():
            if rows["obs"].shape[1] == WIDTH:  # else of another env
                self._check_stamps(rows)
            for key in zip(*(rows[name].tolist() for name in ("eps_id", "agent_index", "t")), strict=True):
                known = self.seen.setdefault(key[:2], set())
                assert key[2] not in known, f"{key} came twice"
                known.add(key[2])
                self._grown.add(key[:2])

    def _check_stamps(self, rows: Any) -> None:
        """Check that rows are what envs gave, each with its own decision and what came of it."""
        now, then = rows["obs"], rows["next_obs"]
        np.testing.assert_array_equal(now[:, 3], rows["env_t"])
        np.testing.assert_array_equal(then[:, 3], rows["next_env_t"])
        np.testing.assert_array_equal(now[:, [0, 2, 4]], then[:, [0, 2, 4]])  # env, episode, agent
        if self.decides:
            np.testing.assert_array_equal(rows["t"], rows["env_t"])
            np.testing.assert_array_equal(rows["actions"], decide(rows))
            np.testing.assert_array_equal(np.round((rows["rewards"] % 1) * 4096), rows["actions"])
            np.testing.assert_array_equal(then[:, 5], (now[:, 5] * 31 + rows["actions"] + 1) % 65_521)

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

    def go_on(self, batches: Iterable[Any] = ()) -> None:
        """Take batches, then two more, of all envs."""
        for batch in batches:
            self.take(batch)
        envs: set[int] = set()
        for amount in (
            [{"episodes": N}, {"episodes": N + 1}] if self.complete else [{"steps": 2 * N}, {"steps": 3 * N - 1}]
        ):
            batch = self.collector.collect(**amount)
            self.take(batch)
            envs |= {int(i) for rows in batch.values() for i in rows["env_id"]}
        assert self.complete or not self.decides or envs == set(range(N))
        self.settle()


def healed(collector: Collector) -> None:
    """After a reset whole episodes are collected, also by another thread, and weights can be changed."""
    collector.reset()
    metrics = collector.metrics
    before, lost, books = metrics.env_steps, metrics.env_steps_lost, Books(collector)
    for k in (4 * N, 2 * N + 1, 3 * N):
        books.take(collector.collect(env_steps=k))
    with collector.updating():
        pass
    with collector.background(env_steps=2 * N, total=2 * N) as more:
        for batch in more:
            books.take(batch)
    assert metrics.env_steps - before == books.env_steps == 11 * N + 1
    assert metrics.env_steps_lost == lost


# --- in code of others


class Trap:
    """Raises at one call from one place."""

    def __init__(self, where: str, at: int, error: type[BaseException]) -> None:
        self.where, self.left, self.error = where, at, error

    def __call__(self, here: str) -> None:
        self.left -= here == self.where
        if here == self.where and self.left == 0:
            raise self.error("scripted")


def trapped(trap: Trap) -> dict[str, Any]:
    """A collector's parts, each of which calls a trap."""

    class Agents(AgentConnector):
        def __call__(self, rows: Rows) -> Rows:
            trap("agent")
            return rows

        def on_policy_output(self, rows: Rows) -> None:
            trap("on_policy_output")

    class Actions(ActionConnector):
        def __call__(self, rows: Rows) -> Rows:
            trap("action")
            return rows

    class Learner(LearnerConnector):
        def __call__(self, rows: Rows) -> Rows:
            trap("learner")
            return rows

    class Decider(Policy):
        def act(self, rows: Rows, *, explore: bool = True) -> Any:
            trap("policy")
            return decide(rows)

    def mapping(agent: str, episode: Any) -> str:
        trap("mapping")
        return "main"

    return {
        "policies": {"main": Decider()},
        "policy_mapping": mapping,
        "agent_connectors": [Agents()],
        "action_connectors": [Actions()],
        "learner_connectors": [Learner()],
        "callbacks": [{"on_sample_end": lambda *_: trap("callback")}],
    }


PLACES = ("policy", "agent", "action", "learner", "on_policy_output", "mapping", "callback")
TRAPS = [pytest.param((KeyboardInterrupt, "env"), id="Ctrl-C-env")]
TRAPS += [pytest.param((KeyboardInterrupt, where), id=f"Ctrl-C-{where}") for where in PLACES]
TRAPS += [pytest.param((ZeroDivisionError, where), id=f"error-{where}") for where in PLACES]


@pytest.mark.mostly_slow("interrupts at many places", quick=12, slow="pairs")
@pytest.mark.fault("A25")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("at", [1, 2, 5, 9, 13])
@pytest.mark.parametrize("what", TRAPS)
def test_what_code_of_others_raises_costs_what_ran_at_most(what: Any, at: int, overlap: bool, mode: str) -> None:
    """It raises once; the next call goes on, or what ran is lost and counted."""
    error, where = what
    with made(mode=mode, interrupt_at=at - 1 if where == "env" else -1) as envs:
        collector = Collector(envs, seed=0, overlap=overlap, **trapped(Trap(where, at, error)))
        books, raised = Books(collector), 0
        for _ in range(14):
            try:
                books.take(collector.collect(env_steps=2 * N))
            except error:
                raised += 1
        assert raised == 1
        books.go_on()
        metrics = collector.metrics
        began = not (where == "agent" and at == 1) and not (where == "mapping" and at <= 2 * N)
        if where in ("env", "agent", "on_policy_output", "mapping") and began:
            assert metrics.episodes_interrupted == N
        else:  # nothing was lost
            assert metrics.env_steps_lost == metrics.episodes_interrupted == 0
        healed(collector)


# --- at any line

COLLECT = ("/marlvec/collect/",)


class NewLine(Tracer):
    """Ctrl-C at the first line that is not known yet, or, of lines that are not, at every so manieth.

    Args:
        folders: Parts of file names.
        known: Lines; those that are reached are added.
        every: How many.
    """

    def __init__(self, folders: tuple[str, ...], known: set[tuple[str, int]], every: int) -> None:
        super().__init__(folders, 0)
        self.known, self.every = known, every

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        where = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and where not in self.known and not self._is_left_out(frame, *where):
            self.known.add(where)
            self.left = len(self.known) % self.every + 1
        else:
            self.left = 2
        return super()._line(frame, event, argument)


class Sweep:
    """Ctrl-C at one line after the other of the same call.

    Args:
        density: "few" lines; each of the "lines" once, where it is first reached; "some" of those that are run, however
            often; or "all" of them.
        folders: Parts of the names of the files in which it comes.
        known: Of the "lines", those where it comes in another test.
    """

    def __init__(self, density: str, folders: tuple[str, ...] = COLLECT, known: Iterable[tuple[str, int]] = ()) -> None:
        self.density, self.folders, self.count = density, folders, 0
        self.known = set(known) if density == "lines" else set()

    def __call__(
        self,
        call: Callable[[], Iterable[Any]],
        after: Callable[[list[Any]], None],
        before: Callable[[], Any] | None = None,
    ) -> int:
        """Call until a call is not interrupted any more.

        Args:
            call: Gives batches.
            after: Is given those that came, each time.
            before: Is called first, each time.

        Returns:
            How often the call was interrupted.
        """
        first = self.count
        while True:
            if before is not None:
                before()
            batches: list[Any] = []
            tracer = self._tracer(self.count - first + 1)
            try:
                with tracer:
                    for batch in call():
                        batches.append(batch)  # what has come is there, whatever comes then
            except KeyboardInterrupt:
                pass
            try:
                after(batches)
            except BaseException as error:
                error.add_note(f"after Ctrl-C at {tracer.place}, the {self.count}th")
                raise
            if tracer.place is None:
                return self.count - first
            self.count += 1

    def _tracer(self, number: int) -> Tracer:
        if self.density in ("some", "all"):
            return Tracer(self.folders, number if self.density == "all" else 31 * number - 30)
        return NewLine(self.folders, self.known, 40 if self.density == "few" else 1)


FEW = pytest.param("few")
LINES = pytest.param("lines", marks=pytest.mark.slow("hundreds of calls, each interrupted at another line"))
ALL = pytest.param("all", marks=[pytest.mark.soak, pytest.mark.time_limit(7200)])
NATIVE = pytest.mark.slow("numba compiles")
DENSITIES = pytest.mark.parametrize("density", [FEW, LINES, ALL])


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


def collector_of(envs: VectorEnv, **options: Any) -> Collector:
    policies = options.pop("policies", FunctionPolicy(noop if envs.backend == "native" else decide))
    return Collector(envs, policies, seed=0, callbacks=[Teller()], **options)


@dataclass
class Setting:
    """A collector, and what is collected while Ctrl-C comes.

    Attributes:
        decides: As `Books`'.
        frozen: Policies that are added.
    """

    backend: str = "sync"
    mode: str = "same_step"
    options: dict[str, Any] | None = None
    amount: dict[str, int] | None = None
    decides: bool = True
    frozen: tuple[str, ...] = ()

    def check(self, sweep: Sweep) -> int:
        with made(self.backend, self.mode) as envs:
            options = self.options or {}
            complete = options.get("batch_mode") == "complete"
            collector = collector_of(envs, **options)
            for policy_id in self.frozen:
                collector.add_policy(policy_id, FunctionPolicy(decide), frozen=True)
            books = Books(collector, decides=self.decides, complete=complete)
            books.go_on()
            amount = self.amount or ({"episodes": N} if complete else {"env_steps": 4 * N})
            call: Callable[[], Iterable[Any]] = lambda: [collector.collect(**amount)]  # noqa: E731  (short)
            if "total" in amount:
                call = lambda: collector.batches(**amount)  # noqa: E731
            lost: list[int] = [0]

            def after(batches: list[Any]) -> None:
                books.go_on(batches)
                lost.append(collector.metrics.episodes_interrupted)
                assert lost[-1] - lost[-2] in (0, N)

            found = sweep(call, after)
            assert 0 in np.diff(lost), "some cost nothing"
            collector._loop._drop_delivered()
            assert collector._current.state.counters.closed_steps == len(collector._policy_set.log.closed())
            if self.decides and not complete and not self.frozen:
                healed(collector)
            return found


def two(agent: str, episode: Any) -> str:
    return "main" if (episode.number % 2) == (agent == "agent_0") else "other"


def three(agent: str, episode: Any) -> str:
    return ("main", "old", "older")[(episode.number + (agent == "agent_0")) % 3]


def batched(**options: Any) -> list[dict[str, Any]]:
    return [{**options, "batch_mode": batch_mode} for batch_mode in ("truncate", "complete")]


OLD: Any = {
    "options": {"policies": {"main": FunctionPolicy(decide)}, "policy_mapping": three},
    "frozen": ("old", "older"),
}
SETTINGS: dict[str, Setting] = {
    **{
        f"{backend}-{mode}-{options.get('overlap', False)}-{options['batch_mode']}": Setting(backend, mode, options)
        for backend, mode, overlap in [
            ("sync", "same_step", False),
            ("sync", "next_step", True),
            ("sync", "disabled", False),
            ("thread", "same_step", True),
            ("async", "same_step", False),
            ("async", "next_step", True),
            ("native", "same_step", False),
            ("pool", "same_step", False),
        ]
        for options in batched(overlap=overlap)
    },
    "agent steps": Setting(amount={"agent_steps": 7}),
    "two policies": Setting(
        options={"policies": {name: FunctionPolicy(decide) for name in ("main", "other")}, "policy_mapping": two}
    ),
    "frozen": Setting(**OLD, decides=False),
    "frozen agent steps": Setting(**OLD, amount={"agent_steps": 7}, decides=False),
    "noops": Setting(
        options={"agent_connectors": [FilterRows(lambda rows: (rows["obs"][:, 3] != 2) | rows["last"], noop=0)]},
        decides=False,
    ),
    "random steps": Setting(options={"random_steps": 10**6}, decides=False),
    "batches": Setting(amount={"env_steps": 2 * N, "total": 2 * N}),
    **{
        f"answers-{name}": Setting(backend, options={"policies": decide_row, **options})
        for name, backend, options in [
            ("truncate", "sync", {}),
            ("as they come", "thread", {"overlap": True}),
            ("complete", "sync", {"batch_mode": "complete", "overlap": True}),
        ]
    },
}


@pytest.mark.slow("interrupts at many lines")
@pytest.mark.fault("A25")
@pytest.mark.parametrize("density", [FEW, ALL])
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=NATIVE if setting.backend == "native" else ()) for name, setting in SETTINGS.items()],
)
def test_at_any_line_of_a_collect(name: str, density: str) -> None:
    assert SETTINGS[name].check(Sweep(density)) > 3


@pytest.mark.fault("A25")
@pytest.mark.slow("hundreds of calls, each interrupted at another line")
def test_at_each_line_that_any_collect_reaches() -> None:
    """Each line once, in the first of all collects that reaches it."""
    sweep = Sweep("lines")
    assert sum(setting.check(sweep) for setting in SETTINGS.values()) > 500


@pytest.mark.fault("A25")
@pytest.mark.slow("hundreds of calls, each interrupted at another line")
@pytest.mark.parametrize("name", [name for name in SETTINGS if name.startswith("sync") and name.endswith("truncate")])
def test_at_some_of_all_lines_of_a_collect(name: str) -> None:
    """Also at lines that have been reached before, in later steps of a call."""
    assert SETTINGS[name].check(Sweep("some")) > 50


# --- at any line of other calls


@cache
def lines_of_a_collect() -> frozenset[tuple[str, int]]:
    """Lines of a collect that is not the first: `test_at_each_line_that_any_collect_reaches` interrupts at each."""
    known: set[tuple[str, int]] = set()
    with made() as envs:
        collector = collector_of(envs)
        Books(collector).go_on()
        with NewLine(COLLECT, known, sys.maxsize):
            collector.collect(env_steps=4 * N)
    return frozenset(known)


@pytest.mark.slow("interrupts at many lines")
@pytest.mark.fault("A25")
@DENSITIES
def test_at_any_line_of_the_recovery(density: str) -> None:
    """Ctrl-C, and once more while the next call declares lost what ran."""
    with made() as envs:
        collector = collector_of(envs)
        books, loop, metrics = Books(collector), collector._loop, collector.metrics
        take_in, lost = loop._take_in, [0]
        books.go_on()

        def interrupted(env_step: Any) -> None:
            take_in(env_step)
            raise KeyboardInterrupt

        def before() -> None:
            loop._take_in = interrupted  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                collector.collect(env_steps=5)
            loop._take_in = take_in  # type: ignore[method-assign]

        def after(batches: list[Any]) -> None:
            books.go_on(batches)
            lost.append(metrics.episodes_interrupted)
            assert lost[-1] - lost[-2] in (N, 2 * N)

        sweep = Sweep(density, known=lines_of_a_collect())
        assert sweep(lambda: [collector.collect(env_steps=2 * N)], after, before) > 3


@pytest.mark.slow("interrupts at many lines")
@pytest.mark.fault("A25")
@DENSITIES
def test_at_any_line_of_a_reset(density: str) -> None:
    with made() as envs:
        collector = collector_of(envs)
        books = Books(collector)
        books.resets = 1
        books.go_on()
        Sweep(density)(lambda: collector.reset() or (), books.go_on)
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

    with made() as envs:
        collector = collector_of(envs, batch_mode=batch_mode)
        books = Books(collector, complete=batch_mode == "complete")
        books.resets = 1
        for _ in range(3):
            books.take(collector.collect(env_steps=5 * N))
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(RolloutLoop, "_begin_state", interrupted)
                collector.reset()
            if is_saved:
                collector.get_state()
        books.go_on()


@pytest.mark.slow("interrupts at many lines")
@pytest.mark.fault("A25")
@DENSITIES
def test_at_any_line_of_the_first_collect(density: str) -> None:
    """Where policies and connectors first learn their spaces, and columns their form."""
    collectors: list[Collector] = []

    def before() -> None:
        collectors.append(collector_of(made()))

    def after(batches: list[Any]) -> None:
        Books(collectors[-1]).go_on(batches)
        if len(collectors) % 5 == 0:
            healed(collectors[-1])
        collectors[-1].envs.close()

    sweep = Sweep(density, known=lines_of_a_collect())
    assert sweep(lambda: [collectors[-1].collect(env_steps=4 * N)], after, before) > 3


@pytest.mark.fault("A25")
@DENSITIES
@pytest.mark.parametrize("backend", ["sync", pytest.param("async", marks=pytest.mark.slow("worker processes"))])
def test_at_any_line_of_who_takes_batches_from_the_background(backend: str, density: str) -> None:
    """The thread goes on, or has ended: in any case `reset` and `collect` work, and no batch is lost or comes twice."""
    with made(backend) as envs:
        collector = collector_of(envs)
        books, taken = Books(collector), list[Any]()
        books.go_on()

        def call() -> Any:
            background = collector.background(env_steps=2 * N, total=4 * N)
            try:
                with background:
                    for batch in background:
                        taken.append(batch)
            finally:
                sys.settrace(None)
                background.close()
                taken.extend(background)
            return ()

        def after(_: list[Any]) -> None:
            books.go_on(taken)
            taken.clear()
            with collector.updating():
                pass

        assert Sweep(density)(call, after) >= 1
        healed(collector)


@pytest.mark.slow("interrupts at many lines")
@pytest.mark.fault("A25")
@DENSITIES
def test_at_any_line_of_an_evaluation_the_collector_is_not_concerned(density: str) -> None:
    with made() as envs, made() as others, made() as plain:
        collector, undisturbed = collector_of(envs), collector_of(plain)

        def after(_: list[Any]) -> None:
            got, want = collector.collect(env_steps=5), undisturbed.collect(env_steps=5)
            for name, column in want["main"].items():
                np.testing.assert_array_equal(got["main"][name], column)

        sweep = Sweep(density, known=lines_of_a_collect())
        assert sweep(lambda: collector.evaluate(N, others).episodes, after) > 3


@pytest.mark.fault("A25")
def test_at_any_line_of_updating_the_next_call_goes_on() -> None:
    with made() as envs:
        collector = collector_of(envs)
        books = Books(collector)

        def update() -> Any:
            with collector.updating():
                return ()

        def after(_: list[Any]) -> None:
            books.take(collector.collect(env_steps=2 * N))
            books.settle()
            update()

        assert Sweep("all")(update, after) > 10
        assert collector.metrics.episodes_interrupted == 0


@pytest.mark.fault("A25")
@DENSITIES
@pytest.mark.parametrize(
    "backend",
    [
        "sync",
        "thread",
        pytest.param("native", marks=NATIVE),
        pytest.param("async", marks=pytest.mark.slow("worker processes")),
    ],
)
def test_at_any_line_of_the_vectorizer(backend: str, density: str) -> None:
    """In the middle of a message only closing is left, and it says so; everywhere else the next call goes on."""
    broken, envs = 0, made(backend)
    books = Books(collector_of(envs))
    books.go_on()

    def after(batches: list[Any]) -> None:
        nonlocal broken, envs, books
        try:
            books.go_on(batches)
        except BrokenError as error:
            assert "was interrupted" in str(error)  # noqa: PT017  (what follows is of that case alone)
            broken += 1
            envs.close()
            envs = made(backend)
            books = Books(collector_of(envs))
            books.go_on()

    try:
        count = Sweep(density, ("/marlvec/vector/",))(lambda: [books.collector.collect(env_steps=4 * N)], after)
    finally:
        envs.close()
    assert count > 3
    assert broken <= count / 2
