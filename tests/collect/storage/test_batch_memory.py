"""Memory of batches: whoever holds an array, or a view of it, has it for himself; what nobody holds is used again."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from marlvec.collect.rows import BatchMemory

SHAPES: list[tuple[tuple[int, ...], Any]] = [((1 << 14,), np.int64), ((1 << 15, 2), np.float32), ((3,), np.float32)]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 5)), max_size=30))
def test_arrays_held_by_the_caller_are_not_reused(moves: list[tuple[int, int, int]]) -> None:
    memory, held = BatchMemory(), []
    for number, (batches, shape, drop) in enumerate(moves):
        for _ in range(batches):
            memory.begin()
        array = memory.empty(*SHAPES[shape])
        assert array.shape == SHAPES[shape][0]
        assert array.dtype == SHAPES[shape][1]
        assert array.flags.writeable
        assert array.flags.c_contiguous
        array[...] = number
        held.append((number, array[1:] if drop % 2 else array.view()))
        del array
        for value, other in held:
            assert (other == value).all()
        if drop > 2:
            held.pop(drop % len(held))


def address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def test_a_loop_that_holds_one_batch_goes_round_in_two() -> None:
    memory, seen = BatchMemory(), set()
    for _ in range(9):
        memory.begin()
        batch = [memory.empty((1 << 13, k), np.float64) for k in (1, 1, 3)]
        seen |= {address(array) for array in batch}
    assert len(seen) == 6


def test_what_two_batches_did_not_need_is_let_go() -> None:
    memory = BatchMemory()
    piece = weakref.ref(memory.empty((1 << 14,), np.int64).base)
    for _ in range(2):
        gc.collect()
        assert piece() is not None
        memory.begin()
    memory.begin()
    gc.collect()
    assert piece() is None


def test_object_columns_are_not_reused() -> None:
    array = BatchMemory().empty((1 << 14,), np.object_)
    assert array.base is None
    assert array[0] is None
