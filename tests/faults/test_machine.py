"""Random calls, random harm: what comes back is what a model of every env says, and nothing ever hangs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.faults.machine import Machine

# Both in `make soak` for now: what is drawn depends on what has arrived, which Hypothesis takes for flaky now and then.
RUNS, CALLS = 200, 30
LONG_RUNS, LONG_CALLS = 5_000, 50


def run(runs: int, calls: int, **options: Any) -> None:
    chosen = settings(max_examples=runs, stateful_step_count=calls, suppress_health_check=list(HealthCheck), **options)
    run_state_machine_as_test(Machine, settings=chosen)


def proves(test: Callable[[], None]) -> Callable[[], None]:
    """Marks of both."""
    return pytest.mark.time_limit(3600)(test)


@pytest.mark.soak
@proves
def test_any_calls_whatever_happens() -> None:
    run(RUNS, CALLS)


@pytest.mark.soak
@proves
def test_any_calls_whatever_happens_for_long() -> None:
    run(LONG_RUNS, LONG_CALLS)
