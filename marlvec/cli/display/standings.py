"""The table that ``marlvec arena`` prints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from marlvec.selfplay import BradleyTerry, Elo, MatchResult, OpenSkill, WinRate, alpha_rank

__all__ = ["Rated", "print_standings", "rated"]

_NOTHING = "–"


@dataclass(frozen=True, slots=True)
class Rated:
    """A player's rating.

    Attributes:
        rating: It.
        error: How far from it the ends of its interval are; NaN where ratings of that kind have none.
    """

    rating: float
    error: float = math.nan


def rated(result: MatchResult, kind: str) -> dict[str, Rated]:
    """Every player's rating, the best first.

    Args:
        result: The tournament.
        kind: ``"bradley-terry"``, ``"elo"``, ``"skill"`` or ``"alpha-rank"``.

    Raises:
        MissingExtraError: What computes it is not installed.
    """
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
    """Print who is how good, and who did how against whom; the best first.

    Args:
        console: Where to.
        env: The env's name.
        result: The tournament.
        kind: What the ratings are.
        ratings: Player to rating, the best first.
    """
    names = tuple(ratings)
    width = max(map(len, names))
    level = f"{result.confidence:.3g}" if result.confidence * 100 % 1 else f"{result.confidence:.0%}"
    table = Table(title=f"[bold]{env}[/] · {_summary(result)}", title_style="", title_justify="left")
    table.box, table.pad_edge = box.SIMPLE_HEAD, False
    table.add_column("player", no_wrap=True, min_width=width)
    for name in (
        kind,
        "games",
        "win rate",
        f"{level} interval",
        "won",
        "drawn",
        "lost",
        *(f"as {side}" for side in result.sides),
    ):
        table.add_column(Text(name), justify="right", no_wrap=True)
    for name in names:
        rate = result.win_rate(name)
        table.add_row(
            Text(name, "bold cyan"),
            _rating(ratings[name], 3 if kind == "alpha-rank" else 1),
            f"{rate.games:,}",
            f"{rate.mean:.1%}" if rate.games else _NOTHING,
            f"{rate.low:.1%} – {rate.high:.1%}",
            *(f"{n:,}" for n in (rate.wins, rate.draws, rate.losses)),
            *(_mean(result.win_rate(name, side=side)) for side in result.sides),
        )
    console.print(table)
    duels = Table(title="row against column: won–drawn–lost, win rate and its interval", title_style="dim")
    duels.title_justify, duels.box, duels.pad_edge = "left", box.SIMPLE_HEAD, False
    duels.add_column("", no_wrap=True, min_width=width)
    for name in names:
        duels.add_column(Text(name), justify="right")
    for one in names:
        duels.add_row(Text(one, "bold cyan"), *(_duel(result.win_rate(one, other)) for other in names))
    console.print(duels)


def _summary(result: MatchResult) -> str:
    parts = [f"{len(result.games):,} games", f"{result.draws:,} drawn", f"{result.truncations:,} truncated"]
    for number, what in (
        (result.unmoved(), "over before a side's first move"),
        (result.lost, "lost to faults and played anew"),
        (result.unplayed, "not played"),
    ):
        parts += [f"{number:,} {what}"] * bool(number)
    return ", ".join(parts)


def _rating(found: Rated, digits: int) -> str:
    if math.isnan(found.error):
        return f"{found.rating:.{digits}f}"
    return f"{found.rating:.0f} ± {found.error:.0f}"


def _mean(rate: WinRate) -> str:
    return f"{rate.mean:.1%}" if rate.games else _NOTHING


def _duel(rate: WinRate) -> Text:
    if not rate.games:
        return Text(_NOTHING, "dim")
    style = "green" if rate.low > 0.5 else "red" if rate.high < 0.5 else ""
    return Text.assemble(
        f"{rate.wins}–{rate.draws}–{rate.losses}\n",
        (f"{rate.mean:.0%}", style),
        (f" [{rate.low:.0%}, {rate.high:.0%}]", "dim"),
    )
