"""Running statistics, and observations and rewards that are normalised by them."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import NormalizeReward as GymnasiumWrapper
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from marlvec import connectors as c
from marlvec.connectors import ActionPipeline, AgentPipeline, EpsilonGreedy, FrameStack, NormalizeObs, Rows
from marlvec.connectors.agent.normalization import Moments, NormalizeReward, RunningMoments, merge_moments
from marlvec.errors import ArgumentError, ContractError, StateError, UnsupportedSpaceError
from marlvec.trees import tree_leaves
from tests.connectors.samples import Tick, pairs_of, rows_at, rows_of, same_tree, ticks, vectors
from tests.vector.support.reference import refused

# --- Statistics against exact ones: of rational numbers, where nothing is rounded


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
            refused(ArgumentError, "expected moments of data", piece.merge_states, [before, state])
            same_tree(piece.state_dict(), before)


def test_pooled_statistics_that_overflow_are_an_error() -> None:
    one, two = normalizer(), normalizer()
    see(one, np.full((2, 2), 1.2e154))
    see(two, np.full((2, 2), -1.2e154))
    refused(ArgumentError, "too large for float64", one.merge_states, [one.state_dict(), two.state_dict()])


def test_moments_refuse() -> None:
    state = normalizer().state_dict()
    state["own"][""]["count"] = np.zeros(2)
    refused(ArgumentError, "moments: mean: expected float64", normalizer().load_state_dict, state)
    agents = normalizer(per_agent=True)
    see(agents, np.ones((len(pairs_of(2, 1)), 2)))
    state = agents.state_dict()
    state["own"][""] = Moments(2, (2,)).state_dict()
    refused(ArgumentError, "as many shared groups as own groups", agents.load_state_dict, state)
    del state["own"][""]["rest"]
    refused(ArgumentError, "expected moments, .*'rest'", agents.load_state_dict, state)


WIDE = vectors(2, dtype=np.float64)


def make(space: spaces.Space[Any] = WIDE, agents: int = 0, **kwargs: Any) -> NormalizeObs:
    piece = NormalizeObs(**kwargs)
    AgentPipeline([piece]).bind(space, [f"agent_{i}" for i in range(agents)])
    return piece


def rows(obs: Any, agent_index: Any = None) -> Rows:
    n = len(next(leaf for _, leaf in tree_leaves(obs)))
    return Rows(obs=obs, env_id=np.arange(n), agent_index=np.zeros(n, int) if agent_index is None else agent_index)


def moments(piece: NormalizeObs, leaf: str = "") -> Any:
    return piece.state_dict()["moments"][leaf]


def assert_moments(got: Any, data: Any) -> None:
    """Count exact; mean and variance to 1e-12 of the data's size, which is all that any summation can promise."""
    if np.ndim(got["count"]):
        assert len(got["count"]) == 1
        got = {key: value[0] for key, value in got.items()}
    size = np.abs(data).max(axis=0, initial=1e-300)
    assert got["count"] == len(data)
    np.testing.assert_allclose(got["mean"], data.mean(axis=0), rtol=1e-12, atol=float((1e-12 * size).max()))
    variance = data.var(axis=0)
    # Below the smallest normal number no digits are left to agree on.
    atol = float((1e-12 * size**2).max()) + np.finfo(np.float64).tiny
    np.testing.assert_allclose(got["m2"] / len(data), variance, rtol=1e-12, atol=atol)


def arrays(n: st.SearchStrategy[int]) -> st.SearchStrategy[Any]:
    values = st.floats(-1e4, 1e4, allow_subnormal=False)
    return n.flatmap(lambda k: hnp.arrays(np.float64, (k, 2), elements=values))


@pytest.mark.parametrize("update", [True, False])
def test_frozen_statistics_are_not_dropped_for_a_space_of_other_shapes(update: bool) -> None:
    """A saved policy in another env would see values that are not normalised."""
    piece = NormalizeObs(update=update)
    chain = AgentPipeline([piece])
    chain.bind(WIDE)
    chain.eval()
    chain.bind(vectors(3))  # nothing was learned yet
    chain.bind(WIDE)
    piece.load_state_dict(learned())
    if not update:
        chain.train()
    refused(UnsupportedSpaceError, r"frozen statistics of the shapes .*\(2,\)", chain.bind, vectors(3))
    assert (chain.input_space, piece.counts.tolist()) == (WIDE, [4])
    chain.bind(vectors(2))
    if update:
        chain.train()
        chain.bind(vectors(3))
        assert piece.counts.tolist() == [0]


def learned() -> Any:
    piece = make()
    piece(rows(np.arange(8.0).reshape(4, 2)))
    return piece.state_dict()


@pytest.mark.checklist(84)
@given(data=arrays(st.integers(1, 30)))
def test_values_are_normalised_with_the_statistics_of_each_leaf_and_agent(data: Any) -> None:
    """Every row counts once, none in eval."""
    unclipped = make(clip=None, epsilon=1e-6)
    out = unclipped(rows(data)).obs
    state = unclipped.state_dict()
    unclipped.eval()(rows(data * 3))
    same_tree(unclipped.state_dict(), state)
    assert unclipped.counts.tolist() == [len(data)]
    np.testing.assert_allclose(out, (data - data.mean(0)) / np.sqrt(data.var(0) + 1e-6), rtol=1e-6, atol=1e-6)

    tree = spaces.Dict({"a": WIDE, "b": spaces.Tuple([spaces.Box(-1e9, 1e9, (), np.float64), spaces.Discrete(3)])})
    leafy = make(tree)
    out = leafy(rows({"a": data, "b": (data[:, 0] * 2, np.ones(len(data), int))})).obs
    assert_moments(moments(leafy, "a"), data)
    assert_moments(moments(leafy, "b/0"), data[:, 0] * 2)
    assert out["b"][1].tolist() == [1] * len(data)
    np.testing.assert_array_equal(out["a"], make()(rows(data)).obs)

    group = np.arange(len(data)) % 3
    each = make(agents=3, per_agent=True)
    out = each(rows(data, group)).obs
    for agent in range(3):
        mine = data[group == agent]
        if len(mine):
            alone = make()
            np.testing.assert_allclose(out[group == agent], alone(rows(mine)).obs, rtol=1e-9, atol=1e-9)
            got = {key: value[agent] for key, value in moments(each).items()}
            assert_moments(got, mine)
        else:
            assert each.counts[agent] == 0


@given(data=arrays(st.integers(2, 20)), cut=st.integers(0, 20))
def test_agents_merge_each_with_itself(data: Any, cut: int) -> None:
    """Also where one copy has met agents that the other has not."""
    group = np.arange(len(data)) % 4
    one, two = make(per_agent=True), make(per_agent=True)
    for worker, part in zip((one, two), (slice(None, cut), slice(cut, None)), strict=True):
        worker(rows(data[part], group[part]))
    merged = one.merge_states([one.state_dict(), two.state_dict()])["moments"][""]
    for agent in range(len(merged["count"])):
        assert_moments({key: value[agent] for key, value in merged.items()}, data[group == agent])


def test_a_copy_that_lost_everything_merges_again() -> None:
    """What was shared counts once, whoever still has it; two different pasts cannot be joined."""
    one, two = make(), make()
    one(rows(np.array([[1.0, 2], [3, 4]])))
    two(rows(np.array([[5.0, 6]])))
    merged = one.merge_states([one.state_dict(), two.state_dict()])
    one.load_state_dict(merged)
    fresh = make()
    fresh(rows(np.array([[7.0, 8]])))
    states = [fresh.state_dict(), one.state_dict()]
    for order in (states, states[::-1]):
        assert_moments(one.merge_states(order)["moments"][""], np.array([[1.0, 2], [3, 4], [5, 6], [7, 8]]))
    fresh.load_state_dict(fresh.merge_states([fresh.state_dict()]))
    with pytest.raises(ArgumentError, match="go back to different merged states"):
        one.merge_states([one.state_dict(), fresh.state_dict()])
    same_tree(one.merge_states([]), one.state_dict())


def test_values_before_there_are_statistics() -> None:
    piece = make(per_agent=True, agents=2).eval()
    assert piece(rows(np.array([[1.0, 99.0]]))).obs.tolist() == [[1.0, 10.0]]
    piece.train()
    assert piece(rows(np.array([[1.0, 99.0]]))).obs.tolist() == [[0.0, 0.0]]
    piece.eval()
    out = piece(rows(np.array([[1.0, 99.0], [3.0, 4.0]]), np.array([0, 5]))).obs  # an agent nobody has met
    assert out.tolist() == [[0.0, 0.0], [3.0, 4.0]]


def test_update_false_freezes_in_training_too() -> None:
    piece = make(update=False)
    piece(rows(np.ones((2, 2))))
    assert piece.counts.tolist() == [0]


@pytest.mark.parametrize(
    ("dtype", "out"),
    [(np.float32, np.float32), (np.float64, np.float64), (np.uint8, np.float32), (np.int64, np.float32)],
)
def test_dtypes(dtype: Any, out: Any) -> None:
    piece = make(spaces.Box(0, 100, (2,), dtype))
    assert piece(rows(np.array([[1, 2], [3, 9]], dtype))).obs.dtype == out
    assert piece.output_space(spaces.Box(0, 100, (2,), dtype)) == spaces.Box(-10, 10, (2,), out)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e300])
@pytest.mark.parametrize("per_agent", [False, True])
def test_a_value_that_would_spoil_the_statistics_is_an_error(bad: float, per_agent: bool) -> None:
    tree = spaces.Dict({"a": WIDE, "b": WIDE})
    piece = make(tree, per_agent=per_agent, agents=1)
    fine = np.arange(4.0).reshape(2, 2)
    piece(rows({"a": fine, "b": fine}))
    state = piece.state_dict()
    with pytest.raises(ContractError, match=r"leaf 'b' has a NaN, infinite or huge entry"):
        piece(rows({"a": fine, "b": fine * [[1, bad], [1, 1]]}))
    same_tree(piece.state_dict(), state)


def test_normalize_obs_refuses() -> None:
    with pytest.raises(StateError, match="does not know its space"):
        _ = NormalizeObs().counts
    piece = make()
    refused(ArgumentError, r"expected moments of the leaves \[''\]", piece.load_state_dict, {"moments": {}})
    with pytest.raises(ArgumentError, match=r"moments: mean: expected float64 of \(1, 2\), got float64 of \(1, 3\)"):
        piece.load_state_dict(make(vectors(3)).state_dict())


# --- Rewards scaled, mapped and normalised, against plain loops and against gymnasium's wrapper


VECTOR = vectors(1)
REWARDS = st.lists(st.tuples(st.floats(-1e100, 1e100), st.booleans()), max_size=6)


@pytest.mark.checklist(85)
@given(pairs=REWARDS, a=st.floats(-9, 9), b=st.floats(-9, 9), limit=st.floats(0.1, 10))
def test_rewards_are_scaled_mapped_or_clipped_and_first_rows_pass(
    pairs: list[tuple[float, bool]], a: float, b: float, limit: float
) -> None:
    reward = np.array([np.nan if first else r for r, first in pairs], np.float64)
    first = np.array([first for _, first in pairs], bool)
    reward.flags.writeable = False
    asked: list[float] = []

    def mapped(reward: Any) -> Any:
        asked.extend(reward.tolist())
        reward *= a  # a function that writes where it reads harms nobody
        return reward + b

    rows = c.Rows(rewards=reward, first=first)
    for piece, wanted in (
        (c.ScaleReward(a, b), lambda r: r * a + b),
        (c.MapReward(mapped), lambda r: r * a + b),
        (c.ClipReward(sign=True), lambda r: float((r > 0) - (r < 0))),
        (c.ClipReward(limit=limit), lambda r: max(-limit, min(limit, r))),
    ):
        out = piece(rows).rewards
        assert out.dtype == np.float64
        np.testing.assert_array_equal(
            out, [r if begins else wanted(r) for r, begins in zip(reward.tolist(), first, strict=True)]
        )
        paid = rows.take(~first).drop("first")
        np.testing.assert_array_equal(piece(paid).rewards, [wanted(r) for r in paid.rewards.tolist()])
    assert asked == [r for r in reward.tolist() if not math.isnan(r)] * 2


@pytest.mark.parametrize(
    ("function", "got"),
    [
        (lambda reward: reward[:1], r"float64 of shape \(1,\)"),
        (lambda reward: 1.0, r"float64 of shape \(\)"),
        (lambda reward: None, "object"),
        (lambda reward: np.array(["a", "b"]), "U1"),
    ],
)
def test_a_function_must_give_one_number_per_reward(function: Any, got: str) -> None:
    with pytest.raises(ContractError, match=rf"one number for each of \(2,\) rewards, got .*{got}"):
        c.MapReward(function)(c.Rows(rewards=np.ones(2)))


class Loop:
    """All returns there were, agent by agent, and the spread of them all."""

    def __init__(self, gamma: float) -> None:
        self.gamma = gamma
        self.running: dict[tuple[int, int], float] = {}
        self.returns: dict[int, list[float]] = {}

    def pay(self, pair: tuple[int, int], reward: float, *, first: bool) -> None:
        if first:
            self.running[pair] = 0.0
            return
        self.running[pair] = self.running.get(pair, 0.0) * self.gamma + reward
        self.returns.setdefault(pair[1], []).append(self.running[pair])

    def seen(self, agent: int | None) -> list[float]:
        return self.returns.get(agent, []) if agent is not None else [x for part in self.returns.values() for x in part]


@pytest.mark.slow("draws many batches")
@given(
    game=ticks(),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    per_agent=st.booleans(),
    clip=st.sampled_from([None, 0.5]),
    cut=st.integers(0, 9),
)
def test_rewards_are_divided_by_the_spread_of_the_returns(
    game: list[Tick], gamma: float, per_agent: bool, clip: float | None, cut: int
) -> None:
    """Against a loop; from tick ``cut`` on by one that took the state over mid-episode; in the end, in eval."""
    piece = c.NormalizeReward(gamma, 1e-8, clip, per_agent)
    loop = Loop(gamma)
    for tick in game:
        if tick.number == cut:
            again = c.NormalizeReward(gamma, 1e-8, clip, per_agent)
            again.load_state_dict(piece.state_dict())
            same_tree(again.state_dict(), piece.state_dict())
            piece = again
        rows = rows_at(tick, VECTOR)
        out = piece(rows).rewards
        for i, pair in enumerate(tick.pairs):
            loop.pay(pair, float(rows.rewards[i]), first=tick.first[i])
        for i, (pair, first) in enumerate(zip(tick.pairs, tick.first, strict=True)):
            if first:
                assert np.isnan(out[i])  # a first row's reward is none, and passes
                continue
            wanted = rows.rewards[i] / math.sqrt(np.var(loop.seen(pair[1] if per_agent else None)) + 1e-8)
            wanted = wanted if clip is None else min(max(wanted, -clip), clip)
            assert out[i] == pytest.approx(wanted, rel=1e-6, abs=1e-12)  # sqrt of 1e-8 and of what rounding leaves
        assert piece.counts.sum() == len(loop.seen(None))  # each reward once, and none of the rows without one
        piece.reset(tick.resets)
        for pair in [pair for pair in loop.running if pair[0] in tick.resets]:
            del loop.running[pair]
    frozen = piece.eval().state_dict()
    piece(rows_of([(0, 0)], np.zeros((1, 1)), rewards=np.array([3.0])))
    after = piece.state_dict()
    for key in ("moments", "own", "shared"):
        same_tree(after[key], frozen[key])


class Paying(gymnasium.Env[Any, Any]):
    """An episode without an end, of given rewards."""

    observation_space = gymnasium.spaces.Discrete(1)
    action_space = gymnasium.spaces.Discrete(1)

    def __init__(self, rewards: list[float]) -> None:
        self.rewards = iter(rewards)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return 0, {}

    def step(self, action: Any) -> Any:
        return 0, next(self.rewards), False, False, {}


def test_one_endless_episode_is_normalised_as_gymnasium_does_it() -> None:
    rewards = np.random.default_rng(0).normal(3, 2, 500).tolist()
    env = GymnasiumWrapper(Paying(rewards), gamma=0.95, epsilon=1e-8)
    env.return_rms.count = 0  # without the 1e-4 returns of variance 1 that gymnasium begins with
    env.reset()
    piece = c.NormalizeReward(0.95, clip=None)
    for reward in rewards:
        ours = piece(rows_of([(0, 0)], np.zeros((1, 1)), rewards=np.array([reward]))).rewards[0]
        assert ours == pytest.approx(env.step(0)[1], rel=1e-10)


@pytest.mark.fault("E10")
@pytest.mark.parametrize("per_agent", [False, True])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e300])
def test_a_reward_that_would_spoil_the_statistics_is_an_error(bad: float, per_agent: bool) -> None:
    piece = c.NormalizeReward(per_agent=per_agent)
    rows = rows_of(pairs_of(2, 2), np.zeros((4, 1)), rewards=np.arange(4.0), first=np.zeros(4, bool))
    piece(rows)
    state = piece.state_dict()
    with pytest.raises(ContractError, match=r"of env 1, agent 0; nothing was learnt|the return is too large"):
        piece(rows.replace(rewards=np.array([1, 1, bad, 1])))
    same_tree(piece.state_dict(), state)


def test_unknown_agent() -> None:
    piece = c.NormalizeReward(per_agent=True)
    piece(rows_of(pairs_of(4, 1), np.zeros((4, 1)), rewards=np.array([0.0, 4, 0, 4])))
    out = piece.eval()(rows_of([(0, 3), (0, 0)], np.zeros((2, 1)), rewards=np.array([3.0, 3])))
    assert out.rewards.tolist() == pytest.approx([3.0, 1.5])


# --- `hand_over` and `take_merged`: what is learnt while others join counts once


SPACE = vectors(2, dtype=np.float64)


def chain(*, per_agent: bool) -> AgentPipeline:
    pipeline = AgentPipeline([FrameStack(1), NormalizeObs(per_agent=per_agent), NormalizeReward(per_agent=per_agent)])
    pipeline.bind(SPACE)
    return pipeline


@pytest.mark.slow("draws many batches")
@settings(max_examples=60)
@given(
    per_agent=st.booleans(),
    copies=st.integers(1, 4),
    rounds=st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=8), max_size=5),
    seed=st.integers(0, 2**16),
)
def test_nothing_is_lost_and_nothing_counts_twice(per_agent: bool, copies: int, rounds: Any, seed: int) -> None:
    """Each round: some learn; each hands over and learns on; what is merged comes to each, or to one in its place."""
    rng = np.random.default_rng(seed)
    chains = [chain(per_agent=per_agent) for _ in range(copies)]
    seen: list[list[Any]] = [[] for _ in range(copies)]  # by each, and in no merged state
    known: list[Any] = []  # behind the merged state

    def learn(i: int, times: int) -> None:
        for _ in range(times):
            obs = rng.normal(3, 2, (4, 2))
            chains[i](rows_of([(0, 0), (1, 0), (0, 1), (1, 1)], obs, rewards=obs[:, 0]))
            seen[i].append(obs)

    for events in rounds:
        for i, times in events:
            learn(i % copies, times)
        handed = [one.hand_over() for one in chains]
        known += [obs for own in seen for obs in own]
        seen = [[] for _ in range(copies)]
        for i, times in events:
            learn((i + 1) % copies, times)
        merged = chain(per_agent=per_agent).merge_states(handed)
        assert merged["FrameStack"] == {}
        if rng.random() < 0.3:
            chains[0], seen[0] = chain(per_agent=per_agent), []  # died, with what it had not handed over
        for one in chains:
            before = one.state_dict()["NormalizeReward"]["returns"]
            one.take_merged(merged)
            same_tree(one.state_dict()["NormalizeReward"]["returns"], before)
        for one, own in zip(chains, seen, strict=True):
            again = chain(per_agent=per_agent)
            again.load_state_dict(one.state_dict())
            same_tree(again.state_dict(), one.state_dict())
            every = np.concatenate([np.zeros((0, 4, 2)), *[obs[None] for obs in known + own]])
            moments = one.state_dict()["NormalizeObs"]["moments"][""]
            for group in range(len(moments["count"])):
                data = every[:, 2 * group : 2 * group + 2] if per_agent else every
                assert_exact(moments, data.reshape(-1, 2), group)


def test_a_state_that_was_handed_over_and_not_yet_merged_can_be_kept() -> None:
    one, other = chain(per_agent=False), chain(per_agent=False)
    for _ in range(2):
        one(rows_of([(0, 0), (1, 0)], np.random.default_rng(0).normal(size=(2, 2)), rewards=np.ones(2)))
        total = one.state_dict()["NormalizeObs"]["moments"]
        one.hand_over()
        same_tree(one.state_dict()["NormalizeObs"]["moments"], total)
    other.load_state_dict(one.state_dict())
    same_tree(other.hand_over(), one.hand_over())
    same_tree(other.merge_states([other.state_dict()]), one.merge_states([one.state_dict()]))


def test_of_decays_the_one_that_has_gone_furthest_counts_and_own_steps_stay() -> None:
    def bound() -> ActionPipeline:
        pipeline = ActionPipeline([EpsilonGreedy(1.0, final=0.0, decay_steps=10)])
        pipeline.bind(spaces.Discrete(3))
        return pipeline

    def decide(pipeline: ActionPipeline, times: int) -> None:
        for t in range(times):
            rows = rows_of([(0, 0)], np.zeros((1, 2)), t=np.array([t]), actions=np.zeros(1, int))
            pipeline(rows.replace(actions_for_env=rows.actions))

    one, other = bound(), bound()
    decide(one, 2)
    decide(other, 5)
    merged = one.merge_states([one.hand_over(), other.hand_over()])
    decide(one, 1)
    decide(other, 1)
    for pipeline, count in ((one, 5), (other, 6), (bound(), 5)):
        pipeline.take_merged(merged)
        assert pipeline.state_dict()["EpsilonGreedy"]["count"]["values"].tolist() == [[count]]
