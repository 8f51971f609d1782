"""The harness has teeth: every seeded defect is found, and within few examples."""

from __future__ import annotations

import pytest
from hypothesis import Phase, given, seed, settings

from tests.defects.findings import is_find
from tests.properties.canaries import CANARIES
from tests.properties.program import check
from tests.properties.setups import IN_PROCESS, Setup, setups
from tests.properties.test_programs import EXAMPLES

TRIES = 3  # which examples come first depends on what else is imported: a file that moves must not decide


class Found(BaseException):
    """Passes through Hypothesis, which would try the example again."""


def found_after(name: str, number: int) -> int | None:
    """How many examples it takes until a defect shows; None: it does not show."""
    count = 0

    @seed(number)
    @settings(max_examples=EXAMPLES, phases=[Phase.generate], database=None)
    @given(setup=setups(IN_PROCESS))
    def harness(setup: Setup) -> None:
        nonlocal count
        count += 1
        with pytest.MonkeyPatch.context() as patch:
            CANARIES[name](patch)
            try:
                check(setup)
            except BaseException as error:
                if not is_find(error):
                    raise
                raise Found from error

    try:
        harness()
    except Found:
        return count
    return None


@pytest.mark.parametrize("name", CANARIES)
def test_a_defect_is_found(name: str) -> None:
    assert any(found_after(name, number) is not None for number in range(TRIES))


@pytest.mark.soak
@pytest.mark.parametrize("number", range(1, 6))
@pytest.mark.parametrize("name", CANARIES)
def test_a_defect_is_found_from_wherever_one_begins(name: str, number: int) -> None:
    assert found_after(name, number) is not None
