"""What the tests of the action side are fed with: decisions of agents whose episodes come and go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Box

from marlvec.connectors import ActionPipeline, Rows
from marlvec.connectors.connector import ActionConnector
from marlvec.testing.connector_trial import SampledRows
from tests.connectors.helpers.samples import Space

AGENTS = ("wolf", "hare")
OBS = Box(-1, 1, (2,))


def bind(piece: ActionConnector, space: Space, *, training: bool = True) -> ActionPipeline:
    """The piece in a pipeline that knows what the env takes."""
    pipeline = ActionPipeline([piece])
    pipeline.bind(space, AGENTS)
    return pipeline.train() if training else pipeline.eval()


def decisions(actions: Any, *, envs: int = 1, agents: int = 1, t: int = 0, eps: int = 0, **columns: Any) -> Rows:
    """One decision of every agent of every env, in order; all are at the same ``t`` of their episodes."""
    n = envs * agents
    env_id = np.repeat(np.arange(envs), agents)
    return Rows(
        env_id=env_id,
        agent_index=np.tile(np.arange(agents), envs),
        eps_id=eps * envs + env_id,
        t=np.full(n, t),
        first=np.full(n, t == 0),
        actions=actions,
        **columns,
    )


def play(
    space: Space, ticks: int, *, envs: int = 3, agents: int = 2, seed: int = 0, mask: Space | None = None
) -> list[Rows]:
    """Draw ticks of an imagined rollout, whose actions are members of ``space``, with action masks of ``mask``."""
    story = SampledRows(OBS, space, OBS if mask is None else mask, {}, envs, agents, seed)
    acting = [moment.take(~moment.rows.last) for moment in story.moments(ticks)]
    return [moment.rows.replace(**moment.answer) for moment in acting]


def send(pipeline: ActionPipeline, ticks: Sequence[Rows]) -> list[Rows]:
    return [pipeline(rows) for rows in ticks]
