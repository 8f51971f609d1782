"""``marlvec check``: everything that breaks an env's contract, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from marlvec.cli.console import print_json
from marlvec.cli.display.table import print_table
from marlvec.errors import EnvArgumentError
from marlvec.registry import resolve
from marlvec.selfplay.results.whole_table import Column
from marlvec.testing import Finding, check_env

__all__ = ["check", "print_findings"]

_COLUMNS: tuple[Column, ...] = (
    ("check", "left"),
    ("where", "left"),
    ("what", "left"),
    ("expected", "left"),
    ("got", "left"),
    ("to change", "left"),
    ("seen", "left"),
)


def check(env: str, kwargs: Mapping[str, Any], *, skip: Sequence[str], progress: bool, **options: int) -> list[Finding]:
    """Check an env; a fault of its constructor's arguments is one of the command line."""
    findings = check_env(resolve(env).with_kwargs(**kwargs), skip=skip, raise_first=False, progress=progress, **options)
    for one in findings:
        if kwargs and one.where.endswith(".__init__()") and one.got.startswith("TypeError: "):
            raise EnvArgumentError(f"--set {', '.join(kwargs)}: {env} does not accept it: {one.got}")
    return findings


def print_findings(console: Console, env: str, findings: Sequence[Finding], *, as_json: bool) -> None:
    """Print the findings: a table, or one JSON object."""
    serious = sum(one.severity == "serious" for one in findings)
    if as_json:
        print_json({"env": env, "serious": serious, "findings": [asdict(one) for one in findings]})
        return
    if not findings:
        console.print(f"{env}: nothing found", style="green", markup=False, highlight=False, soft_wrap=True)
        return
    rows: list[list[str | Text]] = [
        [
            Text(f"{one.check}: {one.severity}", "bold red" if one.severity == "serious" else "bold yellow"),
            one.where,
            one.subject,
            one.expected,
            one.got,
            one.change,
            "once" if one.times == 1 else f"{one.times:,} times",
        ]
        for one in findings
    ]
    count = f"{len(findings)} finding{'s' * (len(findings) != 1)}, {serious} serious"
    print_table(console, Text(f"{env}: {count}"), _COLUMNS, rows)
