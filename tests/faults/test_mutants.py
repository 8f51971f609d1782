"""Our tests have teeth: every defect that is seeded in a copy of marlvec is found.

A patch in tests/mutants is one defect: its first line says which, ``Tests:`` what finds it. They are for what the
canaries of tests/properties cannot reach: worker processes, their deaths, and what follows on them; and, where their
name begins with ``collected_``, what the collector makes of it all.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from os import environ
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATCHES = sorted((ROOT / "tests" / "mutants").glob("*.patch"))
QUICK = (
    "alive_taken_after",
    "collected_idle_rewards_dropped",
    "collected_leftovers_doubled",
    "last_reply_lost_before_a_death",
    "lost_idle_env_not_told",
    "seed_not_advanced",
    "siblings_rows_cleared",
    "stale_reply_after_a_timeout",
)
SEEDS = range(1, 6)
LONGEST = 900  # seconds that tests of one mutant may take
TESTS_FAILED = 1  # exit code of pytest


@dataclass(frozen=True)
class Hunk:
    """What a patch replaces in one place of a file."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    """One patch.

    Attributes:
        title: The defect.
        tests: What pytest is asked to run.
        hunks: What it changes.
    """

    title: str
    tests: list[str]
    hunks: list[Hunk]

    @classmethod
    def read(cls, path: Path) -> Mutant:
        """Read a patch."""
        head, _, body = path.read_text().partition("\n--- a/")
        found = re.search(r"^Tests: (.+)$", head, re.MULTILINE)
        assert found, f"{path.name} does not say which tests find it"
        hunks = []
        for part in f"--- a/{body}".split("--- a/")[1:]:
            names, *places = re.split(r"^@@ .*@@.*\n", part, flags=re.MULTILINE)
            file, new_file = names.splitlines()
            assert new_file == f"+++ b/{file}"
            for place in places:
                lines = [(line[:1], line[1:]) for line in place.splitlines(keepends=True)]
                assert {sign for sign, _ in lines} == {" ", "-", "+"} or {"-", "+"} & {sign for sign, _ in lines}
                old, new = ("".join(text for sign, text in lines if sign in signs) for signs in (" -", " +"))
                hunks.append(Hunk(file, old, new))
        return cls(head.splitlines()[0], found[1].split(), hunks)

    def apply(self, folder: Path) -> None:
        """Put the defect into a copy. Where a place is in its file does not matter, but it must be there just once."""
        for hunk in self.hunks:
            path = folder / hunk.file
            text = path.read_text()
            assert text.count(hunk.old) == 1, f"{hunk.file} has changed; this is no longer there:\n{hunk.old}"
            path.write_text(text.replace(hunk.old, hunk.new))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package and of its tests."""
    for name in ("marlvec", "connectors", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def run(folder: Path, tests: Sequence[str], seed: int) -> subprocess.CompletedProcess[str]:
    """Run these tests in a copy, until one fails."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "tests.mutants.hunt"]
    return subprocess.run(
        [*command, f"--hypothesis-seed={seed}", *tests],
        cwd=folder,
        env={**environ, "PYTHONPATH": str(folder), "CI": ""},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LONGEST,
        check=False,
    )


def hunt(folder: Path, patch: Path, seed: int) -> None:
    mutant = Mutant.read(patch)
    mutant.apply(folder)
    ran = run(folder, mutant.tests, seed)
    assert ran.returncode == TESTS_FAILED, f"not found: {mutant.title}\n{ran.stdout[-3000:]}"


def test_there_are_enough_of_them() -> None:
    assert len(PATCHES) >= 40
    assert sum(path.stem.startswith("collected_") for path in PATCHES) >= 12
    assert set(QUICK) < {path.stem for path in PATCHES}


@pytest.mark.parametrize("patch", PATCHES, ids=lambda path: path.stem)
def test_it_applies_to_the_code_of_today(patch: Path, tmp_path: Path) -> None:
    mutant = Mutant.read(patch)
    assert mutant.title.endswith(".")
    for hunk in mutant.hunks:
        assert hunk.file.startswith("marlvec/")
        (tmp_path / hunk.file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / hunk.file, tmp_path / hunk.file)
    mutant.apply(tmp_path)
    for hunk in mutant.hunks:
        compile((tmp_path / hunk.file).read_text(), hunk.file, "exec")
    for test in mutant.tests:
        assert (ROOT / test.partition("::")[0]).is_file()


def test_without_a_defect_nothing_is_found(copy: Path) -> None:
    """Else the others would prove nothing: a copy is as good as the original."""
    ran = run(copy, ["tests/faults/test_mutants.py", "-k", "applies"], 0)
    assert ran.returncode == 0, ran.stdout[-3000:]


@pytest.mark.time_limit(LONGEST)
@pytest.mark.parametrize("name", QUICK)
def test_it_is_found(name: str, copy: Path) -> None:
    hunt(copy, ROOT / "tests" / "mutants" / f"{name}.patch", 1)


@pytest.mark.soak
@pytest.mark.time_limit(LONGEST)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("patch", PATCHES, ids=lambda path: path.stem)
def test_it_is_found_from_wherever_one_begins(patch: Path, seed: int, copy: Path) -> None:
    hunt(copy, patch, seed)
