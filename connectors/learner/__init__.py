"""Learner-side connectors, between finished batches and the learner."""

from __future__ import annotations

from marlvec.connectors.learner.batches import Standardize, regroup
from marlvec.connectors.learner.fragments import Fragments
from marlvec.connectors.learner.returns import GeneralAdvantageEstimation, NStep, ReturnsToGo, ValueFunction, VTrace
from marlvec.connectors.learner.sequences import AddLastObs, AddView, PadSequences, UnpadSequences
from marlvec.connectors.pipeline import LearnerPipeline

__all__ = [
    "AddLastObs",
    "AddView",
    "Fragments",
    "GeneralAdvantageEstimation",
    "LearnerPipeline",
    "NStep",
    "PadSequences",
    "ReturnsToGo",
    "Standardize",
    "UnpadSequences",
    "VTrace",
    "ValueFunction",
    "regroup",
]
