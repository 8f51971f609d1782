"""What commands draw: tables that are never truncated, plots of rollouts and tournaments, standings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text

from marlvec.cli.console import check_writable
from marlvec.collect import EpisodeRecord, SampleBatch
from marlvec.errors import ArgumentError, MissingExtraError
from marlvec.selfplay import BradleyTerry, Elo, MatchResult, OpenSkill, WinRate, alpha_rank
from marlvec.selfplay.results import Column, WholeTable
from marlvec.trees import tree_leaves

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


NOTHING = "–"


def print_table(console: Console, title: Text, columns: Sequence[Column], rows: Sequence[Sequence[str | Text]]) -> None:
    """Print a table; if the terminal is too narrow, one block of lines per row, which its first cell names."""
    if title.plain:
        console.print(title)
    console.print(WholeTable(columns, rows))


def fits(console: Console, columns: Sequence[Column], rows: Sequence[Sequence[str | Text]]) -> bool:
    """Return whether a table fits without truncating a cell."""
    return WholeTable(columns, rows).fits(console)


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


@dataclass(frozen=True, slots=True)
class Track:
    """One entry per agent and episode, in order of time."""

    env_steps: NDArray[np.int64]  # of all envs together at the episode's end: its env's times N
    returns: NDArray[np.float64]  # sum of the agent's rewards in the episode
    lengths: NDArray[np.int64]  # number of the agent's decisions
    agents: NDArray[np.int64]  # agent index

    def __len__(self) -> int:
        return len(self.returns)

    def of_agent(self, index: int) -> Track:
        mine = self.agents == index
        return Track(self.env_steps[mine], self.returns[mine], self.lengths[mine], self.agents[mine])

    @property
    def agents_differ(self) -> bool:
        """Whether mean returns of two agents differ by more than three standard errors."""
        own = [self.returns[self.agents == a] for a in np.unique(self.agents)]
        if len(own) < 2:
            return False
        means = np.array([part.mean() for part in own])
        low, high = own[int(means.argmin())], own[int(means.argmax())]
        error = np.sqrt(low.var() / len(low) + high.var() / len(high))
        return bool(np.ptp(means) > 3 * error)


def tracks(episodes: Sequence[EpisodeRecord], policy_ids: Sequence[str], num_envs: int) -> Mapping[str, Track]:
    """Sort the results of all episodes since the first reset by policy; an agent that was never in one has no entry."""
    made = np.zeros(num_envs, np.int64)
    entries: dict[str, list[tuple[Any, ...]]] = {name: [] for name in policy_ids}
    for episode in episodes:
        made[episode.env_id] += episode.length
        at = int(made[episode.env_id]) * num_envs
        for a in np.flatnonzero(episode.present_A).tolist():
            entries[episode.policies[a]].append((at, episode.returns_A[a], episode.lengths_A[a], a))
    return {name: _track(found) for name, found in entries.items()}


def _track(entries: list[tuple[Any, ...]]) -> Track:
    at, returns, lengths, agents = zip(*entries, strict=True) if entries else ((), (), (), ())
    steps = np.array(at, np.int64)
    order = np.argsort(steps, kind="stable")
    return Track(
        steps[order],
        np.array(returns, np.float64)[order],
        np.array(lengths, np.int64)[order],
        np.array(agents, np.int64)[order],
    )


@dataclass(frozen=True, slots=True)
class Rollout:
    """Results of a run; keys are policy ids."""

    env: str
    num_envs: int
    agents: tuple[str, ...]
    where: str  # backend and number of workers
    env_steps: int  # of all batches, as agent_steps
    agent_steps: int
    episodes: int  # finished ones
    episodes_faulty: int  # lost, see `Metrics`
    episodes_restarted: int
    env_steps_lost: int
    seconds: float  # including the first reset
    speed: float  # env steps a second; unfinished episodes count, lost ones do not
    samples: Mapping[str, SampleBatch]  # first batches, to read their columns
    rows: Mapping[str, int]  # in all batches
    players: Mapping[str, tuple[str, ...]]  # agents' names
    tracks: Mapping[str, Track]
    timers: Mapping[str, float]  # seconds by activity
    interrupted: bool  # by Ctrl-C


_TIMES = {
    "env_wait": "envs",
    "inference": "policies",
    "agent_connectors": "agent connectors",
    "action_connectors": "action connectors",
    "ingest": "book-keeping",
    "batch": "batches",
    "callbacks": "callbacks",
}


_COLUMNS: tuple[Column, ...] = (
    ("policy", "left"),
    ("plays", "left"),
    ("rows", "right"),
    ("obs", "left"),
    ("actions", "left"),
    ("return per agent", "right"),
    ("min … max", "right"),
    ("length", "right"),
)


def print_rollout(console: Console, result: Rollout) -> None:
    """Print the table of policies, and the totals."""
    agents = f"{len(result.agents)} agent{'s' * (len(result.agents) != 1)}"
    title = Text.assemble((result.env, "bold"), f" · {result.num_envs} envs × {agents}, {result.where}")
    rows: list[list[str | Text]] = []
    for name, track in result.tracks.items():
        batch = result.samples.get(name)
        rows.append(
            [
                Text(name, "bold cyan"),
                Text(_several(result.players[name])),
                f"{result.rows[name]:,}",
                Text(_form(batch, "obs")),
                Text(_form(batch, "actions")),
                *_returns(track),
                _lengths(track),
            ]
        )
        if track.agents_differ:
            for agent in result.players[name]:
                own = track.of_agent(result.agents.index(agent))
                cells = ("", agent, "", "", "", *_returns(own), _lengths(own))
                rows.append([Text(cell, "dim") for cell in cells])
    print_table(console, title, _COLUMNS, rows)
    stopped = "stopped after " if result.interrupted else ""
    console.print(
        f"{stopped}{result.env_steps:,} env steps, {result.agent_steps:,} agent steps, {result.episodes:,} episodes "
        f"in {result.seconds:.1f} s: [bold green]{result.speed:,.0f} env steps/s[/]",
        highlight=False,
    )
    if causes := _losses(result):
        console.print(f"[yellow]also lost: {causes}, {result.env_steps_lost:,} env steps together[/]", highlight=False)
    if total := sum(result.timers.values()):
        parts = {key: result.timers[key] for key in _TIMES if key != "callbacks" or result.timers[key]}
        shares = ", ".join(f"{_TIMES[key]} {seconds / total:.0%}" for key, seconds in parts.items())
        console.print(f"[dim]time went to: {shares}[/]", highlight=False)
    if not result.episodes:
        console.print("[yellow]no episode ended, so there are no returns yet; give more --env-steps[/]")


def rollout_json(result: Rollout) -> dict[str, Any]:
    """Return the results as a JSON object; unknown values are null."""
    names = (
        *("env", "num_envs", "agents", "where", "env_steps", "agent_steps", "episodes", "episodes_faulty"),
        *("episodes_restarted", "env_steps_lost", "seconds", "interrupted"),
    )
    return {
        **{name: getattr(result, name) for name in names},
        "env_steps_per_second": result.speed,
        "seconds_by_part": dict(result.timers),
        "policies": {name: _policy_json(result, name) for name in result.tracks},
    }


def _policy_json(result: Rollout, name: str) -> dict[str, Any]:
    batch, track = result.samples.get(name), result.tracks[name]
    agents = {agent: track.of_agent(result.agents.index(agent)) for agent in result.players[name]}
    return {
        "rows": result.rows[name],
        "obs": None if batch is None else _form(batch, "obs").splitlines(),
        "actions": None if batch is None else _form(batch, "actions").splitlines(),
        **_figures(track),
        "agents": {agent: _figures(own) for agent, own in agents.items()},
    }


def _figures(track: Track) -> dict[str, Any]:
    parts = {"return": track.returns, "length": track.lengths}
    if not len(track):
        return {"agent_episodes": 0, **dict.fromkeys(parts)}
    return {
        "agent_episodes": len(track),
        **{
            key: {"mean": values.mean(), "std": values.std(), "min": values.min(), "max": values.max()}
            for key, values in parts.items()
        },
    }


def _losses(result: Rollout) -> str:
    counts = ((result.episodes_faulty, "to faults"), (result.episodes_restarted, "to restarts requested by envs"))
    return " and ".join(f"{n:,} episode{'s' * (n != 1)} {why}" for n, why in counts if n)


def _several(names: Sequence[str], limit: int = 4) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown}, … ({len(names)})"


def _form(batch: SampleBatch | None, column: str) -> str:
    """Describe shape and dtype of a column, n for the rows; one line per leaf."""
    if batch is None:
        return NOTHING
    lines = []
    for path, leaf in tree_leaves(batch[column]):
        shape = ", ".join(map(str, ("n", *leaf.shape[1:]))) + ("," if leaf.ndim == 1 else "")
        lines.append(f"{path + ' ' if path else ''}({shape}) {leaf.dtype}")
    return "\n".join(lines)


def _returns(track: Track) -> tuple[str, str]:
    if not len(track):
        return NOTHING, NOTHING
    values = track.returns
    return f"{values.mean():.2f} ± {values.std():.2f}", f"{values.min():.2f} … {values.max():.2f}"


def _lengths(track: Track) -> str:
    if not len(track):
        return NOTHING
    low, high = int(track.lengths.min()), int(track.lengths.max())
    return str(low) if low == high else f"{np.mean(track.lengths):.1f} ({low} … {high})"


@dataclass(frozen=True, slots=True)
class Rated:
    """A player's rating."""

    rating: float
    error: float = math.nan  # half the width of its interval; NaN if ratings of that kind have none


def rated(result: MatchResult, kind: str) -> dict[str, Rated]:
    """Return every player's rating of a kind of ``marlvec arena --rating``, the best first."""
    if kind == "alpha-rank":
        found = {name: Rated(share) for name, share in alpha_rank(result.table).items()}
    elif kind == "bradley-terry":
        fitted = BradleyTerry()
        result.rate(fitted)
        found = {name: _fitted(fitted, name, result.confidence) for name in result.players}
    else:
        ratings = result.rate(Elo() if kind == "elo" else OpenSkill())
        found = {name: Rated(ratings.rating(name)) for name in result.players}
    return dict(sorted(found.items(), key=lambda pair: -pair[1].rating))


def _fitted(ratings: BradleyTerry, name: str, confidence: float) -> Rated:
    rating = ratings.rating(name)
    return Rated(rating, ratings.interval(name, confidence)[1] - rating)


def print_standings(console: Console, env: str, result: MatchResult, kind: str, ratings: Mapping[str, Rated]) -> None:
    """Print each player's rating, the best first, and the results of each pair."""
    level = f"{result.confidence:.3g}" if result.confidence * 100 % 1 else f"{result.confidence:.0%}"
    title = Text.assemble((env, "bold"), f" · {_summary(result)}")
    columns: list[Column] = [("player", "left")]
    columns += [(name, "right") for name in (kind, "games", "won", "drawn", "lost", "win rate", f"{level} interval")]
    columns += [(f"as {side}", "right") for side in result.sides]
    rows = [_standing(result, name, ratings[name], 3 if kind == "alpha-rank" else 1) for name in ratings]
    if fits(console, columns, rows):
        print_table(console, title, columns, rows)
    else:  # in two tables
        cut = next(k for k, (name, _) in enumerate(columns) if name.endswith("interval"))
        print_table(console, title, columns[:cut], [row[:cut] for row in rows])
        print_table(
            console, Text("win rates", "dim"), [columns[0], *columns[cut:]], [[row[0], *row[cut:]] for row in rows]
        )
    _print_duels(console, result, tuple(ratings))


def _standing(result: MatchResult, name: str, rating: Rated, digits: int) -> list[str | Text]:
    rate = result.win_rate(name)
    return [
        Text(name, "bold cyan"),
        _rating(rating, digits),
        *(f"{n:,}" for n in (rate.games, rate.wins, rate.draws, rate.losses)),
        _mean(rate),
        f"{rate.low:.1%} – {rate.high:.1%}",
        *(_mean(result.win_rate(name, side=side)) for side in result.sides),
    ]


def _print_duels(console: Console, result: MatchResult, names: tuple[str, ...]) -> None:
    """Print all against all: as a matrix if it fits, else one line per pair."""
    title = Text("row against column: won–drawn–lost, win rate and its interval", "dim")
    columns: list[Column] = [("", "left"), *((name, "right") for name in names)]
    duels = {(one, other): _duel(result.win_rate(one, other)) for one in names for other in names}
    matrix = [[Text(one, "bold cyan"), *(duels[one, other] for other in names)] for one in names]
    if fits(console, columns, matrix):
        print_table(console, title, columns, matrix)
        return
    pairs = [
        [Text(one, "bold cyan"), Text(other), *duels[one, other].split("\n")]
        for k, one in enumerate(names)
        for other in names[k + 1 :]
        if result.win_rate(one, other).games
    ]
    columns = [("player", "left"), ("against", "left"), ("won–drawn–lost", "right"), ("win rate, interval", "right")]
    print_table(console, Text("player against player", "dim"), columns, pairs)


def standings_json(env: str, result: MatchResult, kind: str, ratings: Mapping[str, Rated]) -> dict[str, Any]:
    """Return players, the best first, and all pairs as a JSON object."""
    return {
        "env": env,
        "games": len(result.games),
        "draws": result.draws,
        "truncations": result.truncations,
        "lost_to_faults": result.lost,
        "unplayed": result.unplayed,
        "confidence": result.confidence,
        "rating": kind,
        "players": [
            {
                "id": name,
                "rating": found.rating,
                "rating_interval": [found.rating - found.error, found.rating + found.error],
                **_rate_json(result.win_rate(name)),
                "sides": {side: _rate_json(result.win_rate(name, side=side)) for side in result.sides},
            }
            for name, found in ratings.items()
        ],
        "pairs": [
            {"player": one, "against": other, **_rate_json(result.win_rate(one, other))}
            for one in ratings
            for other in ratings
            if one != other
        ],
    }


def _rate_json(rate: WinRate) -> dict[str, Any]:
    return {
        "games": rate.games,
        "wins": rate.wins,
        "draws": rate.draws,
        "losses": rate.losses,
        "win_rate": rate.mean if rate.games else None,
        "win_rate_interval": [rate.low, rate.high],
    }


def _summary(result: MatchResult) -> str:
    parts = [f"{len(result.games):,} games", f"{result.draws:,} drawn", f"{result.truncations:,} truncated"]
    for number, what in (
        (result.unmoved(), "over before a side's first move"),
        (result.lost, "lost to faults and repeated"),
        (result.unplayed, "not played"),
    ):
        parts += [f"{number:,} {what}"] * bool(number)
    return ", ".join(parts)


def _rating(found: Rated, digits: int) -> str:
    if math.isnan(found.error):
        return f"{found.rating:.{digits}f}"
    return f"{found.rating:.0f} ± {found.error:.0f}"


def _mean(rate: WinRate) -> str:
    return f"{rate.mean:.1%}" if rate.games else NOTHING


def _duel(rate: WinRate) -> Text:
    if not rate.games:
        return Text(NOTHING, "dim")
    style = "green" if rate.low > 0.5 else "red" if rate.high < 0.5 else ""
    return Text.assemble(
        f"{rate.wins}–{rate.draws}–{rate.losses}\n",
        (f"{rate.mean:.0%}", style),
        (f" [{rate.low:.0%}, {rate.high:.0%}]", "dim"),
    )
