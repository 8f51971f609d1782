"""A picture of a tournament: who beats whom, beside their ratings. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from marlvec.cli.standings import Rated
from marlvec.selfplay import MatchResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["heat_map"]


def heat_map(env: str, result: MatchResult, kind: str, ratings: Mapping[str, Rated]) -> Figure:
    """Draw win rates, row against column, and ratings; ``figure.savefig(path)`` writes it.

    Args:
        env: The env's name.
        result: The tournament.
        kind: What the ratings are.
        ratings: Player to rating, in the order to draw them.
    """
    from matplotlib.figure import Figure

    names = list(ratings)
    rates_PP = result.table.payoffs(names)
    size = 2.2 + 0.62 * len(names)
    figure = Figure(figsize=(size + 3.4, size + 0.4), dpi=110, layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2, gridspec_kw={"width_ratios": (size, 2.2)})
    image = left.imshow(np.ma.masked_invalid(rates_PP), vmin=0, vmax=1, cmap="RdYlBu")
    left.set_xticks(range(len(names)), names, rotation=45, ha="right")
    left.set_yticks(range(len(names)), names)
    for i, row in enumerate(rates_PP):
        for j, rate in enumerate(row):
            if i != j and np.isfinite(rate):
                left.text(j, i, f"{rate:.0%}", ha="center", va="center", fontsize=9)
    left.set_title("win rate, row against column", loc="left", fontsize=10)
    figure.colorbar(image, ax=left, shrink=0.8, format=_percent)
    values, errors = np.transpose([(found.rating, found.error) for found in ratings.values()])
    wide = None if np.isnan(errors).any() else np.where(np.isfinite(errors), errors, 0.0)
    right.errorbar(values, range(len(names)), xerr=wide, fmt="o", color="#0072B2")
    right.set_yticks(range(len(names)), names)
    right.invert_yaxis()
    right.grid(axis="x", color="#e6e6e6")
    right.spines[["top", "right"]].set_visible(False)
    right.set_title(kind, loc="left", fontsize=10)
    figure.suptitle(f"{env}: {len(result.games):,} games", x=0.01, ha="left", fontweight="bold")
    return figure


def _percent(rate: float, _: Any) -> str:
    return f"{rate:.0%}"
