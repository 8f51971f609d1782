"""A row's name in messages."""

from __future__ import annotations

from marlvec.connectors.rows import Rows

__all__ = ["row_name"]


def row_name(rows: Rows, i: int) -> str:
    """Say which row this is: ``env 3, agent 1`` where the rows have ids, else ``row 7``."""
    if "env_id" not in rows.columns or "agent_index" not in rows.columns:
        return f"row {i}"
    return f"env {int(rows.env_id[i])}, agent {int(rows.agent_index[i])}"
