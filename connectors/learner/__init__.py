"""Learner-side connectors: what stands between finished batches and the learner."""

from __future__ import annotations

from marlvec.connectors.learner.advantages import GeneralAdvantageEstimation, ValueFunction, VTrace
from marlvec.connectors.learner.fragments import Fragments
from marlvec.connectors.learner.neighbours import AddLastObs, AddView
from marlvec.connectors.learner.pipeline import LearnerPipeline
from marlvec.connectors.learner.regroup import regroup
from marlvec.connectors.learner.returns import NStep, ReturnsToGo
from marlvec.connectors.learner.sequences import PadSequences, UnpadSequences
from marlvec.connectors.learner.standardize import Standardize

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
