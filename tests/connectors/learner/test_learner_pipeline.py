from __future__ import annotations

import pickle
from collections.abc import Mapping

import numpy as np
import pytest

from marlvec.connectors.agent.memory.frame_stack import FrameStack
from marlvec.connectors.connector import LearnerConnector
from marlvec.connectors.learner.advantages import GeneralAdvantageEstimation, VTrace
from marlvec.connectors.learner.neighbours import AddLastObs, AddView
from marlvec.connectors.learner.pipeline import LearnerPipeline
from marlvec.connectors.learner.returns import NStep, ReturnsToGo
from marlvec.connectors.learner.sequences import PadSequences, UnpadSequences
from marlvec.connectors.learner.standardize import Standardize
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError
from tests.connectors.helpers.samples import same_tree, vectors
from tests.connectors.learner.fragments import Critic, Fragment, rows_of

BATCH = [
    Fragment((1.0, 2.0, 3.0), (4.0, 5.0, 6.0), end, 7.0, (-1.0, -2.0, -3.0), (-1.5, -1.5, -1.5))
    for end in ("truncated", "cut", "terminated")
]


class CountRows(LearnerConnector):
    """Adds how many rows all policies have together."""

    def __init__(self) -> None:
        self.total = 0

    def see_batch(self, batch: Mapping[str, Rows]) -> None:
        self.total = sum(map(len, batch.values()))

    def __call__(self, rows: Rows) -> Rows:
        return rows.replace(total=np.full(len(rows), self.total))


class Fails(LearnerConnector):
    def see_batch(self, batch: Mapping[str, Rows]) -> None:
        raise ValueError("no such policy")

    def __call__(self, rows: Rows) -> Rows:
        return rows


def whole_chain() -> LearnerPipeline:
    """Every piece there is, in an order that makes sense."""
    return LearnerPipeline(
        [
            AddView("before", "obs", "-2:-1"),
            VTrace(value_function=Critic()),
            GeneralAdvantageEstimation(value_function=Critic()),
            ReturnsToGo(),
            NStep(2),
            AddLastObs(),
            LearnerPipeline([Standardize(), Standardize("vs")]),
            PadSequences(2),
            UnpadSequences(),
        ]
    )


def test_it_runs_without_a_space() -> None:
    rows = rows_of(BATCH)
    assert LearnerPipeline.default()(rows) is rows
    pipeline = whole_chain()
    assert not pipeline.bound
    out = pipeline(rows)
    assert len(out) == len(rows) + len(BATCH)
    assert {"before", "vs", "advantages", "returns_to_go", "discounts", "phantom"} <= out.keys()
    np.testing.assert_allclose(out["advantages"][out["loss_mask"]].mean(), 0, atol=1e-6)
    assert pipeline.timings["PadSequences"].calls == 1


def test_a_space_does_no_harm() -> None:
    pipeline = whole_chain()
    pipeline.bind(vectors(2), ["a", "b"])
    same_tree(pipeline(rows_of(BATCH)), whole_chain()(rows_of(BATCH)))
    assert pipeline["AddView"].agents == ("a", "b")


def test_edits() -> None:
    pipeline = whole_chain()
    assert pipeline.changes_length
    for name in ("PadSequences", "UnpadSequences", "AddLastObs"):
        pipeline.remove(name)
    assert not pipeline.changes_length
    with pytest.raises(ArgumentError, match="LearnerPipeline takes LearnerConnectors, got FrameStack"):
        pipeline.append(FrameStack(2))  # type: ignore[arg-type]  # of another side


def test_no_rows() -> None:
    """Every piece takes an empty batch, and the columns are those of a full one."""
    rows = rows_of(BATCH)
    empty, full = whole_chain()(rows.take([])), whole_chain()(rows)
    assert len(empty) == 0
    assert list(empty.keys()) == list(full.keys())
    for name, column in full.items():
        if isinstance(column, np.ndarray):
            assert (empty[name].shape[1:], empty[name].dtype) == (column.shape[1:], column.dtype), name


def test_all_pieces_see_the_batch() -> None:
    count = CountRows()
    pipeline = LearnerPipeline([ReturnsToGo(), LearnerPipeline([count])])
    rows = rows_of(BATCH)
    pipeline.see_batch({"p": rows, "q": rows})
    assert pipeline(rows)["total"].tolist() == [18] * 9
    with pytest.raises(ValueError, match="no such policy") as caught:
        LearnerPipeline([Fails()]).see_batch({"p": rows})
    assert caught.value.__notes__ == ["in connector 'Fails' of LearnerPipeline"]


def test_errors_name_the_piece() -> None:
    with pytest.raises(Exception, match="expected a column 'values'") as caught:
        whole_chain()(rows_of(BATCH).drop("values"))
    assert caught.value.__notes__ == ["in connector 'VTrace' of LearnerPipeline"]


def test_pieces_go_through_pickle_and_have_no_state() -> None:
    pipeline = whole_chain()
    rows = rows_of(BATCH)
    same_tree(pickle.loads(pickle.dumps(pipeline))(rows), pipeline(rows))
    state = pipeline.state_dict()
    assert not any(value for name, value in state.items() if name != "LearnerPipeline")
    pipeline.load_state_dict(state)
    for piece in pipeline:
        if not isinstance(piece, LearnerPipeline):
            again = type(piece)(**piece.params())
            assert repr(again) == repr(piece)
