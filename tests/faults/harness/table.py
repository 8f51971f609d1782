"""The catalogue of faults, and for each the tests that cover it.

    python -m tests.faults.harness.table                    all lines
    python -m tests.faults.harness.table --open             only those without a passing test
    python -m tests.faults.harness.table --require A,B7     exit 1 if a line of these is open

Outcomes are those that pytest runs recorded (`tests.checklist`); the tests are collected as they are now. A line is
covered by a test that passed, if none of its others failed. It is open if it is not covered and no reason is stated for
that in `tests.faults.harness.catalogue`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tests import checklist
from tests.checklist import Status, parse_ranges, statuses
from tests.faults.harness.catalogue import CATALOGUE, REASONS, SECTIONS

__all__ = ["Line", "lines", "main", "parse_lines"]


@dataclass(frozen=True, slots=True)
class Line:
    """One fault and how its tests ended.

    Attributes:
        id: Its id.
        fault: The fault in short.
        tests: Test functions, without ``tests/`` and parameters, to how they ended.
        status: How all of them ended.
        reason: Why there is no test, or "".
    """

    id: str
    fault: str
    tests: Mapping[str, Status]
    status: Status
    reason: str

    @property
    def is_open(self) -> bool:
        """Whether it is neither covered nor excused."""
        return not self.status.covered and not (self.reason and not self.status.outcomes["failed"])

    def __str__(self) -> str:
        parts = [f"{name} ({status})" for name, status in self.tests.items()]
        parts += [f"no test: {self.reason}"] if self.reason else []
        state = "" if not self.is_open else "open" if not parts else "open: "
        return f"{self.id:<4} {self.fault}: {state}{'; '.join(parts)}"


def lines(tests: Iterable[tuple[str, Sequence[str]]], outcomes: Mapping[str, str]) -> list[Line]:
    """All lines of the catalogue.

    Args:
        tests: Test ids, each with the faults that it covers.
        outcomes: Outcomes by test id.
    """
    known = list(tests)
    by_line = statuses(known, outcomes)
    found = []
    for fault_id, fault in CATALOGUE.items():
        own = [nodeid for nodeid, ids in known if fault_id in ids]
        by_function = statuses([(nodeid, [_function_of(nodeid)]) for nodeid in own], outcomes)
        found.append(Line(fault_id, fault, by_function, by_line[fault_id], REASONS.get(fault_id, "")))
    return found


def _function_of(nodeid: str) -> str:
    return nodeid.partition("[")[0].removeprefix("tests/")


def parse_lines(text: str) -> tuple[str, ...]:
    """``"B,C1-C4"`` as single ids, in order; a letter alone is its whole section."""
    found: list[str] = []
    for part in text.replace(" ", "").split(","):
        found += [fault for fault in CATALOGUE if fault[0] == part] if part in SECTIONS else parse_ranges(part)
    if others := [line for line in found if line not in CATALOGUE]:
        raise argparse.ArgumentTypeError(f"no faults: {', '.join(others)}")
    return tuple(found)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.harness.table", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--open", action="store_true", help="only lines without a passing test")
    parser.add_argument(
        "--require", type=parse_lines, default=(), metavar="LINES", help="fail if one of these is open, e.g. A,B,C7"
    )
    options = parser.parse_args(arguments)

    marks = checklist.collect()
    outcomes = checklist.read_record(checklist.RECORD)
    found = lines(((nodeid, mark.faults) for nodeid, mark in marks.items()), outcomes)
    covered = sum(line.status.covered for line in found)
    excused = sum(not line.is_open for line in found) - covered
    shown = [str(line) for line in found if not options.open or not line.status.covered]
    shown.append(f"{covered} of {len(found)} covered, {excused} with a reason, {len(found) - covered - excused} open")
    sys.stdout.write("\n".join(shown) + "\n")
    missing = [line.id for line in found if line.id in options.require and line.is_open]
    if missing:
        sys.stderr.write(f"required, but open: {', '.join(missing)}\n")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
