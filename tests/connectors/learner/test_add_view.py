from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marlvec.connectors._support.shifts import parse_shifts
from marlvec.connectors.learner.neighbours import AddLastObs, AddView
from marlvec.connectors.learner.pipeline import LearnerPipeline
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, ContractError
from marlvec.trees import map_tree
from tests.connectors.helpers.samples import same_tree
from tests.connectors.learner.fragments import Fragment, batches, rows_of

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
        got = AddView("view", name, shift, fill)(rows)["view"]
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


def test_by_hand() -> None:
    rows = Rows(x=np.array([1, 2, 3, 4]), unroll_id=np.array([0, 0, 0, 1]))
    assert AddView("y", "x", -1)(rows)["y"].tolist() == [0, 1, 2, 0]
    assert AddView("y", "x", 1, fill="repeat")(rows)["y"].tolist() == [2, 3, 3, 4]
    assert AddView("y", "x", [1, -1], fill=9)(rows)["y"].tolist() == [[9, 2], [1, 3], [2, 9], [9, 9]]
    trees = rows.replace(x={"a": np.ones((4, 2), np.float32), "b": np.array(["p", "q", "r", "s"], np.object_)})
    view = AddView("y", "x", 1, fill={"a": np.array([5.0, 6.0]), "b": "none"})(trees)["y"]
    assert view["a"].dtype == np.float32
    assert view["a"].tolist() == [[1, 1], [1, 1], [5, 6], [5, 6]]
    assert view["b"].tolist() == ["q", "r", "none", "none"]
    assert AddView("y", "x", 1)(trees)["y"]["b"].tolist() == ["q", "r", None, None]


def test_a_phantom_row_shows_the_last_observation() -> None:
    rows = rows_of([Fragment((1.0, 2.0), (10.0, 20.0), "truncated", 30.0, (0.0, 0.0), (0.0, 0.0))])
    out = LearnerPipeline([AddLastObs(), AddView("after", "obs", 1, "repeat")])(rows)
    np.testing.assert_array_equal(out["after"][:2], rows["next_obs"])


def test_refusals() -> None:
    with pytest.raises(ArgumentError, match="a shift is an int"):
        AddView("y", "x", "0:k")
    with pytest.raises(ArgumentError, match='fill must be None, "repeat" or one row\'s value'):
        AddView("y", "x", 1, "zeros")
    rows = Rows(x=np.array([1, 2]), u=np.array([1, 2], np.uint8), unroll_id=np.array([0, 0]))
    with pytest.raises(ContractError, match="expected a column 'z'"):
        AddView("y", "z", 1)(rows)
    with pytest.raises(ContractError, match="there is a column 'x' already; choose another name"):
        AddView("x", "x", 1)(rows)
    with pytest.raises(ArgumentError, match=r"fill of shape \(2,\) does not fit 'x' of shape \(\)"):
        AddView("y", "x", 1, np.zeros(2))(rows)
    for fill in (300, 0.5, float("nan")):
        with pytest.raises(ArgumentError, match="does not fit uint8, the dtype of 'u'"):
            AddView("y", "u", 1, fill)(rows)
    with pytest.raises(ArgumentError, match="expected an array, got a dict"):
        AddView("y", "x", 1, {"a": 1})(rows)
    same_tree(AddView("y", "x", 1)(rows)["x"], rows["x"])
