from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given

from marlvec.connectors.learner.fragments import Fragments
from marlvec.connectors.rows import Rows
from marlvec.errors import ContractError
from tests.connectors.learner.fragments import Fragment, batches, rows_of


@pytest.mark.slow("draws many batches")
@given(batch=batches())
def test_where_they_are(batch: list[Fragment]) -> None:
    found = Fragments(rows_of(batch))
    assert len(found) == len(batch)
    number, left, start = [], [], 0
    for f, fragment in enumerate(batch):
        assert (found.first_F[f], found.stop_F[f]) == (start, start + len(fragment))
        number += [f] * len(fragment)
        left += range(len(fragment) - 1, -1, -1)
        start += len(fragment)
    assert found.fragment_n.tolist() == number
    assert found.left_n.tolist() == left
    np.testing.assert_array_equal(found.last_F, found.stop_F - 1)


def rows(unroll_id: Any = (0, 0, 1), **columns: Any) -> Rows:
    return Rows(unroll_id=np.array(unroll_id), **{name: np.array(value) for name, value in columns.items()})


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (rows([0, 1, 0]), "rows of equal unroll_id must be adjacent; shuffle rows after"),
        (rows(t=[1, 0, 0]), "rows of equal unroll_id must ascend in t; shuffle rows after"),
        (rows(t=[1, 1, 0]), "must ascend in t"),
        (rows(phantom=[True, False, False]), "a phantom row must be its fragment's last"),
        (rows(phantom=[False, False, True]), "a phantom row must be its fragment's last, and not its only one"),
        (rows(phantom=[True, True, False]), "a phantom row must be its fragment's last"),
        (rows(seq_lens=[1, 1, 1]), r"got sequences \(B, T, …\): put this connector before PadSequences or"),
        (Rows(t=np.arange(3)), "expected a column 'unroll_id'; batches of a Collector have it; the columns are"),
    ],
)
def test_rows_out_of_order_are_refused(bad: Rows, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        Fragments(bad)


@pytest.mark.parametrize("name", ["terminated", "truncated"])
def test_an_episode_that_ends_in_the_middle_is_refused(name: str) -> None:
    spoilt = rows(**{name: [True, False, False]})
    with pytest.raises(ContractError, match=f"a row with {name}=True must be the last of its unroll_id.*NStep"):
        Fragments(spoilt).check_ends(spoilt)


def test_steps_may_be_left_out() -> None:
    """As FilterRows does; and an episode may end in every fragment's last row."""
    given = rows(t=[3, 9, 0], terminated=[False, True, True], phantom=[False, False, False])
    found = Fragments(given)
    found.check_ends(given)
    assert found.left_n.tolist() == [1, 0, 0]
