"""Ratings: one number per policy for its strength."""

from marlvec.selfplay.ratings.bradley_terry import BradleyTerry
from marlvec.selfplay.ratings.elo import Elo
from marlvec.selfplay.ratings.openskill import OpenSkill
from marlvec.selfplay.ratings.ratings import Ratings

__all__ = ["BradleyTerry", "Elo", "Ratings", "OpenSkill"]
