"""numpy's random numbers in compiled code."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("numba", reason="the extra `native` is not installed")

from marlvec.native import rng_kernels
from marlvec.native.rng_streams import as_generator, fresh_streams, row_of

SEEDS = st.integers(0, 2**64 - 1)


def seeded(seeds: list[int]) -> np.ndarray:
    rng = fresh_streams(len(seeds))
    rng_kernels.seed_envs(rng, np.arange(len(seeds)), seeds)
    return rng


@given(st.lists(SEEDS, min_size=1, max_size=30))
def test_seeds_begin_numpys_streams(seeds: list[int]) -> None:
    rng = seeded(seeds)
    for row, seed in zip(rng, seeds, strict=True):
        assert row.tolist() == row_of(np.random.default_rng(seed)).tolist()


@given(SEEDS, st.lists(st.one_of(st.integers(1, 2**32 - 1), st.sampled_from([1, 2, 3, 2**31 + 1]), st.none())))
def test_draws_are_numpys(seed: int, draws: list[int | None]) -> None:
    """Small integers take half of 64 bits and keep the other half, across draws of floats."""
    rng, generator = seeded([0, seed]), np.random.default_rng(seed)
    for n in draws:
        if n is None:
            assert rng_kernels.uniform(rng, 1, -0.9, 0.9) == generator.uniform(-0.9, 0.9)
        else:
            assert rng_kernels.bounded(rng, 1, n) == generator.integers(n)
    assert rng[1].tolist() == row_of(generator).tolist()
    assert rng_kernels.double(rng, 1) == generator.random()
    assert rng_kernels.next_uint64(rng, 1) == generator.bit_generator.random_raw()


@given(SEEDS)
def test_a_row_goes_on_as_numpys_generator(seed: int) -> None:
    rng = seeded([seed])
    rng_kernels.bounded(rng, 0, 5)  # leaves a half
    generator = as_generator(rng[0])
    assert generator.integers(7) == rng_kernels.bounded(rng, 0, 7)
    assert generator.random() == rng_kernels.double(rng, 0)


def test_streams_without_a_seed_differ() -> None:
    rng = fresh_streams(50)
    assert len({rng_kernels.double(rng, i) for i in range(50)}) == 50
