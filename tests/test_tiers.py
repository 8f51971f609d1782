"""Tiers: every value, or every pair of values, of parameters stays in `make test`."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiers import PARTS, kept

pytest_plugins = ["pytester"]


def combined(case: dict[str, Any], size: int) -> set[Any]:
    return set(combinations(sorted(case.items()), size))


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4), quick=st.sampled_from(sorted(PARTS)))
def test_every_combination_of_a_full_product_stays_in_fewest_cases(sizes: list[int], quick: str) -> None:
    cases = [dict(zip("abcd", row, strict=False)) for row in product(*(range(size) for size in sizes))]
    places, size = kept(cases, quick), min(PARTS[quick], len(sizes))
    everything = set[Any]().union(*(combined(case, size) for case in cases))
    assert set[Any]().union(*(combined(cases[place], size) for place in places)) == everything
    largest = sorted(sizes)[-size:]
    assert len(places) >= (largest[0] if size == 1 else largest[0] * largest[1])


def test_parameters_that_are_given_together_count_as_one() -> None:
    pairs = [(f"name {n}", 1000 + n) for n in range(20)]
    together = [{"name": name, "value": value, "mode": mode} for name, value in pairs for mode in ("a", "b")]
    assert len(kept(together, "each")) == 20
    assert kept(together, 15) == {0, 15, 30}


SUITE = """
import pytest

@pytest.mark.slow("a reason")
def test_slow(): pass

@pytest.mark.mostly_slow("a reason", quick="each")
@pytest.mark.parametrize("a", [1, 2, 3])
@pytest.mark.parametrize("b", [1, 2])
def test_mostly(a, b): pass

def test_quick(): pass

@pytest.mark.mostly_slow("a reason", quick=6, slow="each")
@pytest.mark.parametrize("a", [1, 2, 3])
@pytest.mark.parametrize("b", [1, 2])
def test_seldom(a, b): pass
"""


def collect(pytester: pytest.Pytester, text: str, marked: str) -> pytest.RunResult:
    pytester.makeini("[pytest]\nmarkers =\n    slow: ...\n    mostly_slow: ...\n    soak: ...")
    pytester.makeconftest(
        "import pytest\nfrom tests.tiers import mark_slow\n"
        "@pytest.hookimpl(tryfirst=True)\ndef pytest_collection_modifyitems(items): mark_slow(items)\n"
    )
    pytester.makepyfile(text)
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", "-m", marked)


def test_marks_leave_the_rest_out(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", __file__.rpartition("/tests/")[0])
    collect(pytester, SUITE, "not slow and not soak").assert_outcomes(passed=5, deselected=9)
    collect(pytester, SUITE, "slow").assert_outcomes(passed=6, deselected=8)
    collect(pytester, SUITE, "soak").assert_outcomes(passed=3, deselected=11)


@pytest.mark.slow("runs pytest")
@pytest.mark.parametrize(
    "mark",
    [
        "slow",
        "slow()",
        "slow('a', quick='each')",
        "mostly_slow('a')",
        "mostly_slow('a', quick=1)",
        "mostly_slow('a', quick=2, slow='some')",
    ],
)
def test_mark_without_a_reason_or_of_another_form_is_refused(
    mark: str, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", __file__.rpartition("/tests/")[0])
    ran = collect(pytester, f"import pytest\n@pytest.mark.{mark}\ndef test_one(): pass", "")
    ran.stderr.fnmatch_lines(["*expected *slow(reason*"])
