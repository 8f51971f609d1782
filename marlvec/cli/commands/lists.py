"""``marlvec envs`` and ``marlvec connectors``: what there is, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from marlvec.cli.display.rollout_table import _NOTHING
from marlvec.cli.options import Side
from marlvec.connectors.catalogue import CatalogueRow
from marlvec.registry import EnvRow

__all__ = ["print_connectors", "print_envs"]

_WHERE = {
    Side.AGENT: "Agent side: between the envs and a policy",
    Side.ACTION: "Action side: between a policy and the envs",
    Side.LEARNER: "Learner side: on a finished batch",
}


def print_connectors(console: Console, rows: Sequence[CatalogueRow]) -> None:
    """Print the connectors of each side, and what each does."""
    width = max(len(row.name) for row in rows)
    for side, where in _WHERE.items():
        if mine := [row for row in rows if row.side == side]:
            table = Table(title=where, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
            table.add_column("connector", min_width=width, no_wrap=True)
            table.add_column("what it does")
            for row in mine:
                table.add_row(Text(row.name), Text(row.line))
            console.print(table)
    console.print(
        f"{len(rows)} connectors, all in marlvec.connectors; `help(marlvec.connectors.{rows[0].name})` says more.",
        style="dim",
        markup=False,
        highlight=False,
    )


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
