"""Noise, epsilon and held actions; and what all pieces of the action side have in common."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from marlvec import connectors as c
from marlvec.connectors.action.exploration import EpsilonGreedy
from marlvec.connectors.rows import RowRandom
from marlvec.errors import ArgumentError, ContractError
from tests.connectors.samples import (
    all_inside,
    any_spaces,
    bind,
    decisions,
    discretes,
    multi_discretes,
    same_tree,
    sampled_actions,
    send,
    vectors,
)
from tests.vector.support.reference import refused

# --- GaussianNoise and OrnsteinUhlenbeckNoise


FREE = spaces.Box(-np.inf, np.inf, (2,), np.float64)
UNIT = spaces.Box(-1, 1, (2,))
NOISES: list[Any] = [c.GaussianNoise, c.OrnsteinUhlenbeckNoise]
each_noise = pytest.mark.parametrize("noise", NOISES)


def noise_of(pipeline: c.ActionPipeline, ticks: int, envs: int, *, t0: int = 0, eps: int = 0) -> Any:
    """(ticks, envs, 2) noise on actions that are all 0."""
    zeros = np.zeros((envs, 2))
    return np.stack([pipeline(decisions(zeros, envs=envs, t=t0 + t, eps=eps)).actions_for_env for t in range(ticks)])


def test_a_decay_goes_by_each_agents_own_decisions() -> None:
    """Half of the envs decide twice as often: for them it goes twice as fast, over all their episodes."""
    noisy = bind(c.GaussianNoise(1.0, final=0.2, decay_steps=4), FREE)
    greedy = bind(c.EpsilonGreedy(1.0, final=0.2, decay_steps=4), spaces.Discrete(4))
    normal, uniform = c.RowRandom(0, "GaussianNoise").normal, c.RowRandom(0, "EpsilonGreedy").uniform
    rows = decisions(np.zeros((40, 2)), envs=40)
    counts = np.zeros(40)
    for tick in range(12):
        here = np.arange(40) if tick % 2 == 0 else np.arange(20)[::-1]
        now = rows.take(here).replace(t=np.full(len(here), tick), first=np.full(len(here), tick % 5 == 0))
        amount = 1 + (0.2 - 1) * np.minimum(counts[here] / 4, 1)
        np.testing.assert_allclose(noisy(now).actions_for_env, normal(now, 2) * amount[:, None], rtol=1e-12)
        sent = greedy(now.replace(actions=np.full(len(here), 9))).actions_for_env  # 9 is no action: every draw is seen
        np.testing.assert_array_equal(sent != 9, uniform(now)[:, 0] < amount)
        counts[here] += 1
        for pipeline in (noisy, greedy):
            pipeline.reset([1])
    for pipeline in (noisy, greedy):
        state = pipeline.state_dict()
        assert (pipeline.eval()(rows.replace(actions=np.full(40, 9))).actions_for_env == 9).all()
        same_tree(pipeline.state_dict(), state)


def test_a_decay_from_a_deviation_of_each_element() -> None:
    pipeline = bind(c.GaussianNoise([4.0, 2.0], final=0.0, decay_steps=2), FREE)
    for t, share in enumerate((1, 0.5, 0, 0)):
        rows = decisions(np.zeros((3, 2)), envs=3, t=t)
        want = c.RowRandom(0, "GaussianNoise").normal(rows, 2) * [4 * share, 2 * share]
        np.testing.assert_allclose(pipeline(rows).actions_for_env, want, rtol=1e-12)


def test_the_deviation_may_be_set_from_outside() -> None:
    piece = c.GaussianNoise(1.0)
    pipeline = bind(piece, FREE)
    wide = noise_of(pipeline, 1, 3)
    piece.std = 0.5
    np.testing.assert_allclose(noise_of(pipeline, 1, 3), wide / 2)


def test_the_process_is_its_recurrence_and_starts_at_0_in_each_episode() -> None:
    """x ← x - theta x dt + sigma √dt N(0, 1), one row at a time."""
    theta, sigma, dt = 0.6, 0.4, 0.25
    pipeline = bind(c.OrnsteinUhlenbeckNoise(theta, sigma, dt, seed=4), FREE)
    random = c.RowRandom(4, "OrnsteinUhlenbeckNoise")
    x: dict[tuple[int, int], Any] = {}
    for rows in sampled_actions(FREE, 30):
        out = pipeline(rows)
        for i in range(len(rows)):
            pair = int(rows.env_id[i]), int(rows.agent_index[i])
            before = np.zeros(2) if rows.first[i] else x.get(pair, np.zeros(2))
            normal = random.normal(rows.take([i]), 2)[0]
            x[pair] = before - theta * before * dt + sigma * math.sqrt(dt) * normal
            np.testing.assert_allclose(out.actions_for_env[i], rows.actions[i] + x[pair], rtol=1e-12, atol=1e-12)
    assert len(x) == 6


def test_it_wanders_where_gaussian_noise_jumps() -> None:
    """The defaults are Lillicrap's: theta 0.15, sigma 0.2; and dt 0.01."""
    piece = c.OrnsteinUhlenbeckNoise()
    assert (piece.theta, piece.sigma, piece.dt) == (0.15, 0.2, 1e-2)
    drawn = noise_of(bind(piece, FREE), 200, 100)
    assert np.corrcoef(drawn[100:-1].ravel(), drawn[101:].ravel())[0, 1] > 0.95
    assert abs(drawn[0].std() - 0.02) < 5 * 0.02 / math.sqrt(2 * drawn[0].size)


def test_an_episode_that_began_in_evaluation_lends_no_noise_to_the_next_one() -> None:
    pipeline, fresh = (bind(c.OrnsteinUhlenbeckNoise(sigma=5), FREE) for _ in range(2))
    noise_of(pipeline, 5, 2)
    pipeline.eval()
    assert not noise_of(pipeline, 2, 2, eps=1).any()
    pipeline.train()
    same_tree(noise_of(pipeline, 3, 2, t0=2, eps=1), noise_of(fresh, 3, 2, t0=2, eps=1))


@each_noise
def test_only_while_training(noise: Any) -> None:
    pipeline = bind(noise(), UNIT, training=False)
    beyond = decisions(np.full((1, 2), 7, np.float32))
    assert pipeline(beyond).actions_for_env is beyond.actions  # nothing is clipped or cast then either
    pipeline.train()
    assert pipeline(beyond).actions_for_env.tolist() == [[1, 1]]


@each_noise
def test_it_is_clipped_to_the_bounds_there_are_or_not_at_all(noise: Any) -> None:
    half = spaces.Box(np.array([0, -np.inf], np.float32), np.array([np.inf, 0], np.float32))
    kwargs = {"std": 2} if noise is c.GaussianNoise else {"sigma": 20}
    rows = decisions(np.zeros((50, 2), np.float32), envs=50)
    out = bind(noise(**kwargs), half)(rows).actions_for_env
    assert (out[:, 0] >= 0).all()
    assert (out[:, 1] <= 0).all()
    free = bind(noise(**kwargs, clip=False), half)(rows).actions_for_env
    assert ((free[:, 0] < 0).any(), (free[:, 1] > 0).any()) == (True, True)
    np.testing.assert_array_equal(out, np.clip(free, half.low, half.high))
    assert out.dtype == free.dtype == np.float32


@each_noise
def test_every_float_box_of_a_tree_has_noise_of_its_own_and_the_rest_none(noise: Any) -> None:
    space = spaces.Dict(
        {
            "a": spaces.Box(-9, 9, (2, 2)),
            "b": spaces.Box(-9, 9, (), np.float64),
            "dial": spaces.Box(-9, 9, (1,), np.int64),
            "gear": spaces.Discrete(3),
            "say": spaces.Text(3),
        }
    )
    actions = {
        "a": np.zeros((6, 2, 2), np.float32),
        "b": np.zeros(6),
        "dial": np.ones((6, 1), int),
        "gear": np.arange(6) % 3,
        "say": np.array(["x"] * 6, object),
    }
    out = bind(noise(), space)(decisions(actions, envs=3, agents=2)).actions_for_env
    for key in ("dial", "gear", "say"):
        assert out[key] is actions[key]
    drawn = np.concatenate([out["a"].ravel(), out["b"]])
    assert (drawn != 0).all()
    assert len(np.unique(drawn)) == 30
    assert (out["a"].dtype, out["b"].dtype) == (np.float32, np.float64)


@each_noise
def test_before_unsquash_it_is_in_the_policys_units(noise: Any) -> None:
    pipeline = c.ActionPipeline([noise(seed=3), c.UnsquashActions()])
    pipeline.bind(spaces.Box(-100, 100, (2,), np.float64))
    plain = bind(noise(seed=3), spaces.Box(-1, 1, (2,), np.float64))
    rows = decisions(np.zeros((5, 2)), envs=5)
    np.testing.assert_allclose(pipeline(rows).actions_for_env, plain(rows).actions_for_env * 100)


@each_noise
def test_rows_must_say_when(noise: Any) -> None:
    refused(ContractError, "these rows have no 't'", bind(noise(), UNIT), decisions(np.zeros((1, 2))).drop("t"))


def test_states_that_are_not_theirs() -> None:
    plain, decays = c.GaussianNoise(1), c.GaussianNoise(1, final=0, decay_steps=2)
    assert plain.state_dict() == {}
    refused(ArgumentError, r"missing \['count'\], unknown \[\]", decays.load_state_dict, plain.state_dict())
    refused(ArgumentError, r"missing \[\], unknown \['count'\]", plain.load_state_dict, decays.state_dict())


def test_decays_are_joined_by_the_one_that_has_gone_furthest() -> None:
    """Of copies that ran other envs, or the same; joining twice is joining once, and a newcomer does not begin anew."""
    pipelines = [bind(c.GaussianNoise(1, final=0, decay_steps=10), FREE) for _ in range(3)]
    counts = [np.array(count) for count in ([[3, 3]], [[1, 1], [1, 1], [1, 1]], [[5, 5], [5, 5]])]
    for pipeline, count in zip(pipelines, counts, strict=True):
        envs = len(count)
        for t in range(count[0, 0]):
            pipeline(decisions(np.zeros((2 * envs, 2)), envs=envs, agents=2, t=t))
        np.testing.assert_array_equal(pipeline.state_dict()["GaussianNoise"]["count"]["values"], count)
    states = [pipeline.state_dict() for pipeline in pipelines]
    merged = pipelines[0].merge_states(states)
    assert merged["GaussianNoise"]["count"]["values"].tolist() == [[5, 5], [5, 5], [1, 1]]
    same_tree(pipelines[0].merge_states([merged, *states[::-1], merged]), merged)
    pipelines[0].load_state_dict(merged)
    same_tree(pipelines[0].state_dict(), merged)
    refused(ArgumentError, "expected the state key 'count'", pipelines[0][0].merge_states, [{}])
    assert c.GaussianNoise(1).merge_states([{}, {}]) == {}
    same_tree(pipelines[0][0].merge_states([]), pipelines[0][0].state_dict())


def test_new_envs_of_a_loaded_state_continue_the_decay() -> None:
    for make in (
        lambda: c.EpsilonGreedy(1.0, final=0.0, decay_steps=10),
        lambda: c.GaussianNoise(1.0, final=0.0, decay_steps=10),
    ):
        space = spaces.Discrete(5) if isinstance(make(), c.EpsilonGreedy) else spaces.Box(-1, 1, (1,))
        chains = [c.ActionPipeline([make()]) for _ in range(2)]
        for chain in chains:
            chain.bind(space, ("a", "b"))

        def rows(envs: int, space: Any = space) -> c.Rows:
            env_id, agent_index = (index.ravel() for index in np.indices((envs, 2)))
            zeros = np.zeros(2 * envs, np.int64)
            actions = zeros if isinstance(space, spaces.Discrete) else zeros[:, None].astype(np.float32)
            return c.Rows(
                {"env_id": env_id, "agent_index": agent_index, "t": zeros, "eps_id": env_id, "actions": actions}
            )

        chains[0].reset(np.arange(2))
        assert (chains[0](rows(2))["actions_executed"] != 0).any()
        for _ in range(9):
            chains[0](rows(2))
        chains[1].load_state_dict(chains[0].state_dict())
        chains[1].reset(np.arange(6))
        assert (chains[1](rows(6))["actions_executed"] == 0).all()  # none explores from the start
        new = c.ActionPipeline([make()])
        new.bind(space, ("a", "b"))
        new.reset(np.arange(6))
        assert (new(rows(6))["actions_executed"] != 0).any()


GEAR = spaces.Discrete(4, start=-1)
DIALS = spaces.MultiDiscrete([2, 5], start=[0, 3])
N = 20_000


def near(share: float, expected: float, n: int) -> bool:
    """Whether a share of n is what it should be, up to 5 standard deviations."""
    return abs(share - expected) <= 5 * math.sqrt(expected * (1 - expected) / n)


def test_it_explores_as_often_as_asked_and_evenly() -> None:
    out = bind(EpsilonGreedy(0.3), GEAR)(decisions(np.full(N, 2), envs=N)).actions_for_env
    for action in (-1, 0, 1):
        assert near((out == action).mean(), 0.3 / 4, N)
    assert near((out == 2).mean(), 0.7 + 0.3 / 4, N)


def test_all_dimensions_of_an_action_are_drawn_together() -> None:
    out = bind(EpsilonGreedy(0.5), DIALS)(decisions(np.tile([1, 3], (N, 1)), envs=N)).actions_for_env
    assert out.dtype == DIALS.dtype
    for first in (0, 1):
        for second in range(3, 8):
            share = ((out[:, 0] == first) & (out[:, 1] == second)).mean()
            assert near(share, 0.05 + 0.5 * (first == 1 and second == 3), N)


def test_only_what_is_allowed_is_drawn() -> None:
    mask = np.tile([True, False, True, True], (N, 1))
    mask[: N // 2, 3] = False
    rows = decisions(np.zeros(N, int), envs=N, action_mask=mask)
    out = bind(EpsilonGreedy(1.0), GEAR)(rows).actions_for_env
    for part, allowed in ((out[: N // 2], [-1, 1]), (out[N // 2 :], [-1, 1, 2])):
        assert np.isin(part, allowed).all()
        for action in allowed:
            assert near((part == action).mean(), 1 / len(allowed), N // 2)


@given(space=st.one_of(discretes(), multi_discretes()), seed=st.integers(0, 99), epsilon=st.sampled_from([0, 0.5, 1]))
def test_an_action_is_the_policys_or_an_allowed_one(space: Any, seed: int, epsilon: float) -> None:
    sizes = np.ravel(space.n if isinstance(space, spaces.Discrete) else space.nvec)
    rng = np.random.default_rng(seed)
    mask = rng.random((9, sizes.sum())) < 0.4
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    mask[:, bounds[1:] - 1] = True
    chosen = np.stack([rng.integers(size, size=9) for size in sizes], axis=1)
    rows = decisions((chosen.reshape(9, *space.shape) + space.start), envs=3, agents=3, action_mask=mask)
    out = bind(EpsilonGreedy(epsilon, seed=seed), space)(rows).actions_for_env
    assert all_inside(space, out, 9)
    got = (out - space.start).reshape(9, len(sizes))
    for i in range(9):
        stays = (got[i] == chosen[i]).all()
        assert stays or epsilon > 0
        assert (stays and epsilon < 1) or all(mask[i, bounds[d] + got[i, d]] for d in range(len(sizes)))


def test_the_discrete_leaves_of_a_tree_are_drawn_and_the_others_stay() -> None:
    space = spaces.Dict({"arm": spaces.Box(0, 1, (2,)), "gear": GEAR, "head": spaces.Tuple([DIALS])})
    actions = {"arm": np.zeros((N, 2), np.float32), "gear": np.zeros(N, int), "head": (np.tile([1, 7], (N, 1)),)}
    rows = decisions(actions, envs=N, action_mask=np.zeros((N, 3), bool))  # masks are of whole actions: not of this
    out = bind(EpsilonGreedy(1.0), space)(rows).actions_for_env
    assert out["arm"] is actions["arm"]
    assert near((out["gear"] == 0).mean(), 0.25, N)
    assert near((out["head"][0] == [1, 7]).all(axis=1).mean(), 0.1, N)
    both = (out["gear"] == 1) & (out["head"][0][:, 1] == 5)
    assert near(both.mean(), 0.05, N)  # the leaves' draws are independent


def test_the_probability_may_be_set_from_outside() -> None:
    piece = EpsilonGreedy(1.0)
    pipeline = bind(piece, GEAR)
    rows = decisions(np.full(N, 9), envs=N)
    assert (pipeline(rows).actions_for_env != 9).all()
    piece.epsilon = 0.1
    assert near((pipeline(rows).actions_for_env != 9).mean(), 0.1, N)


def test_random_actions_only_while_training() -> None:
    rows = decisions(np.array([1, 2]), envs=2)
    pipeline = bind(EpsilonGreedy(1.0, final=0.0, decay_steps=1), GEAR, training=False)
    assert pipeline(rows).actions_for_env is rows.actions
    pipeline.train()
    state = pipeline.state_dict()["EpsilonGreedy"]["count"]["values"]
    assert not state.size  # what was decided in evaluation does not count


def test_the_policys_dtype_grows_where_it_has_no_room() -> None:
    wide = spaces.Discrete(1000)
    out = bind(EpsilonGreedy(1.0), wide)(decisions(np.zeros(100, np.int8), envs=100)).actions_for_env
    assert out.dtype == np.int64
    assert out.max() > 127


def test_masks_that_make_no_sense() -> None:
    pipeline = bind(EpsilonGreedy(1.0), GEAR)
    with pytest.raises(ContractError, match="expected action masks of 4 entries"):
        pipeline(decisions(np.array([0]), action_mask=np.ones((1, 3), bool)))
    mask = np.ones((2, 4), bool)
    mask[1] = False
    with pytest.raises(ContractError, match="the action mask of env 1, agent 0 allows nothing"):
        pipeline(decisions(np.array([0, 0]), envs=2, action_mask=mask))


# --- StickyActions and RepeatActions: what sends an action again


MANY_GEARS = spaces.Discrete(1000)


@pytest.mark.slow("draws many batches")
@given(
    space=any_spaces(),
    k=st.integers(1, 4),
    p=st.one_of(st.none(), st.sampled_from([0.0, 0.3, 0.9, 1.0])),
    seed=st.integers(0, 5),
    data=st.data(),
)
def test_repeated_actions_equal_a_loop_over_rows(
    space: Any, k: int, p: float | None, seed: int, data: st.DataObject
) -> None:
    """Of each agent the last sent action, in a dict: again with chance p, or but for its decisions 0, k, 2k, …

    Any space, episodes that come and go, resets.
    """
    random = RowRandom(seed, "StickyActions")
    pipeline = bind(c.RepeatActions(k) if p is None else c.StickyActions(p, seed=seed), space)
    count: dict[tuple[int, int], int] = {}
    last: dict[tuple[int, int], Any] = {}
    for rows in sampled_actions(space, data.draw(st.integers(1, 9)), seed=data.draw(st.integers(0, 9))):
        out = pipeline(rows)
        for i, drawn in enumerate(random.uniform(rows)[:, 0]):
            pair = int(rows.env_id[i]), int(rows.agent_index[i])
            count[pair] = 0 if rows.first[i] else count.get(pair, -1) + 1
            if count[pair] == 0 or (drawn >= p if p is not None else count[pair] % k == 0):
                last[pair] = rows.take([i]).actions
            same_tree(out.take([i]).actions_for_env, last[pair])
        env = data.draw(st.integers(0, 3))
        pipeline.reset([env])
        count = {pair: number for pair, number in count.items() if pair[0] != env}


def test_sticky_is_part_of_the_env_so_it_stays_in_evaluation() -> None:
    pipeline = bind(c.StickyActions(1.0), MANY_GEARS, training=False)
    assert [int(pipeline(decisions(np.array([t]), t=t)).actions_for_env[0]) for t in range(3)] == [0, 0, 0]


def test_repeat_sends_every_kth_decision_k_times() -> None:
    pipeline = bind(c.RepeatActions(3), MANY_GEARS)
    sent = [int(pipeline(decisions(np.array([t]), t=t)).actions_for_env[0]) for t in range(8)]
    assert sent == [0, 0, 0, 3, 3, 3, 6, 6]
    assert pipeline(decisions(np.array([99]), t=0)).actions_for_env.tolist() == [99]
    assert pipeline(decisions(np.array([98]), t=1)).actions_for_env.tolist() == [99]
    once = bind(c.RepeatActions(1), MANY_GEARS)
    assert [int(once(decisions(np.array([t]), t=t)).actions_for_env[0]) for t in range(3)] == [0, 1, 2]


def test_rows_without_a_first_column_begin_when_they_are_new() -> None:
    pipeline = bind(c.RepeatActions(2), MANY_GEARS)
    rows = decisions(np.array([5])).drop("first")
    assert pipeline(rows).actions_for_env.tolist() == [5]
    assert pipeline(rows.replace(actions=np.array([6]))).actions_for_env.tolist() == [5]
    pipeline.reset()
    assert pipeline(rows.replace(actions=np.array([7]))).actions_for_env.tolist() == [7]


def test_the_history_outlives_a_new_space_of_equal_slots_and_no_other() -> None:
    pipeline = bind(c.RepeatActions(2), vectors(1))
    ones, twos = np.ones((1, 1), np.float32), np.full((1, 1), 2, np.float32)
    pipeline(decisions(ones))
    pipeline.append(c.ClipActions())  # every edit sets all pieces up anew
    assert pipeline(decisions(twos, t=1)).actions_for_env.tolist() == [[1]]
    pipeline.bind(spaces.Tuple([vectors(1, 0, 9)]))
    assert pipeline(decisions((twos,), t=2)).actions_for_env[0].tolist() == [[2]]
    pipeline.bind(spaces.Box(0, 9, (1,), np.float64))
    assert pipeline(decisions(ones, t=3)).actions_for_env.tolist() == [[1]]


def test_actions_of_another_dtype() -> None:
    """Floats are rounded to the Box's, and ints may be of any dtype that holds them."""
    pipeline = bind(c.RepeatActions(2), vectors(1))
    sent = [pipeline(decisions(np.array([[0.1]]), t=t)).actions_for_env for t in range(2)]
    assert [out.dtype for out in sent] == [np.float32] * 2
    assert sent[0] == sent[1] == np.float32(0.1)
    ints = bind(c.RepeatActions(2), spaces.Box(0, 9, (1,), np.int8))
    assert ints(decisions(np.array([[7.0]]))).actions_for_env.dtype == np.int8
    for bad in ([[300]], [[0.5]], [[np.nan]]):
        refused(ContractError, r"do not fit int8.*put ClipActions", ints, decisions(np.array(bad)))
    assert ints(decisions(np.array([[3]]), t=1)).actions_for_env.tolist() == [[7]]  # nothing was taken in


# --- What all pieces of the action side have in common, and what they are for: lines 97 and 98 of the checklist


FIVE_GEARS = spaces.Discrete(5, start=-2)
ARM = spaces.Box(np.array([-2.0, 0.1], np.float32), np.array([3.0, 0.3], np.float32))
STOCHASTIC: list[tuple[str, dict[str, Any], spaces.Space[Any]]] = [
    ("MaskInvalid", {"fallback": "random"}, FIVE_GEARS),
    ("StickyActions", {}, spaces.Dict({"arm": ARM, "gear": FIVE_GEARS})),
    ("GaussianNoise", {}, ARM),
    ("OrnsteinUhlenbeckNoise", {}, ARM),
    ("EpsilonGreedy", {"epsilon": 0.5}, FIVE_GEARS),
    ("ReplaceNaN", {"fill": "random"}, ARM),
]


def with_nan(actions: Any) -> Any:
    """NaN in half of the rows."""
    return np.where(np.arange(len(actions))[:, None] % 2, actions, np.nan)


@pytest.mark.mostly_slow("draws many batches", quick=2)
@pytest.mark.checklist(97)
@pytest.mark.parametrize(("name", "args", "space"), STOCHASTIC)
def test_masking_lambda_discretise_sticky_and_noise_exist_and_what_is_random_has_a_seed(
    name: str, args: dict[str, Any], space: spaces.Space[Any]
) -> None:
    """Equal seeds send equal actions, other seeds others, in the same episodes; numpy's own generator stays as it is.

    The chain of the second half has all five kinds; the pieces' own tests say what each does.
    """
    np.random.seed(7)  # noqa: NPY002  # that nobody draws from it is the point
    untouched = np.random.random(3).tolist()  # noqa: NPY002
    np.random.seed(7)  # noqa: NPY002
    sent = []
    for seed in (1, 1, 2):
        pipeline = bind(getattr(c, name)(**args, seed=seed), space)
        ticks = sampled_actions(pipeline.policy_space_, 10, mask=FIVE_GEARS if space is FIVE_GEARS else None)
        if name == "ReplaceNaN":
            ticks = [rows.replace(actions=with_nan(rows.actions)) for rows in ticks]
        sent.append([rows.actions_for_env for rows in send(pipeline, ticks)])
    assert np.random.random(3).tolist() == untouched  # noqa: NPY002
    same_tree(sent[0], sent[1])
    refused(AssertionError, "", same_tree, sent[0], sent[2])

    chain = c.ActionPipeline(
        [
            c.MapActions(lambda actions: actions[:, ::-1]),
            c.GaussianNoise(0.2, seed=5),
            c.StickyActions(seed=5),
            c.MapActions(lambda actions: (actions[:, 0] > 0).astype(np.int64), spaces.Box(-1, 1, (2,))),
            c.MaskInvalid("random", seed=5),
            c.DiscretizeActions(2),
        ]
    )
    chain.bind(spaces.Box(-3, 3, ()))
    assert chain.policy_space_ == spaces.Box(-1, 1, (2,))
    for rows in sampled_actions(chain.policy_space_, 5, mask=spaces.Discrete(2)):
        assert np.isin(chain(rows).actions_for_env, [-3, 3]).all()


@pytest.mark.checklist(98)
def test_action_connectors_see_the_rows_and_may_change_states_and_extras() -> None:
    """The connector half of it; tests/collect has the other, where these columns arrive in batches."""
    seen: list[dict[str, Any]] = []

    @c.action_connector
    def cautious(rows: c.Rows) -> c.Rows:
        """Near a wall (obs above 1) the agent stands still, its state is cleared, and its logp says so."""
        seen.append(dict(rows))
        stops = rows.obs[:, 0] > 1
        return rows.replace(
            actions_for_env=np.where(stops[:, None], 0, rows.actions_for_env),
            state_out={"h": np.where(stops[:, None], 0, rows.state_out["h"])},
            logp=np.where(stops, 0, rows.logp),
            stopped=stops,
        )

    space = spaces.Box(-1, 1, (2,))
    chain = c.ActionPipeline([c.GaussianNoise(0.1), cautious])
    chain.bind(space)
    rows = decisions(
        np.ones((4, 2), np.float32),
        envs=2,
        agents=2,
        t=3,
        obs=np.array([[0.0], [2.0], [0.5], [9.0]]),
        rewards=np.arange(4.0),
        action_mask=np.ones((4, 1), bool),
        state_in={"h": np.zeros((4, 3))},
        state_out={"h": np.ones((4, 3))},
        logp=np.full(4, -1.5),
    )
    out = chain(rows)
    inputs = ("env_id", "agent_index", "eps_id", "t", "first", "obs", "rewards", "action_mask", "state_in", "state_out")
    for name in (*inputs, "logp", "actions"):
        assert seen[0][name] is rows[name]
    np.testing.assert_array_equal(out.stopped, [False, True, False, True])
    np.testing.assert_array_equal(out.logp, [-1.5, 0, -1.5, 0])
    np.testing.assert_array_equal(out.state_out["h"][:, 0], [1, 0, 1, 0])
    np.testing.assert_array_equal(out.actions_for_env[[1, 3]], np.zeros((2, 2)))
    assert (out.actions_for_env[[0, 2]] > 0).all()
    np.testing.assert_array_equal(out.actions, np.ones((4, 2)))
    np.testing.assert_array_equal(rows.state_out["h"], np.ones((4, 3)))
