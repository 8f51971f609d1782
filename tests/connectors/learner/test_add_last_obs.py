from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from marlvec.connectors.learner.neighbours import AddLastObs
from marlvec.errors import ContractError
from tests.connectors.helpers.samples import same_tree
from tests.connectors.learner.fragments import Fragment, batches, rows_of

ONE = Fragment((1.0, 2.0), (10.0, 20.0), "truncated", 30.0, (0.0, 0.0), (0.0, 0.0), 5)
TWO = Fragment((3.0,), (40.0,), "terminated", 50.0, (0.0,), (0.0,))


@pytest.mark.slow("draws many batches")
@given(batch=batches())
def test_one_row_after_each_fragment(batch: list[Fragment]) -> None:
    rows = rows_of(batch)
    longer = AddLastObs()(rows)
    phantom = longer["phantom"]
    assert len(longer) == len(rows) + len(batch)
    true = longer.take(~phantom).drop("phantom", "loss_mask")
    same_tree(true, rows)
    assert (longer["loss_mask"] == ~phantom).all()

    ends = np.cumsum([len(fragment) for fragment in batch], dtype=np.int64) - 1
    np.testing.assert_array_equal(np.flatnonzero(phantom), ends + 1 + np.arange(len(batch)))
    new, last = longer.take(phantom), rows.take(ends)
    np.testing.assert_array_equal(new["obs"], last["next_obs"])
    np.testing.assert_array_equal(new["t"], last["t"] + 1)
    assert not new["rewards"].any()
    assert np.isnan(new["values"]).all()
    for name in ("terminated", "truncated", "unroll_id", "eps_id", "env_id", "agent_index", "actions", "next_obs"):
        same_tree(new[name], last[name])


def test_columns_that_have_a_next_one() -> None:
    rows = rows_of([ONE, TWO]).replace(
        obs={"a": np.arange(3)},
        next_obs={"a": np.arange(3) + 70},
        values=np.arange(3),
        next_values=np.arange(3) * 1.5,
        state=np.arange(3),
        next_state=np.arange(3) + 80,
        state_in=(np.zeros(3),),
        state_out=(np.ones(3),),
        loss_mask=np.array([False, True, True]),
        name=np.array(["x", "y", None], np.object_),
    )
    longer = AddLastObs()(rows)
    assert longer["obs"]["a"].tolist() == [0, 1, 71, 2, 72]
    assert longer["values"].tolist() == [0, 1, 1.5, 2, 3]
    assert longer["state"].tolist() == [0, 1, 81, 2, 82]
    assert longer["state_in"][0].tolist() == [0, 0, 1, 0, 1]
    assert longer["loss_mask"].tolist() == [False, True, False, True, False]
    assert longer["phantom"].tolist() == [False, False, True, False, True]
    assert longer["name"].tolist() == ["x", "y", "y", None, None]
    assert longer["terminated"].tolist() == [False, False, False, True, True]
    assert longer["truncated"].tolist() == [False, True, True, False, False]


def test_values_that_are_not_known_are_not_made_up() -> None:
    for dtype, out in ((np.float32, np.float32), (np.float64, np.float64), (np.int64, np.float64)):
        rows = rows_of([TWO])
        longer = AddLastObs()(rows.replace(values=rows["values"].astype(dtype)))
        assert longer["values"].dtype == out
        np.testing.assert_array_equal(longer["values"], [40.0, np.nan])


def test_refusals() -> None:
    rows = rows_of([ONE])
    with pytest.raises(ContractError, match="these rows have phantom rows already; use AddLastObs once"):
        AddLastObs()(AddLastObs()(rows))
    with pytest.raises(ContractError, match="expected a column 'next_state' beside 'state'"):
        AddLastObs()(rows.replace(state=np.zeros(2)))
    with pytest.raises(ContractError, match="expected a column 'next_obs'; batches of a Collector have it"):
        AddLastObs()(rows.drop("next_obs"))
