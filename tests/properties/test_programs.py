"""Any envs, any vectorizer, any program of calls: all that comes out is what a plain loop gives, bit for bit."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from tests.properties.program import check
from tests.properties.setups import IN_PROCESS, PROCESSES, Setup, setups


@pytest.mark.time_limit(900)  # shrinking a counterexample takes its time
@settings(max_examples=1200)
@given(setup=setups(IN_PROCESS))
def test_in_this_process(setup: Setup) -> None:
    check(setup)


@pytest.mark.time_limit(900)  # shrinking a counterexample takes its time
@settings(max_examples=320)
@given(setup=setups(PROCESSES))
def test_in_processes(setup: Setup) -> None:
    check(setup)
