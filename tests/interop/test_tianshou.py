"""Tianshou's views give the numbers of the plain envs, and its collectors and algorithms run on them."""

from __future__ import annotations

import importlib
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest

import marlvec
from marlvec.errors import ActionError, ArgumentError, ContractError, MissingExtraError
from marlvec.testing import Script, ScriptedParallelEnv
from tests.interop.envs import CountEnv, archers
from tests.vector.support.kinds import factories_of
from tests.vector.support.reference import assert_same

torch = pytest.importorskip("torch")
pytest.importorskip("tianshou", exc_type=ImportError)

from tianshou.algorithm import DQN, PPO  # noqa: E402
from tianshou.algorithm.algorithm_base import policy_within_training_step  # noqa: E402
from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy  # noqa: E402
from tianshou.algorithm.modelfree.reinforce import ProbabilisticActorPolicy  # noqa: E402
from tianshou.algorithm.multiagent.marl import MultiAgentOffPolicyAlgorithm  # noqa: E402
from tianshou.algorithm.optim import AdamOptimizerFactory  # noqa: E402
from tianshou.data import Collector, VectorReplayBuffer  # noqa: E402
from tianshou.utils.net.common import Net  # noqa: E402
from tianshou.utils.net.discrete import DiscreteActor, DiscreteCritic  # noqa: E402

from marlvec.interop.tianshou import TianshouTurnVectorEnv, TianshouVectorEnv  # noqa: E402

N = 3


def ppo(observation_shape: tuple[int, ...], actions: Any) -> PPO:
    net = Net(state_shape=observation_shape, hidden_sizes=[16])
    return PPO(
        policy=ProbabilisticActorPolicy(
            actor=DiscreteActor(preprocess_net=net, action_shape=actions.n, softmax_output=False),
            dist_fn=lambda logits: torch.distributions.Categorical(logits=logits),
            action_scaling=False,
            action_space=actions,
        ),
        critic=DiscreteCritic(preprocess_net=net),
        optim=AdamOptimizerFactory(lr=1e-3),
    )


def dqn(observation_shape: tuple[int, ...], actions: Any) -> DQN:
    net = Net(state_shape=observation_shape, action_shape=actions.n, hidden_sizes=[16])
    policy = DiscreteQLearningPolicy(model=net, action_space=actions, eps_training=0.5)
    return DQN(policy=policy, optim=AdamOptimizerFactory(lr=1e-3), n_step_return_horizon=3)


# --- one row per agent


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_rows_are_those_of_the_plain_envs(backend: str) -> None:
    """Whole episodes, stepped in parts and in any order of the rows."""
    plain = marlvec.make("simple_spread", N, backend="sync", autoreset_mode="disabled")
    view = TianshouVectorEnv.make("simple_spread", N, backend=backend)
    assert len(view) == 9
    assert view.action_space == [plain.spec.groups[0].action_space] * 9
    rng = np.random.default_rng(0)
    obs, infos = view.reset(seed=3)
    assert_same(obs, plain.reset(seed=3)[0].reshape(9, -1), "reset")
    assert infos.tolist() == [{"env_id": row} for row in range(9)]
    for step in range(60):
        env_ids = rng.permutation(N)[: rng.integers(1, N + 1)]
        rows = rng.permutation(np.concatenate([np.arange(3) + 3 * i for i in env_ids]))
        actions = rng.integers(5, size=(N, 3))
        plain.send(actions[np.sort(env_ids)], np.sort(env_ids))
        expected = plain.recv()
        place = np.searchsorted(expected.env_ids, rows // 3) * 3 + rows % 3
        obs, rewards, terminated, truncated, infos = view.step(actions.reshape(-1)[rows], rows)
        assert_same(obs, expected.obs_leaves[0][0].reshape(len(rows), -1)[place], f"step {step} obs")
        assert_same(rewards, expected.rewards.reshape(-1)[place], f"step {step} rewards")
        assert_same(terminated, expected.terminated.reshape(-1)[place], f"step {step} terminated")
        assert_same(truncated, expected.truncated.reshape(-1)[place], f"step {step} truncated")
        assert [info["env_id"] for info in infos] == rows.tolist()
        if len(over := expected.env_ids[expected.done]):
            ended = np.flatnonzero(np.isin(np.arange(9) // 3, over))
            again, _ = plain.reset(env_ids=over)
            assert_same(view.reset(ended)[0], again.reshape(9, -1)[ended], f"step {step} reset")
    plain.close()
    view.close()


def test_rows_of_one_agent_have_masks_infos_and_attributes() -> None:
    view = TianshouVectorEnv.make([partial(CountEnv, 2, talks=True), partial(CountEnv, 3, talks=True)], backend="sync")
    view.seed([5, 6])
    obs, infos = view.reset()
    assert obs.tolist() == [0, 0]
    assert infos.tolist() == [{"began": True, "env_id": i} for i in (0, 1)]
    assert [heard[0][0] for heard in view.get_env_attr("heard")] == [5, 6]
    view.set_env_attr("length", 1, [1])
    obs, rewards, terminated, _, infos = view.step(np.array([4]), [1])
    assert (obs.tolist(), rewards.tolist(), terminated.tolist()) == ([1], [4.0], [True])
    assert infos[0]["action"] == 4
    view.close()
    assert view.is_closed
    masked = TianshouVectorEnv.make(partial(ScriptedParallelEnv, [Script.together(2, 3)], agent_num=2, masked=True), 1)
    obs, _ = masked.reset(seed=0)
    assert set(obs[0]) == {"obs", "mask"}
    assert obs[0]["mask"].dtype == bool
    masked.close()


def test_rows_that_are_no_decisions_are_refused() -> None:
    view = TianshouVectorEnv.make("simple_spread", 2, backend="sync")
    view.reset()
    with pytest.raises(ArgumentError, match="expected all 3 rows of env 1.*multiple"):
        view.step(np.zeros(5, int), range(5))
    with pytest.raises(ArgumentError, match="expected all 3 rows of env 0"):
        view.reset(0)
    with pytest.raises(ActionError):
        view.step(np.full(6, 9))
    with pytest.raises(ActionError, match="one action for each of 6 rows"):
        view.step(np.zeros(7, int))
    view.close()
    with pytest.raises(ArgumentError, match="done_on='any'"):
        TianshouVectorEnv.make("simple_spread", 2, backend="sync", done_on="all")
    with pytest.raises(ArgumentError, match="has 2: adversary, agent.*pad=True"):
        TianshouVectorEnv.make("simple_tag", 2, backend="sync")
    with pytest.raises(ArgumentError, match=r"autoreset_mode='disabled'.*TianshouVectorEnv.make\(\)"):
        TianshouVectorEnv(marlvec.make("CartPole-v1", 1, backend="sync"))
    turns = TianshouVectorEnv.make(factories_of("turns", 1), backend="sync")
    with pytest.raises(ContractError, match="does not act now.*TianshouTurnVectorEnv"):
        turns.reset(seed=0)
    turns.close()


# --- one row per env


class Plain:
    """One plain env, asked agent by agent."""

    def __init__(self, factory: Any, seed: int, options: dict[str, Any]) -> None:
        self.envs = marlvec.make([factory], backend="sync", autoreset_mode="disabled", **options)
        self.begin([seed])

    def begin(self, seed: Any = None) -> None:
        self.envs.reset_send(seed=seed)
        self.take()

    def take(self) -> None:
        self.shown = self.envs.recv()
        self.asked = np.flatnonzero(self.shown.acting[0]).tolist()
        self.joint = np.zeros((1, self.envs.agent_num), int)

    def check(self, obs: dict[str, Any], a: int) -> None:
        assert obs["agent_id"] == self.envs.agents[a]
        assert_same(obs["obs"], self.shown.obs_leaves[0][0][0, a], "obs")
        mask = self.shown.action_masks[0]
        n = int(self.envs.spec.groups[0].action_space.n)
        assert_same(obs["mask"], np.ones(n, bool) if mask is None else mask[0, a], "mask")

    def step(self) -> np.ndarray[Any, Any]:
        """Rewards until somebody is to act again, or it is over."""
        rewards = np.zeros(self.envs.agent_num)
        while not self.asked and not (self.shown.done[0] and rewards.any()):
            self.envs.step_send(self.joint)
            self.take()
            rewards += self.shown.rewards[0]
            if self.shown.done[0]:
                break
        return rewards


@pytest.mark.parametrize(
    ("env", "options"),
    [
        ("simple_tag", {"pad": True}),
        ("knights_archers_zombies", {}),
        ("connect_four", {}),
        ("parallel", {}),
        ("turns, masked", {}),
        ("keyed", {}),
    ],
)
def test_turns_carry_the_numbers_of_the_plain_envs(env: str, options: dict[str, Any]) -> None:
    """Two groups; agents that die; turns; births: whoever must act is asked, with what is seen then."""
    if env in ("knights_archers_zombies", "connect_four"):
        pytest.importorskip("pymunk" if env == "knights_archers_zombies" else "pygame")
    factories = [partial(archers, 120)] * 2 if env == "knights_archers_zombies" else factories_of(env, 2)
    view = TianshouTurnVectorEnv.make(factories, backend="sync", **options)
    plains = [Plain(factory, seed, options) for factory, seed in zip(factories, (4, 5), strict=True)]
    rng = np.random.default_rng(1)
    obs, _ = view.reset(seed=[4, 5])
    episodes = [0, 0]
    while min(episodes) < 2:
        ids = [[0], [1], [0, 1], [1, 0]][rng.integers(4)]
        actions = []
        for i in ids:
            a = plains[i].asked.pop(0)
            plains[i].check(obs[i], a)
            plains[i].joint[0, a] = rng.choice(np.flatnonzero(obs[i]["mask"]))
            actions.append(plains[i].joint[0, a])
        shown, rewards, terminated, truncated, infos = view.step(np.array(actions), ids)
        for k, i in enumerate(ids):
            obs[i], plain = shown[k], plains[i]
            assert infos[k]["env_id"] == i
            if plain.asked:
                assert not rewards[k].any()
                assert not terminated[k]
                assert not truncated[k]
                continue
            actor = view.agents[int(np.flatnonzero(plain.shown.acting[0])[-1])]
            assert_same(rewards[k], plain.step(), "rewards")
            done, cut = bool(plain.shown.done[0]), bool(plain.shown.truncated.any())
            assert (terminated[k], truncated[k]) == (done and not cut, done and cut)
            if done:
                episodes[i] += 1
                assert obs[i]["agent_id"] == actor
                plain.check(obs[i], view.agent_idx[actor])
                obs[i] = view.reset([i])[0][0]
                plain.begin()
    for plain in plains:
        plain.envs.close()
    view.close()


# --- its own collectors and algorithms


def test_a_collector_takes_steps_and_episodes_of_rows_and_ppo_learns_from_them() -> None:
    torch.manual_seed(0)
    view = TianshouVectorEnv.make("simple_spread", N, backend="sync", max_episode_steps=6)
    algorithm = ppo((18,), view.action_space[0])
    collector = Collector(algorithm, view, VectorReplayBuffer(2000, len(view)))
    collector.reset()
    stats = collector.collect(n_step=9 * 8)
    assert stats.n_collected_steps == 72
    assert stats.n_collected_episodes == 9
    batch = collector.buffer[:]
    assert batch.obs.shape == (72, 18)
    assert batch.truncated.sum() == 9
    before = [parameter.clone() for parameter in algorithm.parameters()]
    with policy_within_training_step(algorithm.policy):
        algorithm.update(buffer=collector.buffer, batch_size=64, repeat=1)
    assert any((old != new).any() for old, new in zip(before, algorithm.parameters(), strict=True))
    collector.reset()
    assert collector.collect(n_episode=12).n_collected_episodes == 12
    with pytest.raises(ArgumentError, match="multiple"):
        collector.collect(n_episode=10, reset_before_collect=True)
    view.close()


def test_tianshous_multi_agent_algorithms_learn_from_turns() -> None:
    torch.manual_seed(0)
    view = TianshouTurnVectorEnv.make("simple_spread", N, backend="sync", max_episode_steps=6)
    algorithms = [dqn((18,), view.action_space[0]) for _ in view.agents]
    together = MultiAgentOffPolicyAlgorithm(algorithms=algorithms, env=view)
    collector = Collector(together, view, VectorReplayBuffer(2000, len(view)))
    collector.reset()
    stats = collector.collect(n_episode=4)
    assert stats.n_collected_episodes == 4
    assert stats.n_collected_steps == 4 * 6 * 3, "an env step is three rows"
    batch = collector.buffer[:]
    assert batch.rew.shape == (72, 3)
    assert batch.obs.agent_id[:3].tolist() == view.agents
    before = [parameter.clone() for parameter in together.parameters()]
    with policy_within_training_step(together.policy):
        together.update(buffer=collector.buffer, sample_size=32)
    assert any((old != new).any() for old, new in zip(before, together.parameters(), strict=True))
    view.close()


def test_without_tianshou_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "marlvec.interop.tianshou")
    monkeypatch.setitem(sys.modules, "tianshou.env", None)
    with pytest.raises(MissingExtraError, match=r"needs tianshou.*pip install 'marlvec\[tianshou\]'"):
        importlib.import_module("marlvec.interop.tianshou")


@pytest.mark.parametrize(
    "wrong", [np.zeros(1, np.int64), np.zeros(N + 1, np.int64), np.int64(0), np.zeros(0, np.int64)]
)
def test_a_wrong_number_of_actions_moves_nobody(wrong: Any) -> None:
    view = TianshouTurnVectorEnv.make("simple_spread", N, backend="sync")
    view.reset(seed=0)
    with pytest.raises(ActionError, match=f"one action for each of {N} envs"):
        view.step(wrong)
    obs, *_ = view.step(np.zeros(N, np.int64))
    assert [row["agent_id"] for row in obs] == ["agent_1"] * N  # agent 0 had not answered before
    view.close()
