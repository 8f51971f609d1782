"""Agent-side connectors, between the env's observations and the policy."""

from __future__ import annotations

from marlvec.connectors.agent.context import (
    ActionMaskFromObs,
    AgentIndicator,
    DeathMask,
    StateInObs,
    TeamObs,
    TimeFeature,
)
from marlvec.connectors.agent.filtering import FilterRows, FrameSkip, RowFilter
from marlvec.connectors.agent.images import GrayscaleObs, MaxObs, ResizeObs
from marlvec.connectors.agent.memory import DelayObs, FrameStack, PrevActions, PrevRewards, RnnState, View
from marlvec.connectors.agent.normalization import NormalizeObs, NormalizeReward
from marlvec.connectors.agent.rewards import ClipReward, MapReward, ScaleReward
from marlvec.connectors.agent.shape import DropKeys, FlattenObs, PadObs, ReshapeObs, TransposeObs
from marlvec.connectors.agent.text import History, Template
from marlvec.connectors.agent.values import CastObs, ClipObs, MapObs, OneHotObs, PerAgent, ScaleObs
from marlvec.connectors.pipeline import AgentPipeline

__all__ = [
    "ActionMaskFromObs",
    "AgentIndicator",
    "AgentPipeline",
    "CastObs",
    "ClipObs",
    "ClipReward",
    "DeathMask",
    "DelayObs",
    "DropKeys",
    "FilterRows",
    "FlattenObs",
    "FrameSkip",
    "FrameStack",
    "GrayscaleObs",
    "History",
    "MapObs",
    "MapReward",
    "MaxObs",
    "NormalizeObs",
    "NormalizeReward",
    "OneHotObs",
    "PadObs",
    "PerAgent",
    "PrevActions",
    "PrevRewards",
    "ReshapeObs",
    "ResizeObs",
    "RnnState",
    "RowFilter",
    "ScaleObs",
    "ScaleReward",
    "StateInObs",
    "TeamObs",
    "Template",
    "TimeFeature",
    "TransposeObs",
    "View",
]
