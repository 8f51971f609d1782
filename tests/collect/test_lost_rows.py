"""What is lost with an env, and what others did with the envs: every decision is in one batch or counts as lost."""

from __future__ import annotations

import io
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from rich.console import Console

import marlvec
from marlvec import external
from marlvec.cli.display import print_rollout
from marlvec.cli.running import roll_out
from marlvec.collect import Collector
from marlvec.connectors import ActionConnector, AgentConnector, FrameStack, Rows
from marlvec.errors import ArgumentError, BrokenError, EnvFault, EnvRaised, EnvsDriven, StateError
from marlvec.policies import FunctionPolicy
from marlvec.testing.scripted import WIDTH, ExitingEnv, HangingEnv, RaisingEnv
from marlvec.vector import AsyncVectorEnv, VectorEnv
from marlvec.vector.in_process import SyncVectorEnv
from tests.collect.plans import (
    BATCH_MODES,
    DEATHS,
    DRAWN,
    FEW_OR_MANY,
    LONG,
    PROGRAMS,
    Deaths,
    Plan,
    dying_counters,
    for_examples,
    mortals,
    play,
)
from tests.collect.players import KINDS, MODES, EchoPolicy, envs_on, factories, noop
from tests.collect.reference import check_rows
from tests.external.test_thread import ONE, Game

# --- episodes that are lost with their env: none of their rows comes to a batch any more, and every one is counted


SLOW = pytest.mark.slow("worker processes for each run")


@pytest.mark.slow("collects whole runs on several backends")
@pytest.mark.checklist(71)
@pytest.mark.checklist(114)
@pytest.mark.fault("E13")
@FEW_OR_MANY
@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_counts_equal_the_reference_with_faults(kind: str, examples: int) -> None:
    """Envs are built anew or masked; nothing of their episodes comes into a batch any more."""
    plans = st.builds(Plan, st.just(kind), **DRAWN, deaths=DEATHS, masks=st.booleans())
    for_examples(examples, play, plan=plans, calls=PROGRAMS)


@pytest.mark.mostly_slow("collects long runs", quick=12, slow="pairs")
@pytest.mark.checklist(71)
@pytest.mark.checklist(114)
@pytest.mark.fault("E13")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("batch_mode", ["truncate", "complete"])
@pytest.mark.parametrize("mode", MODES)
def test_a_long_run_with_deaths_is_the_references(mode: str, batch_mode: str, masks: bool, kind: str) -> None:
    """Deaths of episodes of which a batch has counted a part, and of envs that have just been built anew."""
    deaths: Deaths = {(0, 0): ("step", 3, False), (1, 0): ("step", 8, True), (1, 1): ("reset", 0, False)}
    more = {(1, 2): ("step", 0, False), (2, 0): ("reset", 2, False), (0, 1): ("step", 12, True)}
    play(
        Plan(kind, mode, batch_mode=batch_mode, masks=masks, deaths=deaths | more, watched=True),
        [("env_steps", 8), *LONG],
    )


def test_quiet_restart_is_counted_even_if_the_new_env_fails() -> None:
    deaths = {(1, 0): ("step", 2, True), (1, 1): ("reset", 0, False)}
    for mode in MODES:
        play(Plan(mode=mode, num_envs=2, agent_num=1, deaths=deaths, masks=True), [("env_steps", 12)])


@pytest.mark.slow("draws many runs")
@pytest.mark.checklist(105)
@pytest.mark.checklist(114)
@pytest.mark.fault("E13")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", ["thread", pytest.param("async", marks=[pytest.mark.many_processes, SLOW])])
def test_any_number_of_workers_equals_the_reference_with_faults(backend: str, mode: str) -> None:
    drawn = DRAWN | {"num_envs": st.integers(1, 6), "mode": st.just(mode)}
    plans = st.builds(Plan, st.sampled_from(list(KINDS)), **drawn, deaths=st.none() | DEATHS, masks=st.booleans())
    for_examples(
        16, lambda **run: play(backend=backend, **run), plan=plans, calls=PROGRAMS, num_workers=st.integers(1, 3)
    )


@pytest.mark.parametrize("on_fault", ["restart", "mask"])
@pytest.mark.parametrize("batch_mode", BATCH_MODES)
@pytest.mark.parametrize("mode", MODES)
def test_connectors_forget_that_env_and_never_see_a_last_row_of_what_was_lost(
    mode: str, batch_mode: Any, on_fault: str
) -> None:
    told: list[tuple[str, list[int]]] = []
    seen: list[tuple[int, int, int, bool, bool, float]] = []

    class AgentSpy(AgentConnector):
        def __call__(self, rows: Rows) -> Rows:
            names = ("env_id", "eps_id", "t", "first", "last", "rewards")
            seen.extend(zip(*(rows[name].tolist() for name in names), strict=True))
            return rows

        def reset(self, env_ids: Any = None) -> None:
            told.append(("agent", sorted(np.asarray(env_ids).tolist())))

    class ActionSpy(ActionConnector):
        def __call__(self, rows: Rows) -> Rows:
            return rows

        def reset(self, env_ids: Any = None) -> None:
            told.append(("action", sorted(np.asarray(env_ids).tolist())))

    deaths = {(1, 0): ("step", 3, False)}
    with dying_counters(deaths, 3, length=9, agent_num=1, autoreset_mode=mode, on_fault=on_fault) as envs:
        collector = Collector(
            envs, noop(), batch_mode=batch_mode, agent_connectors=[AgentSpy()], action_connectors=[ActionSpy()], seed=0
        )
        collector.collect(env_steps=9)
        if batch_mode == "truncate":
            assert told == [("agent", [0, 1, 2]), ("action", [0, 1, 2])]
            collector.collect(env_steps=6)
        assert told[2:4] == [("agent", [1]), ("action", [1])]  # once, beside the beginning of all
        assert all(ids != [1] for _, ids in told[4:6])
        own = [row for row in seen if row[0] == 1]
        assert [row[1:5] for row in own[:4]] == [(1, t, t == 0, False) for t in range(4)]
        assert not any(last for _, eps, _, _, last, _ in own if eps == 1)
        if on_fault == "mask":
            assert len(own) == 4
        else:
            assert own[4] == (1, 4, 0, True, False, 0.0)


@pytest.mark.parametrize("batch_mode", BATCH_MODES)
def test_where_all_envs_are_masked_collect_raises(batch_mode: Any) -> None:
    deaths = {(0, 0): ("step", 1, False), (1, 0): ("step", 2, False)}
    with dying_counters(deaths, on_fault="mask") as envs:
        collector = Collector(envs, noop(), batch_mode=batch_mode, seed=0)
        with pytest.raises(EnvRaised, match="No env is left"):
            collector.collect(env_steps=20)
        with pytest.raises(BrokenError, match=r"only close\(\) is left"):
            collector.collect(env_steps=20)
    with dying_counters({}) as envs:
        collector = Collector(envs, noop(), batch_mode=batch_mode, seed=0)
        collector.collect(env_steps=10)
        collector._loop.scheduler.living = np.zeros(0, np.int64)  # marlvec's own vectorizers raise before that
        for _ in range(2):
            with pytest.raises(StateError, match="no env is left to step: all are masked"):
                collector.collect(env_steps=20)


@pytest.mark.checklist(120)
@pytest.mark.fault("E13")
def test_losses_are_in_the_summary_and_the_repr() -> None:
    deaths = {(0, 0): ("step", 1, False), (1, 0): ("step", 2, True), (0, 1): ("step", 2, True)}
    with dying_counters(deaths) as envs:
        collector = Collector(envs, noop(), seed=0)
        assert "lost" not in repr(collector.metrics)
        collector.collect(env_steps=20)
        summary = collector.metrics.summary()
        assert summary["episodes_faulty"] == 1
        assert summary["episodes_restarted"] == 2
        assert summary["env_steps_lost"] == 2 + 3 + 3
        assert summary["agent_steps_lost"] == 2 * (2 + 3 + 3)
        assert "episodes and 3 lost;" in repr(collector.metrics)


def test_an_env_that_asks_for_a_restart_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with dying_counters({(1, 0): ("step", 7, True)}) as envs:
        collector = Collector(envs, noop(), seed=0)
        collector.collect(env_steps=60)
        metrics = collector.metrics
        assert (metrics.episodes_faulty, metrics.episodes_restarted, metrics.env_steps_lost) == (0, 1, 3)
    assert not caplog.records


def test_a_rollout_at_the_command_line_tells_of_losses() -> None:
    def printed(deaths: Any) -> str:
        text = io.StringIO()
        console = Console(file=text, width=160)
        with dying_counters(deaths) as envs:
            collector = Collector(envs, noop(), batch_mode="complete", seed=0, window=10**6)
            result = roll_out(collector, dict.fromkeys(envs.agents, "main"), 60, console)
            assert result.env_steps >= 60
            print_rollout(console, result)
        return text.getvalue()

    assert "lost" not in printed({})
    once = {(0, 0): ("step", 2, False)}
    assert "also lost: 1 episode to faults, 3 env steps together\n" in printed(once)
    both = printed(once | {(1, 0): ("step", 1, False), (1, 1): ("step", 1, True)})
    assert "2 episodes to faults and 1 episode to restarts requested by envs, 7 env steps together\n" in both


# --- workers that end or hang

TROUBLES: dict[str, Any] = {"exit": ExitingEnv, "hang": HangingEnv}


def in_trouble(kind: Any, marks: Path, at: int | None, **settings: Any) -> AsyncVectorEnv:
    """Four envs of episodes of 5 steps, two in each worker; env 1 gets into trouble in a step of its first life."""
    factories = [
        partial(
            kind, 5, env_index=i, agent_num=2, marks=marks, at=-1 if at is None else at, only_env=1, only_incarnation=0
        )
        for i in range(4)
    ]
    return AsyncVectorEnv(factories, num_workers=2, step_timeout=1.0 if kind is HangingEnv else None, **settings)


def histories(batches: list[Any]) -> dict[tuple[int, int], dict[str, Any]]:
    """Each agent's rows in the order in which they came to be; ids that count across envs are left out."""
    rows = {name: np.concatenate([batch["main"][name] for batch in batches]) for name in batches[0]["main"].keys()}  # noqa: SIM118  (a batch is no iterable)
    order = np.lexsort((rows["t"], rows["eps_id"]))
    found = {}
    for i, a in set(zip(rows["env_id"].tolist(), rows["agent_index"].tolist(), strict=True)):
        own = order[(rows["env_id"][order] == i) & (rows["agent_index"][order] == a)]
        found[i, a] = {name: column[own] for name, column in rows.items() if name not in ("eps_id", "unroll_id")}
    return found


@pytest.mark.checklist(71)
@pytest.mark.fault("E13")
@pytest.mark.slow("processes that end, or are waited for")
@pytest.mark.parametrize("on_fault", ["restart", "mask"])
@pytest.mark.parametrize("batch_mode", BATCH_MODES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TROUBLES)
def test_a_worker_that_ends_or_hangs_costs_the_episodes_of_its_own_envs_alone(
    name: str, mode: str, batch_mode: Any, on_fault: str, tmp_path: Path
) -> None:
    """Env 1 gets into trouble in the third step of its second episode, and takes env 0 with it."""

    def run(marks: Path, at: int | None) -> tuple[list[Any], Any]:
        marks.mkdir()
        with in_trouble(TROUBLES[name], marks, at, autoreset_mode=mode, on_fault=on_fault) as envs:
            collector = Collector(envs, EchoPolicy(), batch_mode=batch_mode, agent_connectors=[FrameStack(3)], seed=5)
            found = [collector.collect(env_steps=24) for _ in range(5)]
            if at is not None:
                assert envs.masked_env_ids == ((0, 1) if on_fault == "mask" else ())
                assert envs.incarnations.tolist() == ([1, 1, 0, 0] if on_fault == "restart" else [0, 0, 0, 0])
            return found, collector.metrics

    (plain, _), (batches, metrics) = run(tmp_path / "plain", None), run(tmp_path / "faulty", 7)
    assert (metrics.episodes_faulty, metrics.episodes_restarted) == (2, 0)
    # Env 0 hears of it in the same step, or in the next if it had replied already; a batch has counted the first step.
    least = 2 if batch_mode == "truncate" else 3
    assert 2 * least <= metrics.env_steps_lost <= 2 * least + 1
    assert metrics.agent_steps_lost == 2 * metrics.env_steps_lost
    expected, got = histories(plain), histories(batches)
    for (i, a), rows in expected.items():
        if i >= 2:  # the other worker's
            n = min(len(rows["t"]), len(got[i, a]["t"]))
            assert n >= 20
            for column, values in rows.items():
                np.testing.assert_array_equal(got[i, a][column][:n], values[:n], err_msg=column)
            continue
        stamps = got[i, a]["obs"][:, -WIDTH:]
        before = [(0, 0, t) for t in range(5)] + [(0, 1, 0)] * (batch_mode == "truncate")
        after = [(1, k // 5, k % 5) for k in range(len(stamps) - len(before))]
        assert stamps[:, 1:4].tolist() == [list(stamp) for stamp in before + after]
        assert (len(after) >= 15) == (on_fault == "restart")
        assert len(after) == 0 or on_fault == "restart"


@pytest.mark.parametrize("backend", ["sync", pytest.param("async", marks=pytest.mark.slow("worker processes"))])
def test_too_many_restarts_raise_and_reset_episodes_are_counted(backend: str) -> None:
    factories = [partial(RaisingEnv, 5, agent_num=2, env_index=i, at=7, only_env=1) for i in range(4)]
    with marlvec.make(factories, backend=backend, on_fault="restart", max_restarts=0) as envs:
        collector = Collector(envs, noop(), seed=0)
        first = collector.collect(env_steps=24)
        with pytest.raises(EnvRaised, match="Gave up"):
            collector.collect(env_steps=24)
        collector.reset()
        metrics = collector.metrics
        assert metrics.env_steps_lost == 4  # step 7 of each; the eighth brought no rows
        second = collector.collect(env_steps=24)
        assert metrics.env_steps == first.env_steps + second.env_steps + metrics.env_steps_lost
        assert metrics.agent_steps == first.agent_steps + second.agent_steps + metrics.agent_steps_lost


# --- every decision is in one batch or counts as lost: recounted from what policies were asked and what batches hold


Key = tuple[int, int, int]  # episode, agent, its turn

TURNS = ("turns", "masked turns", "late turns", "keyed", "keyed, no last obs")


class Recounting(EchoPolicy):
    """Keeps what it was asked."""

    def __init__(self, salt: int) -> None:
        super().__init__(salt)
        self.decided: Counter[Key] = Counter()

    def act(self, rows: Any, *, explore: bool = True) -> Any:
        self.decided.update(keys_of(rows))
        return super().act(rows, explore=explore)


def keys_of(rows: Any) -> list[Key]:
    return list(zip(*(rows[name].tolist() for name in ("eps_id", "agent_index", "t")), strict=True))


def by_number(name: str, episode: Any) -> str:
    return "ab"[(episode.number + int(name[-1])) % 2]


@pytest.fixture
def quiet() -> Iterator[None]:
    """Thousands of envs die here, and each is a warning."""
    log = logging.getLogger("marlvec")
    before = log.level
    log.setLevel(logging.CRITICAL)
    yield
    log.setLevel(before)


@pytest.mark.usefixtures("quiet")
@pytest.mark.slow("collects whole runs on several backends")
@FEW_OR_MANY
def test_decisions_of_lost_episodes_are_all_counted(tmp_path_factory: pytest.TempPathFactory, examples: int) -> None:
    deaths: Deaths = {(0, 0): ("step", 4, False), (1, 0): ("step", 7, False)}
    calls = [("env_steps", 7), ("env_steps", 7), ("reset", 1), ("agent_steps", 5), ("reset", 1)]
    for on_fault in ("restart", "mask", "raise"):
        for batch_mode in BATCH_MODES:
            recount(tmp_path_factory, "turns", "same_step", 3, on_fault, batch_mode, deaths, False, calls)
    deaths = {(0, 0): ("step", 0, True), (0, 1): ("reset", 2, False)}  # one ends in the tick in which another fails
    calls = [("episodes", 2), ("episodes", 3)]
    recount(tmp_path_factory, "turns", "next_step", 2, "raise", "truncate", deaths, False, calls)
    units = st.sampled_from(["env_steps", "agent_steps", "episodes", "reset"])
    for_examples(
        examples,
        partial(recount, tmp_path_factory),
        kind=st.sampled_from(TURNS),
        mode=st.sampled_from(MODES),
        agent_num=st.integers(2, 4),
        on_fault=st.sampled_from(["restart", "mask", "raise", "raise"]),
        batch_mode=st.sampled_from(BATCH_MODES),
        deaths=DEATHS,
        overlap=st.booleans(),
        calls=st.lists(st.tuples(units, st.integers(1, 12)), min_size=2, max_size=7),
    )


def recount(
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    mode: str,
    agent_num: int,
    on_fault: str,
    batch_mode: Any,
    deaths: Deaths,
    overlap: bool,
    calls: list[tuple[Any, int]],
) -> None:
    marks: Path = tmp_path_factory.mktemp("marks")
    policies = {"a": Recounting(0), "b": Recounting(1)}
    held: Counter[Key] = Counter()
    over: set[int] = set()  # lost, or ended, perhaps in a tick that was not finished
    callback_list = {
        "on_episode_lost": lambda episode, why: over.add(episode.eps_id),
        "on_episode_end": lambda episode, record: over.add(episode.eps_id),
    }
    options = {"autoreset_mode": mode, "on_fault": on_fault}
    with SyncVectorEnv(mortals(kind, 3, agent_num, deaths, marks), **options) as envs:
        collector = Collector(
            envs, policies, by_number, batch_mode=batch_mode, seed=0, overlap=overlap, callbacks=[callback_list]
        )
        try:
            for call, amount in calls:
                try:
                    if call == "reset":
                        collector.reset()
                    else:
                        for rows in collector.collect(**{call: amount}).values():
                            held.update(keys_of(rows))
                except EnvFault:
                    collector.reset()
            collector.reset()
        except (StateError, EnvFault):
            return  # all envs are out, or one does not even begin: nothing more is collected here
        decided = policies["a"].decided + policies["b"].decided
        assert max(held.values(), default=1) == max(decided.values(), default=1) == 1
        assert held <= decided
        metrics = collector.metrics
        assert metrics.agent_steps == decided.total()
        assert metrics.agent_steps_lost == (decided - held).total()
        if batch_mode == "truncate":
            assert {eps_id for eps_id, _, _ in decided - held} <= over


# --- envs that somebody else has driven in between: it is said at once, in so many words, and `reset` goes on


N = 4


BACKENDS = ("sync", "thread", "async", "native", "pool")


def made(backend: str, mode: str = "same_step") -> VectorEnv:
    return envs_on(backend, factories("parallel", N, 2), mode)


def policy_of(envs: VectorEnv) -> Any:
    return noop() if envs.backend in ("native", "pool") else EchoPolicy()


def second_collector(envs: VectorEnv) -> None:
    Collector(envs, policy_of(envs), seed=9).collect(env_steps=3)


def stray_stream(envs: VectorEnv) -> None:
    envs.send(envs.random_action())
    envs.recv(1)


def left_behind(envs: VectorEnv) -> None:
    """Sent, and never received."""
    envs.step_send(envs.random_action())


OTHERS: dict[str, Callable[[VectorEnv], Any]] = {
    "step": lambda envs: envs.step(envs.random_action()),
    "reset": lambda envs: envs.reset(),
    "reset of one": lambda envs: envs.reset(env_ids=[1]),
    "stream": stray_stream,
    "left behind": left_behind,
    "second collector": second_collector,
}


@pytest.mark.mostly_slow("collects whole runs on several backends", quick="each")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_it_is_said_at_the_next_collect_and_reset_goes_on(backend: str, other: str, overlap: bool) -> None:
    lost: list[str] = []
    callback_list = {"on_episode_lost": lambda episode, why: lost.append(why)}
    with made(backend) as envs:
        collector = Collector(envs, policy_of(envs), seed=0, overlap=overlap, callbacks=[callback_list])
        handed = collector.collect(agent_steps=17)
        OTHERS[other](envs)
        for _ in range(2):  # again, until it is reset
            with pytest.raises(EnvsDriven, match=r"another collector.* reset\(\)"):
                collector.collect(env_steps=20)
        metrics = collector.metrics
        assert not lost
        collector.reset()
        assert lost == ["reset"] * N
        assert metrics.env_steps == handed.env_steps + metrics.env_steps_lost
        assert metrics.agent_steps == handed.agent_steps + metrics.agent_steps_lost
        batch = collector.collect(env_steps=50)
        assert batch.env_steps == 50
        check_rows(batch)


@pytest.mark.mostly_slow("collects whole runs on several backends", quick=3)
@pytest.mark.parametrize("backend", BACKENDS)
def test_read_only_env_calls_are_allowed(backend: str) -> None:
    with made(backend) as envs, made(backend) as plain:
        collector = Collector(envs, policy_of(envs), seed=0)
        undisturbed = Collector(plain, policy_of(plain), seed=0)
        for _ in range(3):
            got, want = collector.collect(env_steps=19), undisturbed.collect(env_steps=19)
            for name, rows in want.items():
                for column, values in rows.items():
                    np.testing.assert_array_equal(got[name][column], values)
            before = envs.drive_count
            envs.random_action()
            envs.agents_at(1)
            if backend not in ("native", "pool"):
                envs.get_attr("metadata")
                envs.env_is_wrapped(object)
                envs.exec_func(lambda env: env.possible_agents)
                envs.exec_func_send(lambda env: 1, None)
                envs.exec_func_fetch()
            with pytest.raises(ArgumentError):
                envs.step("nonsense")  # nothing was sent
            assert envs.drive_count == before


@pytest.mark.parametrize("mode", MODES)
def test_a_callback_that_steps_the_envs_in_the_middle_is_found_out(mode: str) -> None:
    with made("sync", mode) as envs:

        def on_episode_step(step: Any) -> None:
            if collector.metrics.env_steps == 5 * N:
                envs.reset()

        collector = Collector(envs, EchoPolicy(), seed=0, callbacks=[on_episode_step])
        with pytest.raises(EnvsDriven):
            collector.collect(env_steps=100)
        with pytest.raises(StateError, match=r"reset\(\)"):
            collector.collect(env_steps=100)
        collector.reset()
        check_rows(collector.collect(env_steps=16))


def test_rows_taken_away_between_two_halves_are_missed() -> None:
    """A policy fails with one half on the way; then somebody receives that half."""
    calls: list[int] = []

    def act(rows: Any) -> Any:
        calls.append(len(rows))
        if len(calls) == 6:
            raise ValueError("scripted")
        return np.zeros(len(rows), int)

    with made("async") as envs:
        collector = Collector(envs, FunctionPolicy(act), seed=0, overlap=True)
        with pytest.raises(ValueError, match="scripted"):
            collector.collect(env_steps=100)
        envs.drain()
        with pytest.raises(EnvsDriven):
            collector.collect(env_steps=100)
        collector.reset()
        check_rows(collector.collect(env_steps=40))


def test_in_the_background_it_comes_out_of_next() -> None:
    with made("thread") as envs:
        collector = Collector(envs, EchoPolicy(), seed=0)
        collector.collect(env_steps=8)
        envs.step(envs.random_action())
        with pytest.raises(EnvsDriven), collector.background(env_steps=8) as batches:
            next(batches)
        collector.reset()
        with collector.background(env_steps=8, total=24) as batches:
            assert [batch.env_steps for batch in batches] == [8, 8, 8]


class Behind:
    """A view: all that it is asked goes to the envs."""

    def __init__(self, envs: VectorEnv) -> None:
        self.envs = envs

    def __getattr__(self, name: str) -> Any:
        return getattr(self.envs, name)


@pytest.mark.parametrize("view", [lambda envs: envs, Behind])
def test_evaluation_uses_separate_envs(view: Any) -> None:
    with made("sync") as envs, made("sync") as others:
        with pytest.raises(ArgumentError, match=r"evaluation_envs.*make\(\) others"):
            Collector(envs, EchoPolicy(), evaluation_envs=view(envs))
        collector = Collector(envs, EchoPolicy(), seed=0, evaluation_envs=others)
        with pytest.raises(ArgumentError, match=r"evaluate\(\).*make\(\) others"):
            collector.evaluate(1, view(envs))
        for _ in range(2):
            collector.collect(env_steps=10)
            assert len(collector.evaluate(3)) == 3


def test_evaluation_in_envs_that_others_have_left_in_the_middle() -> None:
    """As an evaluation that Ctrl-C has ended leaves them."""
    with made("async") as envs, made("async") as others:
        collector = Collector(envs, EchoPolicy(), seed=0, evaluation_envs=others)
        others.reset()
        others.send(others.random_action())
        assert len(collector.evaluate(3)) == 3


@pytest.mark.parametrize("lockstep", [False, True])
def test_two_collectors_on_the_slots_of_simulators_outside(lockstep: bool) -> None:
    with external.make(ONE, lockstep=lockstep) as envs, Game(envs):
        first, second = Collector(envs, noop(), seed=0), Collector(envs, noop(), seed=1)
        first.collect(env_steps=6)
        second.collect(env_steps=6)
        with pytest.raises(EnvsDriven):
            first.collect(env_steps=6)
        first.reset()
        rows = first.collect(env_steps=6)["main"]
        assert (rows["next_obs"][:, 0] == rows["obs"][:, 0] + 1).all()
        assert (rows["rewards"] == rows["obs"][:, 0] + 1).all()
        with pytest.raises(EnvsDriven):
            second.collect(env_steps=6)
