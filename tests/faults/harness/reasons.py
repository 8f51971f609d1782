"""Why a fault of the catalogue has no test: what no test can bring about on the plain machine that runs them all."""

from __future__ import annotations

__all__ = ["REASONS"]

REASONS: dict[str, str] = {
    "F13": "Not built: what an env's process holds is not watched. An env that knows it leaks raises RestartQuietly.",
}
"""Fault id to the reason, in one sentence. A line that stands here is not open, unless a test of it fails."""
