"""A picture of a rollout: returns and lengths over env steps, beside their distributions. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from marlvec.cli.rollout import Rollout
from marlvec.cli.tracks import Track
from marlvec.errors import ArgumentError, MissingExtraError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["check_file", "returns_figure"]

# Okabe and Ito's, told apart by colour-blind eyes too.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_INK, _FAINT = "#222222", "#8a8a8a"
_MAX_DOTS = 6000  # of one policy; more would only hide each other


def check_file(path: Path) -> None:
    """Make sure that a picture can be written there, before anything runs.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ArgumentError: The folder does not exist, or the suffix names no format of pictures.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise MissingExtraError(
            f'a plot needs matplotlib, which cannot be imported ({error}); install it with: pip install "marlvec[plot]"'
        ) from error
    formats = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix[1:].lower() not in formats:
        raise ArgumentError(f"--plot {path}: expected a name that ends in one of .{', .'.join(formats)}")
    if not path.parent.is_dir():
        raise ArgumentError(f"--plot {path}: there is no folder {path.parent}")


def returns_figure(result: Rollout) -> Figure:
    """Draw a rollout; ``figure.savefig(path)`` writes it.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    check_file(Path("returns.png"))
    from matplotlib.figure import Figure

    found = {name: track for name, track in result.tracks.items() if len(track)}
    same_length = len({int(n) for track in found.values() for n in track.lengths}) <= 1
    figure = Figure(figsize=(10, 5.2 if same_length else 7.2), dpi=150, layout="constrained", facecolor="white")
    heights = (1,) if same_length else (5, 2)
    grid: Any = figure.subplots(
        len(heights), 2, squeeze=False, sharey="row", sharex="col" if same_length else False,
        gridspec_kw={"width_ratios": (5, 1), "height_ratios": heights},
    )  # fmt: skip
    _head(figure, result, found, same_length=same_length)
    if not found:
        grid[0, 0].text(0.5, 0.5, "no episode ended", transform=grid[0, 0].transAxes, ha="center", color=_FAINT)
    rows = [("return per agent", "returns")] + ([] if same_length else [("decisions", "lengths")])
    for (label, name), (left, right) in zip(rows, grid, strict=True):
        _bare(left)
        _bare(right)
        left.set_ylabel(label)
        values = {policy: getattr(track, name) for policy, track in found.items()}
        for colour, (policy, track) in zip(_colours(len(found)), found.items(), strict=True):
            _over_time(left, track.env_steps, values[policy], colour, f"{policy}: mean {values[policy].mean():.4g}")
        _distribution(right, list(values.values()))
        left.set_xlim(0, None)
        if found:
            left.legend(loc="best", frameon=True, framealpha=0.85, edgecolor="none", fontsize=9)
    bottom = grid[-1]
    bottom[0].set_xlabel("env steps, all envs together")
    bottom[0].xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    bottom[1].set_xlabel("share")
    if not same_length:
        grid[0, 0].sharex(bottom[0])
        grid[0, 0].tick_params(labelbottom=False)
    return figure


def _head(figure: Figure, result: Rollout, found: Mapping[str, Track], *, same_length: bool) -> None:
    setting = result.setting
    lengths = next((track.lengths for track in found.values()), None)
    each = f" of {int(lengths[0])} decisions each" if same_length and lengths is not None else ""
    figure.suptitle(setting.name, x=0.01, ha="left", fontsize=14, fontweight="bold", color=_INK)
    figure.supxlabel(
        f"{setting.num_envs} envs × {len(setting.agents)} agents · {result.env_steps:,} env steps · "
        f"{result.episodes:,} episodes{each} · one dot per agent and episode; line: rolling mean, "
        "shaded: the middle 80 %",
        x=0.01,
        ha="left",
        fontsize=8,
        color=_FAINT,
    )


def _over_time(axes: Axes, at: NDArray[np.int64], values: NDArray[Any], colour: str, label: str) -> None:
    """Dots, their rolling mean, and the band that holds the middle 80 %."""
    every = -(-len(values) // _MAX_DOTS)
    axes.scatter(at[::every], values[::every], s=7, color=colour, alpha=0.22, linewidths=0, rasterized=True)
    window = min(len(values), int(np.clip(len(values) // 12, 8, 600)))
    ends = np.unique(np.linspace(window - 1, len(values) - 1, 300).astype(int))
    windows = sliding_window_view(values, window)[ends - window + 1]
    low, high = np.percentile(windows, (10, 90), axis=1)
    axes.fill_between(at[ends], low, high, color=colour, alpha=0.13, linewidth=0)
    axes.plot(at[ends], windows.mean(axis=1), color=colour, linewidth=2.2, label=label)


def _distribution(axes: Axes, values: list[NDArray[Any]]) -> None:
    """Histograms on common bins, turned to share the value axis with what is beside them."""
    if not values:
        return
    everything = np.concatenate(values)
    low, high = float(everything.min()), float(everything.max())
    whole = everything.dtype.kind == "i" and high - low < 40
    if whole or low == high:
        bins = np.arange(np.floor(low) - 0.5, np.ceil(high) + 1.0)
    else:
        bins = np.linspace(low, high, 36)
    for colour, part in zip(_colours(len(values)), values, strict=True):
        share = np.histogram(part, bins)[0] / len(part)
        axes.stairs(share, bins, orientation="horizontal", fill=True, color=colour, alpha=0.3)
        axes.stairs(share, bins, orientation="horizontal", color=colour, linewidth=1.2)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:.0%}")
    axes.xaxis.set_major_locator(_few())


def _few() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=3, prune="lower")


def _bare(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_FAINT)
    axes.tick_params(colors=_INK, labelsize=9)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)


def _colours(count: int) -> list[str]:
    return [_COLOURS[i % len(_COLOURS)] for i in range(count)]
