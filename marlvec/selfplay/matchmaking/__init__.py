"""Matchmakers: whom a learner plays next."""

from marlvec.selfplay.matchmaking.by_rating import ByRating
from marlvec.selfplay.matchmaking.exploiter import MainExploiter
from marlvec.selfplay.matchmaking.matchmaker import Matchmaker
from marlvec.selfplay.matchmaking.mixture import Mixture
from marlvec.selfplay.matchmaking.plain import Latest, Mirror, Uniform
from marlvec.selfplay.matchmaking.prioritised import Prioritised

__all__ = ["ByRating", "Latest", "MainExploiter", "Matchmaker", "Mirror", "Mixture", "Prioritised", "Uniform"]
