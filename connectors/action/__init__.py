"""Action-side connectors, between the policy's actions and the env."""

from __future__ import annotations

from marlvec.connectors.action.conversions import (
    DiscretizeActions,
    MapActions,
    PadActions,
    ReadOnlyActions,
    ToNumpy,
    UnsquashActions,
)
from marlvec.connectors.action.exploration import EpsilonGreedy, GaussianNoise, OrnsteinUhlenbeckNoise
from marlvec.connectors.action.held_actions import RepeatActions, StickyActions
from marlvec.connectors.action.pipeline import ActionPipeline
from marlvec.connectors.action.valid_actions import ClipActions, MaskInvalid, ReplaceNaN

__all__ = [
    "ActionPipeline",
    "ClipActions",
    "DiscretizeActions",
    "EpsilonGreedy",
    "GaussianNoise",
    "MapActions",
    "MaskInvalid",
    "OrnsteinUhlenbeckNoise",
    "PadActions",
    "ReadOnlyActions",
    "RepeatActions",
    "ReplaceNaN",
    "StickyActions",
    "ToNumpy",
    "UnsquashActions",
]
