"""Any envs, any vectorizer, any program of calls: all that comes out is what a plain loop gives, bit for bit.

What is drawn stands in `setups`, what the envs say in `worlds`, which calls are made in `program`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, Tuple
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.properties.program import check
from tests.properties.setups import IN_PROCESS, PROCESSES, Setup, setups
from tests.properties.worlds import Design, Seat

pytestmark = pytest.mark.many_processes

# In this process, and with worker processes; of `make test`, and of `make test-all`.
EXAMPLES, WITH_PROCESSES = 120, 8
MANY, MANY_WITH_PROCESSES = 400, 60
LINES = (
    *(10, 13, 15, 18, 19, 21, 22, 23, 25, 33, 34, 35, 37, 40, 41, 42),
    *(44, 45, 46, 47, 50, 51, 55, 56, 57, 58, 63),
)

BIT = Seat(Discrete(2), Discrete(2))


def proves(test: Callable[..., None]) -> Callable[..., None]:
    """Marks of a test of some backends; together they are all."""
    for line in LINES:
        test = pytest.mark.checklist(line)(test)
    for fault in ("B5", "B7", "B8", "C13", "C14", "C15", "D3", "D5", "D9", "E2"):
        test = pytest.mark.fault(fault)(test)
    return pytest.mark.time_limit(1800)(test)  # shrinking a counterexample takes its time


def without_leaves(backend: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Draw actions that hold nothing always: a dict without keys was once taken for actions agent by agent."""

    def add(test: Callable[..., None]) -> Callable[..., None]:
        for n, space in enumerate((Tuple([Dict()]), Tuple([Dict(), Dict()]), Dict(), Tuple([])), 1):
            design = Design("single", (Seat(Discrete(2), space),))
            test = example(setup=Setup(design, n=min(n, 2), backend=backend))(test)
        design = Design("parallel", (Seat(Discrete(2), Dict()), BIT))
        test = example(setup=Setup(design, backend=backend))(test)
        # Two groups of two, which have the names of two of the agents.
        design = Design("keyed", (Seat(Discrete(2), Dict()), Seat(Discrete(3), Dict())) * 2)
        return example(setup=Setup(design, backend=backend))(test)

    return add


@proves
@settings(max_examples=EXAMPLES)
@given(setup=setups(IN_PROCESS))
# Each of these was a bug once: a state without axes; observations that look like a pair of an observation and its info;
# masks that were still there when the env had not given any.
@example(setup=Setup(Design("parallel", (BIT,), state=Box(0, 1, (), np.float16)), state=True))
@example(setup=Setup(Design("single", (Seat(Tuple([MultiBinary(1), Dict(a=Discrete(3))]), Discrete(2)),))))
@example(setup=Setup(Design("parallel", (Seat(Discrete(3), Discrete(4), "info"),) * 2, talk=0.0), episodes=20))
@without_leaves("sync")
def test_in_this_process(setup: Setup) -> None:
    check(setup)


@pytest.mark.slow("draws many programs")
@proves
@settings(max_examples=MANY)
@given(setup=setups(IN_PROCESS))
def test_in_this_process_at_length(setup: Setup) -> None:
    check(setup)


@proves
@settings(max_examples=WITH_PROCESSES)
@given(setup=setups(PROCESSES))
@without_leaves("async")
def test_in_processes(setup: Setup) -> None:
    check(setup)


@pytest.mark.slow("draws many programs")
@proves
@settings(max_examples=MANY_WITH_PROCESSES)
@given(setup=setups(PROCESSES))
def test_in_processes_at_length(setup: Setup) -> None:
    check(setup)


@pytest.mark.slow("starts processes from nothing")
@pytest.mark.time_limit(1800)
@settings(max_examples=4)
@given(setup=setups(PROCESSES, context=st.sampled_from(("forkserver", "forkserver", "spawn"))))
def test_in_processes_that_start_clean(setup: Setup) -> None:
    check(setup)


@pytest.mark.soak
@settings(max_examples=10_000, suppress_health_check=list(HealthCheck))
@given(setup=setups(IN_PROCESS))
def test_in_this_process_for_long(setup: Setup) -> None:
    check(setup)


@pytest.mark.soak
@settings(max_examples=2_000, suppress_health_check=list(HealthCheck))
@given(setup=setups(PROCESSES, context=st.sampled_from(("fork",) * 9 + ("forkserver",))))
def test_in_processes_for_long(setup: Setup) -> None:
    check(setup)
