"""`Collectors(backend="ray")`: where ray is installed, as by `make distributed`."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from marlvec.distributed import Collectors
from marlvec.errors import ArgumentError, MissingExtraError
from tests.distributed.helpers import plain

ROOT = Path(__file__).resolve().parents[2]
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")


def run(*arguments: str, seconds: float = 500) -> None:
    """Run a scenario in a process of its own; what it leaves behind, every test looks for."""
    command = [sys.executable, "-m", "tests.distributed.ray_scenarios", *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "SCENARIO_SECONDS": str(seconds)}
    found = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-4000:]
    assert found.stdout.endswith("done\n")


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "marlvec.distributed.ray_engine", raising=False)
    with pytest.raises(MissingExtraError, match=r"pip install 'marlvec\[distributed\]'"):
        Collectors(plain, 1)


@needs_ray
def test_what_is_decided_here_is_refused_as_a_remote_arg() -> None:
    with pytest.raises(ArgumentError, match=r"remote_args cannot have \['max_restarts'\]"):
        Collectors(plain, 1, remote_args={"max_restarts": 3})


@needs_ray
@pytest.mark.time_limit(520)  # a minute at most where nothing else runs
@pytest.mark.parametrize(
    "scenario",
    [
        "same_numbers",
        "policies",
        "versions",
        "free_running",
        "faults",
        "stopped",
        "kills",
        "nodes",
        "own_cluster",
        "joined_cluster",
    ],
)
def test_on_a_real_ray(scenario: str) -> None:
    run(scenario)


@needs_ray
@pytest.mark.soak
@pytest.mark.time_limit(1300)
def test_a_hundred_kills() -> None:
    run("kills", "100", seconds=1200)


# --- Deaths at chosen moments, on a real Ray: where ray is installed, as by `make distributed`


@needs_ray
@pytest.mark.time_limit(520)
@pytest.mark.parametrize("scenario", ["exiting_env", "merging", "weights", "large_answers", "leaves_nothing"])
def test_accounting_balances_and_nothing_is_left(scenario: str) -> None:
    run(scenario)


@needs_ray
@pytest.mark.soak  # others on the machine need memory, too
def test_a_collector_that_takes_too_much_memory() -> None:
    run("out_of_memory")


@needs_ray
@pytest.mark.soak
@pytest.mark.time_limit(1000)
def test_killed_while_large_answers_are_written() -> None:
    run("large_answers", "40", seconds=900)
