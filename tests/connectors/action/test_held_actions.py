"""StickyActions and RepeatActions: what sends an action again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from marlvec import connectors as c
from marlvec.connectors.rows import RowRandom
from marlvec.errors import ContractError
from tests.connectors.helpers.action_samples import bind, decisions, play
from tests.connectors.helpers.samples import any_spaces, same_tree, vectors

GEAR = spaces.Discrete(1000)


@pytest.mark.slow("draws many batches")
@given(
    space=any_spaces(),
    k=st.integers(1, 4),
    p=st.one_of(st.none(), st.sampled_from([0.0, 0.3, 0.9, 1.0])),
    seed=st.integers(0, 5),
    data=st.data(),
)
def test_repeated_actions_equal_a_loop_over_rows(
    space: Any, k: int, p: float | None, seed: int, data: st.DataObject
) -> None:
    """Of each agent the last sent action, in a dict: again with chance p, or but for its decisions 0, k, 2k, …

    Any space, episodes that come and go, resets.
    """
    random = RowRandom(seed, "StickyActions")
    pipeline = bind(c.RepeatActions(k) if p is None else c.StickyActions(p, seed=seed), space)
    count: dict[tuple[int, int], int] = {}
    last: dict[tuple[int, int], Any] = {}
    for rows in play(space, data.draw(st.integers(1, 9)), seed=data.draw(st.integers(0, 9))):
        out = pipeline(rows)
        for i, drawn in enumerate(random.uniform(rows)[:, 0]):
            pair = int(rows.env_id[i]), int(rows.agent_index[i])
            count[pair] = 0 if rows.first[i] else count.get(pair, -1) + 1
            if count[pair] == 0 or (drawn >= p if p is not None else count[pair] % k == 0):
                last[pair] = rows.take([i]).actions
            same_tree(out.take([i]).actions_for_env, last[pair])
        env = data.draw(st.integers(0, 3))
        pipeline.reset([env])
        count = {pair: number for pair, number in count.items() if pair[0] != env}


def test_sticky_is_part_of_the_env_so_it_stays_in_evaluation() -> None:
    pipeline = bind(c.StickyActions(1.0), GEAR, training=False)
    assert [int(pipeline(decisions(np.array([t]), t=t)).actions_for_env[0]) for t in range(3)] == [0, 0, 0]


def test_repeat_sends_every_kth_decision_k_times() -> None:
    pipeline = bind(c.RepeatActions(3), GEAR)
    sent = [int(pipeline(decisions(np.array([t]), t=t)).actions_for_env[0]) for t in range(8)]
    assert sent == [0, 0, 0, 3, 3, 3, 6, 6]
    assert pipeline(decisions(np.array([99]), t=0)).actions_for_env.tolist() == [99]
    assert pipeline(decisions(np.array([98]), t=1)).actions_for_env.tolist() == [99]
    once = bind(c.RepeatActions(1), GEAR)
    assert [int(once(decisions(np.array([t]), t=t)).actions_for_env[0]) for t in range(3)] == [0, 1, 2]


def test_rows_without_a_first_column_begin_when_they_are_new() -> None:
    pipeline = bind(c.RepeatActions(2), GEAR)
    rows = decisions(np.array([5])).drop("first")
    assert pipeline(rows).actions_for_env.tolist() == [5]
    assert pipeline(rows.replace(actions=np.array([6]))).actions_for_env.tolist() == [5]
    pipeline.reset()
    assert pipeline(rows.replace(actions=np.array([7]))).actions_for_env.tolist() == [7]


def test_the_history_outlives_a_new_space_of_equal_slots_and_no_other() -> None:
    pipeline = bind(c.RepeatActions(2), vectors(1))
    ones, twos = np.ones((1, 1), np.float32), np.full((1, 1), 2, np.float32)
    pipeline(decisions(ones))
    pipeline.append(c.ClipActions())  # every edit sets all pieces up anew
    assert pipeline(decisions(twos, t=1)).actions_for_env.tolist() == [[1]]
    pipeline.bind(spaces.Tuple([vectors(1, 0, 9)]))
    assert pipeline(decisions((twos,), t=2)).actions_for_env[0].tolist() == [[2]]
    pipeline.bind(spaces.Box(0, 9, (1,), np.float64))
    assert pipeline(decisions(ones, t=3)).actions_for_env.tolist() == [[1]]


def test_actions_of_another_dtype() -> None:
    """Floats are rounded to the Box's, and ints may be of any dtype that holds them."""
    pipeline = bind(c.RepeatActions(2), vectors(1))
    sent = [pipeline(decisions(np.array([[0.1]]), t=t)).actions_for_env for t in range(2)]
    assert [out.dtype for out in sent] == [np.float32] * 2
    assert sent[0] == sent[1] == np.float32(0.1)
    ints = bind(c.RepeatActions(2), spaces.Box(0, 9, (1,), np.int8))
    assert ints(decisions(np.array([[7.0]]))).actions_for_env.dtype == np.int8
    for bad in ([[300]], [[0.5]], [[np.nan]]):
        with pytest.raises(ContractError, match=r"do not fit int8.*put ClipActions"):
            ints(decisions(np.array(bad)))
    assert ints(decisions(np.array([[3]]), t=1)).actions_for_env.tolist() == [[7]]  # nothing was taken in
