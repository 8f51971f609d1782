"""`Hunter`: a process that imports tests once, then forks for each defect and runs its tests there.

Importing marlvec, the libraries and the tests takes longer than most finders do.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.defects.registry import FINDERS, VARIABLE, WRONG
from tests.programs import LineServer

__all__ = ["FOUND", "NOT_FOUND", "Hunter", "Outcome"]

ROOT = Path(__file__).resolve().parents[2]
FOUND, NOT_FOUND = 1, 0  # exit codes of pytest

BASE = ("-q", "-p", "no:cacheprovider", "-p", "tests.defects.plugin")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one run.

    Attributes:
        code: The exit code of pytest, or `tests.defects.registry.WRONG`.
        output: The text that pytest wrote.
        finders: Ids of the tests that failed because of the defect.
    """

    code: int
    output: str
    finders: tuple[str, ...]


class Hunter(LineServer):
    """Runs tests with and without defects; a context manager.

    Args:
        files: Test files that are imported before the first run.
        seed: Where Hypothesis begins; 0: where it begins in CI.
    """

    def __init__(self, files: Sequence[str], seed: int = 0) -> None:
        # With the variable set, tests that draw few examples draw more.
        arguments = ["-m", "tests.defects.hunting", str(seed), *files]
        super().__init__(arguments, cwd=ROOT, env=os.environ | {VARIABLE: ""})

    def run(self, tests: Sequence[str], *, defect: str = "", marked: str = "", most: int = 1) -> Outcome:
        """Run tests.

        Args:
            tests: Ids of tests, or files.
            defect: The name of a defect; none if empty.
            marked: The expression for pytest's ``-m``; empty: all tests.
            most: How many failed tests end the run.
        """
        found = self.ask({"defect": defect, "arguments": [f"--maxfail={most}", "-m", marked, *tests]})
        return Outcome(found["code"], found["output"], tuple(found["finders"]))


def main(seed: str, *files: str) -> None:
    """Serve requests from stdin, one a line, until it is closed."""
    base = [*BASE, *([f"--hypothesis-seed={seed}"] if seed != "0" else [])]
    answers = os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 1)  # the list of tests, and what they print when they are imported
    if files and pytest.main(["--collect-only", "-qq", "-m", "", *base, *files]) != pytest.ExitCode.OK:
        sys.exit(f"these tests cannot be collected: {' '.join(files)}")
    for line in sys.stdin:
        answers.write(json.dumps(serve(base, json.loads(line))) + "\n")
        answers.flush()


def serve(base: Sequence[str], request: dict[str, Any]) -> dict[str, Any]:
    """Run pytest in a forked process; returns its exit code, output and finders."""
    with tempfile.TemporaryDirectory() as folder:
        output, finders = Path(folder, "output"), Path(folder, "finders")
        if not (pid := os.fork()):
            code = WRONG
            try:
                code = _run([*base, *request["arguments"]], request["defect"], output, finders)
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        return {
            "code": os.waitstatus_to_exitcode(status),
            "output": output.read_text(errors="replace"),
            "finders": finders.read_text().splitlines() if finders.exists() else [],
        }


def _run(arguments: list[str], defect: str, output: Path, finders: Path) -> int:
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    with output.open("w") as written:
        os.dup2(written.fileno(), 1)
        os.dup2(written.fileno(), 2)
    os.environ[VARIABLE], os.environ[FINDERS] = defect, str(finders)
    return int(pytest.main(arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])
