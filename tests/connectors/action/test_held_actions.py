"""StickyActions and RepeatActions: what sends an action again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from marlvec.connectors import ActionPipeline, ClipActions, Rows
from marlvec.connectors._support.row_random import RowRandom
from marlvec.connectors.action.held_actions import RepeatActions, StickyActions
from marlvec.errors import ArgumentError, ContractError, StateError, UnsupportedSpaceError
from tests.connectors.helpers.action_samples import bind, decisions, play
from tests.connectors.helpers.samples import any_spaces, same_tree, vectors

GEAR = spaces.Discrete(1000)


def row_of(rows: Rows, i: int) -> Any:
    return rows.take([i]).actions


@pytest.mark.slow("draws many batches")
@given(space=any_spaces(), p=st.sampled_from([0.0, 0.3, 0.9, 1.0]), seed=st.integers(0, 5), data=st.data())
def test_sticky_against_a_loop_over_rows(space: Any, p: float, seed: int, data: st.DataObject) -> None:
    """Any space, episodes that come and go, resets: the last sent action of each agent, kept in a dict."""
    pipeline, random = bind(StickyActions(p, seed=seed), space), RowRandom(seed, "StickyActions")
    last: dict[tuple[int, int], Any] = {}
    for rows in play(space, data.draw(st.integers(1, 8)), seed=data.draw(st.integers(0, 9))):
        out = pipeline(rows)
        sticks = random.uniform(rows)[:, 0] < p
        for i in range(len(rows)):
            pair = int(rows.env_id[i]), int(rows.agent_index[i])
            if rows.first[i] or pair not in last or not sticks[i]:
                last[pair] = row_of(rows, i)
            same_tree(out.take([i]).actions_for_env, last[pair])
        env = data.draw(st.integers(0, 3))
        pipeline.reset([env])
        last = {pair: action for pair, action in last.items() if pair[0] != env}


@pytest.mark.slow("draws many batches")
@given(space=any_spaces(), k=st.integers(1, 4), data=st.data())
def test_repeat_against_a_loop_over_rows(space: Any, k: int, data: st.DataObject) -> None:
    """Decisions 0, k, 2k, … of each agent's episode are sent, whatever the agents of other rows are at."""
    pipeline = bind(RepeatActions(k), space)
    count: dict[tuple[int, int], int] = {}
    last: dict[tuple[int, int], Any] = {}
    for rows in play(space, data.draw(st.integers(1, 9)), seed=data.draw(st.integers(0, 9))):
        out = pipeline(rows)
        for i in range(len(rows)):
            pair = int(rows.env_id[i]), int(rows.agent_index[i])
            count[pair] = 0 if rows.first[i] else count.get(pair, -1) + 1
            if count[pair] % k == 0:
                last[pair] = row_of(rows, i)
            same_tree(out.take([i]).actions_for_env, last[pair])
        env = data.draw(st.integers(0, 3))
        pipeline.reset([env])
        count = {pair: number for pair, number in count.items() if pair[0] != env}


def test_an_action_sticks_as_often_as_asked_and_never_across_an_episodes_start() -> None:
    envs, ticks = 300, 40
    pipeline = bind(StickyActions(0.25), GEAR)
    stuck = np.zeros((ticks, envs), bool)
    for tick in range(ticks):
        rows = decisions(np.full(envs, tick), envs=envs, t=tick % 10, eps=tick // 10)
        stuck[tick] = pipeline(rows).actions_for_env != tick
    assert not stuck[::10].any()
    others = np.delete(stuck, np.s_[::10], axis=0)
    assert abs(others.mean() - 0.25) < 5 * np.sqrt(0.25 * 0.75 / others.size)


def test_what_sticks_is_what_was_sent_not_what_the_policy_gave() -> None:
    pipeline = bind(StickyActions(1.0), GEAR)
    assert [int(pipeline(decisions(np.array([10 + t]), t=t)).actions_for_env[0]) for t in range(4)] == [10] * 4
    again = decisions(np.array([77]), t=0, eps=1)
    assert pipeline(again).actions_for_env.tolist() == [77]
    assert pipeline(again).actions.tolist() == [77]


def test_sticky_is_part_of_the_env_so_it_stays_in_evaluation() -> None:
    pipeline = bind(StickyActions(1.0), GEAR, training=False)
    assert [int(pipeline(decisions(np.array([t]), t=t)).actions_for_env[0]) for t in range(3)] == [0, 0, 0]


def test_repeat_sends_every_kth_decision_k_times() -> None:
    pipeline = bind(RepeatActions(3), GEAR)
    sent = [int(pipeline(decisions(np.array([t]), t=t)).actions_for_env[0]) for t in range(8)]
    assert sent == [0, 0, 0, 3, 3, 3, 6, 6]
    assert pipeline(decisions(np.array([99]), t=0)).actions_for_env.tolist() == [99]
    assert pipeline(decisions(np.array([98]), t=1)).actions_for_env.tolist() == [99]
    once = bind(RepeatActions(1), GEAR)
    assert [int(once(decisions(np.array([t]), t=t)).actions_for_env[0]) for t in range(3)] == [0, 1, 2]


def test_rows_without_a_first_column_begin_when_they_are_new() -> None:
    pipeline = bind(RepeatActions(2), GEAR)
    rows = decisions(np.array([5])).drop("first")
    assert pipeline(rows).actions_for_env.tolist() == [5]
    assert pipeline(rows.replace(actions=np.array([6]))).actions_for_env.tolist() == [5]
    pipeline.reset()
    assert pipeline(rows.replace(actions=np.array([7]))).actions_for_env.tolist() == [7]


def test_what_it_gave_is_not_changed_by_what_comes_after() -> None:
    pipeline = bind(RepeatActions(2), vectors(1))
    actions = np.ones((1, 1), np.float32)
    out = pipeline(decisions(actions)).actions_for_env
    actions[:] = 5
    out[:] = 7
    assert pipeline(decisions(np.zeros((1, 1), np.float32), t=1)).actions_for_env.tolist() == [[1]]


def test_the_history_outlives_a_new_space_of_equal_slots_and_no_other() -> None:
    pipeline = bind(RepeatActions(2), vectors(1))
    ones, twos = np.ones((1, 1), np.float32), np.full((1, 1), 2, np.float32)
    pipeline(decisions(ones))
    pipeline.append(ClipActions())  # every edit sets all pieces up anew
    assert pipeline(decisions(twos, t=1)).actions_for_env.tolist() == [[1]]
    pipeline.bind(spaces.Tuple([vectors(1, 0, 9)]))
    assert pipeline(decisions((twos,), t=2)).actions_for_env[0].tolist() == [[2]]
    pipeline.bind(spaces.Box(0, 9, (1,), np.float64))
    assert pipeline(decisions(ones, t=3)).actions_for_env.tolist() == [[1]]


def test_actions_of_another_dtype() -> None:
    """Floats are rounded to the Box's, and ints may be of any dtype that holds them."""
    pipeline = bind(RepeatActions(2), vectors(1))
    sent = [pipeline(decisions(np.array([[0.1]]), t=t)).actions_for_env for t in range(2)]
    assert [out.dtype for out in sent] == [np.float32] * 2
    assert sent[0] == sent[1] == np.float32(0.1)
    ints = bind(RepeatActions(2), spaces.Box(0, 9, (1,), np.int8))
    assert ints(decisions(np.array([[7.0]]))).actions_for_env.dtype == np.int8
    for bad in ([[300]], [[0.5]], [[np.nan]]):
        with pytest.raises(ContractError, match=r"do not fit int8.*put ClipActions"):
            ints(decisions(np.array(bad)))
    assert ints(decisions(np.array([[3]]), t=1)).actions_for_env.tolist() == [[7]]  # nothing was taken in


@pytest.mark.parametrize("piece", [StickyActions(), RepeatActions(2)])
def test_what_has_no_fixed_size_cannot_be_kept(piece: Any) -> None:
    with pytest.raises(UnsupportedSpaceError, match="cannot keep leaf 'say' of Text, which has no fixed size"):
        bind(piece, spaces.Dict({"say": spaces.Text(4), "go": GEAR}))


def test_refusals() -> None:
    for p in (-0.1, 1.1, np.nan):
        with pytest.raises(ArgumentError, match="p must be a probability"):
            StickyActions(p)
    for k in (0, 1.5, True, "2"):
        with pytest.raises(ArgumentError, match="k must be an int from 1 on"):
            RepeatActions(k)  # type: ignore[arg-type]  # a wrong value is the point
    with pytest.raises(StateError, match="does not know its space"):
        RepeatActions(2).load_state_dict({})
    assert RepeatActions(2).state_dict() == {}
    one, two = bind(RepeatActions(2), GEAR), ActionPipeline([RepeatActions(2)])
    two.bind(spaces.Tuple([GEAR, GEAR]))
    with pytest.raises(ArgumentError, match="RepeatActions: actions: expected 2 leaves, got 1"):
        two.load_state_dict(one.state_dict())
    two.bind(vectors(1))
    with pytest.raises(ArgumentError, match="RepeatActions: actions: values: expected float32"):
        two.load_state_dict(one.state_dict())
