"""GaussianNoise and OrnsteinUhlenbeckNoise."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from marlvec import connectors as c
from marlvec.errors import ArgumentError, ContractError
from tests.connectors.helpers.action_samples import bind, decisions, play
from tests.connectors.helpers.samples import same_tree

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
    for rows in play(FREE, 30):
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
    with pytest.raises(ContractError, match="these rows have no 't'"):
        bind(noise(), UNIT)(decisions(np.zeros((1, 2))).drop("t"))


def test_states_that_are_not_theirs() -> None:
    plain, decays = c.GaussianNoise(1), c.GaussianNoise(1, final=0, decay_steps=2)
    assert plain.state_dict() == {}
    with pytest.raises(ArgumentError, match=r"missing \['count'\], unknown \[\]"):
        decays.load_state_dict(plain.state_dict())
    with pytest.raises(ArgumentError, match=r"missing \[\], unknown \['count'\]"):
        plain.load_state_dict(decays.state_dict())


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
    with pytest.raises(ArgumentError, match="expected the state key 'count'"):
        pipelines[0][0].merge_states([{}])
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
