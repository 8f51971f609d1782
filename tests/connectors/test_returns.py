"""Advantages, returns and n-step transitions against their definitions; nothing is computed from what nobody knows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import marlvec
from marlvec import connectors as c
from marlvec.connectors.learner.returns import VTrace
from marlvec.connectors.learner.sequences import AddLastObs
from marlvec.errors import ArgumentError, ContractError
from tests.connectors.samples import (
    GAMMAS,
    Critic,
    Fragment,
    advantage,
    assert_close,
    batches,
    n_step,
    per_row,
    return_to_go,
    rows_of_fragments,
    v_trace,
    v_trace_advantage,
)
from tests.vector.support.reference import refused

# --- Advantages, returns and n-step transitions against their definitions


@pytest.mark.slow("draws many batches")
@pytest.mark.checklist(101)
@given(batch=batches(), gamma=GAMMAS, lambda_=GAMMAS, n=st.integers(1, 12))
def test_every_row_is_what_its_definition_says(batch: list[Fragment], gamma: float, lambda_: float, n: int) -> None:
    """Whatever a fragment's end: 0 after it if terminated, V(final obs) if truncated, V(next obs) if cut."""
    rows, critic = rows_of_fragments(batch), Critic()

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
    rows, critic = rows_of_fragments(batch), Critic()
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
    rows = rows_of_fragments(ONE).replace(next_values=np.array([99.0, 30.0]))
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
    rows = rows_of_fragments(ONE).replace(state_in=states, state_out={"h": states["h"] + 50}, state=np.ones((2, 3)))
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
    rows = c.AddLastObs()(rows_of_fragments(ONE))
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
        c.GeneralAdvantageEstimation()(rows_of_fragments(ONE))


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
        c.GeneralAdvantageEstimation(value_function=lambda rows: answer)(rows_of_fragments(ONE))


def test_n_step_comes_last() -> None:
    """The flags of its rows say how later ones ended; who takes them for their own is told."""
    steps = c.NStep(2)(rows_of_fragments(ONE))
    for piece in (c.GeneralAdvantageEstimation(value_function=Critic()), c.ReturnsToGo(), c.NStep(2)):
        refused(ContractError, "truncated=True must be the last of its unroll_id.*put NStep.*after", piece, steps)


def test_returns_refuse() -> None:
    rows = rows_of_fragments(ONE)
    with pytest.raises(ContractError, match="expected a column 'values'; the policy returns it beside its actions"):
        c.GeneralAdvantageEstimation()(rows.drop("values"))
    with pytest.raises(ContractError, match=r"column 'values' of shape \(2,\), one number a row, got \(2, 1\)"):
        c.GeneralAdvantageEstimation()(rows.replace(values=np.zeros((2, 1))))
    with pytest.raises(ContractError, match="column 'rewards' to be one array, got a dict of arrays"):
        c.ReturnsToGo()(rows.replace(rewards={"a": np.zeros(2)}))
    with pytest.raises(ContractError, match="expected a column 'terminated'; batches of a Collector have it"):
        c.NStep(2)(rows.drop("terminated"))
    assert repr(c.GeneralAdvantageEstimation(0.9)) == "GeneralAdvantageEstimation(gamma=0.9)"


LIMITS = st.sampled_from([0.3, 1.0, 2.5])


@pytest.mark.slow("draws many batches")
@given(batch=batches(), gamma=GAMMAS, limits=st.tuples(LIMITS, LIMITS))
def test_every_row_is_what_the_paper_says(batch: list[Fragment], gamma: float, limits: tuple[float, float]) -> None:
    c_bar, rho_bar = sorted(limits)
    rows, critic = rows_of_fragments(batch), Critic()
    out = VTrace(gamma, rho_bar, c_bar, critic)(rows)
    assert_close(out["vs"], per_row(v_trace, batch, gamma, rho_bar, c_bar))
    assert_close(out["pg_advantages"], per_row(v_trace_advantage, batch, gamma, rho_bar, c_bar))
    assert len(critic.asked) <= 1

    longer = AddLastObs()(rows)
    longer = longer.replace(values=critic(longer))
    phantom = longer["phantom"]
    with_phantoms = VTrace(gamma, rho_bar, c_bar)(longer)
    for name in ("vs", "pg_advantages"):
        np.testing.assert_array_equal(with_phantoms[name][~phantom], out[name])
        assert not with_phantoms[name][phantom].any()


@pytest.mark.slow("draws many batches")
@given(batch=batches(), gamma=GAMMAS)
def test_on_policy_it_is_the_whole_return(batch: list[Fragment], gamma: float) -> None:
    """Section 4.1 of the paper: with both policies the same, vs is the n-step Bellman target."""
    rows = rows_of_fragments(batch)
    rows = rows.replace(behaviour=rows["target_logp"])
    out = VTrace(gamma, value_function=Critic(), logp="behaviour")(rows)
    assert_close(out["vs"], per_row(return_to_go, batch, gamma, True))


def test_a_ratio_beyond_all_numbers_is_clipped() -> None:
    one = Fragment((1.0,), (2.0,), "terminated", 0.0, (-2000.0,), (0.0,))
    out = VTrace(1.0)(rows_of_fragments([one]))
    assert out["vs"].tolist() == [1.0]
    assert out["pg_advantages"].tolist() == [-1.0]


def test_v_trace_refuses() -> None:
    one = rows_of_fragments([Fragment((1.0,), (2.0,), "cut", 0.0, (0.0,), (0.0,))])
    with pytest.raises(ContractError, match="expected a column 'target_logp'; a learner connector before this one"):
        VTrace(value_function=Critic())(one.drop("target_logp"))
    refused(ContractError, "expected a column 'values'", VTrace(), one.drop("values"))
    refused(ArgumentError, "give value_function=", VTrace(), one)
    assert VTrace(rho_bar=math.inf, c_bar=math.inf).params()["c_bar"] == math.inf


def reference(values: list[float], epsilon: float) -> list[float]:
    mean = sum(values) / len(values)
    deviation = (sum((x - mean) ** 2 for x in values) / len(values)) ** 0.5
    return [(x - mean) / (deviation + epsilon) for x in values]


@pytest.mark.slow("draws many batches")
@pytest.mark.checklist(102)
@given(batch=batches(min_size=1), max_len=st.integers(1, 5), epsilon=st.sampled_from([1e-8, 0.5]))
def test_padding_and_phantom_rows_do_not_count(batch: list[Fragment], max_len: int, epsilon: float) -> None:
    """The same numbers on rows, on rows with phantom ones, on sequences; and not at all without the piece."""
    rows = rows_of_fragments(batch)
    gae = c.GeneralAdvantageEstimation(0.9, 0.8, Critic())
    plain = gae(rows)["advantages"]
    want = reference(plain.tolist(), epsilon)

    piece = c.Standardize(epsilon=epsilon)
    assert_standard(piece(gae(rows))["advantages"], want)
    chain = c.LearnerPipeline([c.AddLastObs(), gae, piece, c.PadSequences(max_len)])
    for sequences in (chain(rows), c.LearnerPipeline([c.AddLastObs(), gae, c.PadSequences(max_len), piece])(rows)):
        assert_standard(sequences["advantages"][sequences["loss_mask"]], want)
        assert not sequences["advantages"][~sequences["loss_mask"]].any()
    unmasked = c.LearnerPipeline(
        [c.AddLastObs(), gae, c.PadSequences(max_len), c.Standardize(mask=None, epsilon=epsilon)]
    )(rows)
    np.testing.assert_array_equal(unmasked["advantages"], sequences["advantages"])
    # Also where a spoilt value stands in a phantom row, or no mask is asked for.
    longer = c.AddLastObs()(rows)
    values = np.full(len(longer), np.nan)
    values[longer["loss_mask"]] = plain
    for mask in ("loss_mask", None):
        out = c.Standardize("spoilt", mask, epsilon)(longer.replace(spoilt=values))["spoilt"]
        assert_standard(out[longer["loss_mask"]].astype(np.float32), want)
        assert not out[longer["phantom"]].any()

    chain.remove("Standardize")
    without = chain(rows)
    np.testing.assert_array_equal(without["advantages"][without["loss_mask"]], plain)


def assert_standard(got: Any, want: list[float]) -> None:
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@given(
    values=hnp.arrays(np.float64, st.tuples(st.integers(1, 9), st.integers(1, 4)), elements=st.floats(-1e3, 1e3)),
    data=st.data(),
)
def test_masked_entries_come_out_as_0(values: Any, data: st.DataObject) -> None:
    mask = data.draw(hnp.arrays(np.bool_, values.shape))
    rows = c.Rows(x=values, keep=mask)
    out = c.Standardize("x", "keep", 1e-3)(rows)["x"]
    assert out.dtype == np.float64
    assert not out[~mask].any()
    if mask.any():
        np.testing.assert_allclose(out[mask], reference(values[mask].tolist(), 1e-3), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("value", [0.1, 1e8 + 0.1, -3.0, 0.0])
@pytest.mark.parametrize("epsilon", [1e-8, 0.0])
def test_equal_values_come_out_as_0(value: float, epsilon: float) -> None:
    out = c.Standardize("x", epsilon=epsilon)(c.Rows(x=np.full(1000, value)))["x"]
    np.testing.assert_allclose(out, 0, atol=1e-6)


def test_dtypes_and_nothing_to_count() -> None:
    whole = c.Rows(x=np.array([1, 3]), loss_mask=np.array([True, True]))
    out = c.Standardize("x")(whole)["x"]
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, [-1, 1])
    assert c.Standardize("x")(whole.replace(loss_mask=np.array([False, False])))["x"].tolist() == [0, 0]
    assert len(c.Standardize("x")(whole.take([]))) == 0


def test_standardize_refuses() -> None:
    refused(ContractError, "expected a column 'advantages'; the columns are", c.Standardize(), c.Rows(x=np.zeros(2)))
    with pytest.raises(ContractError, match=r"has shape \(2,\), its mask 'loss_mask' \(2, 3\)"):
        c.Standardize("x")(c.Rows(x=np.zeros(2), loss_mask=np.ones((2, 3), bool)))
    with pytest.raises(ContractError, match="column 'x' has 2 NaN or inf entries"):
        c.Standardize("x")(c.Rows(x=np.array([np.nan, np.inf, 1.0])))
    with pytest.raises(ContractError, match="expected column 'x' to be one array, got a dict of arrays"):
        c.Standardize("x")(c.Rows(x={"a": np.zeros(2)}))


# --- Rows of agents that were truncated and left no final observation: nothing is computed from what nobody knows


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


@pytest.mark.checklist(109)
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


@pytest.mark.checklist(109)
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


@pytest.mark.checklist(109)
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


@pytest.mark.checklist(109)
def test_a_phantom_row_changes_nothing() -> None:
    rows = batch([3, 2, 1], ["lost", "truncated", "lost"])
    plain = c.GeneralAdvantageEstimation(value_function=value_function)(rows)
    spread = c.AddLastObs()(rows)
    values = np.where(spread["phantom"], spread["obs"].sum(axis=1), spread["values"])
    again = c.GeneralAdvantageEstimation()(spread.replace(values=values))
    np.testing.assert_array_equal(again["advantages"][~spread["phantom"]], plain["advantages"])


@pytest.mark.checklist(109)
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


@pytest.mark.checklist(109)
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


@pytest.mark.checklist(109)
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


@pytest.mark.checklist(109)
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


@pytest.mark.checklist(109)
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


@pytest.mark.checklist(109)
def test_a_nan_of_the_policys_own_is_not_hidden() -> None:
    rows = batch([3, 2], ["terminated", "terminated"])
    values = rows["values"].copy()
    values[1] = np.nan
    out = c.GeneralAdvantageEstimation(0.9, 0.7)(rows.replace(values=values, off_policy=np.zeros(5, np.bool_)))
    assert out["loss_mask"].all()
    refused(ContractError, "NaN or inf entries", c.Standardize(), out)
    with pytest.raises(ContractError, match="NaN or inf entries"):
        c.Standardize()(c.GeneralAdvantageEstimation(0.9, 0.7)(rows.replace(values=values)))


@pytest.mark.checklist(109)
def test_an_int_value_of_a_given_action_means_nothing() -> None:
    rows = batch([3], ["terminated"])
    rows = rows.replace(values=np.array([5, 0, 7]), off_policy=np.array([False, True, False]))
    out = c.GeneralAdvantageEstimation(0.9, 0.7)(rows)
    assert np.isnan(out["advantages"]).tolist() == [False, True, False]


@pytest.mark.checklist(109)
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
