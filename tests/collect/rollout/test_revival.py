"""Agents that end and are born again in the same episode: each life is a trajectory of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from marlvec.collect import Collector
from marlvec.connectors import FrameStack, GeneralAdvantageEstimation
from marlvec.envs import MultiAgentEnv
from marlvec.envs.env import Slot
from marlvec.errors import ContractError
from marlvec.policies import FunctionPolicy
from marlvec.testing import check_env
from marlvec.vector.in_process import SyncVectorEnv
from tests.collect.helpers.players import MODES

LENGTH, LIFE, PAUSE = 12, 3, 2


class Phoenix(MultiAgentEnv):
    """Agent 0 lives on; agent 1 dies after three steps, and is born again two steps later."""

    def __init__(self) -> None:
        self.name, self.agents = "phoenix", ("a", "b")
        self.observation_spaces = (Box(0, 99, (2,), np.float64),) * 2
        self.action_spaces = (Discrete(2),) * 2

    def reset(self, slot: Slot, *, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        self.t = 0
        for a in range(2):
            self.show(slot, a)
            slot.alive[a] = slot.acting[a] = True

    def step(self, slot: Slot) -> None:
        slot.read_actions()
        self.t += 1
        phase = self.t % (LIFE + PAUSE)
        over = self.t == LENGTH
        slot.reward[0] = 1.0
        self.show(slot, 0)
        if slot.alive[1]:
            slot.reward[1] = 10.0 + self.t
            self.show(slot, 1)
            if phase == LIFE:
                slot.terminated[1], slot.alive[1], slot.acting[1] = True, False, False
        elif phase == 0:
            self.show(slot, 1)
            slot.alive[1] = slot.acting[1] = True
        if over:
            for a in range(2):
                if slot.alive[a]:
                    slot.truncated[a], slot.alive[a], slot.acting[a] = True, False, False
            slot.done = True

    def show(self, slot: Slot, a: int) -> None:
        slot.write_obs(a, np.array([self.t, a], np.float64))


def policy() -> FunctionPolicy:
    return FunctionPolicy(lambda rows: (np.zeros(len(rows), np.int64), {"values": rows["obs"][:, 0] * 0.5}))


@pytest.mark.checklist(108)
@pytest.mark.fault("D3")
@pytest.mark.parametrize("mode", MODES)
def test_each_revival_begins_a_new_trajectory(mode: str) -> None:
    chain, gae = [FrameStack(2)], GeneralAdvantageEstimation(0.9, 0.8, lambda rows: rows["obs"][:, 0])
    with SyncVectorEnv([Phoenix] * 2, autoreset_mode=mode) as envs:
        collector = Collector(
            envs, policy(), agent_connectors=chain, learner_connectors=[gae], batch_mode="complete", seed=0
        )
        batch = collector.collect(episodes=4)
        episodes = batch.episodes(envs.agents)
    rows = batch["main"]
    mine = rows.take((rows["agent_index"] == 1) & (rows["eps_id"] == 0))
    lives = mine.split_by_fragment()
    assert [part["env_t"].tolist() for part in lives] == [[0, 1, 2], [5, 6, 7], [10, 11]]
    assert [part["next_env_t"].tolist() for part in lives] == [[1, 2, 3], [6, 7, 8], [11, 12]]
    assert mine["t"].tolist() == list(range(8))
    assert len(set(mine["unroll_id"].tolist())) == 3
    assert mine["terminated"].tolist() == [False, False, True, False, False, True, False, False]
    assert mine["rewards"].tolist() == [11, 12, 13, 16, 17, 18, 21, 22]
    for part in lives:
        # The first stack of a life holds nothing of the one before.
        born = float(part["env_t"][0])
        assert set(part["obs"][0].ravel().tolist()) <= {0.0, 1.0, born}
        assert part["next_obs"][-1][-2] == part["next_env_t"][-1]
    # Nothing of a later life flows into the advantages of an earlier one: its end is worth 0.
    first = lives[0]
    delta = 13.0 - first["values"][-1]
    np.testing.assert_allclose(first["advantages"][-1], delta, rtol=1e-6)
    record = collector.metrics.episodes[0]
    assert record.returns_A.tolist() == [12.0, 11 + 12 + 13 + 16 + 17 + 18 + 21 + 22]
    assert record.lengths_A.tolist() == [12, 8]
    for episode in episodes:
        agent_episodes = episode.episodes_of("b")
        assert [(t.env_start, t.env_stop, t.first_t, t.terminated) for t in agent_episodes] == [
            (0, 3, 0, True),
            (5, 8, 3, True),
            (10, 12, 6, False),
        ]
        there = episode.decided()[:, 1]
        assert there.tolist() == [True] * 3 + [False] * 2 + [True] * 3 + [False] * 2 + [True] * 2
        seen = episode.at("obs", agent="b", fill=-1)[:, -2]
        assert seen.tolist() == [0, 1, 2, 3, -1, 5, 6, 7, 8, -1, 10, 11, 12]
        for step in range(1, LENGTH):
            head, tail = episode.cut(step, lookback=2)
            assert head is not None
            assert tail is not None
            whole = head.concat(tail)
            assert [len(track) for track in whole.agent_episodes] == [12, 3, 3, 2]
            np.testing.assert_array_equal(whole.at("obs", fill=-1), episode.at("obs", fill=-1))


@pytest.mark.parametrize("size", [1, 5, 7])
def test_pieces_of_batches_keep_lives_apart(size: int) -> None:
    with SyncVectorEnv([Phoenix]) as envs:
        collector = Collector(envs, policy(), seed=0)
        found = [e for _ in range(24 // size + 1) for e in collector.collect(env_steps=size).episodes()]
    whole = [e for e in found if e.eps_id == 0]
    joined = whole[0]
    for piece in whole[1:]:
        joined = joined.concat(piece)
    assert [(t.env_start, t.env_stop) for t in joined.agent_episodes] == [(0, 12), (0, 3), (5, 8), (10, 12)]


def test_the_check_of_envs_lets_them_be() -> None:
    check_env(Phoenix)


def test_acting_without_being_alive_is_an_error() -> None:
    class Haunted(Phoenix):
        def step(self, slot: Slot) -> None:
            super().step(slot)
            if self.t == 4:
                slot.acting[1] = True

    with SyncVectorEnv([Haunted]) as envs:
        collector = Collector(envs, policy(), seed=0)
        with pytest.raises(ContractError, match="agent 'b' is to act, but it has ended already"):
            collector.collect(env_steps=6)
