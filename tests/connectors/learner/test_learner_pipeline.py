from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from marlvec import connectors as c
from tests.connectors.helpers.samples import same_tree, vectors
from tests.connectors.learner.fragments import Critic, Fragment, rows_of

BATCH = [
    Fragment((1.0, 2.0, 3.0), (4.0, 5.0, 6.0), end, 7.0, (-1.0, -2.0, -3.0), (-1.5, -1.5, -1.5))
    for end in ("truncated", "cut", "terminated")
]


class CountRows(c.LearnerConnector):
    """Adds how many rows all policies have together."""

    def __init__(self) -> None:
        self.total = 0

    def see_batch(self, batch: Mapping[str, c.Rows]) -> None:
        self.total = sum(map(len, batch.values()))

    def __call__(self, rows: c.Rows) -> c.Rows:
        return rows.replace(total=np.full(len(rows), self.total))


class Fails(c.LearnerConnector):
    def see_batch(self, batch: Mapping[str, c.Rows]) -> None:
        raise ValueError("no such policy")

    def __call__(self, rows: c.Rows) -> c.Rows:
        return rows


def whole_chain() -> c.LearnerPipeline:
    """Every piece there is, in an order that makes sense."""
    return c.LearnerPipeline(
        [
            c.AddView("before", "obs", "-2:-1"),
            c.VTrace(value_function=Critic()),
            c.GeneralAdvantageEstimation(value_function=Critic()),
            c.ReturnsToGo(),
            c.NStep(2),
            c.AddLastObs(),
            c.LearnerPipeline([c.Standardize(), c.Standardize("vs")]),
            c.PadSequences(2),
            c.UnpadSequences(),
        ]
    )


def test_it_runs_without_a_space() -> None:
    rows = rows_of(BATCH)
    assert c.LearnerPipeline.default()(rows) is rows
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


def test_all_pieces_see_the_batch() -> None:
    count = CountRows()
    pipeline = c.LearnerPipeline([c.ReturnsToGo(), c.LearnerPipeline([count])])
    rows = rows_of(BATCH)
    pipeline.see_batch({"p": rows, "q": rows})
    assert pipeline(rows)["total"].tolist() == [18] * 9
    with pytest.raises(ValueError, match="no such policy") as caught:
        c.LearnerPipeline([Fails()]).see_batch({"p": rows})
    assert caught.value.__notes__ == ["in connector 'Fails' of LearnerPipeline"]
