from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marlvec.connectors import Rows
from marlvec.connectors.rows import _STEP, RowRandom, mix
from marlvec.errors import ArgumentError, ContractError

# Every statistic below is of fixed seeds, so it is the same in each run; the limits are of 5 standard deviations.
SIGMAS = 5.0

PINNED_UNIFORM = [[0.32960526700318404, 0.13680722899162334], [0.05697456017210467, 0.6500522471657959]]
PINNED_NORMAL = [[0.5837576320738468, 0.6774984868635846], [-0.2012407322364964, -0.2771754065889944]]


def grid(episodes: int = 40, agents: int = 5, steps: int = 100) -> Rows:
    eps, agent, t = np.meshgrid(np.arange(episodes), np.arange(agents), np.arange(steps), indexing="ij")
    return Rows(eps_id=eps.ravel(), agent_index=agent.ravel(), t=t.ravel())


def correlation(a: Any, b: Any) -> float:
    """Correlation of two samples of numbers, in standard deviations of its value for independent ones."""
    return float(np.corrcoef(np.ravel(a), np.ravel(b))[0, 1] * math.sqrt(np.size(a)))


def chi_square(counts: Any) -> float:
    """Distance of counts from equal ones, in standard deviations of its value for uniform draws."""
    expected, freedom = np.sum(counts) / np.size(counts), np.size(counts) - 1
    return float((np.sum((counts - expected) ** 2) / expected - freedom) / math.sqrt(2 * freedom))


def test_the_generator_is_splitmix64() -> None:
    """Vigna's splitmix64.c, started at 1234567."""
    words = mix(np.uint64(1234567) + np.arange(1, 6, dtype=np.uint64) * _STEP)
    assert words.tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_the_numbers_stay_the_same_for_good() -> None:
    """Another release, machine or process must not change a run that was seeded."""
    rows = Rows(eps_id=np.array([0, 7]), agent_index=np.array([0, 2]), t=np.array([0, 31]))
    assert RowRandom(3, "noise").uniform(rows, 2).tolist() == PINNED_UNIFORM
    np.testing.assert_allclose(RowRandom(3, "noise").normal(rows, 2), PINNED_NORMAL, rtol=1e-13)


@given(data=st.data())
def test_a_row_draws_the_same_in_any_batch(data: st.DataObject) -> None:
    whole, random = grid(3, 2, 4), RowRandom(data.draw(st.integers(0, 2**70)), data.draw(st.text()))
    index = np.array(data.draw(st.lists(st.integers(0, len(whole) - 1), unique=True)), np.int64)
    rows, k = whole.take(index), data.draw(st.integers(1, 5))
    for draw in (random.uniform, random.normal):
        assert draw(rows, k).shape == (len(index), k)
        assert draw(rows, k).dtype == np.float64
        np.testing.assert_array_equal(draw(rows, k), draw(whole, 5)[index, :k])
    high_n = 1 + whole.t
    np.testing.assert_array_equal(random.integers(rows, high_n[index], k), random.integers(whole, high_n, k)[index])


def test_the_dtype_of_an_id_does_not_matter() -> None:
    rows, random = grid(4, 3, 5), RowRandom(0, "x")
    small = Rows(
        eps_id=rows.eps_id.astype(np.int32), agent_index=rows.agent_index.astype(np.uint8), t=rows.t.astype(np.int16)
    )
    np.testing.assert_array_equal(random.uniform(rows), random.uniform(small))
    far = Rows(eps_id=np.array([2**62, -1]), agent_index=np.zeros(2, int), t=np.zeros(2, int))
    assert len(set(random.uniform(far).ravel())) == 2


def test_uniform_numbers_are_uniform() -> None:
    drawn = RowRandom(0, "uniform").uniform(grid(), 3)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    for column in drawn.T:
        assert abs(chi_square(np.histogram(column, 100, (0, 1))[0])) < SIGMAS
        assert abs(column.mean() - 0.5) < SIGMAS / math.sqrt(12 * len(column))
    # Low bits too: what a product with a large number of choices looks at.
    low = np.floor(drawn[:, 0] * 2**50) % 64
    assert abs(chi_square(np.bincount(low.astype(int), minlength=64))) < SIGMAS


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["eps_id", "agent_index", "t"])
def test_neighbours_are_independent(axis: int) -> None:
    """Rows one, two and three steps apart, in every id: no correlation, and pairs fill the square evenly."""
    drawn = RowRandom(0, "neighbours").uniform(grid(60, 60, 30)).reshape(60, 60, 30)
    along = np.moveaxis(drawn, axis, 0)
    for lag in (1, 2, 3):
        a, b = along[:-lag].ravel(), along[lag:].ravel()
        assert abs(correlation(a, b)) < SIGMAS
        assert abs(correlation((a - 0.5) ** 2, (b - 0.5) ** 2)) < SIGMAS
        assert abs(chi_square(np.histogram2d(a, b, 20, ((0, 1), (0, 1)))[0])) < SIGMAS


def test_ids_do_not_stand_in_for_each_other() -> None:
    """(1, 0, 0), (0, 1, 0) and (0, 0, 1) are three rows, and no two of many draw the same."""
    drawn = RowRandom(0, "ids").uniform(grid(40, 40, 40))
    assert len(np.unique(drawn)) == drawn.size
    cube = drawn.reshape(40, 40, 40)
    for axes in itertools.permutations(range(3)):
        if axes != (0, 1, 2):
            other = cube.transpose(axes)
            distinct = cube != other  # rows with equal ids are the same row
            assert abs(correlation(cube[distinct], other[distinct])) < 2 * SIGMAS  # each pair stands in it twice


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (RowRandom(0, "a"), RowRandom(0, "b")),
        (RowRandom(0, "a"), RowRandom(1, "a")),
        (RowRandom(1, "1/a"), RowRandom(11, "/a")),
        (RowRandom(0, ""), RowRandom(2**64, "")),
    ],
)
def test_streams_and_seeds_are_independent(one: RowRandom, two: RowRandom) -> None:
    rows = grid()
    a, b = one.uniform(rows), two.uniform(rows)
    assert abs(correlation(a, b)) < SIGMAS
    assert abs(chi_square(np.histogram2d(a[:, 0], b[:, 0], 20, ((0, 1), (0, 1)))[0])) < SIGMAS


def test_the_draws_of_one_row_are_independent() -> None:
    rows, random = grid(), RowRandom(0, "draws")
    for draws in (random.uniform(rows, 6), random.normal(rows, 6)):
        for i, j in itertools.combinations(range(6), 2):
            assert abs(correlation(draws[:, i], draws[:, j])) < SIGMAS
            assert abs(correlation(np.abs(draws[:, i]), np.abs(draws[:, j]))) < SIGMAS


def test_one_bit_of_an_id_changes_half_of_the_bits() -> None:
    rng, random = np.random.default_rng(0), RowRandom(0, "bits")
    ids = rng.integers(2**62, size=(3, 2000))
    rows = Rows(eps_id=ids[0], agent_index=ids[1], t=ids[2])
    words = random._words(rows, 1)
    for name, bit in itertools.product(("eps_id", "agent_index", "t"), range(0, 62, 6)):
        other = random._words(rows.replace(**{name: rows[name] ^ (1 << bit)}), 1)
        flipped = (words ^ other) >> np.arange(64, dtype=np.uint64) & np.uint64(1)
        assert abs(flipped.mean() - 0.5) < SIGMAS * 0.5 / math.sqrt(flipped.size)
        assert (np.abs(flipped.mean(axis=0) - 0.5) < SIGMAS * 0.5 / math.sqrt(2000)).all()


def test_normal_numbers_are_normal() -> None:
    drawn = RowRandom(0, "normal").normal(grid(100), 3)  # an odd number: the last of a pair is left over
    for column in drawn.T:
        n = len(column)
        moments = [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)]  # power, its mean, its variance
        for power, mean, variance in moments:
            assert abs((column**power).mean() - mean) < SIGMAS * math.sqrt(variance / n)
        # Kolmogorov and Smirnov: the largest distance between the distribution functions; beyond 2.5, p < 1e-5.
        ideal = np.array([0.5 * (1 + math.erf(x / math.sqrt(2))) for x in np.sort(column)])
        steps = np.arange(n + 1) / n
        assert max((ideal - steps[:-1]).max(), (steps[1:] - ideal).max()) * math.sqrt(n) < 2.5
    assert np.abs(drawn).max() > 4


@pytest.mark.parametrize("high", [1, 2, 7, 100])
def test_integers_are_uniform(high: int) -> None:
    drawn = RowRandom(0, "integers").integers(grid(), high, 2)
    assert drawn.dtype == np.int64
    counts = np.bincount(drawn.ravel(), minlength=high)
    assert len(counts) == high
    if high > 1:
        assert abs(chi_square(counts)) < SIGMAS


def test_integers_below_a_number_of_each_row_and_draw() -> None:
    rows, random = grid(), RowRandom(0, "integers")
    high_n = 1 + rows.t % 7
    drawn = random.integers(rows, high_n, 3)
    assert (drawn.max(axis=1) < high_n).all()
    assert (drawn.min(), drawn.max()) == (0, 6)
    each = np.stack([high_n, high_n + 1], axis=1)
    assert (random.integers(rows, each, 2) < each).all()
    assert (random.integers(rows, 2**53) < 2**53).all()


def test_without_episodes_the_env_takes_their_place() -> None:
    rows, random = grid(), RowRandom(0, "x")
    named = Rows(env_id=rows.eps_id, agent_index=rows.agent_index, t=rows.t)
    np.testing.assert_array_equal(random.uniform(rows), random.uniform(named))
    both = rows.replace(env_id=np.zeros(len(rows), np.int64))
    np.testing.assert_array_equal(random.uniform(rows), random.uniform(both))


@pytest.mark.parametrize("name", ["t", "agent_index"])
def test_a_missing_column_is_named(name: str) -> None:
    with pytest.raises(ContractError, match=f"these rows have no '{name}'; the columns are"):
        RowRandom(0, "x").uniform(grid().drop(name))


def test_neither_episode_nor_env_is_an_error() -> None:
    with pytest.raises(ContractError, match="these rows have no 'env_id'"):
        RowRandom(0, "x").normal(grid().drop("eps_id"))


@pytest.mark.parametrize("seed", [-1, 0.5, True, None, "0"])
def test_a_seed_is_an_int(seed: Any) -> None:
    with pytest.raises(ArgumentError, match="seed must be an int from 0 on"):
        RowRandom(seed, "x")


def test_no_rows_and_no_hidden_state() -> None:
    seed: Any = np.int64(5)
    random = RowRandom(seed, "x")
    assert random.uniform(grid(0), 2).shape == (0, 2)
    assert random.normal(grid(0), 3).shape == (0, 3)
    np.testing.assert_array_equal(random.uniform(grid()), random.uniform(grid()))
    assert repr(random) == "RowRandom(5, 'x')"
    rows = grid(2, 2, 2)
    before = {name: column.copy() for name, column in rows.items()}
    random.normal(rows, 3)
    for name, column in before.items():
        np.testing.assert_array_equal(rows[name], column)
