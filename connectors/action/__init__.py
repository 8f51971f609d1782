"""Action-side connectors: what stands between the policy's actions and the env."""

from __future__ import annotations

from marlvec.connectors.action.bounds import ClipActions, UnsquashActions
from marlvec.connectors.action.conversions import MapActions, PadActions, ReadOnlyActions, ToNumpy
from marlvec.connectors.action.discretize_actions import DiscretizeActions
from marlvec.connectors.action.epsilon_greedy import EpsilonGreedy
from marlvec.connectors.action.held_actions import RepeatActions, StickyActions
from marlvec.connectors.action.noise import GaussianNoise, OrnsteinUhlenbeckNoise
from marlvec.connectors.action.pipeline import ActionPipeline
from marlvec.connectors.action.valid_actions import MaskInvalid, ReplaceNaN

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
