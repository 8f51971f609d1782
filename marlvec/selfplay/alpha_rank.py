"""Alpha-Rank: a ranking of players who beat one another in circles."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from marlvec.errors import ArgumentError
from marlvec.extras import import_extra
from marlvec.selfplay.results.match_table import MatchTable

__all__ = ["alpha_rank"]


def alpha_rank(table: MatchTable | ArrayLike, *, alpha: float = 100.0, population: int = 50) -> dict[str, float]:
    """The share of each policy in the long run, if policies that do worse turn into those that do better.

    Ratings put policies in a line, and have nothing to say of rock, paper and scissors; here each of the three gets a
    third. It is OpenSpiel's alpha-rank of one population.

    Args:
        table: A table of match-ups, in which pairs that never met count as even; or win rates (P, P), row against
            column.
        alpha: How strongly the better one is preferred.
        population: How many there are in it.

    Returns:
        Policy id, or the row's number as a text, to its share; the shares sum to 1.

    Raises:
        MissingExtraError: OpenSpiel is not installed (extra ``openspiel``).
        ArgumentError: There are no players, or these are no win rates of all against all.
    """
    rates = table.payoffs(unknown=0.5) if isinstance(table, MatchTable) else np.array(table, np.float64)
    if rates.ndim != 2 or not len(rates) or rates.shape[0] != rates.shape[1] or not np.isfinite(rates).all():
        raise ArgumentError(f"expected win rates of all against all, (P, P) numbers, got an array of {rates.shape}")
    names = table.players if isinstance(table, MatchTable) else tuple(map(str, range(len(rates))))
    ranking = import_extra("open_spiel.python.egt.alpharank", "alpha_rank()", "pip install 'marlvec[openspiel]'")
    with np.errstate(over="ignore"):  # where one is surely better, an exponential is infinite, and its inverse 0
        _, _, shares, _, _ = ranking.compute([rates], m=population, alpha=alpha)
    return dict(zip(names, map(float, shares), strict=True))
