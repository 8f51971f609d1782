from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from tests import checklist
from tests.checklist import CHECKLIST, FAULTS, Marks, Recorder, parse_ranges, read_record, statuses, texts, unmarked
from tests.conftest import COLLECTED
from tests.tiers import SOAK

pytest_plugins = ["pytester"]

SUITE = """
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


def run(pytester: pytest.Pytester, *arguments: str) -> tuple[Recorder, dict[str, str]]:
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
    pytester.makepyfile(test_suite=SUITE)
    recorder, outcomes = run(pytester)
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
    pytester.makepyfile(test_suite=SUITE)
    _, before = run(pytester)
    pytester.makepyfile(test_suite=SUITE.replace("assert n == 1", "assert n == 2"))
    _, after = run(pytester, "-k", "one_alone")
    changed = {nodeid for nodeid in before if before[nodeid] != after[nodeid]}
    assert before.keys() == after.keys()
    assert changed == {f"test_suite.py::test_passes_for_one_alone[{n}]" for n in (1, 2)}


def test_an_address_in_a_name_makes_no_other_test_of_it(pytester: pytest.Pytester) -> None:
    """As ``ids=repr`` gives it to an object without a name; a record of every address would never end."""
    text = 'import pytest\n@pytest.mark.fault("A1")\n@pytest.mark.parametrize("x", [object()], ids=repr)\n'
    pytester.makepyfile(test_suite=f"{text}def test_it(x): pass")
    recorder, outcomes = run(pytester)
    assert outcomes == {"test_suite.py::test_it[<object object>]": "passed"}
    assert recorder.marks.keys() == outcomes.keys()


def test_collecting_alone_records_nothing(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_suite=SUITE)
    recorder, outcomes = run(pytester, "--collect-only")
    assert len(recorder.marks) == 5
    assert outcomes == {}


@pytest.mark.slow("starts programs of its own")
@pytest.mark.parametrize("mark", ["checklist(132)", "checklist('1')", "checklist(1, 2)", "checklist()", "fault('I1')"])
def test_a_mark_that_names_no_line_ends_the_run(pytester: pytest.Pytester, mark: str) -> None:
    pytester.makepyfile(test_suite=f"import pytest\n@pytest.mark.{mark}\ndef test_it(): pass")
    _, outcomes = run(pytester)
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
