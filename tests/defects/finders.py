"""The table of defects and their finders: which test of which tier finds each defect.

    python -m tests.defects.finders             make finders.tsv anew, for all defects
    python -m tests.defects.finders NAME ...    for these alone; the other lines stay

A finder is quick where `make test` runs it, slow where `make test-all` does. Up to three are written down for each
defect; slow ones only where no quick one finds it.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.defects.hunting import Hunter
from tests.defects.registry import DEFECTS, Defect

__all__ = ["QUICK", "SLOW", "TABLE", "Finders", "files_of", "find", "read_table", "write_table"]

TABLE = Path(__file__).with_name("finders.tsv")
HEAD = "defect\ttier\tfinder"
QUICK, SLOW = "quick", "slow"
TIERS = {QUICK: "not slow and not soak", SLOW: "slow and not soak"}
MOST = 3


@dataclass(frozen=True, slots=True)
class Finders:
    """Who finds one defect.

    Attributes:
        tier: `QUICK` or `SLOW`.
        tests: Their ids, at least one.
    """

    tier: str
    tests: tuple[str, ...]


def files_of(defects: Iterable[Defect]) -> list[str]:
    """Return the files of the tests that may find these defects."""
    return sorted({test.partition("::")[0] for defect in defects for test in defect.tests})


def find(hunter: Hunter, defect: Defect) -> Finders | None:
    """Run the tests that should find a defect, the quick ones first; None if none does."""
    for tier, marked in TIERS.items():
        if finders := hunter.run(defect.tests, defect=defect.name, marked=marked, most=MOST).finders:
            return Finders(tier, finders)
    return None


def read_table(path: Path = TABLE) -> dict[str, Finders]:
    """Return the finders of each defect in the table."""
    head, *lines = path.read_text(encoding="utf-8").splitlines()
    assert head == HEAD
    tiers, tests = {}, defaultdict(list)
    for line in lines:
        name, tier, test = line.split("\t")
        assert tier in TIERS, line
        assert tiers.setdefault(name, tier) == tier, line
        tests[name].append(test)
    return {name: Finders(tiers[name], tuple(own)) for name, own in tests.items()}


def write_table(table: Mapping[str, Finders], path: Path = TABLE) -> None:
    """Write the table, sorted by defect."""
    lines = [f"{name}\t{table[name].tier}\t{test}" for name in sorted(table) for test in table[name].tests]
    path.write_text("\n".join([HEAD, *lines]) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the table anew; returns the exit code, 1 where a defect is not found."""
    from tests.defects import plugin  # noqa: F401  (all defects are in the registry then)

    parser = argparse.ArgumentParser(prog="python -m tests.defects.finders", description="Make the table anew.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="defects; default: all")
    names = parser.parse_args(arguments).names or list(DEFECTS)
    if unknown := set(names) - set(DEFECTS):
        parser.error(f"no such defects: {', '.join(sorted(unknown))}")
    table = {name: own for name, own in (read_table() if TABLE.exists() else {}).items() if name in DEFECTS}
    missed = []
    with Hunter(files_of(DEFECTS[name] for name in names)) as hunter:
        for number, name in enumerate(names, 1):
            table.pop(name, None)
            if found := find(hunter, DEFECTS[name]):
                table[name] = found
            else:
                missed.append(name)
            print(f"{number:>4} of {len(names)}  {name}: {found.tier if found else 'NOT FOUND'}", flush=True)
    write_table(table)
    print(f"{sum(found.tier == QUICK for found in table.values())} of {len(DEFECTS)} are found by `make test`")
    if missed:
        print(f"not found: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
