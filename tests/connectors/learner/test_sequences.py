"""Rows to sequences and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marlvec import connectors as c
from marlvec.errors import ContractError
from marlvec.trees import map_tree
from tests.connectors.helpers.samples import same_tree
from tests.connectors.learner.fragments import Fragment, batches, rows_of


def with_more(batch: list[Fragment], masked: bool) -> c.Rows:
    """Rows with a state, a column of objects, and perhaps a mask of their own."""
    rows = rows_of(batch)
    n = len(rows)
    rows = rows.replace(
        state_in={"h": np.arange(2.0 * n).reshape(n, 2), "c": (np.arange(n) + 500,)},
        name=np.array([f"row {i}" for i in range(n)], np.object_),
    )
    return rows.replace(loss_mask=np.arange(n) % 3 > 0) if masked else rows


def chunks(batch: list[Fragment], max_len: int) -> list[list[int]]:
    """The rows of each sequence, by hand."""
    found, at = [], 0
    for fragment in batch:
        for start in range(0, len(fragment), max_len):
            found.append(list(range(at + start, at + min(start + max_len, len(fragment)))))
        at += len(fragment)
    return found


@pytest.mark.slow("draws many batches")
@pytest.mark.checklist(103)
@given(batch=batches(), max_len=st.integers(1, 10), masked=st.booleans())
def test_sequences_and_back(batch: list[Fragment], max_len: int, masked: bool) -> None:
    """Zero-padded, with lengths, mask and the state at each sequence's start; and exactly the rows again."""
    rows = with_more(batch, masked)
    sequences = c.PadSequences(max_len)(rows)
    expected = chunks(batch, max_len)
    assert len(sequences) == len(expected)
    assert sequences["seq_lens"].tolist() == [len(chunk) for chunk in expected]
    mask = rows["loss_mask"] if masked else np.ones(len(rows), bool)
    assert sequences["loss_mask"].shape == (len(expected), max_len)
    assert sequences["loss_mask"].dtype == np.bool_
    for b, chunk in enumerate(expected):
        padding = max_len - len(chunk)
        assert sequences["loss_mask"][b].tolist() == [*mask[chunk].tolist(), *[False] * padding]
        same_tree(entry(sequences["state_in"], b), entry(rows["state_in"], chunk[0]))
        for name in ("obs", "actions", "rewards", "terminated", "unroll_id", "name"):
            own, true = entry(sequences[name], b), rows.take(chunk)[name]
            same_tree(entry(own, slice(None, len(chunk))), true)
            same_tree(entry(own, slice(len(chunk), None)), blank(true, padding))

    back = c.UnpadSequences()(sequences)
    assert list(back.keys()) == list(rows.keys())
    same_tree(back, rows)


def entry(column: Any, where: Any) -> Any:
    return map_tree(lambda leaf: leaf[where], column)


def blank(column: Any, n: int) -> Any:
    """What n rows without anything in them look like."""
    return map_tree(lambda leaf: np.full((n, *leaf.shape[1:]), None if leaf.dtype == object else 0, leaf.dtype), column)


@pytest.mark.slow("draws many batches")
@given(batch=batches(min_size=1), max_len=st.integers(1, 4))
def test_columns_added_to_sequences_come_back_as_rows(batch: list[Fragment], max_len: int) -> None:
    """As where values are computed by a network that remembers; phantom rows are rows like any other here."""
    rows = c.AddLastObs()(with_more(batch, False))
    sequences = c.PadSequences(max_len)(rows)
    back = c.UnpadSequences()(sequences.replace(doubled=sequences["obs"] * 2))
    np.testing.assert_array_equal(back["doubled"], rows["obs"] * 2)
    same_tree(back.drop("doubled"), rows)
    np.testing.assert_array_equal(sequences["loss_mask"].sum(), (~rows["phantom"]).sum())


def test_by_hand() -> None:
    rows = c.Rows(x=np.arange(1, 6), unroll_id=np.array([3, 3, 3, 4, 4]), memory=np.arange(5) * 10)
    sequences = c.PadSequences(2, "memory")(rows)
    assert sequences["x"].tolist() == [[1, 2], [3, 0], [4, 5]]
    assert sequences["seq_lens"].tolist() == [2, 1, 2]
    assert sequences["memory"].tolist() == [0, 20, 30]
    assert sequences["loss_mask"].tolist() == [[True, True], [True, False], [True, True]]
    same_tree(c.UnpadSequences("memory")(sequences), rows)
    sequences = c.PadSequences(4, None)(rows)
    assert sequences["memory"].tolist() == [[0, 10, 20, 0], [30, 40, 0, 0]]
    same_tree(c.UnpadSequences(None)(sequences), rows)


def test_refusals() -> None:
    rows = c.Rows(x=np.arange(5), unroll_id=np.array([3, 3, 3, 4, 4]), loss_mask=np.ones(5, bool))
    with pytest.raises(ContractError, match=r"got sequences \(B, T, …\)"):
        c.PadSequences(2)(c.PadSequences(2)(rows))
    with pytest.raises(ContractError, match=r"columns \['loss_mask_rows'\] have names that PadSequences needs"):
        c.PadSequences(2)(rows.replace(loss_mask_rows=np.zeros(5)))
    with pytest.raises(ContractError, match="expected the columns 'seq_lens' and 'loss_mask' that PadSequences adds"):
        c.UnpadSequences()(rows)
    sequences = c.PadSequences(2)(rows)
    with pytest.raises(ContractError, match=r"column 'loss' must begin with the axes \(B, T\) = \(3, 2\), got \(3,\)"):
        c.UnpadSequences()(sequences.replace(loss=np.zeros(3)))
