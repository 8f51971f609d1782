"""Pure, batched transforms over rows: agent side before a policy, action side after it.

Always imported as ``marlvec.connectors``, also in a checkout where this folder stands at the top.
"""

from __future__ import annotations

if __name__ != "marlvec.connectors":
    raise ImportError(
        f"import marlvec.connectors, not {__name__}: under a second name every class here would exist twice, "
        f"and isinstance checks and pickles would fail"
    )

from marlvec.connectors.action import ActionPipeline, ClipActions, ReadOnlyActions, ToNumpy, UnsquashActions
from marlvec.connectors.agent import AgentIndicator, AgentPipeline, ClipReward, FlattenObs, FrameStack, NormalizeObs
from marlvec.connectors.connector import ActionConnector, AgentConnector, Connector
from marlvec.connectors.function import (
    FunctionActionConnector,
    FunctionAgentConnector,
    action_connector,
    agent_connector,
)
from marlvec.connectors.pipeline import Pipeline
from marlvec.connectors.rows import Rows
from marlvec.connectors.stage import Timing
from marlvec.connectors.table import AgentTable
from marlvec.connectors.trees import Tree

__all__ = [
    "ActionConnector",
    "ActionPipeline",
    "AgentConnector",
    "AgentIndicator",
    "AgentPipeline",
    "AgentTable",
    "ClipActions",
    "ClipReward",
    "Connector",
    "FlattenObs",
    "FrameStack",
    "FunctionActionConnector",
    "FunctionAgentConnector",
    "NormalizeObs",
    "Pipeline",
    "ReadOnlyActions",
    "Rows",
    "Timing",
    "ToNumpy",
    "Tree",
    "UnsquashActions",
    "action_connector",
    "agent_connector",
]
