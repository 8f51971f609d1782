"""Episodes that are lost with their env: none of their rows comes to a batch any more, and every one is counted."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from rich.console import Console

import marlvec
from marlvec.cli.display import print_rollout
from marlvec.cli.running import roll_out
from marlvec.collect import Collector
from marlvec.connectors import ActionConnector, AgentConnector, FrameStack, Rows
from marlvec.errors import BrokenError, EnvRaised, StateError
from marlvec.policies import FunctionPolicy
from marlvec.testing.scripted import WIDTH, ExitingEnv, HangingEnv, RaisingEnv
from marlvec.vector import AsyncVectorEnv
from tests.collect.helpers.mortal import DEATHS, Deaths, dying_counters
from tests.collect.helpers.plans import BATCH_MODES, DRAWN, FEW_OR_MANY, LONG, PROGRAMS, Plan, for_examples, play
from tests.collect.helpers.players import KINDS, MODES, EchoPolicy

noop = FunctionPolicy(lambda rows: np.zeros(len(rows), int))


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
            envs, noop, batch_mode=batch_mode, agent_connectors=[AgentSpy()], action_connectors=[ActionSpy()], seed=0
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
        collector = Collector(envs, noop, batch_mode=batch_mode, seed=0)
        with pytest.raises(EnvRaised, match="No env is left"):
            collector.collect(env_steps=20)
        with pytest.raises(BrokenError, match=r"only close\(\) is left"):
            collector.collect(env_steps=20)
    with dying_counters({}) as envs:
        collector = Collector(envs, noop, batch_mode=batch_mode, seed=0)
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
        collector = Collector(envs, noop, seed=0)
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
        collector = Collector(envs, noop, seed=0)
        collector.collect(env_steps=60)
        metrics = collector.metrics
        assert (metrics.episodes_faulty, metrics.episodes_restarted, metrics.env_steps_lost) == (0, 1, 3)
    assert not caplog.records


def test_a_rollout_at_the_command_line_tells_of_losses() -> None:
    def printed(deaths: Any) -> str:
        text = io.StringIO()
        console = Console(file=text, width=160)
        with dying_counters(deaths) as envs:
            collector = Collector(envs, noop, batch_mode="complete", seed=0, window=10**6)
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
        collector = Collector(envs, noop, seed=0)
        first = collector.collect(env_steps=24)
        with pytest.raises(EnvRaised, match="Gave up"):
            collector.collect(env_steps=24)
        collector.reset()
        metrics = collector.metrics
        assert metrics.env_steps_lost == 4  # step 7 of each; the eighth brought no rows
        second = collector.collect(env_steps=24)
        assert metrics.env_steps == first.env_steps + second.env_steps + metrics.env_steps_lost
        assert metrics.agent_steps == first.agent_steps + second.agent_steps + metrics.agent_steps_lost
