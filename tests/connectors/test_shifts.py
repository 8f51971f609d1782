from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marlvec.connectors.agent_tables import parse_shifts
from marlvec.errors import ArgumentError

INTS = st.integers(-50, 50)


@given(start=INTS, length=st.integers(0, 40), step=st.one_of(st.none(), st.integers(1, 9)))
def test_both_ends_belong_to_a_range(start: int, length: int, step: int | None) -> None:
    stop = start + length
    wanted, at = [], start
    while at <= stop:
        wanted.append(at)
        at += step or 1
    assert parse_shifts(f"{start}:{stop}" if step is None else f"{start}:{stop}:{step}") == tuple(wanted)


@given(shifts=st.lists(INTS, min_size=1, unique=True))
def test_lists_come_oldest_first_and_an_int_is_a_list_of_one(shifts: list[int]) -> None:
    assert parse_shifts(shifts) == parse_shifts(tuple(np.array(shifts))) == tuple(sorted(shifts))
    assert parse_shifts(shifts[0]) == parse_shifts(np.int64(shifts[0])) == (shifts[0],)
    assert all(type(shift) is int for shift in parse_shifts(list(np.array(shifts))))


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [("-3:-1", (-3, -2, -1)), ("0:3", (0, 1, 2, 3)), ("0:0", (0,)), ("-5:0:2", (-5, -3, -1)), ("-0:1", (0, 1))],
)
def test_what_rllib_gets_wrong_and_what_it_writes_in_its_examples(spec: str, wanted: tuple[int, ...]) -> None:
    assert parse_shifts(spec) == wanted


@pytest.mark.mostly_slow("draws many batches", quick=5)
@pytest.mark.parametrize(
    "spec",
    [
        *("", ":", "1", "-3", "1:", ":1", "-3:-1:", "a:b", "0:k", "1:2:3:4", " 1:2", "1: 2", "1:2\n", "+1:2", "1_0:20"),
        *("\u0661:\u0662", "1.0:2", "--1:0", "-1:-3", "0:5:0", "0:5:-1", "-999999999:0", "0:" + "9" * 5000),
        *(
            None,
            1.0,
            True,
            [],
            (),
            [1, 1],
            [0.5],
            ["1"],
            [True],
            [[1]],
            {1, 2},
            {1: 2},
            b"0:1",
            np.float64(1),
            range(0),
        ),
        *(np.array([1, 2]), np.array([0.0])),
    ],
)
def test_everything_else_is_an_error(spec: Any) -> None:
    with pytest.raises(ArgumentError, match="shift|a <= b and a step above 0"):
        parse_shifts(spec)
