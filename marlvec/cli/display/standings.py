"""The table that ``marlvec arena`` prints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from marlvec.cli.display.table import NOTHING, fits, print_table
from marlvec.selfplay import BradleyTerry, Elo, MatchResult, OpenSkill, WinRate, alpha_rank
from marlvec.selfplay.results.whole_table import Column

__all__ = ["Rated", "print_standings", "rated", "standings_json"]


@dataclass(frozen=True, slots=True)
class Rated:
    """A player's rating."""

    rating: float
    error: float = math.nan  # half the width of its interval; NaN if ratings of that kind have none


def rated(result: MatchResult, kind: str) -> dict[str, Rated]:
    """Return every player's rating of a kind of ``marlvec arena --rating``, the best first."""
    if kind == "alpha-rank":
        found = {name: Rated(share) for name, share in alpha_rank(result.table).items()}
    elif kind == "bradley-terry":
        fitted = BradleyTerry()
        result.rate(fitted)
        found = {name: _fitted(fitted, name, result.confidence) for name in result.players}
    else:
        ratings = result.rate(Elo() if kind == "elo" else OpenSkill())
        found = {name: Rated(ratings.rating(name)) for name in result.players}
    return dict(sorted(found.items(), key=lambda pair: -pair[1].rating))


def _fitted(ratings: BradleyTerry, name: str, confidence: float) -> Rated:
    rating = ratings.rating(name)
    return Rated(rating, ratings.interval(name, confidence)[1] - rating)


def print_standings(console: Console, env: str, result: MatchResult, kind: str, ratings: Mapping[str, Rated]) -> None:
    """Print each player's rating, the best first, and the results of each pair."""
    level = f"{result.confidence:.3g}" if result.confidence * 100 % 1 else f"{result.confidence:.0%}"
    title = Text.assemble((env, "bold"), f" · {_summary(result)}")
    columns: list[Column] = [("player", "left")]
    columns += [(name, "right") for name in (kind, "games", "won", "drawn", "lost", "win rate", f"{level} interval")]
    columns += [(f"as {side}", "right") for side in result.sides]
    rows = [_standing(result, name, ratings[name], 3 if kind == "alpha-rank" else 1) for name in ratings]
    if fits(console, columns, rows):
        print_table(console, title, columns, rows)
    else:  # in two tables
        cut = next(k for k, (name, _) in enumerate(columns) if name.endswith("interval"))
        print_table(console, title, columns[:cut], [row[:cut] for row in rows])
        print_table(
            console, Text("win rates", "dim"), [columns[0], *columns[cut:]], [[row[0], *row[cut:]] for row in rows]
        )
    _print_duels(console, result, tuple(ratings))


def _standing(result: MatchResult, name: str, rating: Rated, digits: int) -> list[str | Text]:
    rate = result.win_rate(name)
    return [
        Text(name, "bold cyan"),
        _rating(rating, digits),
        *(f"{n:,}" for n in (rate.games, rate.wins, rate.draws, rate.losses)),
        _mean(rate),
        f"{rate.low:.1%} – {rate.high:.1%}",
        *(_mean(result.win_rate(name, side=side)) for side in result.sides),
    ]


def _print_duels(console: Console, result: MatchResult, names: tuple[str, ...]) -> None:
    """Print all against all: as a matrix if it fits, else one line per pair."""
    title = Text("row against column: won–drawn–lost, win rate and its interval", "dim")
    columns: list[Column] = [("", "left"), *((name, "right") for name in names)]
    duels = {(one, other): _duel(result.win_rate(one, other)) for one in names for other in names}
    matrix = [[Text(one, "bold cyan"), *(duels[one, other] for other in names)] for one in names]
    if fits(console, columns, matrix):
        print_table(console, title, columns, matrix)
        return
    pairs = [
        [Text(one, "bold cyan"), Text(other), *duels[one, other].split("\n")]
        for k, one in enumerate(names)
        for other in names[k + 1 :]
        if result.win_rate(one, other).games
    ]
    columns = [("player", "left"), ("against", "left"), ("won–drawn–lost", "right"), ("win rate, interval", "right")]
    print_table(console, Text("player against player", "dim"), columns, pairs)


def standings_json(env: str, result: MatchResult, kind: str, ratings: Mapping[str, Rated]) -> dict[str, Any]:
    """Return players, the best first, and all pairs as a JSON object."""
    return {
        "env": env,
        "games": len(result.games),
        "draws": result.draws,
        "truncations": result.truncations,
        "lost_to_faults": result.lost,
        "unplayed": result.unplayed,
        "confidence": result.confidence,
        "rating": kind,
        "players": [
            {
                "id": name,
                "rating": found.rating,
                "rating_interval": [found.rating - found.error, found.rating + found.error],
                **_rate_json(result.win_rate(name)),
                "sides": {side: _rate_json(result.win_rate(name, side=side)) for side in result.sides},
            }
            for name, found in ratings.items()
        ],
        "pairs": [
            {"player": one, "against": other, **_rate_json(result.win_rate(one, other))}
            for one in ratings
            for other in ratings
            if one != other
        ],
    }


def _rate_json(rate: WinRate) -> dict[str, Any]:
    return {
        "games": rate.games,
        "wins": rate.wins,
        "draws": rate.draws,
        "losses": rate.losses,
        "win_rate": rate.mean if rate.games else None,
        "win_rate_interval": [rate.low, rate.high],
    }


def _summary(result: MatchResult) -> str:
    parts = [f"{len(result.games):,} games", f"{result.draws:,} drawn", f"{result.truncations:,} truncated"]
    for number, what in (
        (result.unmoved(), "over before a side's first move"),
        (result.lost, "lost to faults and repeated"),
        (result.unplayed, "not played"),
    ):
        parts += [f"{number:,} {what}"] * bool(number)
    return ", ".join(parts)


def _rating(found: Rated, digits: int) -> str:
    if math.isnan(found.error):
        return f"{found.rating:.{digits}f}"
    return f"{found.rating:.0f} ± {found.error:.0f}"


def _mean(rate: WinRate) -> str:
    return f"{rate.mean:.1%}" if rate.games else NOTHING


def _duel(rate: WinRate) -> Text:
    if not rate.games:
        return Text(NOTHING, "dim")
    style = "green" if rate.low > 0.5 else "red" if rate.high < 0.5 else ""
    return Text.assemble(
        f"{rate.wins}–{rate.draws}–{rate.losses}\n",
        (f"{rate.mean:.0%}", style),
        (f" [{rate.low:.0%}, {rate.high:.0%}]", "dim"),
    )
