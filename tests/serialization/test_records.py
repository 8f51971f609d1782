"""Records become plain data, and data of the wrong type is refused with the name of the part that is wrong."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest

from marlvec.errors import ArgumentError
from marlvec.serialization.records import Count, PositiveCount, from_plain, read_fields, to_plain
from tests.vector.support.reference import same


class Point(NamedTuple):
    x: int
    y: float = 0.0


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    ends: tuple[Point, Point]
    marks: Mapping[str, Count]
    closed: bool
    kind: Literal["thin", "thick"] = "thin"
    note: str | None = None


LINE = Line("a", (Point(1, 2.5), Point(-3)), {"one": 1}, True, "thick")

PLAIN = ["a", ([1, 2.5], [-3, 0.0]), {"one": 1}, True, "thick", None]

READ = [
    (Line, PLAIN, LINE),
    (Line, tuple(PLAIN), LINE),
    (list[Point], [[1, 2], {"x": 3, "y": math.inf}], [Point(1, 2.0), Point(3, math.inf)]),
    (tuple[int, ...], [3, 4], (3, 4)),
    (tuple[int, ...], [], ()),
    (set[str], ["b", "a"], {"a", "b"}),
    (dict[str, list[int]], {"a": (1, 2)}, {"a": [1, 2]}),
    (dict[int, Any], {3: {4}}, {3: {4}}),
    (float, 3, 3.0),
    (float, np.float32(0.5), 0.5),
    (int, np.int64(7), 7),
    (Real, 7, 7),
    (Real, 7.0, 7.0),
    (bool, np.bool_(True), True),
    (Count, 0, 0),
    (int | None, None, None),
    (int | None, 5, 5),
]


@pytest.mark.parametrize(("kind", "data", "value"), READ)
def test_data_that_fits_is_read(kind: Any, data: Any, value: Any) -> None:
    same(from_plain(kind, data, "it"), value)


def test_a_record_is_written_as_a_list_and_read_back() -> None:
    same(to_plain(LINE), PLAIN)
    same(from_plain(Line, to_plain(LINE), "it"), LINE)
    same(to_plain({"points": deque([Point(1)]), "names": {"b", "a"}, "pair": (1, 2)}), {
        "points": [[1, 0.0]],
        "names": ["a", "b"],
        "pair": (1, 2),
    })  # fmt: skip


WRONG = [
    (int, True, "it: expected an integer, got True"),
    (int, 1.0, "it: expected an integer, got 1.0"),
    (int, np.bool_(True), "it: expected an integer"),
    (Count, -1, "it: expected an integer of at least 0, got -1"),
    (PositiveCount, 0, "at least 1, got 0"),
    (float, "1", "it: expected a number, got '1'"),
    (float, True, "it: expected a number"),
    (Real, True, "it: expected a number, got True"),
    (Real, "1", "it: expected a number"),
    (float, 10**400, "it: expected a number, got 1000"),
    (bool, 1, "it: expected True or False, got 1"),
    (str, b"a", "it: expected a string"),
    (Literal["thin", "thick"], "wide", "expected one of .*'thin', 'thick'.*, got 'wide'"),
    (Literal["thin", "thick"], ["thin"], "expected one of"),
    (list[int], "12", "it: expected a list, got '12'"),
    (list[int], np.arange(3), "it: expected a list"),
    (list[int], {1: 2}, "it: expected a list"),
    (list[int], [1, None], r"it\[1\]: expected an integer, got None"),
    (tuple[int, str], [1], r"it: expected a list of 2, got \[1\]"),
    (tuple[int, str], [1, 2], r"it\[1\]: expected a string, got 2"),
    (dict[str, int], [], "it: expected a dict"),
    (dict[str, int], {1: 1}, "it: a key: expected a string, got 1"),
    (dict[str, int], {"a": "b"}, r"it\['a'\]: expected an integer, got 'b'"),
    (Point, [1], r"it: expected a list of 2, got \[1\]"),
    (Point, 3, "it: expected a list of 2, got 3"),
    (Point, {"x": 1}, r"it: expected other fields; missing \['y'\], unknown \[\]"),
    (Point, {"x": 1, "y": None}, "it: y: expected a number, got None"),
    (Line, ["a", [[1, 2], [3, "4"]], {}, True, "thin", None], r"it: ends\[1\]: y: expected a number, got '4'"),
    (Point | None, [None, 1.0], "it: x: expected an integer, got None"),
]


@pytest.mark.parametrize(("kind", "data", "words"), WRONG)
def test_data_of_another_type_is_refused(kind: Any, data: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        from_plain(kind, data, "it")


def test_fields_of_a_state() -> None:
    assert read_fields({"a": 1, "b": [2]}, "it", a=int, b=tuple[int]) == {"a": 1, "b": (2,)}
    for state, words in (
        ({"a": 1, "c": 2}, r"it: expected other fields; missing \['b'\], unknown \['c'\]"),
        ([1, 2], r"it: expected a saved state, got \[1, 2\]"),
        ({"a": "1", "b": [2]}, "it: a: expected an integer, got '1'"),
    ):
        with pytest.raises(ArgumentError, match=words):
            read_fields(state, "it", a=int, b=tuple[int])
