"""What holds for every test: tiers, the checklist, what is left behind, and how tests wait."""

from __future__ import annotations

import argparse
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marlvec.testing.scripted import CounterEnv
from tests import checklist
from tests.checklist import CHECKLIST, FAULTS, Marks, Recorder, parse_ranges, read_record, statuses, texts, unmarked
from tests.conftest import COLLECTED
from tests.leaks import SHM, Snapshot, leaks
from tests.tiers import PARTS, SOAK, kept
from tests.vector.support.kinds import vectorize
from tests.waiting import Gate, GatedEnv, overdue, until, within

# --- Tiers: every value, or every pair of values, of parameters stays in `make test`


pytest_plugins = ["pytester"]


def combined(case: dict[str, Any], size: int) -> set[Any]:
    return set(combinations(sorted(case.items()), size))


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4), quick=st.sampled_from(sorted(PARTS)))
def test_every_combination_of_a_full_product_stays_in_fewest_cases(sizes: list[int], quick: str) -> None:
    cases = [dict(zip("abcd", row, strict=False)) for row in product(*(range(size) for size in sizes))]
    places, size = kept(cases, quick), min(PARTS[quick], len(sizes))
    everything = set[Any]().union(*(combined(case, size) for case in cases))
    assert set[Any]().union(*(combined(cases[place], size) for place in places)) == everything
    largest = sorted(sizes)[-size:]
    assert len(places) >= (largest[0] if size == 1 else largest[0] * largest[1])


def test_parameters_that_are_given_together_count_as_one() -> None:
    pairs = [(f"name {n}", 1000 + n) for n in range(20)]
    together = [{"name": name, "value": value, "mode": mode} for name, value in pairs for mode in ("a", "b")]
    assert len(kept(together, "each")) == 20
    assert kept(together, 15) == {0, 15, 30}


SUITE = """
import pytest

@pytest.mark.slow("a reason")
def test_slow(): pass

@pytest.mark.mostly_slow("a reason", quick="each")
@pytest.mark.parametrize("a", [1, 2, 3])
@pytest.mark.parametrize("b", [1, 2])
def test_mostly(a, b): pass

def test_quick(): pass

@pytest.mark.mostly_slow("a reason", quick=6, slow="each")
@pytest.mark.parametrize("a", [1, 2, 3])
@pytest.mark.parametrize("b", [1, 2])
def test_seldom(a, b): pass
"""


def collect(pytester: pytest.Pytester, text: str, marked: str) -> pytest.RunResult:
    pytester.makeini("[pytest]\nmarkers =\n    slow: ...\n    mostly_slow: ...\n    soak: ...")
    pytester.makeconftest(
        "import pytest\nfrom tests.tiers import mark_slow\n"
        "@pytest.hookimpl(tryfirst=True)\ndef pytest_collection_modifyitems(items): mark_slow(items)\n"
    )
    pytester.makepyfile(text)
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", "-m", marked)


def test_marks_leave_the_rest_out(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", __file__.rpartition("/tests/")[0])
    collect(pytester, SUITE, "not slow and not soak").assert_outcomes(passed=5, deselected=9)
    collect(pytester, SUITE, "slow").assert_outcomes(passed=6, deselected=8)
    collect(pytester, SUITE, "soak").assert_outcomes(passed=3, deselected=11)


@pytest.mark.slow("runs pytest")
@pytest.mark.parametrize(
    "mark",
    [
        "slow",
        "slow()",
        "slow('a', quick='each')",
        "mostly_slow('a')",
        "mostly_slow('a', quick=1)",
        "mostly_slow('a', quick=2, slow='some')",
    ],
)
def test_mark_without_a_reason_or_of_another_form_is_refused(
    mark: str, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", __file__.rpartition("/tests/")[0])
    ran = collect(pytester, f"import pytest\n@pytest.mark.{mark}\ndef test_one(): pass", "")
    ran.stderr.fnmatch_lines(["*expected *slow(reason*"])


MARKED_SUITE = """
import pytest

@pytest.mark.checklist(1)
def test_passes(): pass

@pytest.mark.checklist(2)
@pytest.mark.checklist(3)
@pytest.mark.fault("C13")
@pytest.mark.parametrize("n", [1, 2])
def test_passes_for_one_alone(n): assert n == 1

@pytest.mark.checklist(4)
def test_is_skipped(): pytest.skip()

@pytest.fixture
def leaky():
    yield
    raise RuntimeError("left behind")

@pytest.mark.checklist(5)
def test_ends_badly(leaky): pass

def test_has_no_mark(): pass
"""


def run_marked(pytester: pytest.Pytester, *arguments: str) -> tuple[Recorder, dict[str, str]]:
    """Run pytest over the folder of ``pytester``; the recorder, and the outcomes recorded by now."""
    path = pytester.path / "record.json"
    recorders: list[Recorder] = []

    class Register:
        def pytest_configure(self, config: pytest.Config) -> None:
            for marker in ("checklist(number): ...", "fault(id): ..."):
                config.addinivalue_line("markers", marker)
            recorders.append(Recorder(config, path))
            config.pluginmanager.register(recorders[0])

    pytester.inline_run("-p", "no:cacheprovider", *arguments, plugins=[Register()])
    return recorders[0], read_record(path)


ELSEWHERE = {"F13", "H1", "H2", "H3", "H4", "H5", "H6", "H7", "H12"}
"""A leak of memory is a matter of hours (`make soak`), and what dies on a cluster needs one (`make distributed`)."""


@pytest.mark.slow("collects all tests, where this run has not")
def test_every_line_is_marked_on_a_test_of_test_all(request: pytest.FixtureRequest) -> None:
    if [Path(path).resolve() for path in request.config.args] == [checklist.ROOT / "tests"]:
        tiers, recorder = request.config.stash[COLLECTED], request.config.pluginmanager.get_plugin("marlvec-checklist")
        found = unmarked(marks for nodeid, marks in recorder.marks.items() if tiers[nodeid] != SOAK)
        assert set(found) <= ELSEWHERE
        return
    command = [sys.executable, "-m", "tests.checklist", "--unmarked"]
    ran = subprocess.run(command, cwd=checklist.ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert set(ran.stdout.split()) <= ELSEWHERE


def test_there_are_131_lines_and_126_faults() -> None:
    assert (len(CHECKLIST), CHECKLIST[0], CHECKLIST[-1]) == (131, "1", "131")
    assert (len(FAULTS), FAULTS[0], FAULTS[-1]) == (126, "A1", "H12")


def test_outcomes_of_marked_tests_are_recorded(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_suite=MARKED_SUITE)
    recorder, outcomes = run_marked(pytester)
    assert outcomes == {
        "test_suite.py::test_passes": "passed",
        "test_suite.py::test_passes_for_one_alone[1]": "passed",
        "test_suite.py::test_passes_for_one_alone[2]": "failed",
        "test_suite.py::test_is_skipped": "skipped",
        "test_suite.py::test_ends_badly": "failed",  # the call passed, its fixture did not
    }
    both = Marks(checklist=("3", "2"), faults=("C13",))
    assert sorted(recorder.marks["test_suite.py::test_passes_for_one_alone[2]"].checklist) == sorted(both.checklist)
    assert recorder.marks["test_suite.py::test_passes_for_one_alone[2]"].faults == both.faults


def test_a_partial_run_changes_only_what_it_ran(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_suite=MARKED_SUITE)
    _, before = run_marked(pytester)
    pytester.makepyfile(test_suite=MARKED_SUITE.replace("assert n == 1", "assert n == 2"))
    _, after = run_marked(pytester, "-k", "one_alone")
    changed = {nodeid for nodeid in before if before[nodeid] != after[nodeid]}
    assert before.keys() == after.keys()
    assert changed == {f"test_suite.py::test_passes_for_one_alone[{n}]" for n in (1, 2)}


def test_an_address_in_a_name_makes_no_other_test_of_it(pytester: pytest.Pytester) -> None:
    """As ``ids=repr`` gives it to an object without a name; a record of every address would never end."""
    text = 'import pytest\n@pytest.mark.fault("A1")\n@pytest.mark.parametrize("x", [object()], ids=repr)\n'
    pytester.makepyfile(test_suite=f"{text}def test_it(x): pass")
    recorder, outcomes = run_marked(pytester)
    assert outcomes == {"test_suite.py::test_it[<object object>]": "passed"}
    assert recorder.marks.keys() == outcomes.keys()


def test_collecting_alone_records_nothing(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_suite=MARKED_SUITE)
    recorder, outcomes = run_marked(pytester, "--collect-only")
    assert len(recorder.marks) == 5
    assert outcomes == {}


@pytest.mark.slow("starts programs of its own")
@pytest.mark.parametrize("mark", ["checklist(132)", "checklist('1')", "checklist(1, 2)", "checklist()", "fault('I1')"])
def test_a_mark_that_names_no_line_ends_the_run(pytester: pytest.Pytester, mark: str) -> None:
    pytester.makepyfile(test_suite=f"import pytest\n@pytest.mark.{mark}\ndef test_it(): pass")
    _, outcomes = run_marked(pytester)
    assert outcomes == {}
    with pytest.raises(pytest.UsageError, match="test_it: the mark"):
        _read_marks_of(pytester, "test_it")


def _read_marks_of(pytester: pytest.Pytester, name: str) -> Marks:
    (item,) = (item for item in pytester.getitems((pytester.path / "test_suite.py").read_text()) if item.name == name)
    return checklist.read_marks(item)


def test_a_line_is_covered_by_a_passing_test_and_no_failing_one() -> None:
    tests = [("a", ["1"]), ("b", ["1", "2"]), ("c", ["3", "3"]), ("d", ["4"]), ("e", ["5"])]
    by_line = statuses(tests, {"a": "passed", "b": "failed", "c": "passed", "d": "skipped", "gone": "passed"})
    assert {line: status.covered for line, status in by_line.items()} == {
        "1": False,
        "2": False,
        "3": True,
        "4": False,
        "5": False,
    }
    assert str(by_line["1"]) == "1 failed, 1 passed"
    assert str(by_line["3"]) == "1 passed"
    assert str(by_line["5"]) == "1 not run"
    assert str(by_line["6"]) == "no test"


def test_ranges_of_lines() -> None:
    assert parse_ranges("1-3, 15,A25-A26") == ("1", "2", "3", "15", "A25", "A26")
    for wrong in ("0", "132", "A27", "x", "3-", "A1-B2", ""):
        with pytest.raises(argparse.ArgumentTypeError):
            parse_ranges(wrong)


def test_texts_of_both_documents(tmp_path: Path) -> None:
    document = tmp_path / "LINES.md"
    document.write_text("# Head\n\n1. `make` works: yes.\n| # | Fault |\n| A12 | All die | kill |\n12. Twelve\n")
    assert texts(document) == {"1": "`make` works: yes.", "A12": "All die", "12": "Twelve"}


@pytest.fixture
def small_suite(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As if these were all the tests, and their outcomes."""
    marks = {"a": Marks(("1",), ("A1",)), "b": Marks(("2",))}
    record = tmp_path / "record.json"
    checklist.write_record(record, {"a": "passed", "b": "failed"})
    monkeypatch.setattr(checklist, "collect", lambda marked="": marks)
    monkeypatch.setattr(checklist, "RECORD", record)


@pytest.mark.usefixtures("small_suite")
def test_the_command_lists_what_is_not_covered(capsys: pytest.CaptureFixture[str]) -> None:
    assert checklist.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 131
    assert lines[0].split()[:3] == ["2", "1", "failed"]
    assert lines[1].split()[:3] == ["3", "no", "test"]
    assert lines[-1] == "1 of 131 covered"


@pytest.mark.usefixtures("small_suite")
def test_the_command_lists_lines_that_no_test_is_marked_with(capsys: pytest.CaptureFixture[str]) -> None:
    assert checklist.main(["--unmarked"]) == 0
    assert capsys.readouterr().out.split() == [*CHECKLIST[2:], *FAULTS[1:]]


@pytest.mark.usefixtures("small_suite")
def test_the_command_lists_faults(capsys: pytest.CaptureFixture[str]) -> None:
    assert checklist.main(["--faults", "--all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["A1", "1", "passed"]
    assert lines[-1] == "1 of 126 covered"


@pytest.mark.usefixtures("small_suite")
def test_the_command_fails_where_a_required_line_is_not_covered(capsys: pytest.CaptureFixture[str]) -> None:
    assert checklist.main(["--require", "1,A1"]) == 0
    assert checklist.main(["--require", "1-3"]) == 1
    assert "not covered: 2, 3" in capsys.readouterr().err


def test_an_unreadable_record_is_an_empty_one(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    for text in ("", "[1]", "{"):
        record.write_text(text)
        assert read_record(record) == {}


@pytest.fixture
def before() -> Snapshot:
    return Snapshot.take()


@pytest.fixture
def segment() -> Iterator[Path]:
    path = SHM / f"marlvec-test-{os.getpid()}"
    yield path
    path.unlink(missing_ok=True)


def only(found: list[str]) -> str:
    assert len(found) == 1, found
    return found[0]


def test_nothing_new_is_no_leak(before: Snapshot) -> None:
    assert leaks(before) == []


def test_an_open_file_is_named(before: Snapshot, tmp_path: Path) -> None:
    with (tmp_path / "rows").open("w"):
        assert str(tmp_path / "rows") in only(leaks(before, grace=0))
    assert leaks(before) == []


def test_a_logger_that_is_set_otherwise_is_named(before: Snapshot) -> None:
    log = logging.getLogger("marlvec")
    was = log.level
    try:
        log.setLevel(logging.CRITICAL)
        assert f"level was {was}, is {logging.CRITICAL}" in only(leaks(before, grace=0))
    finally:
        log.setLevel(was)
    assert leaks(before) == []


def test_fonts_that_matplotlib_keeps_open_are_no_leak(before: Snapshot, tmp_path: Path) -> None:
    fonts = tmp_path / "matplotlib" / "mpl-data" / "fonts"
    fonts.mkdir(parents=True)
    with (fonts / "DejaVuSans.ttf").open("w"):
        assert leaks(before, grace=0) == []


def test_a_memfd_and_both_ends_of_a_socket_are_seen(before: Snapshot) -> None:
    fd = os.memfd_create("buffers")
    ours, theirs = socket.socketpair()
    found = leaks(before, grace=0)
    assert len(found) == 3
    assert any("/memfd:buffers" in line for line in found)
    os.close(fd)
    ours.close()
    theirs.close()
    assert leaks(before) == []


def test_one_socket_in_place_of_another_is_no_leak() -> None:
    old = socket.socket()
    try:
        before = Snapshot.take()
        new = socket.socket()
        old.close()
        assert leaks(before, grace=0) == []
        new.close()
    finally:
        old.close()


def test_a_thread_is_named_while_it_runs(before: Snapshot) -> None:
    go = threading.Event()
    thread = threading.Thread(target=go.wait, name="feeder")
    thread.start()
    assert "'feeder'" in only(leaks(before, grace=0))
    go.set()
    thread.join()
    assert leaks(before) == []


def test_what_goes_away_in_time_is_no_leak(before: Snapshot) -> None:
    thread = threading.Thread(target=time.sleep, args=(0.2,))
    thread.start()
    assert leaks(before) == []
    thread.join()


def test_what_only_a_reference_cycle_holds_is_no_leak(before: Snapshot, tmp_path: Path) -> None:
    class Holder:
        def __init__(self) -> None:
            self.me = self
            self.fd = os.open(tmp_path, os.O_RDONLY)

        def __del__(self) -> None:
            os.close(self.fd)

    Holder()
    assert leaks(before, grace=0.1) == []


@pytest.mark.slow("starts programs of its own")
def test_an_unreaped_child_is_a_leak(before: Snapshot) -> None:
    child = subprocess.Popen(["sleep", "60"])
    assert "sleep 60" in only(leaks(before, grace=0))
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # until it is dead, and still to be waited for
    assert "zombie" in only(leaks(before, grace=0.1))
    child.wait()
    assert leaks(before) == []


@pytest.mark.slow("starts programs of its own")
def test_an_orphaned_grandchild_is_still_ours(before: Snapshot) -> None:
    # The shell ends at once, and the kernel gives its child to another process.
    shell = subprocess.run(
        ["sh", "-c", "sleep 61 >/dev/null 2>&1 & echo $!"], capture_output=True, text=True, check=True
    )
    assert "sleep 61" in only(leaks(before, grace=0.1))
    os.kill(int(shell.stdout), signal.SIGKILL)
    assert leaks(before) == []


def test_shared_memory_is_named(before: Snapshot, segment: Path) -> None:
    segment.write_bytes(b"rows")
    assert str(segment) in only(leaks(before, grace=0))
    segment.unlink()
    assert leaks(before) == []


def test_shared_memory_that_others_use_is_theirs(before: Snapshot, segment: Path) -> None:
    segment.write_bytes(b"rows")
    # Not of this run, as far as anybody can tell: no mark in its environment, and its parent is gone.
    hold = f"exec 3<{segment}; {sys.executable} -S -c 'import time; print(flush=True); time.sleep(60)' & echo $!"
    shell = subprocess.Popen(["sh", "-c", hold], env={}, stdout=subprocess.PIPE, text=True)
    assert shell.stdout is not None
    pid = int(shell.stdout.readline())
    shell.stdout.readline()
    shell.stdout.close()
    shell.wait()
    try:
        assert leaks(before, grace=0) == []
    finally:
        os.kill(pid, signal.SIGKILL)


# --- What tests wait with does what it says


def test_a_gate_lets_the_given_number_through(tmp_path: Path) -> None:
    through: list[int] = []

    def go(gate: Gate) -> None:
        gate.wait()
        through.append(1)

    with Gate(tmp_path) as gate:
        threads = [threading.Thread(target=go, args=(pickle.loads(pickle.dumps(gate)),)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for wanted in (1, 3):
            time.sleep(0.02)
            gate.let_through(wanted - len(through))
            until(lambda wanted=wanted: len(through) >= wanted)
            assert len(through) == wanted
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("backend", ["thread", "async"])
def test_only_waiters_at_a_gate_are_overdue(backend: str, tmp_path: Path) -> None:
    with Gate(tmp_path) as gate, Gate(tmp_path) as other:
        factories = [CounterEnv, partial(GatedEnv, gate, env_index=1), partial(GatedEnv, other, env_index=2, at=0)]
        with vectorize(backend, factories, num_workers=3) as envs:
            envs.reset()
            envs.step_send(np.ones((3, 3), np.int64))
            assert "did not reply within 0.02 s" in str(overdue(envs.step_fetch, [1, 2]))
            other.let_through()
            overdue(envs.step_fetch, [1])
            gate.let_through(2)
            envs.step_fetch()
            envs.step(np.ones((3, 3), np.int64))
            envs.step_send(np.ones((3, 3), np.int64))
            overdue(envs.step_fetch, [1])
            gate.let_through()


def test_a_bound_is_ten_times_the_usual() -> None:
    with pytest.raises(AssertionError, match="ten times the usual"), within(1, usual=0.2):
        pass
    with pytest.raises(AssertionError, match="took"), within(0.01, usual=0.001):
        time.sleep(0.02)
