"""A story as a learner reads it: the transitions of a finished batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium.spaces import Space
from numpy.typing import NDArray

from marlvec.connectors.checks.story import ColumnLike, Story
from marlvec.connectors.rows import Rows
from marlvec.connectors.trees import Tree

__all__ = ["transitions"]

_LENGTH = 20  # moments of the story


def transitions(
    obs: Space[Any], action: Space[Any], columns: Mapping[str, ColumnLike], num_envs: int, num_agents: int, seed: int
) -> Rows:
    """Draw the rows of one policy's batch, fragment after fragment, each in the order of time.

    The columns are those of a `SampleBatch`; ``state`` and ``next_state``; ``logp`` and ``values`` of the policy; and
    what learner connectors add for each other: ``next_values``, ``target_logp``, ``advantages``. Long fragments are cut
    in two.

    Args:
        obs: Space of one observation.
        action: Space of one action.
        columns: Further columns.
        num_envs: How many envs there are.
        num_agents: And agents in each.
        seed: Of all that is drawn.
    """
    moments = Story(obs, action, action, columns, num_envs, num_agents, seed).moments(_LENGTH)
    rows = Rows.concat([moment.rows for moment in moments])
    answer = Rows.concat([moment.answer for moment in moments])
    before, after, fragment = _steps(rows)
    now, then, said = rows.take(before), rows.take(after), answer.take(before)
    rng = np.random.default_rng([seed, _LENGTH])
    n = len(now)
    made: dict[str, Tree] = {
        **{
            name: now[name]
            for name in now.columns
            if name not in ("reward", "terminated", "truncated", "first", "last")
        },
        **said.columns,
        "actions_for_env": said["actions"],
        "rewards": then["reward"],
        "next_obs": then["obs"],
        "next_state": then["state"],
        "terminated": then["terminated"],
        "truncated": then["truncated"],
        "unroll_id": fragment,
        "policy_version": np.zeros(n, np.int64),
        "next_values": answer.take(after)["values"],
        "target_logp": said["logp"] + rng.normal(size=n).astype(np.float32) / 4,
        "advantages": rng.normal(size=n).astype(np.float32),
    }
    return Rows(made)


def _steps(rows: Rows) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Where each transition begins and ends, and the number of its fragment."""
    lanes = list(zip(rows.eps_id.tolist(), rows.agent_index.tolist(), strict=True))
    before, after, fragment, number = [], [], [], 0
    for lane in dict.fromkeys(lanes):
        at = [i for i, other in enumerate(lanes) if other == lane]
        cut = len(at) // 2 if len(at) > 6 else 0
        for k in range(len(at) - 1):
            before.append(at[k])
            after.append(at[k + 1])
            fragment.append(number + (k >= cut > 0))
        number += 2
    return np.array(before, np.int64), np.array(after, np.int64), np.array(fragment, np.int64)
