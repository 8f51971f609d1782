"""Stable-Baselines3 on marlvec's envs: what its VecEnv promises, and what its models learn from."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Text
from sb3_contrib import MaskablePPO, RecurrentPPO
from stable_baselines3 import A2C, DQN, PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecCheckNan, VecMonitor, VecNormalize

import marlvec
from marlvec import AsyncVectorEnv, SyncVectorEnv, env_seeds
from marlvec.errors import ActionError, ArgumentError, BusyError, ContractWarning, StateError
from marlvec.interop.sb3 import SB3VecEnv, only_decisions
from marlvec.testing import Script, ScriptedParallelEnv, SingleEnv, TurnEnv
from tests.envs.support import Forgetful
from tests.interop.envs import CountEnv, SampleEnv
from tests.vector.support.kinds import SCRIPTED, factories_of


def view_of(env: Any, num_envs: int = 2, **kwargs: Any) -> SB3VecEnv:
    return SB3VecEnv(marlvec.make(env, num_envs, backend="sync", **kwargs))


def monitored(view: Any) -> VecMonitor:
    with pytest.warns(UserWarning, match="already wrapped with a `Monitor`"):
        return VecMonitor(view)


# --- the VecEnv


@pytest.mark.checklist(127)
def test_the_checkers_find_nothing() -> None:
    """VecCheckNan and VecMonitor over whole episodes; the monitor finds the returns that the view tells."""
    view = view_of("simple_spread")
    monitor = monitored(VecCheckNan(view, raise_exception=True))
    view.seed(3)
    obs = monitor.reset()
    assert view.observation_space.contains(obs[0])
    ends = 0
    for _ in range(60):
        obs, rewards, dones, infos = monitor.step(np.array([view.action_space.sample() for _ in range(6)]))
        assert (obs.dtype, rewards.dtype, dones.dtype) == (np.float32, np.float32, np.bool_)
        assert all(view.observation_space.contains(row) for row in obs)
        ends += dones.sum()
        assert all(info["TimeLimit.truncated"] == done for info, done in zip(infos, dones, strict=True))
    assert ends == 12
    assert monitor.episode_count == 12
    monitor.close()


class Still:
    """A model that does nothing, whatever it sees."""

    def predict(self, obs: Any, **kwargs: Any) -> Any:
        return np.zeros(len(obs), np.int64), None


def test_evaluate_policy_counts_every_agents_life_once() -> None:
    script = Script([0, 0], [2, 6], ["terminated", "terminated"])
    view = view_of(partial(ScriptedParallelEnv, [script], agent_num=2, masked=False), 2)
    returns, _ = evaluate_policy(Still(), view, n_eval_episodes=8, return_episode_rewards=True)  # type: ignore[arg-type]
    assert len(returns) == 8
    assert min(returns) > 0, "padding is no episode of its own"
    view.close()


def test_evaluate_policy_reads_true_returns_through_normalised_rewards() -> None:
    """The view is a Monitor, as its rows' infos["episode"] are."""
    found = []
    for normalise in (False, True):
        view = view_of("simple_spread")
        view.seed(5)
        envs = VecNormalize(view) if normalise else view
        found.append(evaluate_policy(Still(), envs, n_eval_episodes=12, return_episode_rewards=True))  # type: ignore[arg-type]
        view.close()
    assert found[0] == found[1]
    assert found[0][1] == [25] * 12


def test_seeds_and_options_are_for_one_reset() -> None:
    view = view_of("simple_spread", 2)
    assert view.seed(5) == [seed for seed in env_seeds(5, 2) for _ in range(3)]
    first, again, other = view.reset(), view.reset(), None
    view.seed(5)
    other = view.reset()
    assert first.tobytes() == other.tobytes() != again.tobytes()
    with marlvec.make("simple_spread", 2, backend="sync") as envs:
        assert envs.reset(seed=5)[0].tobytes() == first.tobytes()
    drawn = view.seed()
    assert len({*drawn}) == 2
    view.close()

    view = SB3VecEnv(SyncVectorEnv([CountEnv, CountEnv]))
    view.set_options([{"a": 1}, {"a": 2}])
    view.reset()
    view.set_options({"b": 3})
    view.reset()
    view.reset()
    assert view.get_attr("heard") == [[(None, {"a": n}), (None, {"b": 3}), (None, None)] for n in (1, 2)]
    view.close()

    view = view_of(partial(ScriptedParallelEnv, agent_num=2), 2)
    with pytest.raises(ArgumentError, match="one per row, 4 in all, got 2"):
        view.set_options([{}, {}])
    with pytest.raises(ArgumentError, match="equal values for rows of one env; row 3 differs"):
        view.set_options([{}, {}, {}, {"a": 1}])
    view.close()


class Gear(ScriptedParallelEnv):
    """Has a method, an attribute, and a picture."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(agent_num=2, **kwargs)
        self.gear, self.calls, self.render_mode = 1, 0, "rgb_array"

    def shift(self, by: int) -> int:
        self.calls += 1
        self.gear += by
        return self.gear

    def render(self) -> Any:
        return np.full((2, 3, 3), self.gear, np.uint8)


def test_methods_and_attributes_are_those_of_envs() -> None:
    view = view_of(Gear, 3)
    view.reset()
    assert view.env_method("shift", 2, indices=[1, 2, 3]) == [3, 3, 3]
    assert view.get_attr("calls") == [1, 1, 1, 1, 0, 0]
    assert view.env_method("shift", by=1, indices=5) == [2]
    view.set_attr("gear", 9, indices=[0])
    assert view.get_attr("gear") == [9, 9, 3, 3, 2, 2]
    assert view.get_attr("gear", 4) == [2]
    assert view.has_attr("gear")
    assert not view.has_attr("wheel")
    with pytest.raises(AttributeError, match="wheel"):
        view.get_attr("wheel")
    assert view.env_is_wrapped(Gear) == [False] * 6
    assert view.render_mode == "rgb_array"
    assert [frame[0, 0, 0] for frame in view.get_images()] == [9, 3, 2]
    assert view.render().shape == (4, 6, 3)
    with pytest.raises(ArgumentError, match="rows from 0 to 5, got 6"):
        view.get_attr("gear", [6])
    view.close()


def test_steps_are_asynchronous_and_a_second_one_waits_its_turn() -> None:
    view = SB3VecEnv(AsyncVectorEnv(factories_of("parallel", 2), num_workers=2))
    view.reset()
    view.step_async(np.zeros(6, np.int64))
    with pytest.raises(BusyError):
        view.step_async(np.zeros(6, np.int64))
    assert view.step_wait()[0].shape[0] == 6
    with pytest.raises(ActionError, match=r"expected shape \(6,\)"):
        view.step(np.zeros(5, np.int64))
    view.close()


@pytest.mark.parametrize(
    ("spaces", "said"),
    [
        ((Discrete(3), Discrete(4, start=3)), "expected choices that start at 0"),
        ((Dict({"a": Text(3), "b": Discrete(2)}), Discrete(3)), "leaf 'a' .* is a Text"),
    ],
)
def test_spaces_that_it_cannot_hold_are_refused(spaces: tuple[Any, Any], said: str) -> None:
    with SyncVectorEnv([partial(SampleEnv, *spaces)]) as envs, pytest.raises(ArgumentError, match=said):
        SB3VecEnv(envs)


# --- what models learn from


class Diary(BaseCallback):
    """Notes per step what only_decisions() must go by, and per rollout what it has made of it."""

    def __init__(self, view: SB3VecEnv) -> None:
        super().__init__()
        self.view = view
        self.steps: list[dict[str, Any]] = []
        self.checked = self.left_out = 0

    def _on_rollout_start(self) -> None:
        self.steps = []

    def _on_step(self) -> bool:
        driver = self.view.driver
        self.steps.append({"acted": driver.acted.copy(), "lost": driver.lost.copy(), "dones": self.locals["dones"]})
        return True

    def _on_rollout_end(self) -> None:
        buffer: Any = self.model.rollout_buffer
        policy = self.model.policy
        last = policy.predict_values(policy.obs_to_tensor(self.locals["new_obs"])[0]).detach()
        for row in range(buffer.n_envs):
            want = by_definition(self.steps, buffer, row, float(last[row]), self.view)
            usable = np.flatnonzero(buffer.usable[:, row]).tolist()
            assert usable == [*want]
            assert buffer.advantages[usable, row] == pytest.approx([*want.values()], abs=2e-4, rel=1e-5)
            self.checked += len(usable)
            self.left_out += buffer.buffer_size - len(usable)


def by_definition(steps: list[Any], buffer: Any, row: int, last_value: float, view: SB3VecEnv) -> dict[int, float]:
    """Step of each decision that is learned from, to its advantage: forward in time, one decision after the other."""
    lives: list[list[list[float]]] = []  # of (step, value, paid, next value, is known)
    life: list[list[float]] = []
    for t, step in enumerate(steps):
        value, reward = float(buffer.values[t, row]), float(buffer.rewards[t, row])
        if step["lost"][row]:
            if life:
                life[-1][3], life[-1][4] = (value, True) if step["acted"][row] else (0, False)
            lives.append(life)
            life = []
            continue
        if step["acted"][row]:
            if life:
                life[-1][3], life[-1][4] = value, True
            life.append([t, value, 0.0, 0.0, False])
        if life:
            life[-1][2] += reward
        if step["dones"][row]:
            if life:
                life[-1][3], life[-1][4] = 0.0, True
            lives.append(life)
            life = []
    if life and view.driver.acting[row]:
        life[-1][3], life[-1][4] = last_value, True
    lives.append(life)
    found: dict[int, float] = {}
    for life in lives:
        follows = 0.0
        for t, value, paid, next_value, known in reversed(life):
            if not known:
                follows = 0.0
                continue
            follows = paid + buffer.gamma * next_value - value + buffer.gamma * buffer.gae_lambda * follows
            found[int(t)] = follows
    return dict(sorted(found.items()))


SPARE = {"policy_kwargs": {"net_arch": [8]}, "device": "cpu", "seed": 1}


class Flaky(TurnEnv):
    """Raises now and then."""

    def step(self, action: Any) -> Any:
        self.moves = getattr(self, "moves", 0) + 1
        if self.moves % 13 == 0:
            raise RuntimeError("broken")
        return super().step(action)


@pytest.mark.mostly_slow("steps or trains with another library", quick=3)
@pytest.mark.parametrize(
    ("kind", "make_env"),
    [
        ("everyone decides", partial(ScriptedParallelEnv, [Script.together(3, 4)])),
        ("deaths and births", SCRIPTED["parallel"]),
        ("turns", SCRIPTED["turns"]),
        ("waits", SCRIPTED["keyed"]),
        ("faults", Flaky),
    ],
)
def test_decisions_are_learned_from_and_nothing_else(kind: str, make_env: Callable[..., Any]) -> None:
    envs = marlvec.make(
        partial(make_env, agent_num=3),
        3,
        backend="sync",
        on_fault="restart" if kind == "faults" else "raise",
        max_restarts=10_000,
    )
    view = SB3VecEnv(envs)
    model = only_decisions(A2C("MlpPolicy", view, n_steps=20, gae_lambda=0.9, gamma=0.97, **SPARE))
    diary = Diary(view)
    model.learn(9 * 20 * 4, callback=diary)
    assert diary.checked > 100
    assert (diary.left_out == 0) == (kind == "everyone decides")
    if kind == "faults":
        assert len(envs.faults) > 5
    view.close()


@pytest.mark.slow("trains with Stable-Baselines3")
@pytest.mark.parametrize("algorithm", [PPO, A2C])
def test_nothing_changes_where_everyone_decides(algorithm: Any) -> None:
    """The same weights, to the last bit, as from Stable-Baselines3's own buffer."""
    weights = []
    for wrap in (lambda model: model, only_decisions):
        view = view_of("simple_spread", 2)
        batch = {"batch_size": 32} if algorithm is PPO else {}
        model = wrap(algorithm("MlpPolicy", VecNormalize(view), n_steps=16, **batch, **SPARE))
        model.learn(6 * 16 * 3)
        weights.append([parameter.detach().numpy().tobytes() for parameter in model.policy.parameters()])
        view.close()
    assert weights[0] == weights[1]


def test_a_saved_model_goes_on(tmp_path: Path) -> None:
    view = view_of("simple_spread", 1)
    model = only_decisions(PPO("MlpPolicy", view, n_steps=8, batch_size=24, **SPARE))
    model.learn(24)
    model.save(tmp_path / "model")
    again = only_decisions(PPO.load(tmp_path / "model", env=view, device="cpu"))
    again.learn(24)
    assert len(again.rollout_buffer.values) == 24
    view.close()


def test_what_only_decisions_cannot_do_it_says() -> None:
    view = view_of("simple_spread", 1)
    with pytest.raises(ArgumentError, match="expected a model with a rollout buffer, got DQN"):
        only_decisions(DQN("MlpPolicy", view, buffer_size=10, **SPARE))
    with pytest.raises(ArgumentError, match="unbroken sequences.*done_on='any'"):
        only_decisions(RecurrentPPO("MlpLstmPolicy", view, n_steps=8, batch_size=24, device="cpu"))
    view.close()
    with pytest.raises(ArgumentError, match="whose env is an SB3VecEnv, got DummyVecEnv"):
        only_decisions(PPO("MlpPolicy", "CartPole-v1", n_steps=8, batch_size=8, device="cpu"))
    view = SB3VecEnv(SyncVectorEnv([partial(SingleEnv, [5])]))
    model = only_decisions(PPO("MlpPolicy", view, n_steps=8, batch_size=8, **SPARE))
    with pytest.raises(StateError, match="0 of 8 steps"):
        next(model.rollout_buffer.get())
    view.close()


def test_dict_observations_are_learned_from_too() -> None:
    spaces = Dict({"where": Box(-1, 1, (2,), np.float32), "what": Discrete(3)}), Discrete(2)
    view = SB3VecEnv(SyncVectorEnv([partial(SampleEnv, *spaces)] * 2))
    model = only_decisions(A2C("MultiInputPolicy", view, n_steps=10, **SPARE))
    model.learn(40)
    assert {key: len(part) for key, part in model.rollout_buffer.observations.items()} == {"what": 20, "where": 20}
    view.close()


# --- masks, and learning


def test_masks_reach_maskable_ppo() -> None:
    """Whole games of connect four without one forbidden move, and half of all rows learned from."""
    view = view_of("pettingzoo/classic/connect_four", 2)
    assert view.has_attr("action_masks")
    model = only_decisions(MaskablePPO("MlpPolicy", view, n_steps=64, batch_size=64, n_epochs=1, **SPARE))
    model.learn(2 * 64 * 4)
    assert len(model.ep_info_buffer) >= 8
    rewards = [episode["r"] for episode in model.ep_info_buffer]
    assert sum(rewards) == 0, "nobody is punished for a forbidden move: one wins what the other loses"
    buffer = model.rollout_buffer
    assert 100 < len(buffer.values) <= 128
    chosen = buffer.actions[:, 0].astype(int)
    assert (buffer.action_masks[np.arange(len(chosen)), chosen] == 1).all()
    view.close()


def test_ppo_is_told_once_that_it_ignores_masks() -> None:
    view = view_of(partial(Forgetful, lambda t, a: True), validate="off")
    with pytest.warns(ContractWarning, match="Use MaskablePPO of sb3-contrib"):
        PPO("MlpPolicy", view, n_steps=2, batch_size=4, n_epochs=1, **SPARE).learn(4)
    PPO("MlpPolicy", view, n_steps=2, batch_size=4, n_epochs=1, **SPARE).learn(4)
    view.close()


@pytest.mark.slow("trains with Stable-Baselines3")
def test_ppo_learns_to_reach_more() -> None:
    """A world that pays action 1: the view's rows and rewards belong together."""

    class Pays(ScriptedParallelEnv):
        def step(self, actions: Any) -> Any:
            obs, rewards, *rest = super().step(actions)
            return obs, {agent: float(actions.get(agent) == 1) for agent in rewards}, *rest

    view = view_of(partial(Pays, agent_num=2), 4)
    model = only_decisions(
        PPO("MlpPolicy", view, n_steps=32, batch_size=64, n_epochs=4, learning_rate=0.01, gamma=0.0, **SPARE)
    )
    model.learn(8 * 32 * 8)
    obs, right, acted = view.reset(), 0.0, 0
    for _ in range(30):
        obs, rewards, _, _ = view.step(model.predict(obs)[0])
        right, acted = right + rewards.sum(), acted + view.driver.acted.sum()
    assert right / acted > 0.9
    view.close()
