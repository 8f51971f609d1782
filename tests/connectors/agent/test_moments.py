"""Statistics against exact ones: of rational numbers, where nothing is rounded."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from marlvec.connectors import AgentPipeline, NormalizeObs
from marlvec.connectors.agent.normalization import Moments, NormalizeReward, RunningMoments, merge_moments
from marlvec.errors import ArgumentError
from tests.connectors.helpers.samples import pairs_of, rows_of, same_tree, vectors

OFFSETS = (0.0, 1.0, -1e3, 1e8, -1e12, 1e15)


def exact(data: Any) -> tuple[list[Fraction], list[Fraction]]:
    """Mean and variance of every column."""
    columns = [[Fraction(x) for x in column] for column in data.T.tolist()]
    means = [sum(column) / len(column) for column in columns]
    return means, [sum((x - m) ** 2 for x in column) / len(column) for column, m in zip(columns, means, strict=True)]


def assert_exact(state: Any, data: Any, at: int = 0) -> None:
    """Mean to 1e-12 of itself or of the standard deviation, the variance to 1e-12 of itself; both of the exact ones."""
    assert state["count"][at] == len(data)
    if not len(data):
        return
    for j, (mean, variance) in enumerate(zip(*exact(data), strict=True)):
        got = Fraction(float(state["mean"][at, j])) + Fraction(float(state["rest"][at, j]))
        spread = float(variance) ** 0.5
        assert abs(float(got - mean)) <= 1e-12 * max(spread, 1e-3 * abs(float(mean)))
        assert abs(float(Fraction(float(state["m2"][at, j])) / len(data) - variance)) <= 1e-12 * float(variance)


@st.composite
def datasets(draw: st.DrawFn) -> Any:
    """(n, 2) numbers: of any size, around an offset that may be huge beside what they differ by; or all equal."""
    n = draw(st.integers(1, 40))
    unit = draw(hnp.arrays(np.float64, (n, 2), elements=st.floats(-1, 1, allow_subnormal=False)))
    unit[np.abs(unit) < 1e-6] = 0.0  # else squares underflow
    scale = draw(st.sampled_from([0.0, 1e-6, 1.0, 1e4]))
    return unit * scale + draw(st.sampled_from(OFFSETS))


@st.composite
def cuts(draw: st.DrawFn) -> list[int]:
    return sorted(draw(st.lists(st.integers(0, 40), max_size=8)))


def split(data: Any, at: list[int]) -> list[Any]:
    edges = [0, *(min(c, len(data)) for c in at), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


def normalizer(**kwargs: Any) -> NormalizeObs:
    piece = NormalizeObs(**kwargs)
    AgentPipeline([piece]).bind(vectors(2, dtype=np.float64))
    return piece


def see(piece: NormalizeObs, data: Any) -> None:
    pairs = [(i, 0) for i in range(len(data))]
    piece(rows_of(pairs, data))


@pytest.mark.slow("draws many batches")
@pytest.mark.checklist(84)
@pytest.mark.fault("E10")
@given(rounds=st.lists(st.tuples(datasets(), cuts()), min_size=1, max_size=4), ticks=st.sampled_from([1, 3, 100]))
@example(rounds=[(np.full((3, 2), 0.1), [1, 2])], ticks=1)
@example(rounds=[(np.array([[1e15, 0.0]] + [[1e15 + 0.25, 1.0]] * 30), list(range(30)))] * 3, ticks=1)
def test_merged_over_any_split_the_statistics_are_those_of_the_pooled_data(
    rounds: list[tuple[Any, list[int]]], ticks: int
) -> None:
    """Of 1 to 9 workers that see some or nothing, in one call or in many, merged round after round.

    Whoever is asked to merge, all workers end with the very same numbers, to the bit, and one that lost everything in
    between gets them back.
    """
    most = max(len(at) for _, at in rounds) + 1
    workers = [normalizer() for _ in range(most)]
    seen = rounds[0][0][:0]
    for data, at in rounds:
        for worker, part in zip(workers, split(data, at), strict=False):
            for few in np.array_split(part, max(1, min(ticks, len(part)))):
                see(worker, few)
        states = [worker.state_dict() for worker in workers]
        merged = workers[-1].merge_states(states)
        same_tree(workers[0].merge_states(states), merged)
        workers[0] = normalizer()  # lost, with all it knew
        for worker in workers:
            worker.load_state_dict(merged)
            same_tree(worker.state_dict(), merged)
        seen = np.concatenate([seen, data])
        assert_exact(merged["moments"][""], seen)
    same_tree(workers[0].merge_states([merged]), merged)
    same_tree(workers[0].merge_states([]), merged)


@pytest.mark.slow("draws many batches")
@given(data=datasets(), at=cuts(), agents=st.integers(1, 4), seed=st.integers(0, 9))
def test_each_agents_statistics_are_exact_too(data: Any, at: list[int], agents: int, seed: int) -> None:
    group = np.random.default_rng(seed).integers(agents, size=len(data))
    parts = zip(split(data, at), split(group, at), strict=True)
    copies = [RunningMoments(Moments.of(d, g, agents), Moments(agents, (2,))) for d, g in parts if len(d)]
    merged = merge_moments([*copies, RunningMoments.empty(agents, (2,))]).total
    for agent in range(agents):
        assert_exact(merged.state_dict(), data[group == agent], agent)


@pytest.mark.slow("draws many batches")
@pytest.mark.parametrize("offset", OFFSETS)
def test_many_small_steps_lose_nothing(offset: float) -> None:
    """20,000 calls of one row each: rounding does not add up."""
    data = offset + np.random.default_rng(0).normal(size=(20_000, 1))
    running = RunningMoments.empty(1, (1,))
    for row in data:
        running = running.learnt(row[None], None)
    assert_exact(running.total.state_dict(), data)


def test_a_large_copy_and_a_small_one_merge_in_any_order() -> None:
    rng = np.random.default_rng(1)
    large, small = rng.normal(3e9, 1.0, (5_000, 1)), rng.normal(-2e9, 1e-3, (2, 1))
    copies = [RunningMoments(Moments.of(d, None, 1), Moments(1, (1,))) for d in (large, small)]
    for order in (copies, copies[::-1]):
        assert_exact(merge_moments(order).total.state_dict(), np.concatenate([large, small]))


@pytest.mark.fault("E10")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
@pytest.mark.parametrize("key", ["count", "mean", "rest", "m2"])
def test_statistics_that_were_spoilt_are_not_taken_over(key: str, bad: float) -> None:
    for piece in (normalizer(), NormalizeReward()):
        for part in ("own", "shared"):
            state = piece.state_dict()
            if bad == -1.0 and key in ("mean", "rest"):
                continue
            state[part][""][key][0] = bad
            before = piece.state_dict()
            with pytest.raises(ArgumentError, match="expected moments of data, got a negative, NaN or infinite one"):
                piece.load_state_dict(state)
            with pytest.raises(ArgumentError, match="expected moments of data"):
                piece.merge_states([before, state])
            same_tree(piece.state_dict(), before)


def test_pooled_statistics_that_overflow_are_an_error() -> None:
    one, two = normalizer(), normalizer()
    see(one, np.full((2, 2), 1.2e154))
    see(two, np.full((2, 2), -1.2e154))
    with pytest.raises(ArgumentError, match="too large for float64"):
        one.merge_states([one.state_dict(), two.state_dict()])


def test_refusals() -> None:
    state = normalizer().state_dict()
    state["own"][""]["count"] = np.zeros(2)
    with pytest.raises(ArgumentError, match="moments: mean: expected float64"):
        normalizer().load_state_dict(state)
    agents = normalizer(per_agent=True)
    see(agents, np.ones((len(pairs_of(2, 1)), 2)))
    state = agents.state_dict()
    state["own"][""] = Moments(2, (2,)).state_dict()
    with pytest.raises(ArgumentError, match="as many shared groups as own groups"):
        agents.load_state_dict(state)
    del state["own"][""]["rest"]
    with pytest.raises(ArgumentError, match="expected moments, .*'rest'"):
        agents.load_state_dict(state)
