"""Histories and statistics over whole runs: every row counted once, and nothing lost with the process that knew it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from marlvec import connectors as c
from marlvec.collect import Collector
from marlvec.policies import FunctionPolicy
from tests.collect.players import MODES, sync


def count_up(rows: c.Rows) -> Any:
    """Answers with a state that counts the agent's decisions."""
    return np.zeros(len(rows), np.int64), {"state_out": rows["state_in"] + 1, "turn": rows["t"]}


@pytest.mark.mostly_slow("draws many batches", quick=2)
@pytest.mark.fault("E8")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["parallel", "turns", "keyed"])
def test_each_row_and_each_answer_passes_each_piece_once(kind: str, mode: str) -> None:
    """A row or an answer that passed twice, or not at all, would shift every history that counts them.

    The amounts asked for are such that calls return early, in the middle of a step and of an episode.
    """
    spread = c.NormalizeReward(0.5, clip=None)
    pieces = [
        c.RnnState(np.array(0)),
        c.AgentPipeline([c.View("rows", "t", "-2:0", -1), c.View("turns", "turn", "-2:-1", np.array(-1))]),
        *(spread, c.PrevRewards(2)),
    ]
    with sync(kind, 3, 3, mode) as envs:
        collector = Collector(envs, FunctionPolicy(count_up), agent_connectors=pieces, seed=6)
        batches = [collector.collect(env_steps=n)["main"] for n in (50, 1, 7, 64, 13)]
        batches += [collector.collect(agent_steps=n)["main"] for n in (1, 2, 31)]
        batches.append(collector.collect(env_steps=9)["main"])  # and what was closed before
    rows = {key: np.concatenate([batch[key] for batch in batches]) for key, _ in batches[0].items()}
    t = rows["t"]
    assert (t > 3).any()
    np.testing.assert_array_equal(rows["state_in"], t)
    back = t[:, None] + np.array([-2, -1, 0])
    np.testing.assert_array_equal(rows["rows"], np.where(back < 0, -1, back))
    np.testing.assert_array_equal(rows["turns"], np.where(back < 0, -1, back)[:, :2])
    lanes = list(zip(*(rows[name].tolist() for name in ("eps_id", "env_id", "agent_index")), strict=True))
    paid = {
        (*lane, turn): reward for lane, turn, reward in zip(lanes, t.tolist(), rows["rewards"].tolist(), strict=True)
    }
    for lane, turn, shown in zip(lanes, t.tolist(), rows["prev_rewards"].tolist(), strict=True):
        assert shown == [paid[(*lane, when)] if when >= 0 else 0.0 for when in (turn - 2, turn - 1)]
    assert spread.counts[0] == len(t)  # one reward per transition, its last one included
