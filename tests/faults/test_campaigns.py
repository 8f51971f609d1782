"""Faults at random: any calls in any order, campaigns with an audit of every row, and the table of the catalogue."""

from __future__ import annotations

import argparse
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from rich.console import Console
from rich.table import Table

from marlvec import AsyncVectorEnv, RestartLimit, SyncVectorEnv
from tests import checklist
from tests.checklist import FAULTS, Marks
from tests.faults.harness import table
from tests.faults.harness.audit import AGENT_NUM, Audit, LedgerEnv, Order, Rows, encode
from tests.faults.harness.campaign import NUM_ENVS, Campaign, Figures, counted_warnings, slope
from tests.faults.harness.catalogue import CATALOGUE, REASONS, SECTIONS
from tests.faults.harness.havoc import Plan
from tests.faults.harness.machine import Machine
from tests.faults.harness.table import lines, parse_lines
from tests.vector.support.reference import refused
from tests.waiting import until

# Random calls, random harm: what comes back is what a model of every env says, and nothing ever hangs.


CALLS = 30
FEW_RUNS = 30  # of `make test`
# `make test-all` makes more; a hunt for a defect (tests/defects) goes on until it is found; `make soak` makes most.
RUNS = 400 if "MARLVEC_TEST_DEFECT" in os.environ else 50
LONG_RUNS = 5_000
LONG_CALLS = 50


def run(runs: int, calls: int) -> None:
    """Run the machine; what it finds comes as it was found, with all that led to it.

    Nothing is made smaller: what depends on who was faster is not there when it is tried again, and a hang takes long.
    """
    chosen = settings(
        max_examples=runs,
        stateful_step_count=calls,
        phases=[Phase.generate],
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    Machine.finds.clear()
    try:
        run_state_machine_as_test(Machine, settings=chosen)
    except BaseException:
        if Machine.finds:
            raise Machine.finds[0] from None
        raise


def proves(test: Callable[[], None]) -> Callable[[], None]:
    """Marks of both."""
    for fault in ("A16", "B5"):
        test = pytest.mark.fault(fault)(test)
    return pytest.mark.time_limit(3600)(test)


@pytest.mark.many_processes
@proves
def test_some_calls_whatever_happens() -> None:
    run(FEW_RUNS, CALLS)


@pytest.mark.many_processes
@pytest.mark.slow("kills, stops or starts many workers")
@proves
def test_any_calls_whatever_happens() -> None:
    run(RUNS, CALLS)


@pytest.mark.many_processes
@pytest.mark.soak
@proves
def test_any_calls_whatever_happens_for_long() -> None:
    run(LONG_RUNS, LONG_CALLS)


# Random kills, stops, hangs and exceptions while eight envs step: every step is accounted for, and nothing is left.


MODES = ("same_step", "next_step", "disabled")
FORMS: dict[str, dict[str, Any]] = {
    "same_step, step": {"copy": False},
    "same_step, send": {"num_workers": 4},
    "next_step, step": {"num_workers": 3, "context": "fork"},
    "next_step, send": {"shared_memory": False},
    "disabled, step": {"num_workers": 4, "copies": 1},
    "disabled, send": {"num_workers": 3, "context": "fork"},
}
"""Mode and style to what else differs; all together have 36,000 env steps and 66 SIGKILLs in them."""


def campaign(form: str, **settings: Any) -> Campaign:
    mode, style = form.split(", ")
    return Campaign(mode, style, seed=list(FORMS).index(form), **{**FORMS[form], **settings})


@pytest.mark.slow("kills, stops or starts many workers")
@pytest.mark.fault("A1")
@pytest.mark.fault("A2")
@pytest.mark.fault("A8")
@pytest.mark.time_limit(300)
@pytest.mark.parametrize("form", FORMS)
def test_every_step_is_delivered_or_declared_lost(form: str, tmp_path: Path) -> None:
    """R1 and R2 in small; the checks are the campaign's own."""
    hang = Order.HANG if "step," in form else Order.HANG_IN_C
    orders = {Order.RAISE_EARLY: 3, Order.RAISE_LATE: 3, Order.RAISE_IN_RESET: 3, hang: 1, Order.EXIT: 2}
    plan = campaign(form, env_steps=6_000, kills=9, stops=3, gap=0.08, orders=orders)
    figures = plan.run(tmp_path)
    assert figures.env_steps >= plan.env_steps
    assert figures.kills == plan.kills + plan.num_workers
    assert figures.stops == plan.stops
    assert 0 < figures.lost_but_done < figures.lost
    # An order is lost where its env is killed before it gets to it.
    assert figures.exceptions >= 5
    assert figures.hangs + figures.exits >= 1


@pytest.mark.slow("kills, stops or starts many workers")
@pytest.mark.parametrize("mode", MODES)
def test_exceptions_of_envs_cost_other_envs_nothing(mode: str, tmp_path: Path) -> None:
    orders = {Order.RAISE_EARLY: 20, Order.RAISE_LATE: 20, Order.RAISE_IN_RESET: 20}
    figures = Campaign(mode, "send", env_steps=6000, orders=orders).run(tmp_path)
    assert figures.exceptions == 60
    killed = NUM_ENVS  # to warm up, each worker is killed once
    assert figures.episodes_lost == 40 + killed, "the end of an episode was told before its reset raised"


# --- torn observations


def burst(envs: AsyncVectorEnv, audit: Audit, draw: random.Random, number: int, longest: float) -> None:
    """Kill all workers, each at its own moment within the time that a step takes, early ones preferred."""
    ids = np.arange(NUM_ENVS)
    numbers = number + ids
    audit.asked_step(ids, numbers)
    moments = sorted((longest * draw.random() * draw.random(), pid) for pid in envs.worker_pids)
    envs.send(encode(numbers, np.zeros(NUM_ENVS, np.int64)))
    begin = time.perf_counter()
    for moment, pid in moments:
        while time.perf_counter() - begin < moment:
            pass
        os.kill(pid, signal.SIGKILL)
    audit.came(Rows.of_result(envs.recv()))


def kill_at_work(envs: AsyncVectorEnv, audit: Audit, folder: Path, number: int) -> None:
    """Kill all workers once every second env has written down its step, and before it answers."""
    ids = np.arange(NUM_ENVS)
    numbers = number + ids
    ledgers = [folder / f"ledger-{i}" for i in ids[1::2]]
    before = [path.stat().st_size for path in ledgers]
    audit.asked_step(ids, numbers)
    envs.send(encode(numbers, np.where(ids % 2, Order.HANG, Order.NONE)))
    until(lambda: all(path.stat().st_size > size for path, size in zip(ledgers, before, strict=True)))
    for pid in envs.worker_pids:
        os.kill(pid, signal.SIGKILL)
    audit.came(Rows.of_result(envs.recv()))


def tear(folder: Path, bursts: int) -> Audit:
    """So many bursts, and kills at work, while eight envs of four workers send 24 KiB for each agent."""
    factories = [partial(LedgerEnv, folder, env_index=i, copies=512) for i in range(NUM_ENVS)]
    limit = RestartLimit(count=10**9, backoff=0.0)
    draw, ids = random.Random(3), np.arange(NUM_ENVS)
    audit = Audit(folder, NUM_ENVS, "same_step")
    with (
        counted_warnings(),
        AsyncVectorEnv(factories, num_workers=4, context="fork", on_fault="restart", max_restarts=limit) as envs,
    ):
        audit.asked_reset(ids)
        audit.came(Rows.of_reset(envs.reset(), ids))
        took: list[float] = []  # seconds, by steps before the first burst
        for k in range(20 + bursts + 1):
            numbers = 1 + 2 * NUM_ENVS * k + ids
            audit.asked_step(ids, numbers)
            begin = time.perf_counter()
            rows = Rows.of_step(envs.step(encode(numbers, np.zeros(NUM_ENVS, np.int64))))
            audit.came(rows)
            if k < 20:
                took.append(time.perf_counter() - begin)
            elif k < 20 + bursts:
                burst(envs, audit, draw, int(numbers[-1]) + 1, float(np.median(took)))
            else:
                kill_at_work(envs, audit, folder, int(numbers[-1]) + 1)
        audit.settle()
    return audit


@pytest.mark.slow("kills, stops or starts many workers")
@pytest.mark.fault("A3")
@pytest.mark.time_limit(300)
def test_no_observation_is_torn(tmp_path: Path) -> None:
    """Each burst is a trial for the observations of eight envs: 160 here, and sixty times as many in the soak."""
    audit = tear(tmp_path, bursts=20)
    assert audit.fault_rows.sum() > 20, "the kills came too late"
    assert audit.lost_but_done > 0, "none came while an env was at work"


# --- the audit itself: what it must not let pass


def tear_one(rows: Rows, before: Rows) -> Rows:
    obs = rows.obs.copy()
    a = int((rows.alive & before.alive)[0].argmax())
    obs[0, a, -10:-1] = before.obs[0, a, -10:-1]
    return replace(rows, obs=obs)


def leave_one(rows: Rows, before: Rows) -> Rows:
    obs = rows.obs.copy()
    i, a = np.argwhere(~rows.alive)[0]
    obs[i, a] = before.obs[0, before.alive[0].argmax()]
    return replace(rows, obs=obs)


def end_one(rows: Rows, before: Rows) -> Rows:
    truncated = rows.truncated.copy()
    truncated[1, rows.alive[1].argmax()] = True
    return replace(rows, truncated=truncated)


SPOILT: dict[str, tuple[Callable[[Rows, Rows], Rows], str]] = {
    "stale": (lambda rows, before: before, "rewards"),
    "stale observations": (lambda rows, before: replace(rows, obs=before.obs), "labels"),
    "envs swapped": (lambda rows, before: replace(rows, obs=rows.obs[[1, 0, 2, 3]]), "labels"),
    "agents swapped": (lambda rows, before: replace(rows, obs=rows.obs[:, ::-1]), "labels"),
    "torn": (tear_one, "torn"),
    "of the dead": (leave_one, "not there"),
    "rewards of others": (lambda rows, before: replace(rows, rewards=rows.rewards[::-1]), "rewards"),
    "somebody ended": (end_one, "who is truncated"),
    "somebody is dead": (lambda rows, before: replace(rows, alive=~rows.alive, acting=~rows.alive), "who is alive"),
    "autoreset": (lambda rows, before: replace(rows, reset_mask=~rows.reset_mask), "autoresets"),
    "invented fault": (lambda rows, before: replace(rows, fault=~rows.fault), "who was lost"),
    "twice at once": (lambda rows, before: rows.at(np.array([0, 1, 2, 0])), "twice at once"),
}


class Watched:
    """Four envs and their audit, some steps after the first reset."""

    def __init__(self, folder: Path, *, autoreset_mode: str = "same_step", **settings: Any) -> None:
        factories = [partial(LedgerEnv, folder, env_index=i, copies=4) for i in range(4)]
        self.envs = SyncVectorEnv(factories, autoreset_mode=autoreset_mode, **settings)
        self.audit = Audit(folder, 4, autoreset_mode)
        self.ids, self.number = np.arange(4), 1
        self.audit.asked_reset(self.ids)
        self.audit.came(Rows.of_reset(self.envs.reset(), self.ids))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.envs.close()

    def step(self, order: Order = Order.NONE) -> Rows:
        """Rows that the audit has not seen yet."""
        numbers = self.number + self.ids
        self.number += 4
        self.audit.asked_step(self.ids, numbers)
        return Rows.of_step(self.envs.step(encode(numbers, np.array([order, 0, 0, 0]))))

    def step_on(self) -> tuple[Rows, Rows]:
        """Two steps in which nobody ends, and somebody has before; the audit has not seen the second one yet."""
        while True:
            before = self.step()
            self.audit.came(before)
            rows = self.step()
            nobody_ends = before.final_obs is None and rows.final_obs is None and (before.alive == rows.alive).all()
            if nobody_ends and not rows.alive.all():
                return before, rows
            self.audit.came(rows)


@pytest.mark.parametrize("kind", SPOILT)
def test_the_audit_finds_spoilt_rows(kind: str, tmp_path: Path) -> None:
    spoil, said = SPOILT[kind]
    with Watched(tmp_path) as watched:
        before, rows = watched.step_on()
        refused(AssertionError, said, watched.audit.came, spoil(rows, before))


def test_the_audit_finds_unrequested_rows(tmp_path: Path) -> None:
    with Watched(tmp_path) as watched:
        _, rows = watched.step_on()
        watched.audit.came(rows)
        refused(AssertionError, "nobody had asked", watched.audit.came, rows)


@pytest.mark.parametrize("mode", MODES)
def test_the_audit_finds_a_restart_that_was_not_told(mode: str, tmp_path: Path) -> None:
    with Watched(tmp_path, autoreset_mode=mode, on_fault="restart") as watched:
        with counted_warnings():
            rows = watched.step(Order.RAISE_LATE)
        assert rows.fault.tolist() == [True, False, False, False]
        refused(AssertionError, "", watched.audit.came, replace(rows, fault=np.zeros(4, np.bool_)))


def doubled(path: Path) -> None:
    path.write_bytes(path.read_bytes() + path.read_bytes()[-16:])


def unwritten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-16])


def unheard_of(path: Path) -> None:
    path.write_bytes(path.read_bytes() + path.read_bytes()[-16:-4] + (800_000).to_bytes(4, "little"))


def of_before(path: Path) -> None:
    path.write_bytes(path.read_bytes() + path.read_bytes()[:16])


def interrupted(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (doubled, "taken twice"),
        (unwritten, "only delivered"),
        (unheard_of, "only in the ledger"),
        (of_before, "went back in time"),
        (interrupted, "in the middle"),
    ],
)
def test_the_audit_finds_spoilt_books(spoil: Callable[[Path], None], said: str, tmp_path: Path) -> None:
    with Watched(tmp_path) as watched:
        watched.audit.came(watched.step_on()[1])
        spoil(tmp_path / "ledger-2")
        refused(AssertionError, said, watched.audit.settle)


def test_the_plan_of_a_run_is_the_same_each_time() -> None:
    orders = {Order.HANG: 3, Order.EXIT: 4}
    one, other = (Plan(orders, 100, seed=5) for _ in range(2))
    found = [one.order(number) for number in range(1, 101)]
    assert found == [other.order(number) for number in range(1, 101)]
    assert sorted(found)[-7:] == [Order.HANG] * 3 + [Order.EXIT] * 4
    assert not one


# --- the full size


def test_theil_and_sen() -> None:
    points = [(x, 3 * x + 1_000_000) for x in range(100)]
    points[5] = 5, 10**9
    assert slope(points) == pytest.approx(3)


@pytest.mark.soak
@pytest.mark.time_limit(7200)
def test_soak(tmp_path: Path) -> None:
    """R1 and R2 in full size: 2.04 million env steps, over 1,000 kills, 200 stops, 200 exceptions, 50 hangs."""
    orders = {
        Order.RAISE_EARLY: 13,
        Order.RAISE_LATE: 13,
        Order.RAISE_IN_RESET: 13,
        Order.HANG: 6,
        Order.HANG_IN_C: 6,
        Order.EXIT: 10,
    }
    found: dict[str, Figures] = {}
    for form in FORMS:
        folder = tmp_path / form
        folder.mkdir()
        found[form] = campaign(form, env_steps=340_000, kills=170, stops=36, gap=0.3, orders=orders).run(folder)
    console = Console(width=170)
    report(console, found)
    begin = time.perf_counter()
    torn = tear(tmp_path, bursts=1200)
    console.print(
        f"Torn observations: 0, in {1200 * NUM_ENVS} trials with 24 KiB for each of {AGENT_NUM} agents "
        f"({int(torn.fault_rows.sum())} episodes lost, {time.perf_counter() - begin:.0f} s)"
    )
    for name, least in (("env_steps", 2_000_000), ("kills", 1000), ("stops", 200), ("exceptions", 200), ("hangs", 50)):
        assert sum(getattr(figures, name) for figures in found.values()) >= least, name
    assert memory_slope(found) <= 2**20


def memory_slope(found: dict[str, Figures]) -> float:
    """Bytes by which this process grew with each million env steps, when the first campaign had warmed it up."""
    points: list[tuple[int, int]] = []
    begin = 0
    for figures in found.values():
        points += [(begin + steps, size) for steps, size in figures.rss]
        begin += figures.env_steps
    warm = next(iter(found.values())).env_steps
    return 1e6 * slope([point for point in points if point[0] > warm])


def report(console: Console, found: dict[str, Figures]) -> None:
    """Print what each campaign came to."""
    table = Table(title="Eight envs under fire: undeclared gaps 0, duplicates 0, torn or mislabelled rows 0")
    for heading in ("", *found, "all"):
        table.add_column(heading, justify="right" if heading else "left")
    names = [f.name for f in fields(Figures) if f.name != "rss"]
    for name in names:
        values = [getattr(figures, name) for figures in found.values()]
        table.add_row(name.replace("_", " "), *(f"{value:,.0f}" for value in (*values, sum(values))))
    table.add_row("RSS, MiB per 1 M env steps", *[""] * len(found), f"{memory_slope(found) / 2**20:+.2f}")
    console.print(table)


# The table of faults: every line of the catalogue, and what is said of it.


TESTS = {
    "tests/a/test_a.py::test_kill[1]": Marks(faults=("A1", "A2")),
    "tests/a/test_a.py::test_kill[2]": Marks(faults=("A1", "A2")),
    "tests/a/test_b.py::test_hang": Marks(faults=("A2",)),
    "tests/a/test_b.py::test_late": Marks(faults=("A3",)),
    "tests/a/test_b.py::test_skips": Marks(faults=("A5",)),
    "tests/a/test_b.py::test_of_the_checklist": Marks(checklist=("1",)),
}
OUTCOMES = {
    "tests/a/test_a.py::test_kill[1]": "passed",
    "tests/a/test_a.py::test_kill[2]": "passed",
    "tests/a/test_b.py::test_hang": "failed",
    "tests/a/test_b.py::test_skips": "skipped",
    "tests/gone.py::test_is_gone": "passed",
}
STATED = {"A4": "no test can do it", "A2": "nor this", "A5": "not on this machine"}


def test_the_catalogue_is_that_of_the_page() -> None:
    assert list(CATALOGUE) == list(FAULTS)
    assert {fault[0] for fault in CATALOGUE} == set(SECTIONS)
    for letter in SECTIONS:
        own = [fault for fault in CATALOGUE if fault[0] == letter]
        assert own == [f"{letter}{number}" for number in range(1, len(own) + 1)]
    page = checklist.texts(checklist.TEXTS / "faults.md")
    assert {line: text for line, text in page.items() if line[0] in SECTIONS} == CATALOGUE


def test_every_line_of_the_checklist_has_its_words() -> None:
    words = checklist.texts(checklist.TEXTS / "behaviours.md")
    assert set(checklist.CHECKLIST) <= set(words)
    assert all(words[line] for line in checklist.CHECKLIST)


def test_reasons_are_of_lines_that_there_are() -> None:
    assert set(REASONS) <= set(CATALOGUE)
    assert all(reason.strip() for reason in REASONS.values())


def test_a_line_names_its_tests_and_how_they_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "REASONS", STATED)
    found = lines([(nodeid, marks.faults) for nodeid, marks in TESTS.items()], OUTCOMES)
    assert [line.id for line in found] == list(CATALOGUE)
    assert list(map(str, found[:6])) == [
        "A1   SIGKILL mid-step: a/test_a.py::test_kill (2 passed)",
        "A2   SIGKILL while idle: open: a/test_a.py::test_kill (2 passed); a/test_b.py::test_hang (1 failed); "
        "no test: nor this",
        "A3   SIGKILL inside shared-memory write: open: a/test_b.py::test_late (1 not run)",
        "A4   SIGKILL while holding a lock: no test: no test can do it",
        "A5   SIGSEGV / SIGBUS / SIGABRT in env: a/test_b.py::test_skips (1 skipped); no test: not on this machine",
        "A6   `sys.exit(3)` / `os._exit(0)` in env: open",
    ]
    assert [line.is_open for line in found[:6]] == [False, True, True, False, False, True]


@pytest.fixture
def small_suite(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As if these were all the tests, and their outcomes."""
    checklist.write_record(tmp_path / "record.json", OUTCOMES)
    monkeypatch.setattr(checklist, "collect", lambda: TESTS)
    monkeypatch.setattr(checklist, "RECORD", tmp_path / "record.json")
    monkeypatch.setattr(table, "REASONS", STATED)


@pytest.mark.usefixtures("small_suite")
def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    def said() -> list[str]:
        return capsys.readouterr().out.splitlines()

    assert table.main([]) == 0
    everything = said()
    assert len(everything) == len(CATALOGUE) + 1
    assert [text.split()[0] for text in everything[:-1]] == list(CATALOGUE)
    assert everything[-1] == "1 of 126 covered, 2 with a reason, 123 open"
    assert table.main(["--open"]) == 0
    assert [text.split()[0] for text in said()[:-1]] == [fault for fault in CATALOGUE if fault != "A1"]
    assert table.main(["--require", "A1,A4-A5"]) == 0
    assert capsys.readouterr().err == ""
    assert table.main(["--require", "B,A1-A2"]) == 1
    section = ", ".join(fault for fault in CATALOGUE if fault[0] == "B")
    assert capsys.readouterr().err == f"required, but open: A2, {section}\n"


def test_which_lines_can_be_required() -> None:
    assert parse_lines("C18, D,B1-B3") == ("C18", *(f"D{k}" for k in range(1, 13)), "B1", "B2", "B3")
    for wrong in ("I", "A27", "12", "1-3", "", "a", "A1,"):
        refused(argparse.ArgumentTypeError, "", parse_lines, wrong)
