"""Rows to sequences and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marlvec.connectors.learner.neighbours import AddLastObs
from marlvec.connectors.learner.pipeline import LearnerPipeline
from marlvec.connectors.learner.sequences import PadSequences, UnpadSequences
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, ContractError
from marlvec.trees import map_tree
from tests.connectors.helpers.samples import same_tree
from tests.connectors.learner.fragments import Fragment, batches, rows_of


def with_more(batch: list[Fragment], masked: bool) -> Rows:
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
    sequences = PadSequences(max_len)(rows)
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

    back = UnpadSequences()(sequences)
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
    rows = AddLastObs()(with_more(batch, False))
    sequences = PadSequences(max_len)(rows)
    back = UnpadSequences()(sequences.replace(doubled=sequences["obs"] * 2))
    np.testing.assert_array_equal(back["doubled"], rows["obs"] * 2)
    same_tree(back.drop("doubled"), rows)
    np.testing.assert_array_equal(sequences["loss_mask"].sum(), (~rows["phantom"]).sum())


def test_by_hand() -> None:
    rows = Rows(x=np.arange(1, 6), unroll_id=np.array([3, 3, 3, 4, 4]), memory=np.arange(5) * 10)
    sequences = PadSequences(2, "memory")(rows)
    assert sequences["x"].tolist() == [[1, 2], [3, 0], [4, 5]]
    assert sequences["seq_lens"].tolist() == [2, 1, 2]
    assert sequences["memory"].tolist() == [0, 20, 30]
    assert sequences["loss_mask"].tolist() == [[True, True], [True, False], [True, True]]
    same_tree(UnpadSequences("memory")(sequences), rows)
    sequences = PadSequences(4, None)(rows)
    assert sequences["memory"].tolist() == [[0, 10, 20, 0], [30, 40, 0, 0]]
    same_tree(UnpadSequences(None)(sequences), rows)


def test_in_a_pipeline() -> None:
    rows = Rows(x=np.arange(5), unroll_id=np.array([3, 3, 3, 4, 4]))
    pipeline = LearnerPipeline([PadSequences(2), UnpadSequences()])
    assert pipeline.changes_length
    same_tree(pipeline(rows), rows)


def test_refusals() -> None:
    for length in (0, -2, 2.0, False, "3"):
        with pytest.raises(ArgumentError, match="max_len must be a whole number of at least 1, got"):
            PadSequences(length)  # type: ignore[arg-type]  # what is not an int is refused
    rows = Rows(x=np.arange(5), unroll_id=np.array([3, 3, 3, 4, 4]), loss_mask=np.ones(5, bool))
    with pytest.raises(ContractError, match=r"these are sequences \(B, T, …\)"):
        PadSequences(2)(PadSequences(2)(rows))
    with pytest.raises(ContractError, match=r"columns \['loss_mask_rows'\] have names that PadSequences needs"):
        PadSequences(2)(rows.replace(loss_mask_rows=np.zeros(5)))
    with pytest.raises(ContractError, match="expected the columns 'seq_lens' and 'loss_mask' that PadSequences adds"):
        UnpadSequences()(rows)
    sequences = PadSequences(2)(rows)
    with pytest.raises(ContractError, match=r"column 'loss' must begin with the axes \(B, T\) = \(3, 2\), got \(3,\)"):
        UnpadSequences()(sequences.replace(loss=np.zeros(3)))
