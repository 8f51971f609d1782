"""Action-side connectors: what stands between the policy's actions and the env."""

from __future__ import annotations

from marlvec.connectors.action.clip_actions import ClipActions
from marlvec.connectors.action.discretize_actions import DiscretizeActions
from marlvec.connectors.action.epsilon_greedy import EpsilonGreedy
from marlvec.connectors.action.gaussian_noise import GaussianNoise
from marlvec.connectors.action.map_actions import MapActions
from marlvec.connectors.action.mask_invalid import MaskInvalid
from marlvec.connectors.action.ornstein_uhlenbeck import OrnsteinUhlenbeckNoise
from marlvec.connectors.action.pad_actions import PadActions
from marlvec.connectors.action.pipeline import ActionPipeline
from marlvec.connectors.action.read_only_actions import ReadOnlyActions
from marlvec.connectors.action.repeat_actions import RepeatActions
from marlvec.connectors.action.replace_nan import ReplaceNaN
from marlvec.connectors.action.sticky_actions import StickyActions
from marlvec.connectors.action.to_numpy import ToNumpy
from marlvec.connectors.action.unsquash_actions import UnsquashActions

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
