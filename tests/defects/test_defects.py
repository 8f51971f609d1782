"""Our tests have teeth: every defect that is put into marlvec is found."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from os import environ
from pathlib import Path

import pytest

from tests.defects.plugin import VARIABLE, WRONG
from tests.defects.registry import DEFECTS, Defect

ROOT = Path(__file__).resolve().parents[2]
QUICK = (
    "alive_taken_after",
    "collected_idle_rewards_dropped",
    "collected_leftovers_doubled",
    "last_reply_lost_before_a_death",
    "lost_idle_env_not_told",
    "seed_not_advanced",
    "fault_flag_forgotten",
    "stale_reply_after_a_timeout",
)
SEEDS = range(1, 6)
LONGEST = 900  # seconds that the tests of one defect may take
FOUND, NOT_FOUND = 1, 0  # exit codes of pytest

every_defect = pytest.mark.parametrize("defect", DEFECTS.values(), ids=lambda defect: defect.name)


def run(tests: Sequence[str], seed: int, **more: str) -> subprocess.CompletedProcess[str]:
    """Run these tests until one fails."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "tests.defects.plugin"]
    return subprocess.run(
        [*command, f"--hypothesis-seed={seed}", *tests],
        cwd=ROOT,
        env={name: value for name, value in environ.items() if name != VARIABLE} | {"CI": ""} | more,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LONGEST,
        check=False,
    )


def hunt(defect: Defect, seed: int) -> None:
    ran = run(defect.tests, seed, **{VARIABLE: defect.name})
    what = {NOT_FOUND: "not found", WRONG: "wrong itself"}.get(ran.returncode, f"pytest ended with {ran.returncode}")
    assert ran.returncode == FOUND, f"{what}: {defect.title}\n{ran.stdout[-3000:]}"


def hunt_in_vain(test: str, seed: int) -> None:
    ran = run([test], seed)
    assert ran.returncode == NOT_FOUND, ran.stdout[-3000:]


def finders_of(*names: str) -> list[str]:
    """The tests that find these defects, each once."""
    return sorted({test for name in names for test in DEFECTS[name].tests})


def test_there_are_enough_of_them() -> None:
    assert len(DEFECTS) >= 40
    assert sum(name.startswith("collected_") for name in DEFECTS) >= 12
    assert set(QUICK) < set(DEFECTS)


@every_defect
def test_it_can_be_put_into_the_code_of_today(defect: Defect) -> None:
    assert re.fullmatch(r"[A-Z].*\.", defect.title)
    for test in defect.tests:
        file, _, name = test.partition("::")
        assert re.search(rf"^def {name or 'test_'}", (ROOT / file).read_text(), re.MULTILINE), test
    with pytest.MonkeyPatch.context() as patch:
        defect.apply(patch)  # raises where a name is gone


@pytest.mark.time_limit(LONGEST)
@pytest.mark.parametrize("name", QUICK)
def test_it_is_found(name: str) -> None:
    hunt(DEFECTS[name], 1)


@pytest.mark.soak
@pytest.mark.time_limit(LONGEST)
@pytest.mark.parametrize("seed", SEEDS)
@every_defect
def test_it_is_found_from_wherever_one_begins(defect: Defect, seed: int) -> None:
    hunt(defect, seed)


@pytest.mark.soak
@pytest.mark.time_limit(LONGEST)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("test", finders_of(*DEFECTS))
def test_without_a_defect_nothing_is_found(test: str, seed: int) -> None:
    """Else the others would prove nothing. In `make test` these tests run by themselves."""
    hunt_in_vain(test, seed)
