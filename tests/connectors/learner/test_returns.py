"""Advantages, returns and n-step transitions against their definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marlvec import connectors as c
from marlvec.errors import ArgumentError, ContractError
from tests.connectors.learner.fragments import (
    GAMMAS,
    Critic,
    Fragment,
    advantage,
    assert_close,
    batches,
    n_step,
    per_row,
    return_to_go,
    rows_of,
)


@pytest.mark.slow("draws many batches")
@pytest.mark.checklist(101)
@given(batch=batches(), gamma=GAMMAS, lambda_=GAMMAS, n=st.integers(1, 12))
def test_every_row_is_what_its_definition_says(batch: list[Fragment], gamma: float, lambda_: float, n: int) -> None:
    """Whatever a fragment's end: 0 after it if terminated, V(final obs) if truncated, V(next obs) if cut."""
    rows, critic = rows_of(batch), Critic()

    out = c.GeneralAdvantageEstimation(gamma, gae_lambda=lambda_, value_function=critic)(rows)
    want = per_row(advantage, batch, gamma, lambda_)
    assert_close(out["advantages"], want)
    assert_close(out["value_targets"], np.array(want) + rows["values"])

    assert_close(c.ReturnsToGo(gamma)(rows)["returns_to_go"], per_row(return_to_go, batch, gamma, False))
    assert_close(c.ReturnsToGo(gamma, critic)(rows)["returns_to_go"], per_row(return_to_go, batch, gamma, True))

    out = c.NStep(n, gamma)(rows)
    steps = per_row(n_step, batch, n, gamma)
    np.testing.assert_allclose(out["rewards"], [reward for reward, _, _ in steps], rtol=1e-12, atol=1e-12)
    assert_close(out["discounts"], [discount for _, _, discount in steps])
    outcome = np.arange(len(rows)) + np.array([k - 1 for _, k, _ in steps], np.int64)
    for name in ("next_obs", "terminated", "truncated"):
        np.testing.assert_array_equal(out[name], rows[name][outcome])
    for name in ("obs", "actions", "values", "t", "unroll_id"):
        assert out[name] is rows[name]

    # One question for all ends, about the final observations of those that are not terminated.
    ends = np.cumsum([len(fragment) for fragment in batch], dtype=np.int64) - 1
    ends = ends[[not fragment.terminated for fragment in batch]] if batch else ends
    assert len(critic.asked) == (2 if len(ends) else 0)
    for asked in critic.asked:
        np.testing.assert_array_equal(asked["obs"], rows["next_obs"][ends])


@pytest.mark.slow("draws many batches")
@given(batch=batches(), gamma=GAMMAS)
def test_phantom_rows_give_the_same_numbers_as_the_value_function(batch: list[Fragment], gamma: float) -> None:
    """Where the values of all rows, phantom ones included, are computed in one pass after AddLastObs."""
    rows, critic = rows_of(batch), Critic()
    longer = c.AddLastObs()(rows)
    longer = longer.replace(values=critic(longer))
    real = ~longer["phantom"]
    for with_critic, without, columns in (
        (
            c.GeneralAdvantageEstimation(gamma, 0.9, critic),
            c.GeneralAdvantageEstimation(gamma, 0.9),
            ("advantages", "value_targets"),
        ),
        (c.ReturnsToGo(gamma, critic), c.ReturnsToGo(gamma, True), ("returns_to_go",)),
        (c.ReturnsToGo(gamma), c.ReturnsToGo(gamma), ("returns_to_go",)),
        (c.NStep(3, gamma), c.NStep(3, gamma), ("rewards", "discounts", "next_obs", "terminated", "truncated")),
    ):
        want, got = with_critic(rows), without(longer)
        for name in columns:
            np.testing.assert_array_equal(got[name][real], want[name])
            if name in ("next_obs", "terminated", "truncated"):
                np.testing.assert_array_equal(got[name][~real], longer[name][~real])
            else:
                assert not got[name][~real].any()


ONE = [Fragment((1.0, 2.0), (10.0, 20.0), "truncated", 30.0, (0.0, 0.0), (0.0, 0.0))]


def test_by_hand() -> None:
    """Two rows, cut off by a time limit: every number can be checked in one's head."""
    rows = rows_of(ONE).replace(next_values=np.array([99.0, 30.0]))
    out = c.GeneralAdvantageEstimation(0.5, 0.5)(rows)
    assert out["advantages"].tolist() == [1 + 10 - 10 + 0.25 * (2 + 15 - 20), 2 + 15 - 20]
    assert out["value_targets"].tolist() == [10.25, 17.0]
    assert c.ReturnsToGo(0.5)(rows)["returns_to_go"].tolist() == [2.0, 2.0]
    assert c.ReturnsToGo(0.5, True)(rows)["returns_to_go"].tolist() == [1 + 0.5 * 17, 17.0]
    out = c.NStep(2, 0.5)(rows)
    assert out["rewards"].tolist() == [2.0, 2.0]
    assert out["discounts"].tolist() == [0.25, 0.5]
    assert out["next_values"].tolist() == [30.0, 30.0]
    assert out["truncated"].tolist() == [True, True]


def test_the_value_function_gets_the_state_after() -> None:
    states = {"h": np.arange(4.0).reshape(2, 2)}
    rows = rows_of(ONE).replace(state_in=states, state_out={"h": states["h"] + 50}, state=np.ones((2, 3)))
    critic = Critic()
    c.GeneralAdvantageEstimation(value_function=critic)(rows)
    (asked,) = critic.asked
    assert asked["state_in"]["h"].tolist() == [[52.0, 53.0]]
    assert asked["t"].tolist() == [2]
    assert "state" not in asked  # of the moment before: nobody knows the one after
    c.GeneralAdvantageEstimation(value_function=critic)(rows.replace(next_state=np.full((2, 3), 5.0)))
    assert critic.asked[1]["state"].tolist() == [[5.0, 5.0, 5.0]]


def test_what_gives_the_value_of_the_end() -> None:
    """A phantom row's, else next_values, else the function; NaN is not known."""
    rows = c.AddLastObs()(rows_of(ONE))
    assert np.isnan(rows["values"][2])
    critic = Critic()

    def last(rows: c.Rows) -> Any:
        return c.ReturnsToGo(1.0, critic)(rows)["returns_to_go"][1] - 2

    assert last(rows) == 30
    assert len(critic.asked) == 1
    assert last(rows.replace(next_values=np.array([0.0, 40.0, 0.0]))) == 40
    assert last(rows.replace(values=np.array([0.0, 0.0, 50.0]), next_values=np.array([0.0, 40.0, 0.0]))) == 50
    assert len(critic.asked) == 1
    with pytest.raises(ArgumentError, match="1 fragments end in rows that are not terminated.*value_function="):
        c.ReturnsToGo(1.0, True)(rows)
    with pytest.raises(ArgumentError, match="give value_function=, or a column 'next_values', or put AddLastObs"):
        c.GeneralAdvantageEstimation()(rows_of(ONE))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (np.zeros((1, 1)), r"one number for each of 1 rows, shape \(1,\), got float64 of shape \(1, 1\)"),
        (np.zeros(2), r"got float64 of shape \(2,\)"),
        (np.array(["a"]), "got <U1"),
    ],
)
def test_a_value_function_that_answers_something_else(answer: Any, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        c.GeneralAdvantageEstimation(value_function=lambda rows: answer)(rows_of(ONE))


def test_n_step_comes_last() -> None:
    """The flags of its rows say how later ones ended; who takes them for their own is told."""
    steps = c.NStep(2)(rows_of(ONE))
    for piece in (c.GeneralAdvantageEstimation(value_function=Critic()), c.ReturnsToGo(), c.NStep(2)):
        with pytest.raises(ContractError, match="truncated=True must be the last of its unroll_id.*put NStep.*after"):
            piece(steps)


def test_refusals() -> None:
    rows = rows_of(ONE)
    with pytest.raises(ContractError, match="expected a column 'values'; the policy returns it beside its actions"):
        c.GeneralAdvantageEstimation()(rows.drop("values"))
    with pytest.raises(ContractError, match=r"column 'values' of shape \(2,\), one number a row, got \(2, 1\)"):
        c.GeneralAdvantageEstimation()(rows.replace(values=np.zeros((2, 1))))
    with pytest.raises(ContractError, match="column 'rewards' to be one array, got a dict of arrays"):
        c.ReturnsToGo()(rows.replace(rewards={"a": np.zeros(2)}))
    with pytest.raises(ContractError, match="expected a column 'terminated'; batches of a Collector have it"):
        c.NStep(2)(rows.drop("terminated"))
    assert repr(c.GeneralAdvantageEstimation(0.9)) == "GeneralAdvantageEstimation(gamma=0.9)"
