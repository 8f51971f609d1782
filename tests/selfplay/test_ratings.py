"""Ratings and the table of match-ups: what games say about who is better."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
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
from tests.selfplay.nim import Nim, players
from tests.selfplay.test_bradley_terry import GAMES
from tests.selfplay.test_bradley_terry import NAMES as PLAYERS

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
    with pytest.raises(ArgumentError, match="the state of an? .*: expected other fields"):
        own.load_state_dict({"x": 1})
    for sides, scores in ((["a"], [1]), (["a", "b"], [1]), (["a", ()], [1, 0]), (["a", "b"], [math.nan, 0])):
        with pytest.raises(ArgumentError):
            own.rate(sides, scores)


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
    with pytest.raises(ArgumentError, match="model: expected one of .*got 'Elo'"):
        OpenSkill("Elo")


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
    with pytest.raises(marlvec.errors.MissingExtraError, match=rf"marlvec\[{extra}\]"):
        call()


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
    with pytest.raises(ArgumentError, match="decay"):
        MatchTable(0)
    with pytest.raises(ArgumentError, match="the state of an? .*: expected other fields"):
        table.load_state_dict({})
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
    with pytest.raises(ArgumentError, match="state of a RatingTracker"):
        again.load_state_dict({})
    with pytest.raises(ArgumentError, match="note must be a list"):
        RatingTracker(envs.agents, note="main")
    with pytest.raises(CheckpointError):
        again.load(tmp_path / "none.npz")


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
        with pytest.raises(ArgumentError, match="win rates of all against all"):
            alpha_rank(wrong)
