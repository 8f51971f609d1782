"""Learner-side connectors: what stands between finished batches and the learner."""

from __future__ import annotations

from marlvec.connectors.learner.add_last_obs import AddLastObs
from marlvec.connectors.learner.add_view import AddView
from marlvec.connectors.learner.bootstrap import ValueFunction
from marlvec.connectors.learner.fragments import Fragments
from marlvec.connectors.learner.gae import GeneralAdvantageEstimation
from marlvec.connectors.learner.n_step import NStep
from marlvec.connectors.learner.pad_sequences import PadSequences
from marlvec.connectors.learner.pipeline import LearnerPipeline
from marlvec.connectors.learner.regroup import regroup
from marlvec.connectors.learner.returns_to_go import ReturnsToGo
from marlvec.connectors.learner.standardize import Standardize
from marlvec.connectors.learner.unpad_sequences import UnpadSequences
from marlvec.connectors.learner.v_trace import VTrace

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
