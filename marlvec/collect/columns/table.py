"""`COLUMNS`: dtype and source of every column that the collector makes, in batch order."""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

__all__ = ["ANY", "BOOL", "COLUMNS", "INT", "NUMBER", "VERSION", "Column", "Source", "names"]


class Source(Enum):
    """The source of a column."""

    ROW = auto()
    """A row that an agent acted on."""
    OUTCOME = auto()
    """The row that closes the transition: the agent's next one, or its last."""
    ANSWER = auto()
    """The answer to the row."""
    READ = auto()
    """Made when a batch is read."""
    NONE = auto()
    """Rows have it, and no batch does."""


BOOL, INT, NUMBER, ANY = "b", "iu", "fiub", None
"""Dtype kinds (`numpy.dtype.kind`) of a column; ANY: those of its space."""


class Column(NamedTuple):
    """One column."""

    name: str
    kinds: str | None  # dtype kinds; None: given by a space
    source: Source
    is_wide: bool = False  # whether a row may have any shape; else a single value
    from_env: bool = False  # a batch then also has next_…, from the agent's next row
    is_late: bool = False  # whether it may first appear later; earlier rows get `ColumnForm.blanks`


VERSION = "policy_version"
"""The column that has one number for all rows of an answer."""

_ROW, _OUTCOME, _ANSWER, _READ, _NONE = Source
COLUMNS: dict[str, Column] = {
    column.name: column
    for column in (
        Column("obs", ANY, _ROW, is_wide=True, from_env=True),
        Column("actions", ANY, _ANSWER, is_wide=True),
        Column("actions_for_env", ANY, _ANSWER, is_wide=True),
        Column("rewards", NUMBER, _OUTCOME),
        Column("next_obs", ANY, _READ, is_wide=True),
        Column("terminated", BOOL, _OUTCOME),
        Column("truncated", BOOL, _OUTCOME),
        Column("next_obs_missing", BOOL, _READ),
        Column("state", NUMBER, _ROW, is_wide=True, from_env=True),
        Column("next_state", NUMBER, _READ, is_wide=True),
        Column("action_mask", BOOL, _ROW, is_wide=True, from_env=True, is_late=True),
        Column("next_action_mask", BOOL, _READ, is_wide=True),
        Column("t", INT, _ROW),
        Column("env_t", INT, _READ),
        Column("next_env_t", INT, _READ),
        Column("eps_id", INT, _ROW),
        Column("unroll_id", INT, _READ),
        Column("env_id", INT, _ROW),
        Column("agent_index", INT, _ROW),
        Column(VERSION, INT, _ANSWER),
        # After the columns of policies and connectors:
        Column("off_policy", BOOL, _ANSWER, is_late=True),
        Column("first", BOOL, _NONE),
        Column("last", BOOL, _NONE),
    )
}
"""By name, in the order of a batch."""


def names(*sources: Source) -> tuple[str, ...]:
    """Names of the columns from these sources, in order."""
    return tuple(name for name, column in COLUMNS.items() if column.source in sources)
