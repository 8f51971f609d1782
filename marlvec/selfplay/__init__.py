"""Self-play: pools of past opponents, matchmaking, matches, and ratings."""

from marlvec.selfplay.alpha_rank import alpha_rank
from marlvec.selfplay.evaluate import evaluate_match
from marlvec.selfplay.exploitability import exploitability
from marlvec.selfplay.game import Game
from marlvec.selfplay.mapping import SelfPlayMapping
from marlvec.selfplay.matchmaking import (
    ByRating,
    Latest,
    MainExploiter,
    Matchmaker,
    Mirror,
    Mixture,
    Prioritised,
    Uniform,
)
from marlvec.selfplay.opponents.opponent import Opponent
from marlvec.selfplay.opponents.opponent_pool import OpponentPool, read_opponents
from marlvec.selfplay.opponents.rules import Every, EvictionRule, OnWinRate, SnapshotRule, oldest, thinned, weakest
from marlvec.selfplay.rating_tracker import RatingTracker
from marlvec.selfplay.ratings import BradleyTerry, Elo, OpenSkill, Ratings
from marlvec.selfplay.results.match_result import MatchResult, WinRate
from marlvec.selfplay.results.match_table import MatchTable, WinCount

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
