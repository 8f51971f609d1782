"""Numbers as an index: it picks what the numbers pick."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from marlvec.collect.scheduling import index_of


@given(st.sets(st.integers(0, 30)))
@example(set())
@example({5})
@example(set(range(0, 31, 3)))
@example({0, 1, 2, 4, 8})
@example({0, 1, 3, 6})
def test_it_picks_the_same_rows(ids: set[int]) -> None:
    chosen = np.array(sorted(ids), np.int64)
    places = index_of(chosen)
    np.testing.assert_array_equal(np.arange(31)[places], chosen)
    if len(set(np.diff(chosen).tolist())) <= 1 and len(chosen):
        assert isinstance(places, slice)
