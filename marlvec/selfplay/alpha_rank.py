"""Alpha-Rank: a ranking of policies that also handles cycles such as rock, paper, scissors."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from marlvec.errors import ArgumentError
from marlvec.extras import import_extra
from marlvec.selfplay.results.match_table import MatchTable

__all__ = ["alpha_rank"]


def alpha_rank(table: MatchTable | ArrayLike, *, alpha: float = 100.0, population: int = 50) -> dict[str, float]:
    """Rank policies by their long-run share of a population in which policies imitate those that beat them.

    Ratings put policies in a line, and cannot describe rock, paper and scissors; here each of the three gets a third.
    This is OpenSpiel's alpha-rank of one population.

    Args:
        table: A table of matches, in which pairs that never met count as even; or win rates (P, P), row against
            column.
        alpha: How strongly better policies are preferred.
        population: Number of individuals.

    Returns:
        Policy id, or the row's number as a text, to share; the shares sum to 1.

    Raises:
        MissingExtraError: OpenSpiel is not installed (extra ``openspiel``).
        ArgumentError: No players, or not a square matrix of finite win rates.
    """
    rates = table.payoffs(unknown=0.5) if isinstance(table, MatchTable) else np.array(table, np.float64)
    if rates.ndim != 2 or not len(rates) or rates.shape[0] != rates.shape[1] or not np.isfinite(rates).all():
        raise ArgumentError(f"table: expected (P, P) finite win rates of all against all, got shape {rates.shape}")
    names = table.players if isinstance(table, MatchTable) else tuple(map(str, range(len(rates))))
    ranking = import_extra("open_spiel.python.egt.alpharank", "alpha_rank()", "pip install 'marlvec[openspiel]'")
    with np.errstate(over="ignore"):  # a win rate near 1 makes an exponential infinite, and its inverse 0
        _, _, shares, _, _ = ranking.compute([rates], m=population, alpha=alpha)
    return dict(zip(names, map(float, shares), strict=True))
