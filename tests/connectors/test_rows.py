"""Rows, their random numbers, and rows that are taken out."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections import defaultdict
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from marlvec import connectors as c
from marlvec.connectors import Rows
from marlvec.connectors.rows import _STEP, RowRandom, mix
from marlvec.errors import ArgumentError, ContractError
from tests.connectors.samples import Space, Tick, pairs_of, rows_at, rows_of, same_tree, ticks, vectors
from tests.vector.support.reference import refused


def sample(n: int, offset: int = 0) -> Rows:
    at = np.arange(n) + offset
    obs = {"z": at[:, None] * np.ones(2), "a": (at, (at * 2).astype(np.float32))}
    return Rows(env_id=at, obs=obs, done=at % 2 == 0)


def test_columns_are_read_by_attribute_and_by_item() -> None:
    rows = sample(3)
    assert len(rows) == 3
    assert rows.env_id is rows["env_id"] is rows.get("env_id")
    assert "obs" in rows
    assert "logp" not in rows
    with pytest.raises(AttributeError, match=r"no column 'logp'.*env_id"):
        _ = rows.logp
    with pytest.raises(KeyError, match=r"no column 'logp'.*env_id"):
        rows["logp"]
    with pytest.raises(TypeError, match=r"take\(\)"):
        rows[np.array([0])]  # type: ignore[index]  # a wrong index is the point
    with pytest.raises(TypeError):
        iter(rows)  # type: ignore[call-overload]  # that it has none is the point


def test_a_column_with_a_methods_name_is_read_by_item() -> None:
    rows = Rows(take=np.arange(2), obs=np.zeros((2, 1)))
    assert rows["take"].tolist() == [0, 1]
    assert len(rows.take([1])) == 1


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"obs": np.zeros((3, 2)), "t": np.zeros(2)}, r"column 't' has 2 rows, the columns before it have 3"),
        ({"t": np.zeros(2), "obs": {"a": np.zeros(2), "b": np.zeros(3)}}, r"column 'obs' at b has 3 rows"),
        ({"obs": np.float32(1.0)}, r"column 'obs' must be an array"),
        ({"obs": np.array(1.0)}, r"column 'obs' must be an array"),
        ({"obs": (np.zeros(1), 7)}, r"column 'obs' at 1 must be an array .* got int"),
    ],
)
def test_a_bad_column_is_named(columns: dict[str, Any], text: str) -> None:
    refused(ArgumentError, text, Rows, columns)


def test_replace_adds_and_changes_without_touching_the_old_rows() -> None:
    rows = sample(2)
    new = rows.replace(done=np.ones(2), logp=np.zeros(2))
    assert list(new.keys()) == ["env_id", "obs", "done", "logp"]
    assert new.obs is rows.obs
    assert "logp" not in rows
    assert rows.done.dtype == np.bool_
    refused(ArgumentError, "'logp' has 3 rows", rows.replace, logp=np.zeros(3))
    refused(ArgumentError, "'b' has 3 rows", Rows().replace, a=np.zeros(2), b=np.zeros(3))
    assert len(Rows().replace(a=np.zeros(2))) == 2


def test_drop() -> None:
    rows = sample(2)
    assert list(rows.drop("obs", "done").keys()) == ["env_id"]
    assert len(rows.drop("env_id", "obs", "done")) == 0
    refused(KeyError, "no column 'logp'", rows.drop, "logp")


def test_no_rows_and_no_columns() -> None:
    assert len(Rows()) == len(Rows({})) == len(Rows.concat([])) == 0
    empty = sample(0)
    assert len(empty) == 0
    assert len(empty.take([])) == len(empty.take(np.zeros(0, bool))) == 0
    same_tree(Rows.concat([empty, sample(2)]), sample(2))


def test_repr_shows_shapes_and_dtypes() -> None:
    assert repr(sample(3)) == (
        "Rows(3; env_id: (3,) int64, obs/z: (3, 2) float64, obs/a/0: (3,) int64, obs/a/1: (3,) float32, "
        "done: (3,) bool)"
    )
    assert repr(Rows()) == "Rows(0)"
    assert repr(Rows(actions=[1, 2])) == "Rows(2; actions: list)"


def test_rows_survive_copies_and_pickles() -> None:
    rows = sample(3)
    for other in (copy.copy(rows), copy.deepcopy(rows), pickle.loads(pickle.dumps(rows))):
        same_tree(other, rows)
        assert len(other) == 3


@given(n=st.integers(0, 6), data=st.data())
def test_take_is_indexing_of_every_leaf(n: int, data: st.DataObject) -> None:
    rows = sample(n)
    index: Any = data.draw(
        st.one_of(
            st.slices(n) if n else st.just(slice(None)),
            st.lists(st.booleans(), min_size=n, max_size=n).map(lambda m: np.array(m, bool)),
            st.lists(st.integers(-n, n - 1), max_size=8) if n else st.just([]),
        )
    )
    expected = np.arange(n)[np.asarray(index, np.int64) if isinstance(index, list) else index]
    taken = rows.take(index)
    assert len(taken) == len(expected)
    assert taken.env_id.tolist() == expected.tolist()
    assert taken.obs["z"].shape == (len(expected), 2)
    assert taken.obs["a"][1].dtype == np.float32
    same_tree(taken, {**taken, "done": expected % 2 == 0})
    same_tree(taken.obs["a"], (expected, (expected * 2).astype(np.float32)))


@pytest.mark.parametrize("index", [np.zeros((2, 2), int), np.zeros(2), 1, np.zeros(2, bool), np.array(["a"])])
def test_take_rejects_invalid_indices(index: Any) -> None:
    refused(ArgumentError, "", sample(3).take, index)


@pytest.mark.slow("draws many batches")
def test_take_out_of_range() -> None:
    refused(IndexError, "", sample(3).take, [3])


def test_a_list_column_is_chosen_from_by_the_same_index() -> None:
    rows = Rows(env_id=np.arange(3), actions=["x", "y", "z"])
    assert rows.take([2, 0])["actions"] == ["z", "x"]
    assert rows.take(slice(1, None))["actions"] == ["y", "z"]


@given(cuts=st.lists(st.integers(0, 7), max_size=4))
def test_concat_undoes_any_split(cuts: list[int]) -> None:
    rows = sample(7)
    edges = [0, *sorted(cuts), 7]
    parts = [rows.take(slice(a, b)) for a, b in pairwise(edges)]
    joined = Rows.concat(parts)
    assert len(joined) == 7
    same_tree(joined, rows)


def test_concat_names_the_columns_that_differ() -> None:
    with pytest.raises(
        ArgumentError, match=r"batch 1 differs from batch 0: columns \['obs'\] are missing, .*\['x'\] are not"
    ):
        Rows.concat([sample(1), sample(1).drop("obs").replace(x=np.zeros(1))])
    with pytest.raises(
        ArgumentError, match=r"column 'obs' .* at /: expected a dict with keys \['z', 'a'\], got an array"
    ):
        Rows.concat([sample(1), sample(1).replace(obs=np.zeros((1, 2)))])
    with pytest.raises(ArgumentError, match=r"column 'obs' .* at /a: expected arrays at \['0', '1'\], got .* \['0'\]"):
        Rows.concat([sample(1), sample(1).replace(obs={"z": np.zeros((1, 2)), "a": (np.zeros(1),)})])
    with pytest.raises(ArgumentError, match=r"column 'env_id' .* expected an array, got a tuple"):
        Rows.concat([sample(1), sample(1).replace(env_id=(np.zeros(1),))])
    with pytest.raises(ArgumentError, match=r"column 'x' cannot be concatenated"):
        Rows.concat([Rows(x=np.zeros((1, 2))), Rows(x=np.zeros((1, 3)))])


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
    refused(ContractError, "these rows have no 'env_id'", RowRandom(0, "x").normal, grid().drop("eps_id"))


@pytest.mark.parametrize("seed", [-1, 0.5, True, None, "0"])
def test_a_seed_is_an_int(seed: Any) -> None:
    refused(ArgumentError, "seed must be an int from 0 on", RowRandom, seed, "x")


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


# --- Rows that are taken out, and what later rows say for them; against a loop over each agent's rows


VECTOR = vectors(2)


def bound(piece: c.AgentConnector, actions: Space | None = None) -> Any:
    c.AgentPipeline([piece]).bind(VECTOR, (), actions)
    return piece


def awake(rows: c.Rows) -> Any:
    """Keeps about half of the rows: those whose observation begins with a number above 0."""
    return rows.obs[:, 0] > 0


class Reference:
    """One agent's rows, one after the other."""

    def __init__(self) -> None:
        self.owed, self.first_is_gone = 0.0, False

    def pass_(self, *, keep: bool, first: bool, reward: float) -> tuple[bool, float] | None:
        """``first`` and reward of the row as it goes on, or None."""
        if first:
            self.owed, self.first_is_gone = 0.0, not keep
            return (True, reward) if keep else None
        self.owed += reward
        if not keep:
            return None
        if self.first_is_gone:  # no action before this row could be paid
            self.first_is_gone = False
            return True, 0.0
        paid, self.owed = self.owed, 0.0
        return False, paid


@pytest.mark.slow("draws many batches")
@given(game=ticks(14), cut=st.integers(0, 13), k=st.one_of(st.none(), st.integers(1, 4)))
def test_rewards_of_removed_rows_go_to_the_next_kept_row(game: list[Tick], cut: int, k: int | None) -> None:
    """For FilterRows and FrameSkip, also where the state was taken over mid-episode. No reward is lost."""
    make = (lambda: c.FilterRows(awake)) if k is None else (lambda: c.FrameSkip(k))
    piece = make()
    agents: dict[tuple[int, int], Reference] = defaultdict(Reference)
    count: dict[tuple[int, int], int] = defaultdict(int)
    for tick in game:
        if tick.number == cut:
            again = make()
            again.load_state_dict(piece.state_dict())
            same_tree(again.state_dict(), piece.state_dict())
            piece = again
        rows = rows_at(tick, VECTOR)
        out = piece(rows)
        stays = awake(rows)
        wanted = []
        for i, pair in enumerate(tick.pairs):
            count[pair] = 0 if tick.first[i] else count[pair]
            keep = tick.last[i] or (bool(stays[i]) if k is None else count[pair] % k == 0)
            count[pair] += 1
            passed = agents[pair].pass_(keep=keep, first=tick.first[i], reward=float(rows.rewards[i]))
            if passed is not None:
                wanted.append((*pair, *passed, rows.obs[i].tolist(), tick.last[i]))
        got = [out[name].tolist() for name in ("env_id", "agent_index", "first", "rewards", "obs", "last")]
        assert repr(list(zip(*got, strict=True))) == repr(wanted)  # as text, because a first row's reward is NaN
        piece.reset(tick.resets)
        for pair in [pair for pair in agents if pair[0] in tick.resets]:
            del agents[pair], count[pair]


def test_frame_skip_asks_at_every_kth_row() -> None:
    pipeline = c.AgentPipeline([c.FrameSkip(3), c.FrameStack(2)])
    pipeline.bind(vectors(1))
    assert pipeline.changes_length
    seen = []
    for t in range(8):
        obs = np.full((1, 1), t, np.float32)
        columns = {"first": np.array([t == 0]), "last": np.array([t == 7]), "rewards": np.array([float(t)])}
        out = pipeline(rows_of([(0, 0)], obs, **columns))
        seen += list(zip(out.obs.tolist(), out.rewards.tolist(), out.first.tolist(), strict=True))
    # Later pieces see only the rows that stay; what was paid in between is summed; the last row comes out of turn.
    assert seen == [([0, 0], 0, True), ([0, 3], 1 + 2 + 3, False), ([3, 6], 4 + 5 + 6, False), ([6, 7], 7, False)]
    assert c.FrameSkip(3).noop == "repeat"


def test_rows_may_lack_columns() -> None:
    rows = rows_of(pairs_of(3, 2), np.linspace(-1, 1, 12).reshape(6, 2))
    whole = c.FilterRows(awake)
    assert whole(rows).env_id.tolist() == [1, 2, 2]
    assert len(c.FilterRows(awake)(rows.take([]))) == 0
    rows.obs.flags.writeable = False
    reward = np.ones(6)
    reward.flags.writeable = False
    assert whole(rows.replace(rewards=reward)).rewards.tolist() == [1, 1, 1]
    assert whole(rows.replace(rewards=reward, obs=rows.obs + 2)).rewards.tolist() == [2, 2, 2, 1, 1, 1]


@pytest.mark.parametrize(
    ("space", "good", "bad"),
    [
        (spaces.Discrete(3, start=1), 1, 0),
        (spaces.Discrete(3), np.int32(2), 0.5),
        (spaces.Box(-1, 1, (2,), np.float32), [0.1, 0.0], [2.0, 0.0]),
        (spaces.Box(-1, 1, (2,), np.float32), np.zeros(2), np.zeros(3)),
        (spaces.Tuple([spaces.Discrete(2), spaces.MultiBinary(2)]), (1, [0, 1]), (1, 0, 1)),
        (spaces.Dict({"a": spaces.Text(2), "b": spaces.Discrete(2)}), {"a": "x", "b": 0}, {"a": "xyz", "b": 0}),
    ],
)
def test_a_noop_is_an_action_of_the_policy(space: Space, good: Any, bad: Any) -> None:
    assert bound(c.FilterRows(awake, noop=good), space).noop is good
    assert bound(c.FilterRows(awake, noop="repeat"), space).noop == "repeat"
    assert bound(c.FilterRows(awake), space).noop is None
    bound(c.FilterRows(awake, noop=bad))  # where the action space is not known, nobody can tell
    refused(ArgumentError, "noop", bound, c.FilterRows(awake, noop=bad), space)


def test_refusals() -> None:
    rows = rows_of([(0, 0)], np.zeros((1, 2)), rewards=np.ones(1))
    for wrong in (np.ones(1), [True, False], True, None):
        piece = c.FilterRows(lambda rows, wrong=wrong: wrong)
        before = piece.state_dict()
        refused(ContractError, r"must say of each row whether it stays, as bool of shape \(1,\); got", piece, rows)
        same_tree(piece.state_dict(), before)
