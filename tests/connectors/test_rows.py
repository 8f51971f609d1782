from __future__ import annotations

import copy
import pickle
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marlvec.connectors import Rows
from marlvec.errors import ArgumentError
from tests.connectors.helpers.samples import same_tree


def sample(n: int, offset: int = 0) -> Rows:
    at = np.arange(n) + offset
    obs = {"z": at[:, None] * np.ones(2), "a": (at, (at * 2).astype(np.float32))}
    return Rows(env_id=at, obs=obs, done=at % 2 == 0)


def test_columns_are_read_by_attribute_and_by_item() -> None:
    rows = sample(3)
    assert len(rows) == 3
    assert rows.env_id is rows["env_id"] is rows.get("env_id")
    assert "obs" in rows
    assert "logp" not in rows
    with pytest.raises(AttributeError, match=r"no column 'logp'.*env_id"):
        _ = rows.logp
    with pytest.raises(KeyError, match=r"no column 'logp'.*env_id"):
        rows["logp"]
    with pytest.raises(TypeError, match=r"take\(\)"):
        rows[np.array([0])]  # type: ignore[index]  # a wrong index is the point
    with pytest.raises(TypeError):
        iter(rows)  # type: ignore[call-overload]  # that it has none is the point


def test_a_column_with_a_methods_name_is_read_by_item() -> None:
    rows = Rows(take=np.arange(2), obs=np.zeros((2, 1)))
    assert rows["take"].tolist() == [0, 1]
    assert len(rows.take([1])) == 1


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"obs": np.zeros((3, 2)), "t": np.zeros(2)}, r"column 't' has 2 rows, the columns before it have 3"),
        ({"t": np.zeros(2), "obs": {"a": np.zeros(2), "b": np.zeros(3)}}, r"column 'obs' at b has 3 rows"),
        ({"obs": np.float32(1.0)}, r"column 'obs' must be an array"),
        ({"obs": np.array(1.0)}, r"column 'obs' must be an array"),
        ({"obs": (np.zeros(1), 7)}, r"column 'obs' at 1 must be an array .* got int"),
    ],
)
def test_a_bad_column_is_named(columns: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        Rows(columns)


def test_replace_adds_and_changes_without_touching_the_old_rows() -> None:
    rows = sample(2)
    new = rows.replace(done=np.ones(2), logp=np.zeros(2))
    assert list(new.keys()) == ["env_id", "obs", "done", "logp"]
    assert new.obs is rows.obs
    assert "logp" not in rows
    assert rows.done.dtype == np.bool_
    with pytest.raises(ArgumentError, match="'logp' has 3 rows"):
        rows.replace(logp=np.zeros(3))
    with pytest.raises(ArgumentError, match="'b' has 3 rows"):
        Rows().replace(a=np.zeros(2), b=np.zeros(3))
    assert len(Rows().replace(a=np.zeros(2))) == 2


def test_drop() -> None:
    rows = sample(2)
    assert list(rows.drop("obs", "done").keys()) == ["env_id"]
    assert len(rows.drop("env_id", "obs", "done")) == 0
    with pytest.raises(KeyError, match="no column 'logp'"):
        rows.drop("logp")


def test_no_rows_and_no_columns() -> None:
    assert len(Rows()) == len(Rows({})) == len(Rows.concat([])) == 0
    empty = sample(0)
    assert len(empty) == 0
    assert len(empty.take([])) == len(empty.take(np.zeros(0, bool))) == 0
    same_tree(Rows.concat([empty, sample(2)]), sample(2))


def test_repr_shows_shapes_and_dtypes() -> None:
    assert repr(sample(3)) == (
        "Rows(3; env_id: (3,) int64, obs/z: (3, 2) float64, obs/a/0: (3,) int64, obs/a/1: (3,) float32, "
        "done: (3,) bool)"
    )
    assert repr(Rows()) == "Rows(0)"
    assert repr(Rows(actions=[1, 2])) == "Rows(2; actions: list)"


def test_rows_survive_copies_and_pickles() -> None:
    rows = sample(3)
    for other in (copy.copy(rows), copy.deepcopy(rows), pickle.loads(pickle.dumps(rows))):
        same_tree(other, rows)
        assert len(other) == 3


@given(n=st.integers(0, 6), data=st.data())
def test_take_is_indexing_of_every_leaf(n: int, data: st.DataObject) -> None:
    rows = sample(n)
    index: Any = data.draw(
        st.one_of(
            st.slices(n) if n else st.just(slice(None)),
            st.lists(st.booleans(), min_size=n, max_size=n).map(lambda m: np.array(m, bool)),
            st.lists(st.integers(-n, n - 1), max_size=8) if n else st.just([]),
        )
    )
    expected = np.arange(n)[np.asarray(index, np.int64) if isinstance(index, list) else index]
    taken = rows.take(index)
    assert len(taken) == len(expected)
    assert taken.env_id.tolist() == expected.tolist()
    assert taken.obs["z"].shape == (len(expected), 2)
    assert taken.obs["a"][1].dtype == np.float32
    same_tree(taken, {**taken, "done": expected % 2 == 0})
    same_tree(taken.obs["a"], (expected, (expected * 2).astype(np.float32)))


@pytest.mark.parametrize("index", [np.zeros((2, 2), int), np.zeros(2), 1, np.zeros(2, bool), np.array(["a"])])
def test_take_rejects_invalid_indices(index: Any) -> None:
    with pytest.raises(ArgumentError):
        sample(3).take(index)


@pytest.mark.slow("draws many batches")
def test_take_out_of_range() -> None:
    with pytest.raises(IndexError):
        sample(3).take([3])


def test_a_list_column_is_chosen_from_by_the_same_index() -> None:
    rows = Rows(env_id=np.arange(3), actions=["x", "y", "z"])
    assert rows.take([2, 0])["actions"] == ["z", "x"]
    assert rows.take(slice(1, None))["actions"] == ["y", "z"]


@given(cuts=st.lists(st.integers(0, 7), max_size=4))
def test_concat_undoes_any_split(cuts: list[int]) -> None:
    rows = sample(7)
    edges = [0, *sorted(cuts), 7]
    parts = [rows.take(slice(a, b)) for a, b in pairwise(edges)]
    joined = Rows.concat(parts)
    assert len(joined) == 7
    same_tree(joined, rows)


def test_concat_names_the_columns_that_differ() -> None:
    with pytest.raises(
        ArgumentError, match=r"batch 1 differs from batch 0: columns \['obs'\] are missing, .*\['x'\] are not"
    ):
        Rows.concat([sample(1), sample(1).drop("obs").replace(x=np.zeros(1))])
    with pytest.raises(
        ArgumentError, match=r"column 'obs' .* at /: expected a dict with keys \['z', 'a'\], got an array"
    ):
        Rows.concat([sample(1), sample(1).replace(obs=np.zeros((1, 2)))])
    with pytest.raises(ArgumentError, match=r"column 'obs' .* at /a: expected arrays at \['0', '1'\], got .* \['0'\]"):
        Rows.concat([sample(1), sample(1).replace(obs={"z": np.zeros((1, 2)), "a": (np.zeros(1),)})])
    with pytest.raises(ArgumentError, match=r"column 'env_id' .* expected an array, got a tuple"):
        Rows.concat([sample(1), sample(1).replace(env_id=(np.zeros(1),))])
    with pytest.raises(ArgumentError, match=r"column 'x' cannot be concatenated"):
        Rows.concat([Rows(x=np.zeros((1, 2))), Rows(x=np.zeros((1, 3)))])
