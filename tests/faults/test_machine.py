"""Random calls, random harm: what comes back is what a model of every env says, and nothing ever hangs."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.faults.harness.machine import Machine

pytestmark = pytest.mark.many_processes

CALLS = 30
FEW_RUNS = 30  # of `make test`
# `make test-all` makes more; a hunt for a defect (tests/defects) goes on until it is found; `make soak` makes most.
RUNS = 400 if "MARLVEC_TEST_DEFECT" in os.environ else 50
LONG_RUNS, LONG_CALLS = 5_000, 50


def run(runs: int, calls: int) -> None:
    """Run the machine; what it finds comes as it was found, with all that led to it.

    Nothing is made smaller: what depends on who was faster is not there when it is tried again, and a hang takes long.
    """
    chosen = settings(
        max_examples=runs,
        stateful_step_count=calls,
        phases=[Phase.generate],
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    Machine.finds.clear()
    try:
        run_state_machine_as_test(Machine, settings=chosen)
    except BaseException:
        if Machine.finds:
            raise Machine.finds[0] from None
        raise


def proves(test: Callable[[], None]) -> Callable[[], None]:
    """Marks of both."""
    for fault in ("A16", "B5"):
        test = pytest.mark.fault(fault)(test)
    return pytest.mark.time_limit(3600)(test)


@proves
def test_some_calls_whatever_happens() -> None:
    run(FEW_RUNS, CALLS)


@pytest.mark.slow("kills, stops or starts many workers")
@proves
def test_any_calls_whatever_happens() -> None:
    run(RUNS, CALLS)


@pytest.mark.soak
@proves
def test_any_calls_whatever_happens_for_long() -> None:
    run(LONG_RUNS, LONG_CALLS)
