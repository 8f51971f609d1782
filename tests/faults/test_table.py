"""The table of faults: every line of the catalogue, and what is said of it."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tests import checklist
from tests.checklist import FAULTS, Marks
from tests.faults.harness import reasons, table
from tests.faults.harness.catalogue import CATALOGUE, SECTIONS
from tests.faults.harness.table import lines, parse_lines

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
    assert set(reasons.REASONS) <= set(CATALOGUE)
    assert all(reason.strip() for reason in reasons.REASONS.values())


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
        with pytest.raises(argparse.ArgumentTypeError):
            parse_lines(wrong)
