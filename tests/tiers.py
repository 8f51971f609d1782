"""Tiers: which tests are quick (`make test`), slow (`make test-all` runs them, too), or for the soak.

@pytest.mark.slow("trains a policy")                            every case is slow
@pytest.mark.mostly_slow("starts workers", quick="pairs")       but for cases with every pair of parameter values
@pytest.mark.mostly_slow("starts workers", quick="each")        but for cases with every value of each parameter
@pytest.mark.mostly_slow("runs a program each", quick=8)        but for the first of each eight
@pytest.mark.mostly_slow("plays", quick=8, slow="pairs")        as above; of the others, those that pairs need are slow,
                                                                and the rest is for the soak
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest

__all__ = ["covering", "kept", "mark_slow", "tier_of"]

QUICK, SLOW, SOAK = "quick", "slow", "soak"
PARTS = {"each": 1, "pairs": 2, "triples": 3}
"""What ``quick`` and ``slow`` may say, and of how many parameters' values every combination is to occur."""


def tier_of(item: pytest.Item) -> str:
    """Return the tier of a test, once `mark_slow` has seen it."""
    if item.get_closest_marker("soak"):
        return SOAK
    return SLOW if item.get_closest_marker("slow") else QUICK


def mark_slow(items: Iterable[pytest.Item]) -> None:
    """Mark the slow cases of functions of which some are quick.

    Raises:
        pytest.UsageError: A mark has another form than those above: there is no reason, for example.
    """
    functions: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        for mark in item.iter_markers("slow"):
            if len(mark.args) != 1 or not isinstance(mark.args[0], str) or mark.kwargs:
                raise pytest.UsageError(f"{item.nodeid}: expected slow(reason), got {mark.args} {mark.kwargs}")
        if item.get_closest_marker("mostly_slow") and tier_of(item) == QUICK:
            functions[item.nodeid.partition("[")[0]].append(item)
    for name, cases in functions.items():
        (mark,) = cases[0].iter_markers("mostly_slow")
        parts = [mark.kwargs.get("quick"), *([mark.kwargs["slow"]] if "slow" in mark.kwargs else [])]
        if len(mark.args) != 1 or not all(part in PARTS or (isinstance(part, int) and part > 1) for part in parts):
            raise pytest.UsageError(
                f"{name}: expected mostly_slow(reason, quick='each', 'pairs', 'triples' or n), and slow= likewise, "
                f"got {mark.args} {mark.kwargs}"
            )
        rows = [case.callspec.params for case in cases]  # type: ignore[attr-defined]  # of functions
        quick = kept(rows, parts[0])
        slow = kept(rows, parts[1]) if len(parts) > 1 else set(range(len(cases)))
        for place, case in enumerate(cases):
            if place not in quick:
                case.add_marker(pytest.mark.slow(*mark.args) if place in slow else pytest.mark.soak)


def kept(cases: Sequence[Mapping[str, Any]], quick: str | int) -> set[int]:
    """Choose the cases of a function that stay quick, or slow.

    Args:
        cases: The parameters of each.
        quick: As the mark says it.

    Returns:
        Their places.
    """
    if isinstance(quick, int):
        return set(range(0, len(cases), quick))
    rows = [[(name, id(value)) for name, value in case.items()] for case in cases]
    return covering(rows, min(PARTS[quick], len(cases[0])))


def covering(rows: Sequence[Sequence[Any]], size: int) -> set[int]:
    """Choose few rows such that every combination of ``size`` entries that some row has is in one of them.

    Greedy, as in D. M. Cohen et al., "The AETG System", IEEE Transactions on Software Engineering 23(7), 1997, but
    without chance: of the rows with most combinations that are still missing, the first. Parameters that are given
    together, one value of the one for each of the other, count as one.

    Returns:
        Places of the rows.
    """
    alone = [tuple(row[k] for row in rows) for k in range(len(rows[0]))]
    axes = {tuple(column.index(entry) for entry in column): k for k, column in reversed(list(enumerate(alone)))}
    own = [set(combinations([row[k] for k in sorted(axes.values())], min(size, len(axes)))) for row in rows]
    missing = set[Any]().union(*own)
    chosen: set[int] = set()
    while missing:
        best = max(range(len(rows)), key=lambda place: len(own[place] & missing))  # the first of equals
        chosen.add(best)
        missing -= own[best]
    return chosen
