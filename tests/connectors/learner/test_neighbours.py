"""AddLastObs and AddView: what other rows of a fragment have, and the one after it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marlvec import connectors as c
from marlvec.connectors.agent_tables import parse_shifts
from marlvec.connectors.learner.sequences import AddLastObs
from marlvec.errors import ArgumentError, ContractError
from marlvec.trees import map_tree
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


def test_refusals_of_last_observations() -> None:
    rows = rows_of([ONE])
    with pytest.raises(ContractError, match="expected rows without phantom rows, got some; use AddLastObs once"):
        AddLastObs()(AddLastObs()(rows))
    with pytest.raises(ContractError, match="expected a column 'next_state' beside 'state'"):
        AddLastObs()(rows.replace(state=np.zeros(2)))
    with pytest.raises(ContractError, match="expected a column 'next_obs'; batches of a Collector have it"):
        AddLastObs()(rows.drop("next_obs"))


# --- views

SHIFTS = st.one_of(
    st.integers(-10, 10),
    st.lists(st.integers(-4, 4), min_size=1, max_size=4, unique=True),
    st.sampled_from(["-3:-1", "0:2", "-4:4:2", "1:1"]),
)


@pytest.mark.slow("draws many batches")
@given(batch=batches(), shift=SHIFTS, fill=st.sampled_from([None, "repeat", 7]))
def test_what_other_rows_of_the_fragment_had(batch: list[Fragment], shift: Any, fill: Any) -> None:
    rows = rows_of(batch)
    shifts = parse_shifts(shift)
    for name in ("obs", "rewards", "terminated", "actions"):
        if name == "terminated" and fill == 7:
            continue  # no bool
        got = c.AddView("view", name, shift, fill)(rows)["view"]
        want, start = [], 0
        for fragment in batch:
            n = len(fragment)
            for t in range(n):
                row = []
                for s in shifts:
                    value = entry(rows[name], start + min(max(t + s, 0), n - 1))
                    if not 0 <= t + s < n and fill != "repeat":
                        value = map_tree(lambda leaf: np.full_like(leaf, fill or 0), value)
                    row.append(value)
                want.append(row)
            start += n
        assert_view(got, want, rows[name], single=isinstance(shift, int))


def entry(column: Any, i: int) -> Any:
    return map_tree(lambda leaf: leaf[i], column)


def assert_view(got: Any, want: list[list[Any]], source: Any, single: bool) -> None:
    if isinstance(source, dict):
        for key in source:
            assert_view(got[key], [[value[key] for value in row] for row in want], source[key], single)
        return
    assert got.dtype == source.dtype
    k = len(want[0]) if want else got.shape[1] if not single else 1
    expected = np.array(want, source.dtype).reshape(len(source), k, *source.shape[1:])
    np.testing.assert_array_equal(got, expected[:, 0] if single else expected)


def test_views_by_hand() -> None:
    rows = c.Rows(x=np.array([1, 2, 3, 4]), unroll_id=np.array([0, 0, 0, 1]))
    assert c.AddView("y", "x", -1)(rows)["y"].tolist() == [0, 1, 2, 0]
    assert c.AddView("y", "x", 1, fill="repeat")(rows)["y"].tolist() == [2, 3, 3, 4]
    assert c.AddView("y", "x", [1, -1], fill=9)(rows)["y"].tolist() == [[9, 2], [1, 3], [2, 9], [9, 9]]
    trees = rows.replace(x={"a": np.ones((4, 2), np.float32), "b": np.array(["p", "q", "r", "s"], np.object_)})
    view = c.AddView("y", "x", 1, fill={"a": np.array([5.0, 6.0]), "b": "none"})(trees)["y"]
    assert view["a"].dtype == np.float32
    assert view["a"].tolist() == [[1, 1], [1, 1], [5, 6], [5, 6]]
    assert view["b"].tolist() == ["q", "r", "none", "none"]
    assert c.AddView("y", "x", 1)(trees)["y"]["b"].tolist() == ["q", "r", None, None]


def test_a_phantom_row_shows_the_last_observation() -> None:
    rows = rows_of([Fragment((1.0, 2.0), (10.0, 20.0), "truncated", 30.0, (0.0, 0.0), (0.0, 0.0))])
    out = c.LearnerPipeline([c.AddLastObs(), c.AddView("after", "obs", 1, "repeat")])(rows)
    np.testing.assert_array_equal(out["after"][:2], rows["next_obs"])


def test_refusals_of_views() -> None:
    rows = c.Rows(x=np.array([1, 2]), u=np.array([1, 2], np.uint8), unroll_id=np.array([0, 0]))
    with pytest.raises(ContractError, match="expected a column 'z'"):
        c.AddView("y", "z", 1)(rows)
    with pytest.raises(ContractError, match="expected a new column name, got 'x'"):
        c.AddView("x", "x", 1)(rows)
    with pytest.raises(ArgumentError, match=r"fill for 'x': a value of shape \(2,\) does not fit shape \(\)"):
        c.AddView("y", "x", 1, np.zeros(2))(rows)
    for fill in (300, 0.5, float("nan")):
        with pytest.raises(ArgumentError, match="fill for 'u': .* does not fit dtype uint8"):
            c.AddView("y", "u", 1, fill)(rows)
    with pytest.raises(ArgumentError, match="expected an array, got a dict"):
        c.AddView("y", "x", 1, {"a": 1})(rows)
    same_tree(c.AddView("y", "x", 1)(rows)["x"], rows["x"])
