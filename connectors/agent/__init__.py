"""Agent-side connectors: what stands between the env's observations and the policy."""

from __future__ import annotations

from marlvec.connectors.agent.agent_indicator import AgentIndicator
from marlvec.connectors.agent.clip_reward import ClipReward
from marlvec.connectors.agent.flatten_obs import FlattenObs
from marlvec.connectors.agent.frame_stack import FrameStack
from marlvec.connectors.agent.normalize_obs import NormalizeObs
from marlvec.connectors.agent.pipeline import AgentPipeline

__all__ = ["AgentIndicator", "AgentPipeline", "ClipReward", "FlattenObs", "FrameStack", "NormalizeObs"]
