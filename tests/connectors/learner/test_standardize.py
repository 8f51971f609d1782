from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from marlvec import connectors as c
from marlvec.errors import ContractError
from tests.connectors.learner.fragments import Critic, Fragment, batches, rows_of


def reference(values: list[float], epsilon: float) -> list[float]:
    mean = sum(values) / len(values)
    deviation = (sum((x - mean) ** 2 for x in values) / len(values)) ** 0.5
    return [(x - mean) / (deviation + epsilon) for x in values]


@pytest.mark.slow("draws many batches")
@pytest.mark.checklist(102)
@given(batch=batches(min_size=1), max_len=st.integers(1, 5), epsilon=st.sampled_from([1e-8, 0.5]))
def test_padding_and_phantom_rows_do_not_count(batch: list[Fragment], max_len: int, epsilon: float) -> None:
    """The same numbers on rows, on rows with phantom ones, on sequences; and not at all without the piece."""
    rows = rows_of(batch)
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


def test_refusals() -> None:
    with pytest.raises(ContractError, match="expected a column 'advantages'; the columns are"):
        c.Standardize()(c.Rows(x=np.zeros(2)))
    with pytest.raises(ContractError, match=r"has shape \(2,\), its mask 'loss_mask' \(2, 3\)"):
        c.Standardize("x")(c.Rows(x=np.zeros(2), loss_mask=np.ones((2, 3), bool)))
    with pytest.raises(ContractError, match="column 'x' has 2 NaN or inf entries"):
        c.Standardize("x")(c.Rows(x=np.array([np.nan, np.inf, 1.0])))
    with pytest.raises(ContractError, match="expected column 'x' to be one array, got a dict of arrays"):
        c.Standardize("x")(c.Rows(x={"a": np.zeros(2)}))
