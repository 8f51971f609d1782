"""Ratings, game by game and fitted to all games at once."""

from __future__ import annotations

import math
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import marlvec
from marlvec.errors import ArgumentError, CheckpointError
from marlvec.policies import RandomPolicy
from marlvec.selfplay import (
    BradleyTerry,
    Elo,
    Game,
    MatchTable,
    OpenSkill,
    Ratings,
    RatingTracker,
    WinCount,
    alpha_rank,
    evaluate_match,
    exploitability,
)
from marlvec.serialization.values import decode, encode
from tests.selfplay.nim import Nim, players
from tests.vector.support.reference import refused

# --- Ratings that are fitted to all games at once: in any order they are the same, and they know how sure they are


PLAYERS = "abcdef"
GAMES = st.lists(
    st.integers(2, 4).flatmap(
        lambda n: st.tuples(
            st.lists(st.lists(st.sampled_from(PLAYERS), min_size=1, max_size=2, unique=True), min_size=n, max_size=n),
            st.lists(st.integers(-2, 2).map(float), min_size=n, max_size=n),
        )
    ),
    max_size=20,
)


def rated(games: Any, **options: Any) -> BradleyTerry:
    ratings = BradleyTerry(**options)
    for sides, scores in games:
        ratings.rate(sides, scores)
    return ratings


def duels(rng: np.random.Generator, true: dict[str, float], games: int) -> list[Any]:
    """Games of two, drawn as the model says."""
    names = list(true)
    found = []
    for _ in range(games):
        one, other = (names[i] for i in rng.choice(len(names), 2, replace=False))
        found.append(([one, other], [float(rng.random() < 1 / (1 + 10 ** ((true[other] - true[one]) / 400))), 0.5]))
    return found


def races(rng: np.random.Generator, true: dict[str, float], games: int, sides: int) -> list[Any]:
    """Games of more, likewise: each has its strength and the luck that goes with Plackett's and Luce's model."""
    names, found = list(true), []
    for _ in range(games):
        who = [names[i] for i in rng.choice(len(names), sides, replace=False)]
        found.append((who, [true[name] * math.log(10) / 400 + rng.gumbel() for name in who]))
    return found


# --- the order of games


@pytest.mark.slow("plays and rates many matches")
@given(GAMES, st.randoms(use_true_random=False), st.booleans())
def test_games_in_another_order_give_the_same_ratings_to_the_bit(games: Any, random: Any, anchored: bool) -> None:
    fixed = {"a": 0.0} if anchored else None
    shuffled = list(games)
    random.shuffle(shuffled)
    one, other = rated(games, fixed=fixed), BradleyTerry(fixed=fixed)
    for i, (sides, scores) in enumerate(shuffled):  # nor does it matter when somebody looked, or who sat where
        places = list(range(len(sides)))
        random.shuffle(places)
        other.rate([sides[k][::-1] for k in places], [scores[k] for k in places])
        other.rating(PLAYERS[i % len(PLAYERS)])
    assert [one.rating(name) for name in PLAYERS] == [other.rating(name) for name in PLAYERS]
    assert [one.interval(name) for name in PLAYERS] == [other.interval(name) for name in PLAYERS]


def test_four_hundred_games_against_a_fixed_player_say_one_thing() -> None:
    """Elo says something else for each order of the very same games."""
    rng = np.random.default_rng(3)
    won = rng.random(400) < 1 / (1 + 10 ** (-191 / 400))
    found, moving = set(), set()
    for _ in range(3):
        rng.shuffle(won)
        games = [(["a", "random"], [float(win), 0.5]) for win in won]
        ratings, elo = rated(games, fixed={"random": 0}), Elo(fixed={"random": 0})
        for sides, scores in games:
            elo.rate(sides, scores)
        found.add((ratings.rating("a"), *ratings.interval("a")))
        moving.add(elo.rating("a"))
    ((rating, low, high),) = found
    assert max(moving) - min(moving) > 10
    score = (won.sum() + 0.5) / 401  # and one draw
    assert rating == pytest.approx(400 * math.log10(score / (1 - score)), abs=1e-9)
    assert low < 191 < high
    width = 1.959964 * 400 / math.log(10) / math.sqrt(401 * score * (1 - score))
    assert (rating - low, high - rating) == pytest.approx((width, width), rel=1e-6)


# --- what is known of the model


@pytest.mark.mostly_slow("plays and rates many matches", quick=8)
@pytest.mark.parametrize("sides", [2, 3, 6])
@pytest.mark.parametrize("anchored", [False, True])
def test_intervals_hold_the_truth_as_often_as_they_say(sides: int, anchored: bool) -> None:
    rng = np.random.default_rng(sides)
    inside = total = 0
    for _ in range(60):
        true = {name: float(rng.normal(500, 200)) for name in PLAYERS}
        games = duels(rng, true, 200) if sides == 2 else races(rng, true, 120, sides)
        found = rated(games, fixed={"a": true["a"]} if anchored else None)
        shift = 0.0 if anchored else 1000 - np.mean(list(true.values()))
        for name in PLAYERS[anchored:]:
            low, high = found.interval(name)
            inside += low <= true[name] + shift <= high
            total += 1
    assert 0.90 < inside / total < 0.985, "95 %, give or take"


def test_it_finds_the_strengths_of_a_match_of_two() -> None:
    games = 30 * [(["a", "b"], [1.0, 0.0])] + 8 * [(["a", "b"], [0.0, 1.0])] + 12 * [(["b", "a"], [2.0, 2.0])]
    found = rated(games, initial=0)
    score = (30 + 12 / 2 + 1 / 2) / 51
    assert found.rating("a") == pytest.approx(200 * math.log10(score / (1 - score)))
    assert found.rating("b") == pytest.approx(-found.rating("a"))
    assert found.expected("a", "b") == pytest.approx(score)
    assert found.rating("nobody") == 0
    assert found.interval("nobody") == (-math.inf, math.inf)


@pytest.mark.slow("plays and rates many matches")
def test_what_it_finds_is_the_fixed_point_of_hunters_minorize_maximize() -> None:
    """Hunter (2004): a strength is its wins over what is expected of one of strength 1."""
    rng = np.random.default_rng(0)
    games = races(rng, {"a": 0.0, "b": 100.0, "c": 250.0}, 80, 3)
    found = rated(games, initial=0)
    choices = []  # (who was there, who came out best, how often), virtual draws too
    for names, scores in games:
        first, second, third = (names[i] for i in np.argsort(scores)[::-1])
        choices += [((first, second, third), first, 1.0), ((second, third), second, 1.0)]
    for one, other in ("ab", "ac", "bc"):  # they all met equally often: half of half a draw of each
        choices += [((one, other), one, 0.25), ((one, other), other, 0.25)]
    strength = dict.fromkeys("abc", 1.0)
    for _ in range(2000):
        strength = {
            name: sum(times for _, best, times in choices if best == name)
            / sum(times / sum(strength[x] for x in there) for there, _, times in choices if name in there)
            for name in strength
        }
    logs = {name: 400 * math.log10(value) for name, value in strength.items()}
    for name, value in logs.items():
        assert found.rating(name) == pytest.approx(value - sum(logs.values()) / 3, abs=1e-6)


def test_intervals_shrink_with_the_games() -> None:
    rng = np.random.default_rng(1)
    games = duels(rng, {"a": 0.0, "b": 100.0, "c": 200.0}, 3200)
    widths = []
    for k in (50, 200, 800, 3200):
        low, high = rated(games[:k], fixed={"a": 0}).interval("c")
        widths.append(high - low)
    for wide, narrow in pairwise(widths):
        assert narrow == pytest.approx(wide / 2, rel=0.25)
    found = rated(games)
    assert found.interval("b", 0.5)[0] > found.interval("b")[0] > found.interval("b", 0.999)[0]
    assert sum(found.interval("b")) == pytest.approx(2 * found.rating("b"))
    for confidence in (0, 1, math.nan):
        refused(ArgumentError, "confidence must be above 0 and below 1", found.interval, "b", confidence)


# --- where it has little to go by


@pytest.mark.parametrize("games", [1, 20, 100_000])
def test_an_unbeaten_player_has_a_finite_rating(games: int) -> None:
    found = BradleyTerry(fixed={"random": 0})
    for _ in range(min(games, 20)):
        found.rate(["a", "random"], [1, 0])
        found.rate(["random", "b"], [1, 0])
    if games > 20:
        state = found.state_dict()
        state["results"] = [[drawn, worse, games] for drawn, worse, _ in state["results"]]
        found.load_state_dict(state)
    # Alone with the fixed one it would be ln(2 games + 1); here half of the other's draw falls to each, too.
    assert found.rating("a") == pytest.approx(400 * math.log10((games + 0.375) / 0.375))
    assert found.rating("b") == pytest.approx(-found.rating("a"))
    low, high = found.interval("a")
    assert 0 < high - low < 2000
    assert math.isfinite(low)


def test_ratings_of_groups_that_never_met_say_nothing_of_each_other() -> None:
    """Each has the mean where everybody begins, but the one in which somebody is fixed."""
    rng = np.random.default_rng(2)
    weak = duels(rng, {"a": 0.0, "b": 100.0}, 200)
    strong = duels(rng, {"c": 2000.0, "d": 2100.0, "e": 2200.0}, 300)
    found = rated(weak + strong)
    assert sum(map(found.rating, "ab")) == pytest.approx(2 * 1000)
    assert sum(map(found.rating, "cde")) == pytest.approx(3 * 1000)
    alone = rated(strong)
    assert [alone.rating(name) for name in "cde"] == pytest.approx([found.rating(name) for name in "cde"])
    assert [alone.interval(name) for name in "cde"] == [pytest.approx(found.interval(name)) for name in "cde"]
    fixed = rated(weak + strong, fixed={"a": 0})
    assert fixed.initial == 0
    assert 50 < fixed.rating("b") < 150
    assert sum(map(fixed.rating, "cde")) == pytest.approx(0)
    bridged = rated(weak + strong + 50 * [(["c", "b"], [1.0, 0.0])], fixed={"a": 0})
    assert bridged.rating("c") > 600


def test_a_long_line_of_ever_better_ones_is_not_pulled_together() -> None:
    """What keeps ratings finite does not pull them to the middle, far from which a league's best are."""
    rng = np.random.default_rng(4)
    found = BradleyTerry(fixed={"0": 0})
    for k in range(20):
        for _ in range(400):
            found.rate([str(k + 1), str(k)], [float(rng.random() < 1 / (1 + 10 ** (-100 / 400))), 0.5])
    low, high = found.interval("20")
    assert low < 2000 < high
    assert high - low < 400


@pytest.mark.parametrize("scores", [[1, 1, 1, 1], [2, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]])
def test_equals_in_a_game_of_many_stay_equal(scores: list[int]) -> None:
    found = rated([("abcd", scores)])
    by_score: dict[int, list[float]] = {}
    for name, score in zip("abcd", scores, strict=True):
        by_score.setdefault(score, []).append(found.rating(name))
    for same in by_score.values():
        assert same == pytest.approx(len(same) * [same[0]])
    means = [by_score[score][0] for score in sorted(by_score)]
    assert means == sorted(means)
    assert len({round(mean, 6) for mean in means}) == len(means)
    assert sum(map(found.rating, "abcd")) == pytest.approx(4000)


@pytest.mark.parametrize("far", [1e4, 1e9])
def test_fixed_ones_may_be_as_far_apart_as_they_like(far: float) -> None:
    found = rated([(["a", "x"], [0, 1]), (["a", "y"], [1, 0])], fixed={"x": far, "y": -far})
    assert -far <= found.rating("a") <= far
    assert found.initial == 0
    found = rated([(["a", "x"], [1, 0])], fixed={"x": far})
    assert found.rating("a") == pytest.approx(far + 400 * math.log10(3), rel=1e-9)


# --- as the others are


def test_a_copy_has_the_originals_rating_until_it_plays() -> None:
    found = rated(10 * [(["a", "b"], [1, 0])])
    found.copy("a", "old")
    found.copy("old", "older")
    assert found.players == ("a", "b", "old", "older")
    assert found.rating("old") == found.rating("older") == found.rating("a") > 1000
    assert found.interval("old") == (-math.inf, math.inf), "it has not shown anything yet"
    before = found.rating("a")
    for _ in range(3):
        found.rate(["old", "b"], [0, 1])
    assert found.rating("old") < found.rating("a")
    assert found.rating("a") != before
    again = BradleyTerry()
    again.load_state_dict(decode(encode(found.state_dict(), "ratings")))
    assert again.ranking() == found.ranking()
    assert again.state_dict() == found.state_dict()
    found.copy("b", "old")  # from now on it is another one
    assert found.rating("old") == found.rating("b")
    found.copy("nobody", "new")
    assert found.rating("new") == found.initial
    found.forget("a")
    assert "a" not in found.players
    assert found.rating("a") == found.rating("b") == 1000


def test_forgetting_a_player_keeps_the_others_results() -> None:
    both = rated([("abc", [2, 1, 0])] * 5)
    both.forget("a")
    assert both.rating("b") == rated([("bc", [1, 0])] * 5).rating("b")


@pytest.mark.parametrize("kind", [Elo, BradleyTerry])
def test_new_players_begin_at_the_mean_of_fixed_ratings(kind: Any) -> None:
    assert kind().rating("x") == kind().initial == 1000
    assert kind(fixed={"random": 0}).rating("x") == 0
    assert kind(fixed={"random": 0, "rule": 500}).rating("x") == 250
    assert kind(fixed={"random": 0}, initial=7).rating("x") == 7
    for wrong in ({"fixed": {"a": math.nan}}, {"initial": math.inf}):
        refused(ArgumentError, "ratings must be finite", kind, **wrong)


def test_a_rating_tracker_rates_by_it() -> None:
    assert isinstance(RatingTracker(["a", "b"]).ratings, BradleyTerry)


@pytest.mark.parametrize(
    "state", [{}, {"players": [], "results": [[[["a"]], [["b"]], 0]], "copies": []}, {"players": 3}]
)
def test_a_wrong_state_changes_nothing(state: Any) -> None:
    found = rated([("ab", [1, 0])])
    refused(ArgumentError, "the state of a BradleyTerry: ", found.load_state_dict, state)
    assert found.rating("a") > found.rating("b")


@pytest.mark.slow("plays and rates many matches")
def test_a_hundred_thousand_games_of_twenty_take_no_time() -> None:
    """Games are counted, not kept; what is asked for after each is fitted to counts."""
    rng = np.random.default_rng(5)
    true = rng.normal(0, 300, 20)
    names = [f"player {i}" for i in range(20)]
    ones = rng.integers(0, 20, 100_000)
    others = (ones + rng.integers(1, 20, 100_000)) % 20
    won = rng.random(100_000) < 1 / (1 + 10 ** ((true[others] - true[ones]) / 400))
    found = BradleyTerry()
    began = time.perf_counter()
    for one, other, win in zip(ones.tolist(), others.tolist(), won.tolist(), strict=True):
        found.rate([names[one], names[other]], [win, 0.5])
    for _ in range(100):
        found.rate(names[:2], [1, 0])
        found.rating(names[0])
    assert time.perf_counter() - began < 60, "two seconds"
    assert len(found.state_dict()["results"]) <= 20 * 19
    for name, rating in zip(names, true - true.mean() + 1000, strict=True):
        assert abs(found.rating(name) - rating) < 60


# --- Ratings and the table of match-ups: what games say about who is better


NAMES = "abcd"
KINDS = ["Elo", "OpenSkill", "BradleyTerry"]


def ratings(kind: str) -> Ratings:
    if kind == "OpenSkill":
        pytest.importorskip("openskill")
        return OpenSkill()
    return BradleyTerry() if kind == "BradleyTerry" else Elo()


SKILLS = (0.0, 0.45, 0.75, 1.0)


def assert_in_order(table: Ratings) -> None:
    assert [name for name, _ in table.ranking()] == [f"skill {skill}" for skill in reversed(SKILLS)]
    assert table.expected("skill 1.0", "skill 0.0") > 0.75
    assert table.expected("skill 0.0", "skill 1.0") == pytest.approx(1 - table.expected("skill 1.0", "skill 0.0"))


@pytest.mark.mostly_slow("plays and rates many matches", quick=3)
@pytest.mark.checklist(130)
@pytest.mark.parametrize("seed", range(3))
def test_ratings_find_the_order_of_players_of_graded_strength(seed: int) -> None:
    kwargs = {"smallest": 9, "largest": 20}
    found = evaluate_match(players(*SKILLS), Nim, 360, num_envs=24, seed=seed, backend="sync", env_kwargs=kwargs)
    for kind in KINDS:
        assert_in_order(found.rate(ratings(kind)))


@pytest.mark.checklist(130)
@pytest.mark.parametrize("kind", KINDS)
def test_ratings_find_the_order_in_games_for_three(kind: str) -> None:
    """Drawn by lots: everybody's skill and some luck."""
    table = ratings(kind)
    rng = np.random.default_rng(0)
    for _ in range(400):
        who = rng.choice(4, 3, replace=False)
        table.rate([f"skill {SKILLS[i]}" for i in who], (np.array(SKILLS)[who] * 2 + rng.gumbel(size=3)).tolist())
    assert_in_order(table)


@pytest.mark.slow("plays and rates many matches")
@given(GAMES)
def test_elo_makes_no_points_where_sides_are_of_equal_size(games: Any) -> None:
    elo = Elo()
    for sides, scores in games:
        elo.rate([side[0] for side in sides], scores)
    points = [elo.rating(name) for name in PLAYERS]
    assert sum(points) == pytest.approx(len(PLAYERS) * 1000)
    again = Elo()
    again.load_state_dict(elo.state_dict())
    assert again.ranking() == elo.ranking()


@pytest.mark.slow("plays and rates many matches")
@given(GAMES)
def test_better_results_never_rate_below_worse(games: Any) -> None:
    """Of equals the winner gains, the loser loses, a draw moves neither; whatever came before, a win helps."""
    elo = Elo()
    for sides, scores in games:
        elo.rate(sides, scores)
    before = elo.rating("a"), elo.rating("b")
    elo.rate(["a", "b"], [1, 0])
    assert elo.rating("a") > before[0]
    assert elo.rating("b") < before[1]
    assert elo.rating("a") - before[0] == pytest.approx(before[1] - elo.rating("b"))


def test_elo_in_numbers() -> None:
    elo = Elo(k=32)
    elo.rate(["a", "b"], [1, 0])
    assert (elo.rating("a"), elo.rating("b")) == (1016, 984)
    elo.rate(["a", "b"], [3, 3])
    assert elo.rating("a") == pytest.approx(1016 + 32 * (0.5 - 1 / (1 + 10 ** (-32 / 400))))
    three = Elo(k=32)
    three.rate(["a", "b", "c"], [2, 1, 0])
    assert [three.rating(name) for name in "abc"] == [1016, 1000, 984]
    fixed = Elo(fixed={"random": 0})
    for _ in range(500):
        fixed.rate(["a", "random"], [1, 0])
    assert fixed.rating("random") == 0
    assert fixed.rating("a") > 750  # from 0, where who is fixed stands
    assert Elo(fixed={"x": 1e9, "y": -1e9}).expected("y", "x") == pytest.approx(0)


@pytest.mark.checklist(130)
@pytest.mark.parametrize("kind", KINDS)
def test_several_winners_gain_alike(kind: str) -> None:
    """In OpenRL's service a game that several have won moves the last of them only."""
    own = ratings(kind)
    new = own.rating("a")
    own.rate(["a", "b", "c", "d"], [1, 1, 0, 0])
    assert own.rating("a") == pytest.approx(own.rating("b"))
    assert own.rating("c") == pytest.approx(own.rating("d"))
    assert own.rating("a") > new > own.rating("c")


@pytest.mark.parametrize("kind", KINDS)
def test_ratings_keep_their_books(kind: str) -> None:
    own = ratings(kind)
    new = own.rating("nobody")
    own.rate(["a", "a"], [1, 0])  # against itself
    assert own.rating("a") == new
    own.rate([("a", "b"), ("c", "d")], [1, 0])
    assert own.rating("a") == own.rating("b") > new > own.rating("c")
    own.rate(["a", "a", "c"], [1, 0, -1])
    own.copy("a", "copy")
    assert own.rating("copy") == own.rating("a")
    again = ratings(kind)
    again.load_state_dict(own.state_dict())
    assert again.ranking() == own.ranking()
    assert again.players == own.players
    own.forget("a")
    assert own.rating("a") == new
    assert "copy" in repr(own) or "a" in repr(own)
    refused(ArgumentError, "the state of an? .*: expected other fields", own.load_state_dict, {"x": 1})
    for sides, scores in ((["a"], [1]), (["a", "b"], [1]), (["a", ()], [1, 0]), (["a", "b"], [math.nan, 0])):
        refused(ArgumentError, "", own.rate, sides, scores)


def test_skill_gets_surer_and_says_how_sure() -> None:
    pytest.importorskip("openskill")
    skill = OpenSkill()
    widths = []
    for _ in range(5):
        skill.rate(["a", "b"], [1, 0])
        widths.append(skill.belief("a")[1])
    assert widths == sorted(widths, reverse=True)
    assert skill.lower_bound("a") < skill.rating("a")
    assert OpenSkill("BradleyTerryFull").rating("x") == pytest.approx(25)
    refused(ArgumentError, "model: expected one of .*got 'Elo'", OpenSkill, "Elo")


@pytest.mark.parametrize(
    ("missing", "call", "extra"),
    [
        ("openskill.models", OpenSkill, "selfplay"),
        ("pyspiel", lambda: exploitability(RandomPolicy()), "openspiel"),
        ("open_spiel.python.egt.alpharank", lambda: alpha_rank([[0.5]]), "openspiel"),
    ],
)
def test_without_a_library_it_says_what_to_install(
    missing: str, call: Any, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    refused(marlvec.errors.MissingExtraError, rf"marlvec\[{extra}\]", call)


# --- the table


@pytest.mark.slow("plays and rates many matches")
@pytest.mark.checklist(130)
@given(GAMES)
def test_the_table_counts_each_pair_both_ways(games: Any) -> None:
    table = MatchTable()
    expected: dict[tuple[str, str], list[int]] = {}
    for sides, scores in games:
        table.add(Game(tuple(map(str, range(len(sides)))), tuple(map(tuple, sides)), tuple(scores), 1, False, (), 0, 0))
        for i, one in enumerate(sides):
            for j, other in enumerate(sides):
                for a in one:
                    for b in other:
                        if i != j and a != b:
                            result = expected.setdefault((a, b), [0, 0, 0])
                            result[1 - (scores[i] > scores[j]) + (scores[i] < scores[j])] += 1
    for a in NAMES:
        for b in NAMES:
            wins, draws, losses = expected.get((a, b), [0, 0, 0])
            assert table.win_count(a, b) == WinCount(wins, draws, losses)
        assert table.total(a).games == sum(sum(r) for (x, _), r in expected.items() if x == a)
    rates = table.payoffs(NAMES, unknown=0.5)
    np.testing.assert_allclose(rates + rates.T, 1)
    again = MatchTable()
    again.load_state_dict(table.state_dict())
    assert again.state_dict() == table.state_dict()
    table.forget("a")
    assert "a" not in table.players
    assert table.win_count("b", "a").games == 0


def test_a_table_that_decays_follows_a_learner() -> None:
    table = MatchTable(decay=0.9)
    for won in [-1] * 50 + [1] * 50:
        table.add_result("a", "b", won)
    assert table.win_rate("a", "b") > 0.99
    assert table.total("a") == WinCount(50, 0, 50)
    assert math.isnan(table.win_rate("a", "c"))
    refused(ArgumentError, "decay", MatchTable, 0)
    refused(ArgumentError, "the state of an? .*: expected other fields", table.load_state_dict, {})
    console = Console(width=100)
    with console.capture() as shown:
        console.print(table)
    assert "50%" in shown.get()


# --- the rating tracker


@pytest.mark.checklist(130)
def test_a_rating_tracker_hears_of_every_game_of_a_collector(tmp_path: Path) -> None:
    """Draws, games cut short and games over before the first move, with everybody who took part."""
    policies = players(0.0, 1.0)
    names = list(policies)
    with marlvec.make(Nim, 4, backend="sync", env_kwargs={"draws": True}, max_episode_steps=4) as envs:
        board = RatingTracker(envs.agents, note=names, keep=10_000)
        collector = marlvec.Collector(
            envs,
            policies,
            lambda agent, episode: names[(episode.number + int(agent[-1])) % 2],
            callbacks=[board],
            seed=0,
            window=10_000,
        )
        collector.collect(env_steps=800)
        records = collector.metrics.episodes
    assert board.games_total == len(board.games) == len(records) > 100
    for game, record in zip(board.games, records, strict=True):
        assert game.players == tuple((name,) for name in record.policies)
        assert game.scores == tuple(record.returns_A.tolist())
        assert (
            game.truncated
            == bool(record.truncated_A.any())
            == (record.length == 4 and game.is_draw and not _paid(record))
        )
        assert game.unmoved == (("player_1",) if record.length == 1 else ())
        assert record.custom[f"score of {names[0]}"] == game.score_of(names[0])
    assert board.draws == sum(game.is_draw for game in board.games) > 0
    assert board.truncations == sum(game.truncated for game in board.games) > 0
    assert board.unmoved.total() == sum(record.length == 1 for record in records) > 10
    assert sum(board.unmoved[name] for name in names) == board.unmoved.total()
    totals = [board.table.total(name) for name in names]
    assert totals[0].games == totals[1].games == len(records)
    assert totals[0].draws == board.draws
    assert board.ratings.rating(names[1]) > board.ratings.rating(names[0])
    assert "truncated" in repr(board)
    board.save(tmp_path / "board.npz")
    again = RatingTracker(envs.agents)
    again.load(tmp_path / "board.npz")
    assert again.state_dict() == board.state_dict()
    refused(ArgumentError, "state of a RatingTracker", again.load_state_dict, {})
    refused(ArgumentError, "note must be a list", RatingTracker, envs.agents, note="main")
    refused(CheckpointError, "", again.load, tmp_path / "none.npz")


def _paid(record: Any) -> bool:
    return bool(record.returns_A.any()) or not record.truncated_A.any()


# --- where nobody beats all


@pytest.mark.slow("plays and rates many matches")
def test_alpha_rank_gives_rock_paper_and_scissors_a_third_each() -> None:
    pytest.importorskip("pyspiel")
    table = MatchTable()
    for one, other in (("rock", "scissors"), ("scissors", "paper"), ("paper", "rock")):
        for _ in range(10):
            table.add_result(one, other, 1)
    shares = alpha_rank(table)
    assert shares == pytest.approx(dict.fromkeys(("rock", "paper", "scissors"), 1 / 3), abs=1e-6)
    for name in ("rock", "paper", "scissors"):
        for _ in range(10):
            table.add_result("best", name, 1)
    assert alpha_rank(table)["best"] == pytest.approx(1, abs=1e-6)
    assert alpha_rank([[0.5, 1.0], [0.0, 0.5]]) == pytest.approx({"0": 1, "1": 0}, abs=1e-6)
    for wrong in ([], [[0.5, 1.0]], [[math.nan]]):
        refused(ArgumentError, "win rates of all against all", alpha_rank, wrong)
