"""What a rollout, or the list of envs, looks like in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from marlvec.cli.rollout import Rollout
from marlvec.cli.tracks import Track
from marlvec.collect import SampleBatch
from marlvec.registry import EnvRow
from marlvec.trees import tree_leaves

__all__ = ["print_envs", "print_rollout"]

_NOTHING = "–"
_TIMES = {
    "env_wait": "envs",
    "inference": "policies",
    "agent_connectors": "agent connectors",
    "action_connectors": "action connectors",
    "ingest": "book-keeping",
    "batch": "batches",
    "callbacks": "callbacks",
}


def print_rollout(console: Console, result: Rollout) -> None:
    """Print the table per policy, and what the whole cost."""
    setting = result.setting
    agents = f"{len(setting.agents)} agent{'s' * (len(setting.agents) != 1)}"
    title = f"[bold]{escape(setting.name)}[/] · {setting.num_envs} envs × {agents}, {setting.where}"
    table = Table(title=title, title_style="", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name, justify in (
        ("policy", "left"),
        ("plays", "left"),
        ("rows", "right"),
        ("obs", "left"),
        ("actions", "left"),
        ("return per agent", "right"),
        ("min … max", "right"),
        ("length", "right"),
    ):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]  # a literal, though mypy sees a str
    for name, track in result.tracks.items():
        batch = result.samples.get(name)
        table.add_row(
            Text(name, "bold cyan"),
            Text(_several(result.players[name])),
            f"{result.rows[name]:,}",
            Text(_form(batch, "obs")),
            Text(_form(batch, "actions")),
            *_returns(track),
            _lengths(track),
        )
        if track.agents_differ:
            for agent in result.players[name]:
                own = track.of_agent(setting.agents.index(agent))
                table.add_row("", Text(agent, "dim"), "", "", "", *_returns(own), _lengths(own), style="dim")
    console.print(table)
    stopped = "stopped after " if result.interrupted else ""
    console.print(
        f"{stopped}{result.env_steps:,} env steps, {result.agent_steps:,} agent steps, {result.episodes:,} episodes "
        f"in {result.seconds:.1f} s: [bold green]{result.speed:,.0f} env steps/s[/]",
        highlight=False,
    )
    if causes := _losses(result):
        console.print(
            f"[yellow]lost besides: {causes}, {result.env_steps_lost:,} env steps together[/]", highlight=False
        )
    if total := sum(result.timers.values()):
        parts = {key: result.timers[key] for key in _TIMES if key != "callbacks" or result.timers[key]}
        shares = ", ".join(f"{_TIMES[key]} {seconds / total:.0%}" for key, seconds in parts.items())
        console.print(f"[dim]time went to: {shares}[/]", highlight=False)
    if not result.episodes:
        console.print("[yellow]no episode ended, so there are no returns yet; give more --env-steps[/]")


def print_envs(console: Console, rows: Sequence[EnvRow], *, with_gymnasium: bool) -> None:
    """Print ids by family, which extra brings which, and what to install for those that lack something."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("env", "family", "extra", "installed"):
        table.add_column(name)
    for row in sorted(rows, key=lambda row: (not row.installed, row.family, row.id)):
        state = (
            Text("yes", "green")
            if row.installed
            else Text("no" if row.extra else "no: its package is missing", "yellow")
        )
        table.add_row(Text(row.id), Text(row.family), Text(row.extra or _NOTHING), state)
    console.print(table)
    there = sum(row.installed for row in rows)
    console.print(f"{len(rows)} envs, {there} of them ready to use.", highlight=False)
    if missing := sorted({row.extra for row in rows if row.extra and not row.installed}):
        console.print(f'For the others: pip install "marlvec[{",".join(missing)}]"', style="yellow", markup=False)
    if not with_gymnasium:
        console.print(
            "An id may leave out its front and its version: simple_spread is mpe/simple_spread_v3.\n"
            "Gymnasium's ids work too, e.g. CartPole-v1; `marlvec envs gymnasium` lists them.",
            style="dim",
            highlight=False,
        )


def _losses(result: Rollout) -> str:
    counts = ((result.episodes_faulty, "to faults"), (result.episodes_restarted, "to restarts that envs asked for"))
    return " and ".join(f"{n:,} episode{'s' * (n != 1)} {why}" for n, why in counts if n)


def _several(names: Sequence[str], limit: int = 4) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown}, … ({len(names)})"


def _form(batch: SampleBatch | None, column: str) -> str:
    """Shape and dtype of a column, n for the rows; a line per leaf."""
    if batch is None:
        return _NOTHING
    lines = []
    for path, leaf in tree_leaves(batch[column]):
        shape = ", ".join(map(str, ("n", *leaf.shape[1:]))) + ("," if leaf.ndim == 1 else "")
        lines.append(f"{path + ' ' if path else ''}({shape}) {leaf.dtype}")
    return "\n".join(lines)


def _returns(track: Track) -> tuple[str, str]:
    if not len(track):
        return _NOTHING, _NOTHING
    values = track.returns
    return f"{values.mean():.2f} ± {values.std():.2f}", f"{values.min():.2f} … {values.max():.2f}"


def _lengths(track: Track) -> str:
    if not len(track):
        return _NOTHING
    low, high = int(track.lengths.min()), int(track.lengths.max())
    return str(low) if low == high else f"{np.mean(track.lengths):.1f} ({low} … {high})"
