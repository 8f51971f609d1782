"""Scores of matches: `MatchResult`, `WinRate` with intervals, `MatchTable` of all pairs, and `RatingTracker`."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.callbacks import Callback, RunningEpisode
from marlvec.collect.metrics import EpisodeRecord
from marlvec.errors import ArgumentError, CheckpointError
from marlvec.selfplay.ratings import BradleyTerry, Game, Ratings, ScoreFunction, Sides, game_of, sides_of
from marlvec.serialization.archive import read_archive, write_archive
from marlvec.serialization.atomic_file import FilePath
from marlvec.serialization.records import Count, read_fields, to_plain
from marlvec.serialization.values import decode, encode

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.table import Table
    from rich.text import Text


Column = tuple[str, Literal["left", "right"]]
"""Heading and alignment of a column."""
_NO_LIMIT = 10_000  # width in characters


class WholeTable:
    """A table if the terminal is wide enough for all numbers and ids; otherwise one block of lines per row.

    The first cell of a row names it.
    """

    def __init__(self, columns: Sequence[Column], rows: Sequence[Sequence[str | Text]]) -> None:
        self._columns, self._rows = columns, rows

    def fits(self, console: Console, width: int | None = None) -> bool:
        """Return whether the table fits into this many characters, by default the console's width."""
        from rich.measure import Measurement

        options = console.options.update(width=_NO_LIMIT)
        room = console.width if width is None else width
        return Measurement.get(console, options, self._table()).maximum <= room

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.padding import Padding
        from rich.table import Table
        from rich.text import Text

        if self.fits(console, options.max_width):
            yield self._table()
            return
        for first, *cells in self._rows:
            yield Text()
            yield Text(first) if isinstance(first, str) else first
            lines = Table.grid(padding=(0, 2, 0, 0))
            lines.add_column(style="dim", no_wrap=True)
            lines.add_column(overflow="fold")
            for (name, _), cell in zip(self._columns[1:], cells, strict=True):
                if str(cell).strip():
                    lines.add_row(Text(name), cell)
            yield Padding(lines, (0, 0, 0, 2))
        yield Text()

    def _table(self) -> Table:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name, justify in self._columns:
            table.add_column(Text(name), justify=justify, no_wrap=True)
        for row in self._rows:
            table.add_row(*row)
        return table


@dataclass(frozen=True, slots=True)
class WinCount:
    """Wins, draws and losses; whole numbers without decay.

    Attributes:
        wins: Number of wins.
        draws: Number of draws.
        losses: Number of losses.
    """

    wins: float = 0.0
    draws: float = 0.0
    losses: float = 0.0

    @property
    def games(self) -> float:
        """Number of games."""
        return self.wins + self.draws + self.losses

    @property
    def win_rate(self) -> float:
        """Wins plus half the draws, as a share of the games; NaN without games."""
        return (self.wins + self.draws / 2) / self.games if self.games else math.nan

    def __sub__(self, other: WinCount) -> WinCount:
        return WinCount(self.wins - other.wins, self.draws - other.draws, self.losses - other.losses)


class MatchTable:
    """Wins, draws and losses of each policy against each other policy.

    With more than two sides, each pair of sides counts as one result. Results of a policy against itself are ignored.

    Args:
        decay: Weight of earlier results of a pair after each new one: 1 keeps all, 0.99 forgets slowly, so that the
            table follows a policy that learns.

    Raises:
        ArgumentError: ``decay`` is not above 0 and at most 1.

    Attributes:
        decay: As given.
    """

    def __init__(self, decay: float = 1.0) -> None:
        if not 0 < decay <= 1:
            raise ArgumentError(f"decay must be above 0 and at most 1, got {decay!r}")
        self.decay = decay
        self._pairs: dict[tuple[str, str], WinCount] = {}  # in both orders
        self._totals: dict[str, WinCount] = {}  # never decay

    def __repr__(self) -> str:
        return f"MatchTable({len(self._totals)} players, {len(self._pairs) // 2} pairings)"

    @property
    def players(self) -> tuple[str, ...]:
        """All policies with a result, in order of their first one."""
        return tuple(self._totals)

    def add(self, game: Game) -> None:
        """Add a game."""
        for i, j in combinations(range(len(game.players)), 2):
            for one in game.players[i]:
                for other in game.players[j]:
                    self.add_result(one, other, game.scores[i] - game.scores[j])

    def add_result(self, one: str, other: str, margin: float) -> None:
        """Add one result.

        Args:
            one: A policy.
            other: Its opponent; a result of a policy against itself is ignored.
            margin: Above 0: ``one`` won; 0: a draw; below 0: ``other`` won.
        """
        if one == other:
            return
        sign = (margin > 0) - (margin < 0)
        for a, b, won in ((one, other, sign), (other, one, -sign)):
            new = WinCount(float(won > 0), float(won == 0), float(won < 0))
            self._pairs[a, b] = _plus(self._pairs.get((a, b), WinCount()), new, self.decay)
            self._totals[a] = _plus(self._totals.get(a, WinCount()), new, 1.0)

    def win_count(self, one: str, other: str) -> WinCount:
        """Return the results of policy ``one`` against ``other``, fractions with decay; zeros if they never met."""
        return self._pairs.get((one, other), WinCount())

    def total(self, player: str) -> WinCount:
        """Return all results of a policy (``player``), without decay."""
        return self._totals.get(player, WinCount())

    def win_rate(self, one: str, other: str) -> float:
        """Return wins plus half the draws of policy ``one`` against ``other``, as a share; NaN if they never met."""
        return self.win_count(one, other).win_rate

    def payoffs(self, players: Sequence[str] | None = None, *, unknown: float = math.nan) -> NDArray[np.float64]:
        """Return the win rates of all against all: (P, P), row against column, 0.5 on the diagonal.

        Args:
            players: Policy ids; None: all.
            unknown: Value for pairs that never met.

        Returns:
            (P, P) float64.
        """
        names = self.players if players is None else tuple(players)
        rates = np.full((len(names), len(names)), 0.5)
        for i, one in enumerate(names):
            for j, other in enumerate(names):
                if i != j:
                    rate = self.win_rate(one, other)
                    rates[i, j] = unknown if math.isnan(rate) else rate
        return rates

    def forget(self, player: str) -> None:
        """Drop all results of a policy (``player``); the totals of its opponents stay."""
        self._totals.pop(player, None)
        self._pairs = {pair: count for pair, count in self._pairs.items() if player not in pair}

    # --- display and state

    def __rich__(self) -> RenderableType:
        """Render wins, draws and losses, row against column, for the terminal."""
        from rich.console import Group
        from rich.text import Text

        names = self.players
        columns: list[Column] = [("", "left"), *((name, "right") for name in (*names, "win rate"))]
        rows: list[list[str | Text]] = []
        for one in names:
            cells = [_cell(self.win_count(one, other)) for other in names]
            rows.append([Text(one, "bold cyan"), *cells, _share_text(self.total(one).win_rate)])
        return Group(Text("wins–draws–losses", "italic"), WholeTable(columns, rows))

    def state_dict(self) -> dict[str, Any]:
        """Return the table as plain data."""
        return {
            "pairs": [[a, b, t.wins, t.draws, t.losses] for (a, b), t in self._pairs.items()],
            "totals": [[a, t.wins, t.draws, t.losses] for a, t in self._totals.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state from `state_dict`.

        Raises:
            ArgumentError: Not such a state; nothing has changed.
        """
        kinds = {"pairs": list[tuple[str, str, float, float, float]], "totals": list[tuple[str, float, float, float]]}
        found = read_fields(state, "the state of a MatchTable", **kinds)
        self._pairs = {(a, b): WinCount(*numbers) for a, b, *numbers in found["pairs"]}
        self._totals = {a: WinCount(*numbers) for a, *numbers in found["totals"]}


def _plus(old: WinCount, new: WinCount, decay: float) -> WinCount:
    return WinCount(old.wins * decay + new.wins, old.draws * decay + new.draws, old.losses * decay + new.losses)


def _cell(count: WinCount) -> str:
    return f"{count.wins:.4g}–{count.draws:.4g}–{count.losses:.4g}" if count.games else "·"


def _share_text(rate: float) -> str:
    return "·" if math.isnan(rate) else f"{rate:.0%}"


@dataclass(frozen=True, slots=True)
class WinRate:
    """Mean score over some games, with a confidence interval.

    Attributes:
        mean: Mean score: wins 1, draws 0.5, losses 0; NaN without games.
        low, high: Bounds of Wilson's interval. With draws it is wider than necessary.
        games: Number of games.
        wins, draws, losses: Number of scores above, at and below 0.5.
    """

    mean: float
    low: float
    high: float
    games: int
    wins: int
    draws: int
    losses: int

    @classmethod
    def of(cls, scores: Sequence[float], confidence: float = 0.95) -> WinRate:
        """Compute a win rate from scores, one per game, each from 0 to 1.

        Returns:
            The rate with its interval.

        Raises:
            ArgumentError: ``confidence`` is not between 0 and 1.
        """
        if not 0 < confidence < 1:
            raise ArgumentError(f"confidence must be above 0 and below 1, got {confidence!r}")
        n = len(scores)
        if not n:
            return cls(math.nan, 0.0, 1.0, 0, 0, 0, 0)
        mean = math.fsum(scores) / n
        z2 = NormalDist().inv_cdf(0.5 + confidence / 2) ** 2
        centre = (mean + z2 / (2 * n)) / (1 + z2 / n)
        half = math.sqrt(z2 * (mean * (1 - mean) / n + z2 / (4 * n * n))) / (1 + z2 / n)
        wins, losses = sum(score > 0.5 for score in scores), sum(score < 0.5 for score in scores)
        low, high = max(0.0, min(mean, centre - half)), min(1.0, max(mean, centre + half))
        return cls(mean, low, high, n, wins, n - wins - losses, losses)

    def __str__(self) -> str:
        if not self.games:
            return "no games"
        return f"{self.mean:.1%} [{self.low:.1%}, {self.high:.1%}] of {self.games}"


@dataclass(frozen=True)
class MatchResult:
    """The games of a match, and their statistics.

    Attributes:
        players: Ids of the policies.
        sides: Names of the sides.
        games: All games, in the order of the schedule.
        lost: How often a game was lost to a fault of its env, and repeated.
        unplayed: Games that were not played, because their env was masked after faults.
        confidence: Level of the intervals.
    """

    players: tuple[str, ...]
    sides: tuple[str, ...]
    games: tuple[Game, ...]
    lost: int = 0
    unplayed: int = 0
    confidence: float = 0.95

    @property
    def draws(self) -> int:
        """Games in which all sides had the same score."""
        return sum(game.is_draw for game in self.games)

    @property
    def truncations(self) -> int:
        """Games that were cut short."""
        return sum(game.truncated for game in self.games)

    def unmoved(self, player: str | None = None) -> int:
        """Count games that were over before a ``player``'s (None: any policy's) first move on some side."""
        return sum(
            any(player is None or player in game.players[game.sides.index(side)] for side in game.unmoved)
            for game in self.games
        )

    def win_rate(self, player: str, against: str | None = None, *, side: str | None = None) -> WinRate:
        """Compute a policy's win rate.

        Args:
            player: Its id.
            against: Count only games against this opponent; None: all.
            side: Count only games in which the policy played this side; None: all.

        Returns:
            Games, wins, draws and losses, and the rate with its interval.
        """
        self._check(player, against, side)
        scores = []
        for game in self.games:
            if side is not None and player not in game.players[game.sides.index(side)]:
                continue
            if (score := game.score_of(player, against)) is not None:
                scores.append(score)
        return WinRate.of(scores, self.confidence)

    def _check(self, player: str, against: str | None, side: str | None) -> None:
        for name in (player, against):
            if name is not None and name not in self.players:
                raise KeyError(f"no player {name!r}; the players are {list(self.players)}")
        if side is not None and side not in self.sides:
            raise KeyError(f"no side {side!r}; the sides are {list(self.sides)}")

    @property
    def table(self) -> MatchTable:
        """All games in one table."""
        table = MatchTable()
        for game in self.games:
            table.add(game)
        return table

    def rate(self, ratings: Ratings) -> Ratings:
        """Add all games to ratings, in the order of the schedule; return the ratings."""
        for game in self.games:
            ratings.add(game)
        return ratings

    def __repr__(self) -> str:
        return f"<MatchResult of {self._summary()}>"

    def _summary(self) -> str:
        parts = [f"{len(self.games)} games", f"{self.draws} drawn", f"{self.truncations} truncated"]
        parts += [f"{self.unmoved()} over before a side's first move"] * bool(self.unmoved())
        parts += [f"{self.lost} lost and repeated"] * bool(self.lost)
        parts += [f"{self.unplayed} not played"] * bool(self.unplayed)
        return ", ".join(parts)

    def __rich__(self) -> RenderableType:
        """Render win rates with their intervals, in total and by side, and the table of matches."""
        from rich.console import Group
        from rich.text import Text

        columns: list[Column] = [("policy", "left")]
        names = ("win rate", f"{self.confidence:.0%} interval", "wins", "draws", "losses")
        columns += [(name, "right") for name in (*names, *(f"as {side}" for side in self.sides))]
        rows: list[list[str | Text]] = []
        for player in sorted(self.players, key=lambda name: -self.win_rate(name).mean):
            rate = self.win_rate(player)
            interval = f"{rate.low:.1%} – {rate.high:.1%}"
            counts = (str(rate.wins), str(rate.draws), str(rate.losses))
            sides = (_share(self.win_rate(player, side=side)) for side in self.sides)
            rows.append([Text(player, "bold cyan"), _share(rate), interval, *counts, *sides])
        parts: Sequence[RenderableType] = [Text(self._summary()), WholeTable(columns, rows)]
        return Group(*parts, self.table) if len(self.players) > 2 else Group(*parts)


def _share(rate: WinRate) -> str:
    return f"{rate.mean:.1%}" if rate.games else "–"


class RatingTracker(Callback):
    """Adds each finished episode as a game to a table of matches and to ratings.

    Give it to a collector as a callback. A game counts for all policies that took part, also for those that never
    moved. Episodes that were lost to a fault or a reset are not counted.

    Args:
        agents: Names of the env's agents, in order.
        sides: Which agents play together; None: each agent is its own side.
        table: The table of matches; None: a new one.
        ratings: The ratings; None: a new `BradleyTerry`.
        score: One number per side of a finished episode, more is better; None: the sum of its agents' returns.
        note: Ids of policies whose score (1 a win, 0.5 a draw, 0 a loss) becomes a custom metric of the episode,
            ``"score of main"``, for tables and logs. There is none for games of a policy against itself.
        keep: Number of last games to keep.

    Raises:
        ArgumentError: The sides do not fit the agents.

    Attributes:
        sides: Side to its agents.
        table, ratings: As given, or made.
        games: The last games, oldest first.
        games_total, draws, truncations: How many games there were, how many of them were drawn, and cut short.
        unmoved: Policy id to the number of games that were over before its first move.
    """

    def __init__(
        self,
        agents: Sequence[str],
        sides: Sides | None = None,
        *,
        table: MatchTable | None = None,
        ratings: Ratings | None = None,
        score: ScoreFunction | None = None,
        note: Collection[str] = (),
        keep: int = 1000,
    ) -> None:
        if isinstance(note, str):
            raise ArgumentError(f"note must be a list of policy ids, got {note!r}")
        self._agents = tuple(agents)
        self.sides = sides_of(agents, sides)
        self.table = MatchTable() if table is None else table
        self.ratings: Ratings = BradleyTerry() if ratings is None else ratings
        self._score, self._note = score, tuple(note)
        self.games: deque[Game] = deque(maxlen=keep)
        self.games_total = self.draws = self.truncations = 0
        self.unmoved: Counter[str] = Counter()

    def __repr__(self) -> str:
        return (
            f"RatingTracker({self.games_total} games, {self.draws} drawn, {self.truncations} truncated, "
            f"{self.unmoved.total()} over before a side's first move; {self.ratings!r})"
        )

    def on_episode_end(self, episode: RunningEpisode, record: EpisodeRecord) -> None:
        game = game_of(record, self._agents, self.sides, self._score)
        for name in self._note:
            if (score := game.score_of(name)) is not None:
                episode.custom[f"score of {name}"] = score
        self.add(game)

    def add(self, game: Game) -> None:
        """Add a game."""
        self.table.add(game)
        self.ratings.add(game)
        self.games.append(game)
        self.games_total += 1
        self.draws += game.is_draw
        self.truncations += game.truncated
        for side, players in zip(game.sides, game.players, strict=True):
            if side in game.unmoved:
                self.unmoved.update(players)

    def state_dict(self) -> dict[str, Any]:
        """Return table, ratings, counts and the last games as plain data."""
        return {
            "table": self.table.state_dict(),
            "ratings": self.ratings.state_dict(),
            "counts": [self.games_total, self.draws, self.truncations],
            "unmoved": dict(self.unmoved),
            "games": to_plain(self.games),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state from `state_dict`, of a rating tracker with the same kind of ratings.

        Raises:
            ArgumentError: Not such a state.
        """
        kinds = {"counts": tuple[Count, Count, Count], "unmoved": dict[str, Count], "games": list[Game]}
        found = read_fields(state, "the state of a RatingTracker", table=Any, ratings=Any, **kinds)
        self.ratings.load_state_dict(found["ratings"])
        self.table.load_state_dict(found["table"])
        self.games_total, self.draws, self.truncations = found["counts"]
        self.unmoved, self.games = Counter(found["unmoved"]), deque(found["games"], maxlen=self.games.maxlen)

    def save(self, path: FilePath) -> None:
        """Write table, ratings, counts and the last games to a file, atomically.

        Raises:
            OSError: It cannot be written; an old file is unchanged.
        """
        write_archive(path, {"ratings": encode(self.state_dict(), "the rating tracker")})

    def load(self, path: FilePath) -> None:
        """Load a file that `save` wrote.

        Raises:
            CheckpointError: The file is damaged, or holds something else.
            ArgumentError: It holds another kind of ratings.
        """
        found = read_archive(path)
        if "ratings" not in found:
            raise CheckpointError(path, "holds no ratings")
        self.load_state_dict(decode(found["ratings"]))
