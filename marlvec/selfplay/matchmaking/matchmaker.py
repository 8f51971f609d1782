"""What every matchmaker is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from marlvec.errors import ArgumentError
from marlvec.selfplay.opponent import Opponent

__all__ = ["Matchmaker", "draw"]


class Matchmaker(ABC):
    """Chooses whom a learner plays in one game; keeps nothing of its own."""

    @abstractmethod
    def choose(self, learner: str, opponents: Sequence[Opponent], rng: np.random.Generator) -> str:
        """Choose one opponent for one side of one game.

        Args:
            learner: The learner's policy id.
            opponents: Those that can play that side, oldest first; at least one.
            rng: The game's own random stream; nothing else may be drawn from.

        Returns:
            The id of one of the opponents; or of a learner, itself or another one, who plays as it is now. Where that
            one cannot play the side, the learner does who can.
        """


def draw(opponents: Sequence[Opponent], weights: NDArray[np.float64], rng: np.random.Generator) -> str:
    """Draw an opponent by weights, which need not sum to 1; where all are 0, any of them.

    Raises:
        ArgumentError: A weight is negative, infinite or NaN.
    """
    total = float(weights.sum())
    if not np.isfinite(total) or (weights < 0).any():
        named = {opponent.opponent_id: float(w) for opponent, w in zip(opponents, weights, strict=True)}
        raise ArgumentError(f"weights of opponents must be finite and not negative, got {named}")
    if total == 0:
        return opponents[int(rng.integers(len(opponents)))].opponent_id
    # By the sum and not by rng.choice, which wants probabilities that sum to 1 to the last bit.
    found = int(np.searchsorted(np.cumsum(weights), rng.random() * total, side="right"))
    return opponents[min(found, int(np.flatnonzero(weights)[-1]))].opponent_id
