"""Batched transforms of rows: agent side before a policy, action side after it, learner side on finished batches.

Always imported as ``marlvec.connectors``, also in a checkout, where this folder is at the top.
"""

from __future__ import annotations

if __name__ != "marlvec.connectors":
    raise ImportError(
        f"import marlvec.connectors, not {__name__}: under a second name every class here would exist twice, "
        f"and isinstance checks and pickles would fail"
    )

from marlvec.connectors import action, agent, learner
from marlvec.connectors.action import *  # noqa: F403  # each side has the list of its own connectors
from marlvec.connectors.agent import *  # noqa: F403  # likewise
from marlvec.connectors.agent_tables import AgentTable
from marlvec.connectors.connector import ActionConnector, AgentConnector, Connector, LearnerConnector
from marlvec.connectors.function import action_connector, agent_connector, learner_connector
from marlvec.connectors.learner import *  # noqa: F403  # likewise
from marlvec.connectors.pipeline import Pipeline
from marlvec.connectors.registry import catalogue, connector_from_config, register_connector, register_function
from marlvec.connectors.rows import RowRandom, Rows

__all__ = [
    "ActionConnector",
    "AgentConnector",
    "AgentTable",
    "Connector",
    "LearnerConnector",
    "Pipeline",
    "RowRandom",
    "Rows",
    "action_connector",
    "agent_connector",
    "catalogue",
    "connector_from_config",
    "learner_connector",
    "register_connector",
    "register_function",
]
__all__ += agent.__all__
__all__ += action.__all__
__all__ += learner.__all__
