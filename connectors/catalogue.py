"""The table of all connectors that come with marlvec, with the first line of each one's documentation."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any, NamedTuple

from marlvec.connectors.connector import ActionConnector, AgentConnector, Connector, LearnerConnector
from marlvec.connectors.function import FunctionConnector
from marlvec.connectors.pipeline import Pipeline
from marlvec.errors import ArgumentError

__all__ = ["SIDES", "CatalogueRow", "catalogue"]

SIDES: dict[str, type[Any]] = {"agent": AgentConnector, "action": ActionConnector, "learner": LearnerConnector}
"""Where a connector may stand, in the order rows meet them."""


class CatalogueRow(NamedTuple):
    """A connector: its side, its name in ``marlvec.connectors``, and its description in one line."""

    side: str
    name: str
    line: str


def catalogue(name: str = "", side: str | None = None) -> list[CatalogueRow]:
    """List the connectors that ``marlvec.connectors`` exports, by side and name.

    Args:
        name: Only those whose names contain this, in upper or lower case.
        side: Only those of this side; None for all.

    Returns:
        A row a connector, with its side, name and first line.

    Raises:
        ArgumentError: ``side`` does not exist.
    """
    if side is not None and side not in SIDES:
        raise ArgumentError(f"expected a side of {list(SIDES)}, got {side!r}")
    package = importlib.import_module("marlvec.connectors")  # by name: that module imports this one
    found = {exported: getattr(package, exported) for exported in package.__all__}
    return [
        CatalogueRow(at, exported, _first_line(cls))
        for at, base in SIDES.items()
        for exported, cls in sorted(found.items())
        if side in (None, at) and name.lower() in exported.lower() and _is_piece(cls, base)
    ]


def _is_piece(cls: object, base: type[Any]) -> bool:
    if not isinstance(cls, type) or not issubclass(cls, base):
        return False
    return not inspect.isabstract(cls) and not issubclass(cls, (FunctionConnector, Pipeline))


def _first_line(cls: type[Connector]) -> str:
    """Return the first sentence, or paragraph if that is shorter, of a class's docstring."""
    paragraph = " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split())
    return re.split(r"(?<!\be\.g)\. ", paragraph, maxsplit=1)[0].rstrip(".")
