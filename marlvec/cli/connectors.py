"""What the catalogue of connectors looks like in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from marlvec.cli.options import Side
from marlvec.connectors.catalogue import CatalogueRow

__all__ = ["print_connectors"]


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
