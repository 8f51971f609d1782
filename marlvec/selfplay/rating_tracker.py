"""`RatingTracker`: a callback that rates policies by a collector's games."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any

from marlvec.collect.callbacks import Callback, RunningEpisode
from marlvec.collect.metrics.metrics import EpisodeRecord
from marlvec.errors import ArgumentError, CheckpointError
from marlvec.selfplay.game import Game, ScoreFunction, Sides, game_of, sides_of
from marlvec.selfplay.ratings import BradleyTerry, Ratings
from marlvec.selfplay.results.match_table import MatchTable
from marlvec.serialization.archive import FilePath, read_archive, write_archive
from marlvec.serialization.values import decode, encode

__all__ = ["RatingTracker"]


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
            "games": [[getattr(game, field.name) for field in fields(Game)] for game in self.games],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state from `state_dict`, of a rating tracker with the same kind of ratings.

        Raises:
            ArgumentError: Not such a state.
        """
        if state.keys() != {"table", "ratings", "counts", "unmoved", "games"}:
            raise ArgumentError(f"expected the state of a RatingTracker, got {list(state)}")
        self.ratings.load_state_dict(state["ratings"])
        self.table.load_state_dict(state["table"])
        self.games_total, self.draws, self.truncations = state["counts"]
        self.unmoved = Counter(state["unmoved"])
        self.games = deque((Game(*values) for values in state["games"]), maxlen=self.games.maxlen)

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
