"""Plots of a rollout and of a tournament: curves, distributions, heat maps. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from marlvec.cli.console import check_writable
from marlvec.cli.display.rollout_table import Rollout, Track
from marlvec.cli.display.standings import Rated
from marlvec.errors import ArgumentError, MissingExtraError
from marlvec.selfplay import MatchResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["check_file", "returns_figure", "heat_map"]

# The palette of Okabe and Ito, distinct for colour-blind readers.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_INK, _FAINT = "#222222", "#8a8a8a"
_MAX_DOTS = 6000  # of one policy; more would hide each other


def check_file(path: Path) -> None:
    """Raise ArgumentError, or MissingExtraError without matplotlib, if a plot cannot be written to this file."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise MissingExtraError(
            f'a plot needs matplotlib, which cannot be imported ({error}); install it with: pip install "marlvec[plot]"'
        ) from error
    formats = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix[1:].lower() not in formats:
        raise ArgumentError(f"--plot {path}: expected a name that ends in one of .{', .'.join(formats)}")
    check_writable(path, "--plot")


def returns_figure(result: Rollout) -> Figure:
    """Draw a rollout; ``figure.savefig(path)`` writes it. Call `check_file` first."""
    from matplotlib.figure import Figure

    found = {name: track for name, track in result.tracks.items() if len(track)}
    same_length = len({n for track in found.values() for n in track.lengths.tolist()}) <= 1
    panels = [("return per agent", "returns")]
    if not same_length:
        panels.append(("decisions in an episode", "lengths"))
    figure = Figure(figsize=(10, 3 + 2.6 * len(panels)), dpi=150, layout="constrained", facecolor="white")
    grid: Any = figure.subplots(
        len(panels),
        2,
        squeeze=False,
        sharey="row",
        gridspec_kw={"width_ratios": (5, 1), "height_ratios": [1] if same_length else [2, 1]},
    )
    for (label, column), (left, right) in zip(panels, grid, strict=True):
        left.set_ylabel(label, color=_INK)
        left.set_xlim(0, 1.015 * result.env_steps)
        for axes in (left, right):
            _bare(axes)
        for colour, (policy, track) in zip(_colours(found), found.items(), strict=True):
            values = getattr(track, column)
            _dots(left, track.env_steps, values, colour)
            _rolling(left, track.env_steps, values, colour, f"{policy}: {values.mean():.4g} on average")
            if column == "returns":
                _agents(left, track, colour, result)
        _distribution(right, [getattr(track, column) for track in found.values()])
    _words(figure, grid, result, found)
    return figure


def _words(figure: Figure, grid: Any, result: Rollout, found: Mapping[str, Track]) -> None:
    top, bottom = grid[0, 0], grid[-1]
    figure.suptitle(f"{result.env}: what the agents earned", x=0.01, ha="left", fontsize=14, fontweight="bold")
    agents = f"{len(result.agents)} agent{'s' * (len(result.agents) > 1)}"
    each = "".join({f" of {track.lengths[0]} decisions" for track in found.values()}) if len(grid) == 1 else ""
    top.set_title(
        f"{result.num_envs} envs × {agents}, {result.env_steps:,} env steps, {result.episodes:,} episodes{each}",
        loc="left",
        fontsize=9.5,
        color=_FAINT,
        pad=24,
    )
    if found:
        top.legend(
            loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=4, frameon=False, fontsize=9.5, columnspacing=1.6
        )
    else:
        top.text(0.5, 0.5, "no episode ended", transform=top.transAxes, ha="center", fontsize=12, color=_FAINT)
    bottom[0].set_xlabel("env steps, all envs together", color=_INK)
    bottom[0].xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    bottom[1].set_xlabel("share", color=_INK)
    for axes in grid[:-1, 0]:
        axes.tick_params(labelbottom=False)
    figure.supxlabel(
        "a dot: one agent in one episode · line: mean of the latest ones · band: the middle 80 % of them",
        x=0.01,
        ha="left",
        fontsize=8.5,
        color=_FAINT,
    )


def _dots(axes: Axes, at: NDArray[np.int64], values: NDArray[Any], colour: str) -> None:
    every = -(-len(values) // _MAX_DOTS)
    alpha = float(np.clip(350 / len(values), 0.16, 0.6))
    # Rasterized, also in a PDF: thousands of vector dots would be slow.
    axes.scatter(at[::every], values[::every], s=8, color=colour, alpha=alpha, linewidths=0, rasterized=True)


def _rolling(axes: Axes, at: NDArray[np.int64], values: NDArray[Any], colour: str, label: str) -> None:
    """Draw the mean of the latest values, and the band of the middle 80 % of them."""
    x, recent = _latest(at, values)
    low, high = np.transpose([np.percentile(part, (10, 90)) for part in recent])
    axes.fill_between(x, low, high, color=colour, alpha=0.13, linewidth=0)
    axes.plot(x, [part.mean() for part in recent], color=colour, linewidth=2.2, label=label)


def _agents(axes: Axes, track: Track, colour: str, result: Rollout) -> None:
    """Draw a thin line with its name for each agent, if their returns differ significantly."""
    if not track.agents_differ:
        return
    for a in np.unique(track.agents).tolist():
        own = track.of_agent(a)
        x, recent = _latest(own.env_steps, own.returns)
        y = [part.mean() for part in recent]
        axes.plot(x, y, color=colour, linewidth=1.0, alpha=0.8)
        axes.annotate(
            result.agents[a],
            (x[-1], y[-1]),
            xytext=(-4, 4),
            textcoords="offset points",
            ha="right",
            fontsize=8,
            color=colour,
        )


def _latest(at: NDArray[np.int64], values: NDArray[Any]) -> tuple[NDArray[np.int64], list[NDArray[Any]]]:
    """Return up to 300 times, and the latest values at each of them."""
    window = int(np.clip(len(values) // 15, 8, 600))
    # Episodes of equal length end together, so there is one point per time; early points have shorter windows.
    ends = np.flatnonzero(np.append(at[1:] > at[:-1], True)) + 1
    ends = ends[np.unique(np.linspace(0, len(ends) - 1, 300).astype(int))]
    return at[ends - 1], [values[max(0, end - window) : end] for end in ends.tolist()]


def _distribution(axes: Axes, values: list[NDArray[Any]]) -> None:
    """Draw histograms on common bins, rotated to share the value axis of the plot beside them."""
    from matplotlib.colors import to_rgba
    from matplotlib.ticker import MaxNLocator

    if not values:
        return
    everything = np.concatenate(values)
    low, high = float(everything.min()), float(everything.max())
    for colour, part in zip(_colours(values), values, strict=True):
        if high - low < 40 and (everything == np.round(everything)).all():
            numbers, counts = np.unique(part, return_counts=True)
            axes.barh(numbers, counts / len(part), height=0.5, color=to_rgba(colour, 0.3), edgecolor=colour)
        else:
            bins = np.linspace(low, high if high > low else low + 1.0, 36)
            share = np.histogram(part, bins)[0] / len(part)
            axes.stairs(share, bins, orientation="horizontal", fill=True, color=to_rgba(colour, 0.3))
            axes.stairs(share, bins, orientation="horizontal", color=colour, linewidth=1.2)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:.0%}")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=3, prune="lower"))


def _bare(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_FAINT)
    axes.tick_params(colors=_INK, labelsize=9)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)


def _colours(of: Sized) -> list[str]:
    return [_COLOURS[i % len(_COLOURS)] for i in range(len(of))]


def heat_map(env: str, result: MatchResult, kind: str, ratings: Mapping[str, Rated]) -> Figure:
    """Draw win rates, row against column, and ratings, in their order; ``figure.savefig(path)`` writes it."""
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
    figure.colorbar(image, ax=left, shrink=0.8, format=lambda rate, _: f"{rate:.0%}")
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
