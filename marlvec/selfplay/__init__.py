"""Self-play: pools of past opponents, matchmaking, matches, and ratings."""

from marlvec.selfplay.evaluate import evaluate_match
from marlvec.selfplay.mapping import (
    ByRating,
    Latest,
    MainExploiter,
    Matchmaker,
    Mirror,
    Mixture,
    Prioritised,
    SelfPlayMapping,
    Uniform,
)
from marlvec.selfplay.opponents import (
    Every,
    EvictionRule,
    OnWinRate,
    Opponent,
    OpponentPool,
    SnapshotRule,
    oldest,
    read_opponents,
    thinned,
    weakest,
)
from marlvec.selfplay.ratings import BradleyTerry, Elo, Game, OpenSkill, Ratings
from marlvec.selfplay.results import MatchResult, MatchTable, RatingTracker, WinCount, WinRate
from marlvec.selfplay.solutions import alpha_rank, exploitability

__all__ = [
    "OpponentPool",
    "Opponent",
    "read_opponents",
    "EvictionRule",
    "oldest",
    "thinned",
    "weakest",
    "SnapshotRule",
    "Every",
    "OnWinRate",
    "SelfPlayMapping",
    "Matchmaker",
    "Mirror",
    "Latest",
    "Uniform",
    "ByRating",
    "Prioritised",
    "MainExploiter",
    "Mixture",
    "RatingTracker",
    "Game",
    "MatchTable",
    "WinCount",
    "Ratings",
    "BradleyTerry",
    "Elo",
    "OpenSkill",
    "evaluate_match",
    "MatchResult",
    "WinRate",
    "alpha_rank",
    "exploitability",
]
