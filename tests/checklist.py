"""Which lines of the checklist, and which faults of the catalogue, no passing test covers yet.

Their words are in tests/catalogue: behaviours.md has the checklist, faults.md the faults and the goals R1 to R20.

    python -m tests.checklist                     what is not covered, from the outcomes recorded so far
    python -m tests.checklist --run               run the tests first
    python -m tests.checklist --faults            the catalogue of faults instead
    python -m tests.checklist --require 1-10,15   exit 1 unless these are covered
    python -m tests.checklist --unmarked          lines that no test of `make test-all` is marked with

Tests say what they prove with `@pytest.mark.checklist(45)` and `@pytest.mark.fault("C13")`. Every pytest run records
the outcomes of the marked tests it ran in `.checklist.json`; what it did not run keeps its last outcome. The command
collects the tests as they are now, so a test that was renamed or lost its mark no longer counts.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import io
import json
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.faults.harness.catalogue import CATALOGUE

__all__ = [
    "CHECKLIST",
    "FAULTS",
    "Marks",
    "Recorder",
    "Status",
    "collect",
    "main",
    "read_marks",
    "statuses",
    "unmarked",
]

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / ".checklist.json"
TEXTS = ROOT / "tests" / "catalogue"

CHECKLIST = tuple(str(number) for number in range(1, 132))
FAULTS = tuple(CATALOGUE)


@dataclass(frozen=True, slots=True)
class Marks:
    """What one test says it proves."""

    checklist: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()


def read_marks(item: pytest.Item) -> Marks:
    """The test's marks.

    Raises:
        pytest.UsageError: A mark names no line of the checklist or catalogue, or not exactly one.
    """
    return Marks(_ids(item, "checklist", int, CHECKLIST), _ids(item, "fault", str, FAULTS))


def _ids(item: pytest.Item, name: str, of_type: type, known: Sequence[str]) -> tuple[str, ...]:
    found = []
    for mark in item.iter_markers(name):
        value = mark.args[0] if len(mark.args) == 1 and not mark.kwargs else None
        if type(value) is not of_type or str(value) not in known:
            given = ", ".join([*map(repr, mark.args), *(f"{key}={value!r}" for key, value in mark.kwargs.items())])
            expected = f"one {of_type.__name__}, {known[0]} to {known[-1]}"
            raise pytest.UsageError(f"{item.nodeid}: the mark {name}({given}) should have {expected}")
        found.append(str(value))
    return tuple(found)


def stable_id(nodeid: str) -> str:
    """A test's id, the same in every run: a parameter without a name may stand in it by its address."""
    return re.sub(r" at 0x[0-9a-f]+", "", nodeid)


class Recorder:
    """A pytest plugin that checks every mark, and writes down how the marked tests ended.

    Args:
        config: The run's configuration.
        path: Where the outcomes of all runs are kept.
    """

    def __init__(self, config: pytest.Config, path: Path = RECORD) -> None:
        self.marks: dict[str, Marks] = {}
        self._collect_only = bool(config.option.collectonly)
        self._path = path
        self._outcomes: dict[str, str] = {}

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        marks = read_marks(item)
        if marks.checklist or marks.faults:
            self.marks[stable_id(item.nodeid)] = marks

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        nodeid = stable_id(report.nodeid)
        if nodeid not in self.marks:
            return
        # A test has passed when all of it has: the call, and the fixtures around it.
        worst = self._outcomes.get(nodeid, "passed")
        if report.failed or worst == "failed":
            self._outcomes[nodeid] = "failed"
        elif report.skipped or worst == "skipped":
            self._outcomes[nodeid] = "skipped"
        elif report.when == "teardown":
            self._outcomes[nodeid] = "passed"

    def pytest_sessionfinish(self) -> None:
        if self._outcomes and not self._collect_only:
            with alone_with(self._path):
                write_record(self._path, read_record(self._path) | self._outcomes)


def read_record(path: Path) -> dict[str, str]:
    """Outcomes by test id; empty where nothing was recorded yet, or something unreadable."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return record if isinstance(record, dict) else {}


@contextlib.contextmanager
def alone_with(path: Path) -> Iterator[None]:
    """Keep other runs that end at the same time from reading what is about to change."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def write_record(path: Path, outcomes: Mapping[str, str]) -> None:
    """Write all of it or nothing: whoever looks meanwhile sees the old one whole."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(dict(sorted(outcomes.items())), indent=0) + "\n", encoding="utf-8")
    draft.replace(path)


@dataclass(slots=True)
class Status:
    """How the tests of one line ended."""

    outcomes: Counter[str] = field(default_factory=Counter)

    @property
    def covered(self) -> bool:
        """Whether at least one test of this line passed and none failed."""
        return self.outcomes["passed"] > 0 and self.outcomes["failed"] == 0

    def __str__(self) -> str:
        return ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.outcomes.items())) or "no test"


def statuses(tests: Iterable[tuple[str, Sequence[str]]], outcomes: Mapping[str, str]) -> defaultdict[str, Status]:
    """Status by line.

    Args:
        tests: Test ids, each with the lines it proves.
        outcomes: Outcomes by test id.
    """
    by_line: defaultdict[str, Status] = defaultdict(Status)
    for nodeid, lines in tests:
        for line in set(lines):
            by_line[line].outcomes[outcomes.get(nodeid, "not run")] += 1
    return by_line


def unmarked(marks: Iterable[Marks]) -> list[str]:
    """Lines that none of these marks name."""
    marked = {line for mark in marks for line in (*mark.checklist, *mark.faults)}
    return [line for line in (*CHECKLIST, *FAULTS) if line not in marked]


def texts(path: Path) -> dict[str, str]:
    """The words of each line of a page: ``12. text`` or ``| A12 | text | ...``."""
    rows = re.findall(
        r"^(?:\| *)?(\d+|[A-H]\d+)(?:\. | *\| *)([^|\n]*)", path.read_text(encoding="utf-8"), re.MULTILINE
    )
    return {line: text.strip() for line, text in rows}


def collect(marked: str = "") -> dict[str, Marks]:
    """The marked tests as they are now, soak tests included.

    Args:
        marked: The expression for pytest's ``-m``; empty: all tests.

    Raises:
        SystemExit: The tests cannot be collected.
    """
    finder = _Finder()
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = pytest.main(
            ["--collect-only", "-q", "-m", marked, "--rootdir", str(ROOT), str(ROOT / "tests")], [finder]
        )
    if code != pytest.ExitCode.OK:
        sys.exit(output.getvalue())
    return finder.marks


class _Finder:
    def __init__(self) -> None:
        self.marks: dict[str, Marks] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.marks = {stable_id(item.nodeid): read_marks(item) for item in session.items}


def parse_ranges(text: str) -> tuple[str, ...]:
    """``"1-3,15"`` and ``"A1-A3,B2"`` as single lines, in order."""
    lines: list[str] = []
    for part in text.replace(" ", "").split(","):
        match = re.fullmatch(r"([A-H]?)(\d+)(?:-\1(\d+))?", part)
        if not match:
            raise argparse.ArgumentTypeError(f"{part!r} is neither a line nor a range such as 1-10 or A1-A4")
        letter, first, last = match.groups()
        lines += [f"{letter}{number}" for number in range(int(first), int(last or first) + 1)]
    if unknown := [line for line in lines if line not in CHECKLIST and line not in FAULTS]:
        raise argparse.ArgumentTypeError(f"no such line: {', '.join(unknown)}")
    return tuple(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.checklist", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--run", action="store_true", help="run the tests first (with make's own options)")
    parser.add_argument("--faults", action="store_true", help="the catalogue of faults instead of the checklist")
    parser.add_argument("--all", action="store_true", help="show the covered lines, too")
    parser.add_argument(
        "--require", type=parse_ranges, default=(), metavar="LINES", help="fail unless these are covered"
    )
    parser.add_argument("--unmarked", action="store_true", help="lines that no test outside the soak is marked with")
    options = parser.parse_args(arguments)

    if options.unmarked:
        print("\n".join(unmarked(collect("not soak").values())))
        return 0
    if options.run:
        subprocess.run([sys.executable, "-m", "pytest", "-m", "not soak"], cwd=ROOT, check=False)
    marks = collect()
    outcomes = read_record(RECORD)
    by_line = statuses(((nodeid, (*mark.checklist, *mark.faults)) for nodeid, mark in marks.items()), outcomes)
    lines = FAULTS if options.faults else CHECKLIST
    words = CATALOGUE if options.faults else texts(TEXTS / "behaviours.md")

    for line in lines:
        status = by_line[line]
        if options.all or not status.covered:
            print(f"{line:>4}  {status!s:<22}  {words.get(line, '')}".rstrip())
    print(f"{sum(by_line[line].covered for line in lines)} of {len(lines)} covered")
    missing = [line for line in options.require if not by_line[line].covered]
    if missing:
        print(f"required, but not covered: {', '.join(missing)}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
