"""A connector at its place in a pipeline."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

from marlvec.connectors.connector import Connector

__all__ = ["Stage", "Timing"]

P = TypeVar("P", bound=Connector)


class Timing(NamedTuple):
    """Time spent in one piece of a pipeline.

    Attributes:
        seconds: Sum over all calls.
        calls: How many there were.
    """

    seconds: float
    calls: int


class Stage(Generic[P]):
    """A piece, its name in the pipeline, and its timer."""

    __slots__ = ("calls", "name", "ns", "piece")

    def __init__(self, name: str, piece: P) -> None:
        self.name = name
        self.piece = piece
        self.ns = 0
        self.calls = 0

    @property
    def timing(self) -> Timing:
        """Time spent in the piece so far."""
        return Timing(self.ns * 1e-9, self.calls)
