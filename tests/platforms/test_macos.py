"""What runs on macOS, on Linux without what macOS lacks: tests of envs, faults and collecting, run once more there.

Those of workers, memory, signals and files, where systems differ; the soak runs their folders whole.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HARNESS = ROOT / "tests" / "platforms" / "darwin"
LEFT_OUT = "not native"  # numba takes what this machine has
VECTOR, COLLECT = "tests/vector", "tests/collect"
SOME = [
    f"{VECTOR}/test_vector_env.py {VECTOR}/test_calls.py {VECTOR}/test_scripts.py {VECTOR}/test_backends.py "
    f"{COLLECT}/test_background.py {COLLECT}/test_interrupts.py {COLLECT}/test_lost_rows.py",
    f"{VECTOR}/test_recovery.py tests/faults/test_restart.py tests/faults/test_campaigns.py",
]
ALL = [
    f"{VECTOR}/test_vector_env.py {VECTOR}/test_calls.py {VECTOR}/test_scripts.py {VECTOR}/test_backends.py "
    f"{VECTOR}/test_saved_states.py {VECTOR}/test_rendering.py",
    f"{COLLECT}/test_rollout.py {COLLECT}/test_interrupts.py {COLLECT}/test_background.py {COLLECT}/test_state.py",
]


@pytest.mark.parametrize(
    "tests",
    [
        *(pytest.param(tests, marks=pytest.mark.slow("runs other tests")) for tests in SOME),
        *(pytest.param(tests, marks=pytest.mark.soak) for tests in ALL),
    ],
)
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
