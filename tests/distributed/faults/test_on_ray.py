"""Deaths at chosen moments, on a real Ray: where ray is installed, as by `make distributed`."""

from __future__ import annotations

import pytest

from tests.distributed.test_ray import needs_ray, run

FAULTS = "tests.distributed.faults.scenarios"


@needs_ray
@pytest.mark.time_limit(520)
@pytest.mark.parametrize("scenario", ["exiting_env", "merging", "weights", "large_answers", "leaves_nothing"])
def test_accounting_balances_and_nothing_is_left(scenario: str) -> None:
    run(scenario, module=FAULTS)


@needs_ray
@pytest.mark.soak  # others on the machine need memory, too
def test_a_collector_that_takes_too_much_memory() -> None:
    run("out_of_memory", module=FAULTS)


@needs_ray
@pytest.mark.soak
@pytest.mark.time_limit(1000)
def test_killed_while_large_answers_are_written() -> None:
    run("large_answers", "40", seconds=900, module=FAULTS)
