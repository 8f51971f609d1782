"""Rows of agents that were truncated and left no final observation: nothing is computed from what nobody knows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import marlvec
from marlvec import connectors as c
from marlvec.errors import ContractError

pytestmark = pytest.mark.checklist(109)


def batch(lengths: list[int], ends: list[str], seed: int = 0) -> c.Rows:
    """One fragment each; "lost" is truncated without a final observation, "dead" terminated without one."""
    rng = np.random.default_rng(seed)
    n = sum(lengths)
    last = np.cumsum(lengths) - 1
    flags = {name: np.zeros(n, np.bool_) for name in ("terminated", "truncated", "next_obs_missing")}
    for row, end in zip(last, ends, strict=True):
        flags["terminated"][row] = end in ("dead", "terminated")
        flags["truncated"][row] = end in ("lost", "truncated")
        flags["next_obs_missing"][row] = end in ("lost", "dead")
    obs = rng.normal(size=(n, 2))
    return c.Rows(
        obs=obs,
        next_obs=rng.normal(size=(n, 2)),
        rewards=rng.normal(size=n),
        values=rng.normal(size=n),
        logp=rng.normal(size=n),
        target_logp=rng.normal(size=n),
        unroll_id=np.repeat(np.arange(len(lengths)), lengths),
        t=np.concatenate([np.arange(length) for length in lengths]),
        **flags,
    )


ENDS = st.sampled_from(["terminated", "dead", "truncated", "lost", "cut"])
SHAPES = st.lists(st.tuples(st.integers(1, 6), ENDS), min_size=1, max_size=6)


def shortened(rows: c.Rows) -> tuple[c.Rows, Any]:
    """The rows without those whose outcome nobody knows, with the values of their obs beside; and which these are."""
    lost = np.asarray(rows["truncated"] & rows["next_obs_missing"])
    next_values = np.full(len(rows), np.nan)
    for row in np.flatnonzero(lost & (rows["t"] > 0)):
        next_values[row - 1] = rows["values"][row]
    return rows.replace(next_values=next_values).take(~lost), ~lost


def value_function(rows: c.Rows) -> Any:
    return rows["obs"].sum(axis=1)


@given(shape=SHAPES, seed=st.integers(0, 99))
def test_the_rows_before_come_out_as_if_the_fragment_had_been_cut_there(
    shape: list[tuple[int, str]], seed: int
) -> None:
    rows = batch([length for length, _ in shape], [end for _, end in shape], seed)
    rest, kept = shortened(rows)
    for connector, columns in (
        (c.GeneralAdvantageEstimation(0.9, 0.7, value_function), ["advantages", "value_targets"]),
        (c.VTrace(0.9, value_function=value_function), ["vs", "pg_advantages"]),
        (c.ReturnsToGo(0.9, bootstrap=value_function), ["returns_to_go"]),
    ):
        out = connector(rows)
        if kept.any():
            expected = connector(rest)
            for name in columns:
                np.testing.assert_allclose(out[name][kept], expected[name], rtol=1e-6, err_msg=name)
        own = rows["values"][~kept].astype(np.float32)
        for name in columns:
            want = np.zeros_like(own) if name in ("advantages", "pg_advantages") else own
            np.testing.assert_array_equal(out[name][~kept], want, err_msg=name)


@given(shape=SHAPES, n=st.integers(1, 4))
def test_n_steps_do_not_reach_across(shape: list[tuple[int, str]], n: int) -> None:
    rows = batch([length for length, _ in shape], [end for _, end in shape])
    rest, kept = shortened(rows)
    out = c.NStep(n, 0.9)(rows)
    if kept.any():
        expected = c.NStep(n, 0.9)(rest.drop("next_values"))
        for name in ("rewards", "next_obs", "terminated", "truncated", "next_obs_missing", "discounts"):
            np.testing.assert_array_equal(out[name][kept], expected[name], err_msg=name)
    np.testing.assert_array_equal(out["discounts"][~kept], 0)
    np.testing.assert_array_equal(out["rewards"][~kept], rows["rewards"][~kept])
    assert ("loss_mask" in out) is bool((~kept).any())
    if not kept.all():
        np.testing.assert_array_equal(out["loss_mask"], kept)


def test_value_function_is_not_called_for_unknown_outcomes() -> None:
    asked: list[int] = []

    def counting(rows: c.Rows) -> Any:
        asked.append(len(rows))
        return np.zeros(len(rows))

    rows = batch([3, 2, 1, 4], ["lost", "dead", "lost", "terminated"])
    c.GeneralAdvantageEstimation(value_function=counting)(rows)
    assert not asked
    c.GeneralAdvantageEstimation(value_function=counting)(batch([3, 2], ["lost", "truncated"]))
    assert asked == [1]
    c.GeneralAdvantageEstimation()(rows)  # nor is a function needed


def test_a_phantom_row_changes_nothing() -> None:
    rows = batch([3, 2, 1], ["lost", "truncated", "lost"])
    plain = c.GeneralAdvantageEstimation(value_function=value_function)(rows)
    spread = c.AddLastObs()(rows)
    values = np.where(spread["phantom"], spread["obs"].sum(axis=1), spread["values"])
    again = c.GeneralAdvantageEstimation()(spread.replace(values=values))
    np.testing.assert_array_equal(again["advantages"][~spread["phantom"]], plain["advantages"])


@pytest.mark.parametrize("padded", [False, True])
def test_their_0_is_no_part_of_the_mean(padded: bool) -> None:
    rows = c.GeneralAdvantageEstimation(value_function=value_function)(batch([3, 2, 4], ["lost", "truncated", "lost"]))
    known = ~(rows["truncated"] & rows["next_obs_missing"])
    if padded:
        rows = c.PadSequences(4)(rows)
        out = c.Standardize()(rows)["advantages"][rows["loss_mask"]]
    else:
        out = c.Standardize()(rows)["advantages"]
    assert out[known].mean() == pytest.approx(0, abs=1e-6)
    assert out[known].std() == pytest.approx(1, rel=1e-5)
    assert (out[~known] == 0).all()


# --- given actions: the policy was not asked, so it left no value and no logp


def given_rows(shape: list[tuple[int, str]], seed: int) -> c.Rows:
    """A batch in which a third of the actions were given: NaN in the policy's columns."""
    rows = batch([length for length, _ in shape], [end for _, end in shape], seed)
    given = np.random.default_rng(seed + 1).random(len(rows)) < 1 / 3
    nan = {name: np.where(given, np.nan, rows[name]) for name in ("values", "logp")}
    return rows.replace(off_policy=given, **nan)


LEARNERS = (
    (c.GeneralAdvantageEstimation(0.9, 0.7, value_function), ["advantages", "value_targets"]),
    (c.VTrace(0.9, value_function=value_function), ["vs", "pg_advantages"]),
    (c.ReturnsToGo(0.9, bootstrap=value_function), ["returns_to_go"]),
    (c.NStep(3, 0.9), ["rewards", "discounts"]),
)


@pytest.mark.filterwarnings("error")
@given(shape=SHAPES, seed=st.integers(0, 99))
def test_no_formula_crosses_a_fragment_whatever_its_values_are(shape: list[tuple[int, str]], seed: int) -> None:
    rows = given_rows(shape, seed)
    wild = np.random.default_rng(seed).choice([0.0, np.nan, np.inf], len(rows))
    for each in (rows, rows.replace(rewards=wild), rows.drop("off_policy").replace(values=wild)):
        for connector, columns in LEARNERS:
            with np.errstate(invalid="ignore"):
                out = connector(each)
                for unroll in np.unique(each["unroll_id"]):
                    here = each["unroll_id"] == unroll
                    alone = connector(each.take(here))
                    for name in columns:
                        np.testing.assert_array_equal(out[name][here], alone[name], err_msg=name)


@given(shape=SHAPES, seed=st.integers(0, 99))
def test_a_value_function_values_the_rows_of_given_actions(shape: list[tuple[int, str]], seed: int) -> None:
    rows = given_rows(shape, seed)
    given = rows["off_policy"]
    valued = rows.replace(values=np.where(given, value_function(rows), rows["values"]))
    for connector, columns in (LEARNERS[0], LEARNERS[2]):
        out, expected = connector(rows), connector(valued)
        for name in columns:
            np.testing.assert_array_equal(out[name], expected[name])
            assert np.isfinite(out[name]).all()
    out = LEARNERS[1][0](rows)
    assert (np.isnan(out["pg_advantages"]) == given).all()  # without logp there is no ratio
    assert (out["loss_mask"] == ~given).all()
    as_ratio_0 = rows.replace(values=valued["values"], logp=np.where(given, np.inf, rows["logp"]))
    for name in ("vs", "pg_advantages"):
        np.testing.assert_array_equal(out[name][~given], LEARNERS[1][0](as_ratio_0)[name][~given])


@given(shape=SHAPES, seed=st.integers(0, 99))
def test_without_a_value_function_rows_of_given_actions_alone_are_nan_and_masked(
    shape: list[tuple[int, str]], seed: int
) -> None:
    rows = given_rows([(length, "terminated") for length, _ in shape], seed)
    given, last = rows["off_policy"], rows["terminated"]
    for connector, columns in (
        (c.GeneralAdvantageEstimation(0.9, 0.7), ["advantages", "value_targets"]),
        (c.VTrace(0.9), ["vs", "pg_advantages"]),
    ):
        out = connector(rows)
        for name in columns:
            assert (np.isnan(out[name]) == given).all(), name
        assert not out["loss_mask"][given].any()
    own = c.GeneralAdvantageEstimation(0.9, 0.7)(rows)
    assert (own["loss_mask"] == ~given).all()
    # In place of V, the row before takes the return: r + gamma * ((1 - lambda) * V + lambda * return), or the return.
    returns = np.zeros(len(rows))
    for i in reversed(range(len(rows))):
        after = 0.0
        if not last[i]:
            known = 0.0 if given[i + 1] else 0.3 * rows["values"][i + 1]
            after = known + (1.0 if given[i + 1] else 0.7) * returns[i + 1]
        returns[i] = rows["rewards"][i] + 0.9 * after
    np.testing.assert_allclose(own["value_targets"][~given], returns[~given], rtol=1e-5, atol=1e-5)
    standard = c.Standardize()(own)["advantages"]
    assert not standard[given].any()
    assert np.isfinite(standard).all()
    unmasked = c.Standardize(mask=None)(own)["advantages"]
    np.testing.assert_array_equal(unmasked, standard)


def test_a_return_that_nobody_knows_teaches_the_row_before_nothing() -> None:
    rows = batch([4, 3], ["lost", "terminated"])
    given = np.isin(np.arange(7), [2, 3])
    rows = rows.replace(off_policy=given, values=np.where(given, np.nan, rows["values"]))
    out = c.GeneralAdvantageEstimation(0.9, 0.7)(rows)
    assert np.isnan(out["advantages"]).tolist() == given.tolist()
    assert out["loss_mask"].tolist() == [True, False, False, False, True, True, True]
    assert (out["advantages"][1], out["value_targets"][1]) == (0, np.float32(rows["values"][1]))
    out = c.ReturnsToGo(0.9, bootstrap=True)(rows)
    assert np.isnan(out["returns_to_go"]).tolist() == [True] * 4 + [False] * 3
    assert out["loss_mask"].tolist() == [False] * 4 + [True] * 3


def test_a_nan_of_the_policys_own_is_not_hidden() -> None:
    rows = batch([3, 2], ["terminated", "terminated"])
    values = rows["values"].copy()
    values[1] = np.nan
    out = c.GeneralAdvantageEstimation(0.9, 0.7)(rows.replace(values=values, off_policy=np.zeros(5, np.bool_)))
    assert out["loss_mask"].all()
    with pytest.raises(ContractError, match="NaN or inf entries"):
        c.Standardize()(out)
    with pytest.raises(ContractError, match="NaN or inf entries"):
        c.Standardize()(c.GeneralAdvantageEstimation(0.9, 0.7)(rows.replace(values=values)))


def test_an_int_value_of_a_given_action_means_nothing() -> None:
    rows = batch([3], ["terminated"])
    rows = rows.replace(values=np.array([5, 0, 7]), off_policy=np.array([False, True, False]))
    out = c.GeneralAdvantageEstimation(0.9, 0.7)(rows)
    assert np.isnan(out["advantages"]).tolist() == [False, True, False]


def test_random_steps_spoil_no_decision_of_the_policys_own() -> None:
    def critic(rows: c.Rows) -> Any:
        return rows["obs"].sum(axis=1).astype(np.float64)

    def act(rows: c.Rows) -> Any:
        return np.zeros(len(rows), np.int64), {"values": critic(rows), "logp": np.zeros(len(rows))}

    with marlvec.make("CartPole-v1", num_envs=3, backend="sync") as envs:
        collector = marlvec.Collector(envs, {"main": act}, "main", seed=0, random_steps=15)
        rows = c.Rows(collector.collect(env_steps=90)["main"])
    given = rows["off_policy"]
    assert 0 < given.sum() < len(rows)
    assert np.isfinite(c.GeneralAdvantageEstimation(value_function=critic)(rows)["advantages"]).all()
    out = c.VTrace(value_function=critic)(rows.replace(target_logp=np.zeros(len(rows))))
    assert np.isfinite(out["vs"][~given]).all()
    assert np.isfinite(out["pg_advantages"][~given]).all()
