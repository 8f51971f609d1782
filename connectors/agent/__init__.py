"""Agent-side connectors: what stands between the env's observations and the policy."""

from __future__ import annotations

from marlvec.connectors.agent.action_mask_from_obs import ActionMaskFromObs
from marlvec.connectors.agent.agent_indicator import AgentIndicator
from marlvec.connectors.agent.cast_obs import CastObs
from marlvec.connectors.agent.clip_obs import ClipObs
from marlvec.connectors.agent.clip_reward import ClipReward
from marlvec.connectors.agent.death_mask import DeathMask
from marlvec.connectors.agent.delay_obs import DelayObs
from marlvec.connectors.agent.drop_keys import DropKeys
from marlvec.connectors.agent.filter_rows import FilterRows, RowFilter
from marlvec.connectors.agent.flatten_obs import FlattenObs
from marlvec.connectors.agent.frame_skip import FrameSkip
from marlvec.connectors.agent.frame_stack import FrameStack
from marlvec.connectors.agent.grayscale_obs import GrayscaleObs
from marlvec.connectors.agent.map_obs import MapObs
from marlvec.connectors.agent.map_reward import MapReward
from marlvec.connectors.agent.max_obs import MaxObs
from marlvec.connectors.agent.normalize_obs import NormalizeObs
from marlvec.connectors.agent.normalize_reward import NormalizeReward
from marlvec.connectors.agent.one_hot_obs import OneHotObs
from marlvec.connectors.agent.pad_obs import PadObs
from marlvec.connectors.agent.per_agent import PerAgent
from marlvec.connectors.agent.pipeline import AgentPipeline
from marlvec.connectors.agent.prev_actions import PrevActions
from marlvec.connectors.agent.prev_rewards import PrevRewards
from marlvec.connectors.agent.reshape_obs import ReshapeObs
from marlvec.connectors.agent.resize_obs import ResizeObs
from marlvec.connectors.agent.rnn_state import RnnState
from marlvec.connectors.agent.scale_obs import ScaleObs
from marlvec.connectors.agent.scale_reward import ScaleReward
from marlvec.connectors.agent.state_in_obs import StateInObs
from marlvec.connectors.agent.team_obs import TeamObs
from marlvec.connectors.agent.time_feature import TimeFeature
from marlvec.connectors.agent.transpose_obs import TransposeObs
from marlvec.connectors.agent.view import View

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
