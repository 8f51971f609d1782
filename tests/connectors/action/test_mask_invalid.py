from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from marlvec.connectors import Rows
from marlvec.connectors.action.valid_actions import MaskInvalid
from marlvec.errors import ArgumentError, ContractError
from tests.connectors.helpers.action_samples import bind, decisions
from tests.connectors.helpers.samples import Space, discretes, multi_discretes

GEAR = spaces.Discrete(4, start=10)
DIALS = spaces.MultiDiscrete([2, 3], start=[0, 5])


def sent(piece: MaskInvalid, space: Space, actions: Any, mask: Any, **columns: Any) -> Rows:
    actions = np.asarray(actions)
    return bind(piece, space)(decisions(actions, envs=len(actions), action_mask=np.array(mask, bool), **columns))


def test_a_forbidden_action_becomes_the_first_that_is_allowed() -> None:
    out = sent(MaskInvalid(), GEAR, [10, 11, 13], [[1, 1, 1, 1], [0, 0, 1, 1], [0, 1, 1, 0]])
    assert out.actions_for_env.tolist() == [10, 12, 11]
    assert out.actions.tolist() == [10, 11, 13]


def test_dimension_by_dimension() -> None:
    mask = [[1, 0, 1, 1, 1], [0, 1, 0, 0, 1], [1, 1, 0, 1, 1]]
    out = sent(MaskInvalid(), DIALS, [[1, 6], [0, 5], [1, 7]], mask)
    assert out.actions_for_env.tolist() == [[0, 6], [1, 7], [1, 7]]


@given(space=st.one_of(discretes(), multi_discretes()), fallback=st.sampled_from(["first", "random"]), data=st.data())
def test_what_is_allowed_stays_and_what_is_not_is_replaced(space: Any, fallback: Any, data: st.DataObject) -> None:
    """Against a loop over rows and dimensions."""
    sizes = np.ravel(space.n if isinstance(space, spaces.Discrete) else space.nvec)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**20)))
    masks = [[rng.random(size) < 0.5 for size in sizes] for _ in range(7)]
    for row in masks:
        for part in row:
            part[rng.integers(len(part))] = True
    chosen = np.array([[rng.integers(size) for size in sizes] for _ in range(7)])
    actions = (chosen.reshape(7, *space.shape) + space.start).astype(space.dtype)
    piece = MaskInvalid(fallback, seed=data.draw(st.integers(0, 9)))
    out = sent(piece, space, actions, [np.concatenate(row) for row in masks]).actions_for_env
    assert out.dtype == space.dtype
    got = (out - space.start).reshape(7, len(sizes))
    for i in range(7):
        for d in range(len(sizes)):
            if masks[i][d][chosen[i, d]]:
                assert got[i, d] == chosen[i, d]
            elif fallback == "first":
                assert got[i, d] == np.flatnonzero(masks[i][d])[0]
            else:
                assert masks[i][d][got[i, d]]


def test_random_ones_are_drawn_evenly_from_what_is_allowed() -> None:
    n = 6000
    mask = np.tile(np.array([0, 1, 0, 1]) > 0, (n, 1))
    mask[::2, 2] = True
    out = sent(MaskInvalid("random"), GEAR, np.full(n, 10), mask).actions_for_env - 10
    for allowed, part in (([1, 2, 3], out[::2]), ([1, 3], out[1::2])):
        counts = np.bincount(part, minlength=4)
        expected = n / 2 / len(allowed)
        assert counts.sum() == counts[allowed].sum()
        assert (np.abs(counts[allowed] - expected) < 5 * np.sqrt(expected)).all()
    other = sent(MaskInvalid("random", seed=1), GEAR, np.full(n, 10), mask).actions_for_env - 10
    assert (other != out).any()


def test_or_it_is_an_error() -> None:
    piece = MaskInvalid("raise")
    assert sent(piece, GEAR, [12], [[0, 0, 1, 0]]).actions_for_env.tolist() == [12]
    with pytest.raises(ContractError, match=r"the action 11 of env 1, agent 0 is forbidden by its action mask"):
        sent(piece, GEAR, [12, 11], [[0, 0, 1, 0], [1, 0, 1, 1]])


@pytest.mark.parametrize("fallback", ["first", "random"])
def test_where_nothing_is_allowed_there_is_nothing_to_send(fallback: Any) -> None:
    with pytest.raises(ContractError, match="the action mask of env 1, agent 0 allows nothing"):
        sent(MaskInvalid(fallback), GEAR, [10, 10], [[1, 1, 1, 1], [0, 0, 0, 0]])
    with pytest.raises(ContractError, match="the action mask of env 0, agent 0 allows nothing"):
        sent(MaskInvalid(fallback), DIALS, [[0, 5]], [[1, 1, 0, 0, 0]])


@pytest.mark.parametrize("actions", [[14], [9], [10.0]])
def test_what_is_no_action_is_an_error_and_not_replaced(actions: Any) -> None:
    with pytest.raises(ContractError, match="expected (an action|actions) of Discrete"):
        sent(MaskInvalid(), GEAR, actions, [[1, 1, 1, 1]])


@pytest.mark.parametrize("mask", [[[1, 1, 1]], [[1, 1, 1, 1, 1]], [1]])
def test_a_mask_of_another_length_is_an_error(mask: Any) -> None:
    with pytest.raises(ContractError, match="expected action masks of 4 entries"):
        sent(MaskInvalid(), GEAR, [10], mask)


def test_without_masks_there_is_nothing_to_do() -> None:
    rows = decisions(np.array([3]))
    assert bind(MaskInvalid(), spaces.Discrete(4))(rows).actions_for_env is rows.actions
    boxes = decisions(np.ones((1, 2)), action_mask=np.zeros((1, 2), bool))
    assert bind(MaskInvalid(), spaces.Box(0, 1, (2,)))(boxes).actions_for_env is boxes.actions


def test_in_evaluation_too_and_rows_without_ids() -> None:
    pipeline = bind(MaskInvalid(), GEAR, training=False)
    rows = Rows(actions=np.array([10, 11], np.int8), action_mask=np.array([[0, 0, 0, 1]] * 2, bool))
    assert pipeline(rows).actions_for_env.tolist() == [13, 13]
    with pytest.raises(ContractError, match="of row 1 allows nothing"):
        pipeline(rows.replace(action_mask=np.array([[0, 0, 0, 1], [0] * 4], bool)))
    with pytest.raises(ContractError, match="no 'env_id'"):
        bind(MaskInvalid("random"), GEAR)(rows)


def test_the_fallback_is_one_of_three() -> None:
    with pytest.raises(ArgumentError, match='fallback must be "first", "random" or "raise"'):
        MaskInvalid("last")  # type: ignore[arg-type]  # a wrong value is the point
