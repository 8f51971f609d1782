"""Matchmakers: how often whom, and from nothing but the game's own random stream."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marlvec.errors import ArgumentError
from marlvec.selfplay import (
    ByRating,
    Elo,
    Latest,
    MainExploiter,
    Matchmaker,
    MatchTable,
    Mirror,
    Mixture,
    Opponent,
    Prioritised,
    Uniform,
)
from tests.selfplay.nim import Net

DRAWS = 4000


def opponents(*names: str) -> list[Opponent]:
    """Records of opponents that nobody builds."""
    return [Opponent(name, name.split("_")[0], i, False, Net, (None, None, None)) for i, name in enumerate(names)]  # type: ignore[arg-type]


OLD = opponents("main_0", "main_1", "main_2", "rival_0")


def shares(maker: Matchmaker, given: list[Opponent] = OLD, learner: str = "main") -> dict[str, float]:
    rng = np.random.default_rng(0)
    counts = Counter(maker.choose(learner, given, rng) for _ in range(DRAWS))
    return {name: count / DRAWS for name, count in counts.items()}


def near(found: dict[str, float], expected: dict[str, float]) -> None:
    """Within four standard deviations."""
    for name in found.keys() | expected.keys():
        share = expected.get(name, 0.0)
        assert abs(found.get(name, 0.0) - share) <= 4 * np.sqrt(share * (1 - share) / DRAWS) + 1e-9, (name, found)


@pytest.mark.checklist(128)
def test_latest_and_uniform() -> None:
    assert shares(Latest()) == {"rival_0": 1.0}
    near(shares(Latest(2)), {"main_2": 0.5, "rival_0": 0.5})
    near(shares(Latest(9)), dict.fromkeys(("main_0", "main_1", "main_2", "rival_0"), 0.25))
    near(shares(Uniform()), dict.fromkeys(("main_0", "main_1", "main_2", "rival_0"), 0.25))
    assert shares(Mirror()) == {"main": 1.0}


@pytest.mark.slow("plays and rates many matches")
@pytest.mark.checklist(128)
def test_prioritised_by_win_rate() -> None:
    table = MatchTable()
    for other, wins, losses in (("main_0", 9, 1), ("main_1", 1, 1), ("main_2", 1, 9)):
        for _ in range(wins):
            table.add_result("main", other, 1)
        for _ in range(losses):
            table.add_result("main", other, -1)
    hard = np.array([0.1**2, 0.5**2, 0.9**2, 0.5**2])  # who was never met counts as even
    names = [one.opponent_id for one in OLD]
    near(shares(Prioritised(table)), dict(zip(names, hard / hard.sum(), strict=True)))
    even = np.array([0.09, 0.25, 0.09, 0.25])
    near(shares(Prioritised(table, "even")), dict(zip(names, even / even.sum(), strict=True)))
    near(shares(Prioritised(table, lambda rate: float(rate > 0.8))), {"main_0": 1.0})
    near(shares(Prioritised(table, lambda rate: 0.0)), dict.fromkeys(names, 0.25))
    near(shares(Prioritised(table, "even", of=["rival"])), {"rival_0": 1.0})
    near(shares(Prioritised(table, lambda rate: 1.0, of=["nobody"])), dict.fromkeys(names, 0.25))


def test_by_rating_prefers_equals() -> None:
    ratings = Elo(fixed={"main": 1200, "main_0": 1200, "main_1": 1000, "main_2": 1400, "rival_0": -5000})
    weights = np.array([1.0, np.exp(-0.5), np.exp(-0.5), 0.0])
    names = [one.opponent_id for one in OLD]
    near(shares(ByRating(ratings, spread=200)), dict(zip(names, weights / weights.sum(), strict=True)))
    ratings.fixed["main"] = 1e6  # far above all: the nearest one
    assert shares(ByRating(ratings)) == {"main_2": 1.0}


def test_an_exploiter_plays_the_main_learner_until_it_has_no_chance() -> None:
    table = MatchTable()
    maker = MainExploiter("main", table, enough=0.2, games=10)
    assert shares(maker, learner="exploiter") == {"main": 1.0}
    for i in range(10):
        table.add_result("exploiter", "main", 1 if i < 1 else -1)
    found = shares(maker, learner="exploiter")
    near(found, dict.fromkeys(("main_0", "main_1", "main_2"), 1 / 3))  # the main learner's past, and nobody else's
    for _ in range(10):
        table.add_result("exploiter", "main", 1)
    assert shares(maker, learner="exploiter") == {"main": 1.0}


def test_a_mixture_gives_each_its_share() -> None:
    maker = Mixture((3, Mirror()), (1, Latest()))
    near(shares(maker), {"main": 0.75, "rival_0": 0.25})


@pytest.mark.slow("plays and rates many matches")
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=6), st.integers(0, 2**32))
def test_whom_has_no_weight_is_never_drawn(weights: list[float], seed: int) -> None:
    names = [f"main_{i}" for i in range(len(weights))]
    table = MatchTable()
    by_rate = {0.5: 0.0}
    for i, (name, weight) in enumerate(zip(names, weights, strict=True)):
        for _ in range(i + 1):
            table.add_result("main", name, 1)
        table.add_result("main", name, -1)
        by_rate[table.win_rate("main", name)] = weight
    chosen = Prioritised(table, by_rate.__getitem__).choose("main", opponents(*names), np.random.default_rng(seed))
    assert by_rate[table.win_rate("main", chosen)] > 0 or not any(by_rate[table.win_rate("main", n)] for n in names)


def test_invalid_arguments_raise() -> None:
    table, rng = MatchTable(), np.random.default_rng(0)
    calls: list[tuple[Any, str]] = [
        (lambda: Latest(0), "count must be"),
        (lambda: ByRating(Elo(), 0), "spread must be"),
        (lambda: Prioritised(table, "soft"), "weighting must be one of"),
        (lambda: MainExploiter("main", table, enough=2), "enough must be"),
        (lambda: Mixture(), "expected pairs"),
        (lambda: Mixture((0, Mirror())), "positive share"),
        (lambda: Prioritised(table, lambda rate: -1.0).choose("main", OLD, rng), "of at least 0"),
        (lambda: Prioritised(table, lambda rate: float("nan")).choose("main", OLD, rng), "finite"),
    ]
    for call, message in calls:
        with pytest.raises(ArgumentError, match=message):
            call()
