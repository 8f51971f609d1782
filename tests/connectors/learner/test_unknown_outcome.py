"""Rows of agents that were truncated and left no final observation: nothing is computed from what nobody knows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marlvec import connectors as c

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
