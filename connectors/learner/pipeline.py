"""`LearnerPipeline`: the chain of connectors over finished batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gymnasium.spaces import Space

from marlvec.connectors.connector import LearnerConnector
from marlvec.connectors.pipeline import Pipeline
from marlvec.connectors.rows import Rows

__all__ = ["LearnerPipeline"]


class LearnerPipeline(Pipeline[LearnerConnector], LearnerConnector):
    """A chain of learner connectors: from a finished batch's rows to the rows to learn from.

    It needs no space and so no `bind`: ``pipeline(batch["main"])``.

    Args:
        pieces: Learner connectors, first to last.
    """

    _side = LearnerConnector
    _needs_space = False

    def see_batch(self, batch: Mapping[str, Rows]) -> None:
        for stage in self._stages:
            with self._naming(stage):
                stage.piece.see_batch(batch)

    def _past(self, piece: LearnerConnector, space: Space[Any]) -> Space[Any]:
        return space
