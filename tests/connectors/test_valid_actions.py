"""Actions that the env takes, and what was executed in the policy's own space."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.spaces import Box, Discrete
from hypothesis import given
from hypothesis import strategies as st

from marlvec import connectors as c
from marlvec import external
from marlvec.collect import Collector
from marlvec.connectors import ActionPipeline, ClipActions, Rows, UnsquashActions
from marlvec.connectors.action.valid_actions import MaskInvalid, ReplaceNaN
from marlvec.errors import ArgumentError, ContractError
from marlvec.external import replay
from marlvec.policies import FunctionPolicy
from marlvec.testing.scripted import SampledEnv
from marlvec.vector.in_process import SyncVectorEnv
from tests.connectors.samples import Space, all_inside, bind, decisions, discretes, multi_discretes
from tests.vector.support.reference import refused

# --- MaskInvalid and ReplaceNaN: what makes actions that an env would refuse into some that it takes


GEAR = spaces.Discrete(4, start=10)
DIALS = spaces.MultiDiscrete([2, 3], start=[0, 5])


def sent(piece: MaskInvalid, space: Space, actions: Any, mask: Any, **columns: Any) -> Rows:
    actions = np.asarray(actions)
    return bind(piece, space)(decisions(actions, envs=len(actions), action_mask=np.array(mask, bool), **columns))


@given(space=st.one_of(discretes(), multi_discretes()), fallback=st.sampled_from(["first", "random"]), data=st.data())
def test_only_forbidden_actions_are_replaced(space: Any, fallback: Any, data: st.DataObject) -> None:
    """Against a loop over rows and dimensions."""
    sizes = np.ravel(space.n if isinstance(space, spaces.Discrete) else space.nvec)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**20)))
    masks = [[rng.random(size) < 0.5 for size in sizes] for _ in range(7)]
    for row in masks:
        for part in row:
            part[rng.integers(len(part))] = True
    chosen = np.array([[rng.integers(size) for size in sizes] for _ in range(7)])
    actions = (chosen.reshape(7, *space.shape) + space.start).astype(space.dtype)
    piece = MaskInvalid(fallback, seed=data.draw(st.integers(0, 9)))
    out = sent(piece, space, actions, [np.concatenate(row) for row in masks]).actions_for_env
    assert out.dtype == space.dtype
    got = (out - space.start).reshape(7, len(sizes))
    for i in range(7):
        for d in range(len(sizes)):
            if masks[i][d][chosen[i, d]]:
                assert got[i, d] == chosen[i, d]
            elif fallback == "first":
                assert got[i, d] == np.flatnonzero(masks[i][d])[0]
            else:
                assert masks[i][d][got[i, d]]


def test_random_ones_are_drawn_evenly_from_what_is_allowed() -> None:
    n = 6000
    mask = np.tile(np.array([0, 1, 0, 1]) > 0, (n, 1))
    mask[::2, 2] = True
    out = sent(MaskInvalid("random"), GEAR, np.full(n, 10), mask).actions_for_env - 10
    for allowed, part in (([1, 2, 3], out[::2]), ([1, 3], out[1::2])):
        counts = np.bincount(part, minlength=4)
        expected = n / 2 / len(allowed)
        assert counts.sum() == counts[allowed].sum()
        assert (np.abs(counts[allowed] - expected) < 5 * np.sqrt(expected)).all()
    other = sent(MaskInvalid("random", seed=1), GEAR, np.full(n, 10), mask).actions_for_env - 10
    assert (other != out).any()


def test_or_it_is_an_error() -> None:
    piece = MaskInvalid("raise")
    assert sent(piece, GEAR, [12], [[0, 0, 1, 0]]).actions_for_env.tolist() == [12]
    with pytest.raises(ContractError, match=r"the action 11 of env 1, agent 0 is forbidden by its action mask"):
        sent(piece, GEAR, [12, 11], [[0, 0, 1, 0], [1, 0, 1, 1]])


@pytest.mark.parametrize("fallback", ["first", "random"])
def test_where_nothing_is_allowed_there_is_nothing_to_send(fallback: Any) -> None:
    with pytest.raises(ContractError, match="the action mask of env 1, agent 0 allows nothing"):
        sent(MaskInvalid(fallback), GEAR, [10, 10], [[1, 1, 1, 1], [0, 0, 0, 0]])
    with pytest.raises(ContractError, match="the action mask of env 0, agent 0 allows nothing"):
        sent(MaskInvalid(fallback), DIALS, [[0, 5]], [[1, 1, 0, 0, 0]])


@pytest.mark.parametrize("actions", [[14], [9], [10.0]])
def test_invalid_action_raises_and_is_not_replaced(actions: Any) -> None:
    with pytest.raises(ContractError, match="expected (an action|actions) of Discrete"):
        sent(MaskInvalid(), GEAR, actions, [[1, 1, 1, 1]])


@pytest.mark.parametrize("mask", [[[1, 1, 1]], [[1, 1, 1, 1, 1]], [1]])
def test_a_mask_of_another_length_is_an_error(mask: Any) -> None:
    refused(ContractError, "expected action masks of 4 entries", sent, MaskInvalid(), GEAR, [10], mask)


def test_without_masks_there_is_nothing_to_do() -> None:
    rows = decisions(np.array([3]))
    assert bind(MaskInvalid(), spaces.Discrete(4))(rows).actions_for_env is rows.actions
    boxes = decisions(np.ones((1, 2)), action_mask=np.zeros((1, 2), bool))
    assert bind(MaskInvalid(), spaces.Box(0, 1, (2,)))(boxes).actions_for_env is boxes.actions


def test_in_evaluation_too_and_rows_without_ids() -> None:
    pipeline = bind(MaskInvalid(), GEAR, training=False)
    rows = Rows(actions=np.array([10, 11], np.int8), action_mask=np.array([[0, 0, 0, 1]] * 2, bool))
    assert pipeline(rows).actions_for_env.tolist() == [13, 13]
    with pytest.raises(ContractError, match="of row 1 allows nothing"):
        pipeline(rows.replace(action_mask=np.array([[0, 0, 0, 1], [0] * 4], bool)))
    refused(ContractError, "no 'env_id'", bind(MaskInvalid("random"), GEAR), rows)


# --- NaN

NAN = np.nan
# Bounds on both sides, below, above, and none; the first two leave out 0.
MIXED = spaces.Box(np.array([2, 3, -np.inf, -np.inf], np.float32), np.array([5, np.inf, -4, np.inf], np.float32))


def filled(piece: ReplaceNaN, space: Any, actions: Any) -> Any:
    return bind(piece, space)(decisions(actions, envs=len(actions))).actions_for_env


def test_zeros_or_the_bound_next_to_0() -> None:
    given = np.array([[NAN] * 4, [2.5, 4, -5, 7], [NAN, 4, NAN, 7]], np.float32)
    out = filled(ReplaceNaN(), MIXED, given)
    assert out.tolist() == [[2, 3, -4, 0], [2.5, 4, -5, 7], [2, 4, -4, 7]]
    assert out.dtype == np.float32
    assert all_inside(MIXED, out, 3)


def test_random_members_drawn_as_the_box_does() -> None:
    n = 20_000
    out = filled(ReplaceNaN("random"), MIXED, np.full((n, 4), NAN, np.float32))
    assert all_inside(MIXED, out[:500], 500)
    # Means and variances of U(2, 5), 3 + Exp(1), -4 - Exp(1), N(0, 1).
    moments = [(3.5, 9 / 12, 1.8), (4.0, 1.0, 9.0), (-5.0, 1.0, 9.0), (0.0, 1.0, 3.0)]
    for element, (mean, variance, kurtosis) in zip(out.T.astype(np.float64), moments, strict=True):
        assert abs(element.mean() - mean) < 5 * math.sqrt(variance / n)
        assert abs(element.var() / variance - 1) < 5 * math.sqrt((kurtosis - 1) / n)
    own = MIXED.sample  # gymnasium's own draws have the same moments
    MIXED.seed(0)
    theirs = np.stack([own() for _ in range(4000)]).astype(np.float64)
    np.testing.assert_allclose(theirs.mean(axis=0), out.mean(axis=0), atol=0.1)


def test_only_the_elements_that_are_nan() -> None:
    out = filled(ReplaceNaN("random"), spaces.Box(-1, 1, (2, 2)), np.array([[[0.5, NAN], [9, -9]]]))
    assert out[0, 0, 0] == 0.5
    assert abs(out[0, 0, 1]) <= 1
    assert out[0, 1].tolist() == [9, -9]  # out of bounds, but numbers: not for this piece


def test_leaves_draw_their_own_numbers_and_others_stay() -> None:
    space = spaces.Dict({"a": spaces.Box(0, 1, (1,)), "b": spaces.Box(0, 1, ()), "gear": spaces.Discrete(3)})
    actions = {"a": np.full((50, 1), NAN), "b": np.full(50, NAN), "gear": np.zeros(50, int)}
    out = filled_rows(ReplaceNaN("random"), space, actions)
    assert out["gear"] is actions["gear"]
    assert len(np.unique(np.concatenate([out["a"].ravel(), out["b"]]))) == 100
    assert np.isnan(actions["a"]).all()


def filled_rows(piece: ReplaceNaN, space: Any, actions: Any) -> Any:
    return bind(piece, space)(decisions(actions, envs=50)).actions_for_env


def test_or_it_is_an_error_that_says_whose() -> None:
    space = spaces.Dict({"arm": spaces.Box(0, 1, (2,))})
    rows = decisions({"arm": np.array([[0, 0], [0, 1], [1, NAN], [NAN, 0]])}, envs=2, agents=2)
    with pytest.raises(ContractError, match="the policy gave NaN for leaf 'arm' of env 1, agent 0"):
        bind(ReplaceNaN("raise"), space)(rows)


def test_without_nan_nothing_happens() -> None:
    rows = decisions(np.array([[0.5, np.inf]]))
    for fill in ("zeros", "random", "raise"):
        pipeline = bind(ReplaceNaN(fill), spaces.Box(0, 1, (2,)), training=False)
        assert pipeline(rows).actions_for_env is rows.actions
    ints = decisions(np.array([2]))
    assert bind(ReplaceNaN("raise"), spaces.Discrete(3))(ints).actions_for_env is ints.actions


def test_before_clip_it_saves_what_clip_would_refuse() -> None:
    space = spaces.Box(-10, 10, (1,))
    rows = decisions(np.array([[NAN]], np.float32))
    bare = ActionPipeline([UnsquashActions(), ClipActions()])
    bare.bind(space)
    refused(ContractError, "NaN", bare, rows)
    bare.prepend(ReplaceNaN())
    assert bare(rows).actions_for_env.tolist() == [[0]]


# --- `actions_executed`: what agents did behind exploration, in the space of their policy


OBS = Box(-1, 1, (3,), np.float32)
ARM = Box(np.float32(2), np.float32(6), (1,))


def constant(action: Any) -> FunctionPolicy:
    return FunctionPolicy(lambda rows: np.stack([np.asarray(action)] * len(rows)))


def collected(space: Space, policy: Any, chain: list[Any], env_steps: int = 200, **options: Any) -> Any:
    with SyncVectorEnv([lambda i=i: SampledEnv(OBS, space, env_index=i) for i in range(2)]) as envs:
        collector = Collector(envs, policy, action_connectors=chain, seed=0, **options)
        return collector.collect(env_steps=env_steps)["main"]


def test_discrete_choice_behind_epsilon_greedy_of_a_box() -> None:
    """5 choices for an arm from 2 to 6: choice k is position 2 + k."""
    rows = collected(ARM, constant(0), [c.EpsilonGreedy(0.5), c.DiscretizeActions(5, joint=True)])
    done = rows["actions_executed"]
    assert (rows["actions"] == 0).all()
    assert done.dtype == np.int64
    np.testing.assert_array_equal(rows["actions_for_env"], 2 + done[:, None])
    counts = np.bincount(done, minlength=5) / len(rows)
    np.testing.assert_allclose(counts, [0.6, 0.1, 0.1, 0.1, 0.1], atol=0.08)


@pytest.mark.parametrize("noise", [c.GaussianNoise(0.5), c.OrnsteinUhlenbeckNoise(sigma=5.0)])
def test_noise_before_the_bounds_of_the_env(noise: Any) -> None:
    rows = collected(ARM, constant([0.0]), [noise, *c.ActionPipeline.default()])
    done = rows["actions_executed"]
    assert (rows["actions"] == 0).all()
    assert done.dtype == np.float32
    assert np.abs(done).max() <= 1
    assert np.unique(done).size > len(rows) / 2
    np.testing.assert_allclose(rows["actions_for_env"], 4 + 2 * done, rtol=1e-5)


def test_later_connectors_in_the_policys_space_keep_it_true() -> None:
    mask = np.array([True, False, True, True, True])

    def forbid(rows: c.Rows) -> c.Rows:
        return rows.replace(action_mask=np.tile(mask, (len(rows), 1)))

    chain = [c.EpsilonGreedy(0.5), c.action_connector(forbid), c.MaskInvalid(), c.RepeatActions(2)]
    rows = collected(Discrete(5), constant(1), [*chain, c.StickyActions(0.5)], batch_mode="complete", env_steps=400)
    done = rows["actions_executed"]
    assert set(done.tolist()) == {0, 2, 3, 4}
    assert (done != rows["actions_for_env"]).any()  # sticky actions are the env's
    held = rows["t"] % 2 == 1
    np.testing.assert_array_equal(done[held], done[:-1][held[1:]])
    alone = collected(Discrete(5), constant(1), [c.EpsilonGreedy(0.5), c.RepeatActions(2)])
    np.testing.assert_array_equal(alone["actions_executed"], alone["actions_for_env"])


def test_noise_that_leaves_the_bounds_is_clipped_in_the_column_too() -> None:
    space = Box(-1, 1, (1,), np.float32)
    chain = [c.GaussianNoise(2.0, clip=False), c.ClipActions()]
    rows = collected(space, constant([0.0]), chain)
    np.testing.assert_array_equal(rows["actions_executed"], rows["actions_for_env"])
    assert (np.abs(rows["actions_executed"]) == 1).mean() > 0.3


class Masked(SampledEnv):
    """An env whose masks forbid one of five actions, another in each step."""

    def infos(self) -> dict[str, Any]:
        self.count = getattr(self, "count", 0) + 1
        return {agent: {"action_mask": (np.arange(5) != self.count % 5).astype(np.int8)} for agent in self.agents}

    def reset(self, *args: Any, **options: Any) -> Any:
        return super().reset(*args, **options)[0], self.infos()

    def step(self, actions: Any) -> Any:
        result = super().step(actions)
        return *result[:4], self.infos()


def of_masked(chain: list[Any], policy: Any = None) -> Any:
    with SyncVectorEnv([lambda i=i: Masked(OBS, Discrete(5), env_index=i) for i in range(2)]) as envs:
        collector = Collector(envs, constant(1) if policy is None else policy, action_connectors=chain, seed=0)
        return collector.collect(env_steps=100)["main"]


@pytest.mark.parametrize("fallback", ["first", "random"])
def test_mask_invalid_alone_writes_the_column(fallback: Any) -> None:
    rows = of_masked([c.MaskInvalid(fallback)])
    np.testing.assert_array_equal(rows["actions_executed"], rows["actions_for_env"])
    assert (rows["actions_executed"] != rows["actions"]).mean() > 0.15
    assert rows["actions_executed"].dtype == np.int64


def test_mask_invalid_behind_padding_and_sticky_actions() -> None:
    wide = of_masked([c.PadActions(9), c.MaskInvalid()], constant(7))
    changed = wide["actions_for_env"] != 0  # PadActions sends 0
    assert 0 < changed.sum() < len(wide)
    np.testing.assert_array_equal(wide["actions_executed"], np.where(changed, wide["actions_for_env"], 7))
    turns = FunctionPolicy(lambda rows: rows.t % 5)
    rows = of_masked([c.StickyActions(0.5, seed=1), c.MaskInvalid()], turns)
    is_own = rows["actions_executed"] == rows["actions"]
    assert (is_own & (rows["actions_for_env"] != rows["actions"])).any()  # repeated by the env alone
    np.testing.assert_array_equal(rows["actions_executed"][~is_own], rows["actions_for_env"][~is_own])


COUNTING = FunctionPolicy(lambda rows: ((rows.t % 8) / 8).astype(np.float32)[:, None])


@pytest.mark.parametrize(
    "chain",
    [
        [c.RepeatActions(3), c.UnsquashActions()],
        [c.UnsquashActions(), c.RepeatActions(3)],
        [c.MapActions(lambda a: (4 + 2 * a).astype(np.float32), Box(-1, 1, (1,))), c.RepeatActions(3)],
    ],
)
def test_repeated_actions_are_in_the_column_wherever_they_are_repeated(chain: list[Any]) -> None:
    rows = collected(ARM, COUNTING, chain)
    assert rows["actions_executed"].dtype == np.float32
    np.testing.assert_array_equal(rows["actions_executed"][:, 0], (rows["t"] // 3 * 3 % 8) / 8)
    np.testing.assert_array_equal(rows["actions_for_env"], 4 + 2 * rows["actions_executed"])
    assert "actions_executed_missing" not in rows


@pytest.mark.parametrize(
    "noise", [c.GaussianNoise(0.5), c.OrnsteinUhlenbeckNoise(sigma=5.0), c.GaussianNoise(0.5, clip=False)]
)
def test_noise_behind_the_bounds_of_the_env_is_converted_back(noise: Any) -> None:
    rows = collected(ARM, COUNTING, [*c.ActionPipeline.default(), noise, c.RepeatActions(2), c.ClipActions()])
    done, sent = rows["actions_executed"], rows["actions_for_env"]
    assert done.dtype == np.float32
    assert (done != rows["actions"]).mean() > 0.9
    np.testing.assert_allclose(np.clip(4 + 2 * done, 2, 6), sent, rtol=1e-5)
    quiet = collected(ARM, COUNTING, [*c.ActionPipeline.default(), c.GaussianNoise(0.0)])
    np.testing.assert_array_equal(quiet["actions_executed"], quiet["actions"])  # unchanged rows: exactly


def test_changes_of_own_connectors_are_in_the_column() -> None:
    @c.action_connector
    def half(rows: c.Rows) -> c.Rows:
        return rows.replace(actions_for_env=np.where(rows.t[:, None] % 2 == 0, 3, rows.actions_for_env))

    class Half(c.ActionConnector):
        def __call__(self, rows: c.Rows) -> c.Rows:
            return half(rows)

    for own in (half, Half(), c.ActionPipeline([half])):
        rows = collected(ARM, COUNTING, [*c.ActionPipeline.default(), own])
        np.testing.assert_array_equal(
            rows["actions_executed"], np.where(rows["t"][:, None] % 2 == 0, np.float32(-0.5), rows["actions"])
        )
        assert rows["actions_executed"].dtype == np.float32

    class Flipped(Half):
        is_choice = False

        def __call__(self, rows: c.Rows) -> c.Rows:
            return rows.replace(actions_for_env=-rows.actions_for_env)

    assert "actions_executed" not in collected(Box(-1, 1, (1,)), COUNTING, [Flipped()])

    class Undone(Flipped):
        def undo(self, actions: Any) -> Any:
            return -actions

    rows = collected(Box(-1, 1, (1,)), COUNTING, [Undone(), c.GaussianNoise(0.5)])
    np.testing.assert_array_equal(rows["actions_executed"], -rows["actions_for_env"])


def test_replaced_nan_is_in_the_column() -> None:
    policy = FunctionPolicy(lambda rows: np.where(rows.t % 2 == 0, np.nan, 0.5).astype(np.float32)[:, None])
    rows = collected(ARM, policy, [c.ReplaceNaN(), *c.ActionPipeline.default()])
    np.testing.assert_array_equal(rows["actions_executed"][:, 0], np.where(rows["t"] % 2 == 0, 0, 0.5))


def test_changes_that_cannot_be_converted_back_are_marked() -> None:
    rows = collected(ARM, constant([1]), [c.DiscretizeActions(5), c.GaussianNoise(0.5)])
    assert (rows["actions_executed"] == rows["actions"]).all()
    np.testing.assert_array_equal(rows["actions_executed_missing"], rows["actions_for_env"][:, 0] != 3)
    assert rows["actions_executed_missing"].mean() > 0.9
    held = collected(ARM, constant([1]), [c.DiscretizeActions(5), c.GaussianNoise(0.5), c.RepeatActions(2)])
    np.testing.assert_array_equal(held["actions_executed_missing"], held["actions_for_env"][:, 0] != 3)
    whole = collected(ARM, constant([1]), [c.DiscretizeActions(5), c.GaussianNoise(0.5)], batch_mode="complete")
    with (
        external.make({"agent_0": (OBS, ARM), "agent_1": (OBS, ARM)}, num_envs=1) as envs,
        pytest.raises(ArgumentError, match="marked in 'actions_executed_missing'"),
        replay(whole, envs),
    ):
        pass


def test_no_column_where_actions_follow_from_the_policys() -> None:
    for space, policy, chain in (
        (ARM, constant([0.0]), None),
        (Discrete(5), constant(1), [c.MaskInvalid(), c.StickyActions(0.5)]),
        (ARM, constant([0]), [c.DiscretizeActions(5)]),
    ):
        options = {} if chain is None else {"action_connectors": chain}
        with SyncVectorEnv([lambda space=space: SampledEnv(OBS, space)]) as envs:
            assert "actions_executed" not in Collector(envs, policy, seed=0, **options).collect(env_steps=9)["main"]


def test_column_stays_where_training_is_off_whatever_the_policys_dtype() -> None:
    chain = [c.EpsilonGreedy(0.5), c.DiscretizeActions(5, joint=True)]
    with SyncVectorEnv([lambda: SampledEnv(OBS, ARM)]) as envs:
        policy = FunctionPolicy(lambda rows: np.zeros(len(rows), np.int16))
        collector = Collector(envs, policy, action_connectors=chain, seed=0)
        shares = []
        for train in (True, False, True):
            pipeline: Any = collector.action_connectors["main"]
            pipeline.train() if train else pipeline.eval()
            rows = collector.collect(env_steps=40)["main"]
            shares.append((rows["actions_executed"] != 0).mean())
    assert shares[0] > 0.1
    assert shares[1] == 0
    assert shares[2] > 0.1


def test_exploration_leaves_actions_that_no_policy_chose() -> None:
    options = {"random_steps": 100}
    rows = collected(ARM, constant(0), [c.EpsilonGreedy(1.0), c.DiscretizeActions(5, joint=True)], **options)
    given = rows["off_policy"]
    assert 0 < given.sum() < len(rows)
    np.testing.assert_array_equal(rows["actions_executed"][given], rows["actions"][given])
    assert (rows["actions_executed"][~given] != 0).mean() > 0.6
    for noise in (c.GaussianNoise(0.5), c.OrnsteinUhlenbeckNoise(sigma=5.0)):
        rows = collected(ARM, constant([0.0]), [noise, *c.ActionPipeline.default()], **options)
        same = (rows["actions_executed"] == rows["actions"]).all(axis=1)
        assert same[rows["off_policy"]].all()
        assert not same[~rows["off_policy"]].all()


def test_replay_gives_the_actions_that_were_executed() -> None:
    chain = [c.EpsilonGreedy(0.5), c.DiscretizeActions(5, joint=True)]
    log = collected(ARM, constant(0), chain, batch_mode="complete")
    with external.make({"agent_0": (OBS, ARM), "agent_1": (OBS, ARM)}, num_envs=1) as envs, replay(log, envs):
        again = Collector(
            envs,
            constant(0),
            action_connectors=[c.EpsilonGreedy(0.5, seed=9), c.DiscretizeActions(5, joint=True)],
            batch_mode="complete",
        ).collect(episodes=len(np.unique(log.eps_id)))["main"]
    order = np.lexsort((log.t, log.eps_id, log.agent_index))
    for name in ("actions", "actions_executed"):
        np.testing.assert_array_equal(again[name], log["actions_executed"][order])
    np.testing.assert_array_equal(again["actions_for_env"], log["actions_for_env"][order])
    np.testing.assert_array_equal(again["rewards"], log["rewards"][order])
