"""Agent-side connectors: what stands between the env's observations and the policy."""

from __future__ import annotations

from marlvec.connectors.agent.context.action_mask_from_obs import ActionMaskFromObs
from marlvec.connectors.agent.context.agent_indicator import AgentIndicator
from marlvec.connectors.agent.context.death_mask import DeathMask
from marlvec.connectors.agent.context.state_in_obs import StateInObs
from marlvec.connectors.agent.context.team_obs import TeamObs
from marlvec.connectors.agent.context.time_feature import TimeFeature
from marlvec.connectors.agent.filtering.filter_rows import FilterRows, RowFilter
from marlvec.connectors.agent.filtering.frame_skip import FrameSkip
from marlvec.connectors.agent.images.grayscale_obs import GrayscaleObs
from marlvec.connectors.agent.images.max_obs import MaxObs
from marlvec.connectors.agent.images.resize_obs import ResizeObs
from marlvec.connectors.agent.memory.delay_obs import DelayObs
from marlvec.connectors.agent.memory.frame_stack import FrameStack
from marlvec.connectors.agent.memory.prev_actions import PrevActions
from marlvec.connectors.agent.memory.prev_rewards import PrevRewards
from marlvec.connectors.agent.memory.rnn_state import RnnState
from marlvec.connectors.agent.memory.view import View
from marlvec.connectors.agent.pipeline import AgentPipeline
from marlvec.connectors.agent.rewards.normalize_reward import NormalizeReward
from marlvec.connectors.agent.rewards.reward_transforms import ClipReward, MapReward, ScaleReward
from marlvec.connectors.agent.shape.drop_keys import DropKeys
from marlvec.connectors.agent.shape.flatten_obs import FlattenObs
from marlvec.connectors.agent.shape.pad_obs import PadObs
from marlvec.connectors.agent.shape.reshape_obs import ReshapeObs
from marlvec.connectors.agent.shape.transpose_obs import TransposeObs
from marlvec.connectors.agent.values.cast_obs import CastObs
from marlvec.connectors.agent.values.clip_obs import ClipObs
from marlvec.connectors.agent.values.map_obs import MapObs
from marlvec.connectors.agent.values.normalize_obs import NormalizeObs
from marlvec.connectors.agent.values.one_hot_obs import OneHotObs
from marlvec.connectors.agent.values.per_agent import PerAgent
from marlvec.connectors.agent.values.scale_obs import ScaleObs

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
    "TimeFeature",
    "TransposeObs",
    "View",
]
