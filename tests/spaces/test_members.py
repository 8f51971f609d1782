"""`membership`: which rows are members of a space, whatever dtype they come in, and what is said of others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Space, Text

from marlvec.spaces import Leaf, SpaceTree, membership

INF, NAN = np.inf, np.nan
HERE = np.ones((1, 2), np.bool_)


class Even(Discrete):
    """Contains even numbers, and raises on numbers that it does not know."""

    def contains(self, x: Any) -> bool:
        if x > 100:
            raise LookupError("too large")
        return super().contains(x) and int(x) % 2 == 0


def leaf_of(space: Space[Any]) -> Leaf:
    (leaf,) = SpaceTree(space).leaves
    return leaf


@pytest.mark.parametrize(
    ("space", "good", "bad", "words"),
    [
        (Box(-128, 127, (2,), np.int8), [1, -128], [1, 128], r"\[-128, 127\], got 128 at index \(1,\); wrong: 1 of 2"),
        (Box(0, 255, (), np.uint8), 255, -1, r"expected values in \[0, 255\], got -1"),
        (Box(0, 1, (), np.bool_), 1, 2, r"expected values in \[False, True\], got 2"),
        (Box(-INF, INF, (2,), np.float32), [1e300, -INF], [0.0, NAN], r"\[-inf, inf\], got nan at index \(1,\)"),
        (Box(np.float32([0, -INF]), np.float32([1, 5]), (2,)), [1, -9], [1.5, 0], r"\[0.0, 1.0\], got 1.5"),
        (Discrete(3, start=-1), 1, 2, r"\[-1, 1\], got 2"),
        (Discrete(3, dtype=np.uint64), np.int64(2), np.int64(-1), r"\[0, 2\], got -1"),
        (MultiDiscrete([2, 3]), [1, 2], [1, 3], r"\[0, 2\], got 3 at index \(1,\)"),
        (MultiBinary(2), [0, 1], [2, 0], r"\[0, 1\], got 2"),
        (Even(9), 8, 7, r"expected a member of Discrete\(9\), got (np\.int64\()?7"),
        (Even(9), 8, 101, r"contains\(\) raised LookupError: too large"),
        (Text(3), "abc", "abcd", "expected a member of Text.*got 'abcd'"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_rows_outside_of_a_space_are_found_in_any_dtype(space: Space[Any], good: Any, bad: Any, words: str) -> None:
    leaf = leaf_of(space)
    members = membership(leaf, in_buffer=False)
    assert members is not None
    if leaf.is_object:
        rows = np.empty((1, 2), np.object_)
        rows[0] = good, bad
    else:
        rows = np.stack([good, bad])[None]
    assert not members.are_all(rows)
    assert members.rows(rows, HERE).tolist() == [[True, False]]
    assert members.rows(rows[:, :1], HERE[:, :1]).all()
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(members.describe(rows[0, 1, ...]))


def test_rows_that_nobody_asks_for_are_not_shown_to_a_space_of_ones_own() -> None:
    members = membership(leaf_of(Even(9)), in_buffer=False)
    assert members is not None
    assert members.rows(np.array([[101, 2]]), np.array([[False, True]])).tolist() == [[True, True]]


@pytest.mark.parametrize("space", [Box(0, 1, (0,)), MultiDiscrete(np.zeros((0,), np.int64))], ids=str)
def test_values_without_numbers_are_members(space: Space[Any]) -> None:
    assert membership(leaf_of(space), in_buffer=False) is None
