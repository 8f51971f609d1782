"""Learner connectors on what a collector gathers from real envs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import marlvec
from marlvec import connectors as c
from tests.connectors.helpers.samples import same_tree

GAMMA, LAMBDA = 0.97, 0.9
ENVS = {"CartPole-v1": 15, "simple_spread": 10}
"""An env that ends by itself or by its time limit, and three agents that only ever run out of time."""


class Linear(marlvec.Policy):
    """Random actions; the value of an observation is a weighted sum of it."""

    def reseed(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def values(self, rows: c.Rows) -> Any:
        """(n,) values of rows; also the value function of the learner side."""
        obs = rows["obs"].astype(np.float64)
        return obs @ np.linspace(1.0, 2.0, obs.shape[1])

    def act(self, rows: c.Rows, *, explore: bool = True) -> Any:
        assert self.action_space is not None
        actions = self.rng.integers(0, self.action_space.n, len(rows))  # type: ignore[attr-defined]  # a Discrete
        return actions, {"values": self.values(rows)}


def gather(env_id: str, num_envs: int = 3, calls: int = 3) -> tuple[Linear, list[c.Rows]]:
    """Rows of some batches, cut wherever the steps ran out."""
    policy = Linear()
    with marlvec.make(env_id, num_envs=num_envs, backend="sync", max_episode_steps=ENVS[env_id]) as envs:
        collector = marlvec.Collector(envs, {"main": policy}, "main", seed=3)
        batches = [collector.collect(env_steps=23 * num_envs)["main"] for _ in range(calls)]
    return policy, [c.Rows(batch) for batch in batches]


def v(obs: Any) -> float:
    """The same value, of one observation."""
    return float(np.dot(obs.astype(np.float64), np.linspace(1.0, 2.0, len(obs))))


def reference(rows: c.Rows) -> list[float]:
    """Advantages row by row, from the end of the batch; whether a row is its fragment's last is read off its ids."""
    advantages = [0.0] * len(rows)
    for i in reversed(range(len(rows))):
        last = i + 1 == len(rows) or any(rows[name][i + 1] != rows[name][i] for name in ("eps_id", "agent_index"))
        after = 0.0 if rows["terminated"][i] else v(rows["next_obs"][i])
        advantages[i] = float(rows["rewards"][i]) + GAMMA * after - v(rows["obs"][i])
        if not last:
            advantages[i] += GAMMA * LAMBDA * advantages[i + 1]
    return advantages


@pytest.mark.checklist(100)
@pytest.mark.parametrize("env_id", ENVS)
def test_the_final_observation_is_what_a_truncated_row_bootstraps_from(env_id: str) -> None:
    """Never the observation of the reset that follows; of a cut fragment, the one the next batch goes on from."""
    policy, batches = gather(env_id)
    kinds = set()
    for rows, following in zip(batches, [*batches[1:], None], strict=True):
        out = c.LearnerPipeline([c.GeneralAdvantageEstimation(GAMMA, LAMBDA, policy.values)])(rows)
        np.testing.assert_allclose(out["advantages"], reference(rows), rtol=1e-6, atol=1e-6)

        ends = np.flatnonzero(np.append(rows["unroll_id"][1:] != rows["unroll_id"][:-1], True))
        for i in ends:
            obs, next_obs, got = rows["obs"][i], rows["next_obs"][i], float(out["advantages"][i])
            lane = (rows["env_id"] == rows["env_id"][i]) & (rows["agent_index"] == rows["agent_index"][i])
            paid = float(rows["rewards"][i]) - v(obs)
            if rows["terminated"][i]:
                kinds.add("terminated")
                assert got == pytest.approx(paid, rel=1e-6)
                continue
            assert got == pytest.approx(paid + GAMMA * v(next_obs), rel=1e-6, abs=1e-6)
            if rows["truncated"][i]:
                kinds.add("truncated")
                assert rows["t"][i] == ENVS[env_id] - 1
                for reset_obs in rows["obs"][lane & (rows["t"] == 0)]:
                    assert got != pytest.approx(paid + GAMMA * v(reset_obs), rel=1e-3)
            elif following is not None:
                kinds.add("cut")
                again = (following["eps_id"] == rows["eps_id"][i]) & (following["t"] == rows["t"][i] + 1)
                again &= following["agent_index"] == rows["agent_index"][i]
                np.testing.assert_array_equal(following["obs"][again], next_obs[None])
    assert kinds == {"truncated", "cut"} | ({"terminated"} if env_id == "CartPole-v1" else set())


@pytest.mark.parametrize("env_id", ENVS)
def test_where_a_batch_is_cut_changes_no_return(env_id: str) -> None:
    """With a perfect critic; here, with rewards that make any critic perfect: V(obs) - gamma * V(next_obs)."""
    policy, batches = gather(env_id)
    for rows in batches:
        true = policy.values(rows)
        after = policy.values(rows.replace(obs=rows["next_obs"])) * ~rows["terminated"]
        paid = rows.replace(rewards=true - GAMMA * after)
        out = c.ReturnsToGo(GAMMA, policy.values)(paid)
        np.testing.assert_allclose(out["returns_to_go"], true, rtol=1e-5, atol=1e-5)
        steps = c.NStep(4, GAMMA)(paid)
        targets = steps["rewards"] + steps["discounts"] * policy.values(steps.replace(obs=steps["next_obs"]))
        np.testing.assert_allclose(targets, true, rtol=1e-5, atol=1e-5)


@pytest.mark.mostly_slow("draws many batches", quick=3)
@pytest.mark.parametrize("env_id", ENVS)
def test_one_pass_over_all_sequences_values_everything(env_id: str) -> None:
    """The chain of a policy that remembers: values of all rows at once, phantom ones included, in sequences."""
    policy, batches = gather(env_id)
    rows = batches[0]
    sequences = c.LearnerPipeline([c.AddLastObs(), c.PadSequences(8)])(rows.drop("values"))
    b, t = sequences["loss_mask"].shape
    flat = policy.values(c.Rows(obs=sequences["obs"].reshape(b * t, -1)))
    learner = c.LearnerPipeline([c.UnpadSequences(), c.GeneralAdvantageEstimation(GAMMA, LAMBDA)])
    out = learner(sequences.replace(values=flat.reshape(b, t)))
    want = c.GeneralAdvantageEstimation(GAMMA, LAMBDA, policy.values)(rows)
    true = out.take(~out["phantom"]).drop("phantom", "loss_mask")
    np.testing.assert_allclose(true["advantages"], want["advantages"], rtol=1e-6, atol=1e-6)
    same_tree({name: true[name] for name in ("obs", "actions", "t")}, {n: rows[n] for n in ("obs", "actions", "t")})
    standard = c.Standardize()(out)
    assert standard["advantages"][~out["phantom"]].std() == pytest.approx(1, rel=1e-4)


@pytest.mark.parametrize("n", [1, 3, 50])
def test_all_columns_of_the_successor_are_of_one_moment_after_n_steps(n: int) -> None:
    """The truth is read off the rows before NStep, by episode, agent and decision."""

    def act(rows: c.Rows) -> Any:
        after = {"sum": rows["state_in"]["sum"] + rows["obs"][:, :2], "turns": rows["state_in"]["turns"] + 1}
        return np.zeros(len(rows), np.int64), {"state_out": after, "h_out": rows["h_in"] - 1}

    chain = [
        c.RnnState({"sum": np.zeros(2, np.float32), "turns": np.zeros((), np.int64)}),
        c.RnnState(np.zeros(1), "h_in", "h_out"),
    ]
    cut = False
    with marlvec.make("simple_spread", num_envs=2, backend="sync", max_episode_steps=7, state=True) as envs:
        collector = marlvec.Collector(envs, marlvec.FunctionPolicy(act), agent_connectors=chain, seed=1)
        for _ in range(4):
            rows = c.Rows(collector.collect(env_steps=2 * 11)["main"])
            out = c.NStep(n, GAMMA)(rows)
            moved = {"next_obs", "next_state", "next_env_t", "next_obs_missing", "state_out", "h_out"}
            moved |= {"terminated", "truncated"}
            for name in rows.keys() - {*moved, "rewards"}:
                same_tree(out[name], rows[name])
            for i in range(len(rows)):
                unroll = rows["unroll_id"][i]
                last = max(j for j in range(len(rows)) if rows["unroll_id"][j] == unroll and j < i + n)
                cut |= not rows["truncated"][last]
                for name in moved:
                    same_tree(out.take([i])[name], rows.take([last])[name])
                # The state that goes with next_obs has seen all observations before it, and not that one.
                assert out["state_out"]["turns"][i] == out["next_env_t"][i] == -out["h_out"][i, 0]
    assert cut
