"""`difference`: what counts as equal, and how the first difference is named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Discrete, Space

from marlvec.connectors.rows import Rows
from marlvec.spaces.equality import describe_difference, difference

NAN = float("nan")
BYTES = np.arange(3, dtype=np.uint8)


class Odd:
    """Compares by identity."""

    def __repr__(self) -> str:
        return "Odd()"  # ids of tests must not have addresses in them


def objects(*cells: Any) -> np.ndarray[Any, Any]:
    out = np.empty(len(cells), np.object_)
    out[:] = cells
    return out


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"x": 1, "y": (2.0, NAN)}, {"y": (2.0, NAN), "x": 1}),
        (np.array([1.0, NAN]), np.array([1.0, NAN])),
        (np.array(["NaT", "2026-01-01"], "M8[D]"), np.array(["NaT", "2026-01-01"], "M8[D]")),
        (objects(BYTES, None, {"k": NAN}), objects(BYTES.copy(), None, {"k": NAN})),
        (np.float32(NAN), np.float32(NAN)),
        (Rows(obs=BYTES), Rows(obs=BYTES.copy())),
        ({"x": BYTES}, Rows(x=BYTES)),
        (Discrete(3), Discrete(3, seed=1)),
    ],
    ids=repr,
)
def test_equal_values_have_no_difference(a: Any, b: Any) -> None:
    assert difference(a, b) is None
    assert difference(b, a) is None


@pytest.mark.parametrize(
    ("a", "b", "path", "at"),
    [
        ({"x": {"y": [0, BYTES]}}, {"x": {"y": [0, BYTES + np.uint8(1)]}}, "x/y/1", (0,)),
        ({"x": 1}, {"y": 1}, "", ()),
        ({"0": 1}, [1], "", ()),
        ([1], (1,), "", ()),
        ([1], [1, 2], "", ()),
        (1, True, "", ()),
        (1.0, NAN, "", ()),
        (np.float32(1), np.float64(1), "", ()),
        (BYTES, BYTES.astype(np.int8), "", ()),
        (BYTES, BYTES[:2], "", ()),
        (np.array([1.0, NAN]), np.array([1.0, 2.0]), "", (1,)),
        (objects(1, BYTES), objects(1, BYTES * 2), "", (1,)),
        (Discrete(3), Discrete(4), "", ()),
        (Odd(), Odd(), "", ()),
    ],
    ids=repr,
)
def test_first_difference_is_named(a: Any, b: Any, path: str, at: tuple[int, ...]) -> None:
    for found in (difference(a, b), difference(b, a)):
        assert found is not None
        assert (found.path, found.at) == (path, at)
        assert found.expected != found.got or isinstance(a, Odd)


def test_opaque_objects_count_as_equal_and_known_ones_do_not() -> None:
    assert difference({"x": Odd()}, {"x": Odd()}, opaque=True) is None
    assert difference({"x": Odd()}, {"x": 1}, opaque=True) is not None
    assert difference({"x": b"1"}, {"x": b"2"}, opaque=True) is not None


def test_numbers_of_other_types_are_equal_where_types_do_not_count() -> None:
    assert difference([1, np.float32(2)], (1.0, 2), typed=False) is None
    assert difference([1], (2.0,), typed=False) is not None
    assert difference(BYTES, BYTES + 1e-9, typed=False, close=lambda a, b: np.isclose(a, b)) is None


def test_spaces_of_a_class_without_equality_are_equal_where_their_attributes_are() -> None:
    class Temperature(Space[float]):
        def __init__(self, lowest: float, names: dict[str, Any]) -> None:
            super().__init__((), np.float64)
            self.lowest, self.names = lowest, names

    inner = {"unit": "K", "scale": [np.zeros(2)], "of": Discrete(2)}
    assert describe_difference(Temperature(NAN, inner), Temperature(NAN, {**inner, "of": Discrete(2)})) is None
    assert describe_difference(Temperature(0.0, inner), Temperature(NAN, inner)) is not None
    assert describe_difference(Temperature(0.0, inner), Temperature(0.0, {**inner, "of": Discrete(3)})) is not None
