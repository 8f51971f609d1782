"""Rewards scaled, mapped and normalised, against plain loops and against gymnasium's wrapper."""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import NormalizeReward as GymnasiumWrapper
from hypothesis import given
from hypothesis import strategies as st

from marlvec import connectors as c
from marlvec.errors import ContractError
from tests.connectors.helpers.episodes import Tick, rows_at, ticks
from tests.connectors.helpers.samples import pairs_of, rows_of, same_tree, vectors

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
