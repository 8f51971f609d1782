"""What runs on macOS, on Linux without what macOS lacks: tests of envs, faults and collecting, run once more there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HARNESS = ROOT / "tests" / "platforms" / "darwin"
LEFT_OUT = "not native"  # numba takes what this machine has
TESTS = (
    "tests/vector/api tests/vector/backends",
    "tests/vector/faults tests/faults/test_mask.py tests/faults/test_restart.py tests/faults/test_machine.py",
    "tests/collect/rollout tests/collect/background tests/collect/state",
)


@pytest.mark.slow("runs other tests")
@pytest.mark.parametrize("tests", TESTS)
def test_the_same_tests_pass_where_macos_has_gaps(tests: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", LEFT_OUT, *tests.split()],
        env=os.environ | {"PYTHONPATH": f"{HARNESS}{os.pathsep}{ROOT}"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-5000:]
    assert "passed" in ran.stdout
