"""What the tests of the action side are fed with: decisions of agents whose episodes come and go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from marlvec.connectors import ActionPipeline, Rows
from marlvec.connectors.connector import ActionConnector
from tests.connectors.helpers.samples import Space, batch

AGENTS = ("wolf", "hare")


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
    space: Space, ticks: int, *, envs: int = 3, agents: int = 2, seed: int = 0, mask: int | None = None
) -> list[Rows]:
    """Ticks of an imagined rollout, whose actions are members of the space.

    Episodes are of any length from 1, agents are absent now and then, and rows stand in any order.

    Args:
        space: Of the policy's actions.
        ticks: How many.
        envs: Number of envs.
        agents: Number of agents.
        seed: Equal seeds give equal rows.
        mask: Length of action masks to give, which allow the first choice at least, and the last one; None: no masks.
    """
    rng = np.random.default_rng(seed)
    n = envs * agents
    env_id, agent_index = np.divmod(np.arange(n), agents)
    t, eps = np.zeros(n, np.int64), np.arange(envs)
    out = []
    for tick in range(ticks):
        ends = rng.random(envs) < 0.25
        eps[ends] = eps.max() + 1 + np.arange(ends.sum())
        t[ends[env_id]] = 0
        columns: dict[str, Any] = {
            "env_id": env_id,
            "agent_index": agent_index,
            "eps_id": eps[env_id],
            "t": t.copy(),
            "first": t == 0,
            "obs": rng.normal(size=(n, 2)),
            "actions": batch(space, n, seed * 1000 + tick),
        }
        if mask is not None:
            columns["action_mask"] = rng.random((n, mask)) < 0.5
            columns["action_mask"][:, [0, -1]] = True
        here = rng.permutation(np.flatnonzero(rng.random(n) < 0.8))
        out.append(Rows(columns).take(here))
        t[here] += 1
    return out


def send(pipeline: ActionPipeline, ticks: Sequence[Rows]) -> list[Rows]:
    return [pipeline(rows) for rows in ticks]
