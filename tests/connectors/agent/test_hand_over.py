"""`hand_over` and `take_merged`: what is learnt while others join counts once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from marlvec.connectors import ActionPipeline, AgentPipeline, EpsilonGreedy, FrameStack, NormalizeObs, NormalizeReward
from tests.connectors.agent.test_moments import assert_exact
from tests.connectors.helpers.samples import rows_of, same_tree, vectors

SPACE = vectors(2, dtype=np.float64)


def chain(*, per_agent: bool) -> AgentPipeline:
    pipeline = AgentPipeline([FrameStack(1), NormalizeObs(per_agent=per_agent), NormalizeReward(per_agent=per_agent)])
    pipeline.bind(SPACE)
    return pipeline


@pytest.mark.slow("draws many batches")
@settings(max_examples=60)
@given(
    per_agent=st.booleans(),
    copies=st.integers(1, 4),
    rounds=st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=8), max_size=5),
    seed=st.integers(0, 2**16),
)
def test_nothing_is_lost_and_nothing_counts_twice(per_agent: bool, copies: int, rounds: Any, seed: int) -> None:
    """Each round: some learn; each hands over and learns on; what is merged comes to each, or to one in its place."""
    rng = np.random.default_rng(seed)
    chains = [chain(per_agent=per_agent) for _ in range(copies)]
    seen: list[list[Any]] = [[] for _ in range(copies)]  # by each, and in no merged state
    known: list[Any] = []  # behind the merged state

    def learn(i: int, times: int) -> None:
        for _ in range(times):
            obs = rng.normal(3, 2, (4, 2))
            chains[i](rows_of([(0, 0), (1, 0), (0, 1), (1, 1)], obs, rewards=obs[:, 0]))
            seen[i].append(obs)

    for events in rounds:
        for i, times in events:
            learn(i % copies, times)
        handed = [one.hand_over() for one in chains]
        known += [obs for own in seen for obs in own]
        seen = [[] for _ in range(copies)]
        for i, times in events:
            learn((i + 1) % copies, times)
        merged = chain(per_agent=per_agent).merge_states(handed)
        assert merged["FrameStack"] == {}
        if rng.random() < 0.3:
            chains[0], seen[0] = chain(per_agent=per_agent), []  # died, with what it had not handed over
        for one in chains:
            before = one.state_dict()["NormalizeReward"]["returns"]
            one.take_merged(merged)
            same_tree(one.state_dict()["NormalizeReward"]["returns"], before)
        for one, own in zip(chains, seen, strict=True):
            again = chain(per_agent=per_agent)
            again.load_state_dict(one.state_dict())
            same_tree(again.state_dict(), one.state_dict())
            every = np.concatenate([np.zeros((0, 4, 2)), *[obs[None] for obs in known + own]])
            moments = one.state_dict()["NormalizeObs"]["moments"][""]
            for group in range(len(moments["count"])):
                data = every[:, 2 * group : 2 * group + 2] if per_agent else every
                assert_exact(moments, data.reshape(-1, 2), group)


def test_a_state_that_was_handed_over_and_not_yet_merged_can_be_kept() -> None:
    one, other = chain(per_agent=False), chain(per_agent=False)
    for _ in range(2):
        one(rows_of([(0, 0), (1, 0)], np.random.default_rng(0).normal(size=(2, 2)), rewards=np.ones(2)))
        total = one.state_dict()["NormalizeObs"]["moments"]
        one.hand_over()
        same_tree(one.state_dict()["NormalizeObs"]["moments"], total)
    other.load_state_dict(one.state_dict())
    same_tree(other.hand_over(), one.hand_over())
    same_tree(other.merge_states([other.state_dict()]), one.merge_states([one.state_dict()]))


def test_of_decays_the_one_that_has_gone_furthest_counts_and_own_steps_stay() -> None:
    def bound() -> ActionPipeline:
        pipeline = ActionPipeline([EpsilonGreedy(1.0, final=0.0, decay_steps=10)])
        pipeline.bind(spaces.Discrete(3))
        return pipeline

    def decide(pipeline: ActionPipeline, times: int) -> None:
        for t in range(times):
            rows = rows_of([(0, 0)], np.zeros((1, 2)), t=np.array([t]), actions=np.zeros(1, int))
            pipeline(rows.replace(actions_for_env=rows.actions))

    one, other = bound(), bound()
    decide(one, 2)
    decide(other, 5)
    merged = one.merge_states([one.hand_over(), other.hand_over()])
    decide(one, 1)
    decide(other, 1)
    for pipeline, count in ((one, 5), (other, 6), (bound(), 5)):
        pipeline.take_merged(merged)
        assert pipeline.state_dict()["EpsilonGreedy"]["count"]["values"].tolist() == [[count]]
