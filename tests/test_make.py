"""`marlvec.make`: what it takes, what reaches the envs, and what it gives back."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Discrete

import marlvec
from marlvec.errors import ArgumentError, ContractError, EnvArgumentError
from marlvec.testing import CounterEnv, KeyedEnv, Script, ScriptedParallelEnv, SingleEnv, TurnEnv, decode

BACKENDS = ("sync", "async")


class Told(CounterEnv):
    """Declares what a vectorizer may tell a factory."""

    def __init__(self, num_envs: int, env_index: int = -1, tag: int = 0, box: list[int] | None = None) -> None:
        super().__init__(env_index=env_index)
        self.metadata = {**self.metadata, "told": (num_envs, tag)}
        if box is not None:
            box.append(env_index)
            assert len(box) == 1, "this list is another env's too"


class Shift(gymnasium.RewardWrapper):
    def __init__(self, env: Any, by: float = 1.0) -> None:
        super().__init__(env)
        self.by = by

    def reward(self, reward: float) -> float:
        return reward + self.by


class Double(gymnasium.RewardWrapper):
    def reward(self, reward: float) -> float:
        return 2 * reward


def rewards_of(steps: int = 3, **settings: Any) -> np.ndarray:
    with marlvec.make("CartPole-v1", num_envs=2, **settings) as envs:
        envs.reset(seed=0)
        return np.stack([envs.step(np.zeros((2, 1), np.int64))[1] for _ in range(steps)])


@pytest.mark.checklist(1)
@pytest.mark.parametrize("settings", [{}, {"backend": "sync"}], ids=["default", "sync"])
def test_simple_spread_works_by_its_name(settings: dict[str, Any]) -> None:
    with marlvec.make("simple_spread", num_envs=16, **settings) as envs:
        assert (envs.num_envs, envs.agent_num) == (16, 3)
        obs, _ = envs.reset(seed=0)
        assert obs.shape == (16, 3, 18)
        assert [envs.agent_action_space(agent) for agent in envs.agents] == [Discrete(5)] * 3
        for t in range(1, 76):
            obs, rewards, terminated, truncated, _ = envs.step(np.zeros((16, 3), np.int64))
            assert truncated.all() == truncated.any() == (t % 25 == 0)
            assert not terminated.any()
            assert (obs.shape, rewards.shape) == ((16, 3, 18), (16, 3))
        state = envs.state()
        assert state.shape == (16, 54)
        # mpe2's state is what all agents see, one after the other.
        assert state.tobytes() == obs.reshape(16, 54).tobytes()


@pytest.mark.checklist(2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "env",
    ["CartPole-v1", "marlvec.testing:CounterEnv", CounterEnv, lambda: CounterEnv(), partial(CounterEnv, agent_num=2)],
    ids=["id", "module:attr", "class", "lambda", "partial"],
)
def test_anything_that_builds_an_env_will_do(env: Any, backend: str) -> None:
    with marlvec.make(env, num_envs=3, backend=backend) as envs:
        assert envs.reset(seed=0)[0].shape[:2] == (3, envs.agent_num)
    with marlvec.make([env, env], backend=backend) as envs:
        assert envs.num_envs == 2
    with marlvec.make([env, env], num_envs=2, backend=backend) as envs:
        assert envs.num_envs == 2
    with pytest.raises(ValueError, match=re.escape("num_envs=3, but 2 factories were given")):
        marlvec.make([env, env], num_envs=3, backend=backend)


@pytest.mark.checklist(4)
@pytest.mark.parametrize("backend", BACKENDS)
def test_keyword_arguments_reach_the_env_or_raise(backend: str) -> None:
    with marlvec.make("simple_spread", num_envs=2, backend=backend, N=5, max_cycles=7) as envs:
        assert envs.agent_num == 5
        envs.reset(seed=0)
        ends = [envs.step(np.zeros((2, 5), np.int64))[3].all() for _ in range(21)]
        assert np.flatnonzero(ends).tolist() == [6, 13, 20]
    with marlvec.make(CounterEnv, num_envs=2, backend=backend, agent_num=5) as envs:
        assert envs.agent_num == 5
    for env in ("simple_spread", "CartPole-v1", CounterEnv, lambda: CounterEnv()):
        with pytest.raises(TypeError, match="flavour") as caught:
            marlvec.make(env, num_envs=2, backend=backend, flavour="vanilla")
        assert isinstance(caught.value, EnvArgumentError)
        assert isinstance(caught.value.__cause__, TypeError)


@pytest.mark.checklist(5)
@pytest.mark.parametrize("backend", BACKENDS)
def test_arguments_may_differ_per_env_and_a_factory_that_asks_is_told_its_place(backend: str) -> None:
    with marlvec.make(Told, num_envs=4, backend=backend, env_kwargs={"tag": 3}) as envs:
        assert tuple(envs.metadata["told"]) == (4, 3)
        obs, _ = envs.reset(seed=0)
        assert [decode(obs[i, 0]).env for i in range(4)] == [0, 1, 2, 3]
    with marlvec.make(
        CounterEnv, num_envs=3, backend=backend, env_kwargs=[{"env_index": 7}, {}, {"env_index": 9}]
    ) as envs:
        obs, _ = envs.reset(seed=0)
        assert [decode(obs[i, 0]).env for i in range(3)] == [7, 1, 9]
    with marlvec.make(Told, num_envs=3, backend=backend, box=[]) as envs:  # each env has a copy of its own
        envs.reset(seed=0)
    with pytest.raises(ArgumentError, match="expected one dict per env, 3 in all, got 2"):
        marlvec.make(CounterEnv, num_envs=3, backend=backend, env_kwargs=[{}, {}])
    with pytest.raises(ArgumentError, match="expected a dict, or a list of one dict per env"):
        marlvec.make(CounterEnv, num_envs=3, backend=backend, env_kwargs=7)  # type: ignore[arg-type]  # on purpose


@pytest.mark.checklist(6)
@pytest.mark.parametrize("backend", BACKENDS)
def test_wrappers_go_round_every_env_innermost_first(backend: str) -> None:
    plain = rewards_of(backend=backend)
    assert (plain == 1).all()
    assert (rewards_of(backend=backend, wrappers=Double) == 2).all()
    assert (rewards_of(backend=backend, wrappers=lambda env: Double(env)) == 2).all()
    assert (rewards_of(backend=backend, wrappers=partial(Shift, by=10)) == 11).all()
    assert (rewards_of(backend=backend, wrappers=[Shift, Double]) == 4).all()  # (1 + 1) * 2
    assert (rewards_of(backend=backend, wrappers=[Double, Shift]) == 3).all()  # 1 * 2 + 1
    assert (rewards_of(backend=backend, wrappers=(Double, partial(Shift, by=5), Double)) == 14).all()
    with pytest.raises(ArgumentError, match="expected classes or functions from env to env"):
        rewards_of(backend=backend, wrappers=[3])


@pytest.mark.checklist(8)
@pytest.mark.parametrize("backend", BACKENDS)
def test_old_and_new_envs_give_the_same_five_values(backend: str) -> None:
    runs = []
    for old_api in (False, True):
        script = [Script.together(3, 4, "terminated"), Script.together(3, 3, "terminated")]
        with marlvec.make(partial(ScriptedParallelEnv, script, old_api=old_api), num_envs=2, backend=backend) as envs:
            obs, infos = envs.reset(seed=1)
            assert isinstance(infos, dict)
            run = [obs.tobytes()]
            for _ in range(12):
                values = envs.step(np.ones((2, 3), np.int64))
                assert len(values) == 5
                run += [value.tobytes() for value in values[:4]]
            runs.append(run)
    assert runs[0] == runs[1]


@pytest.mark.checklist(9)
@pytest.mark.parametrize("backend", BACKENDS)
def test_agents_have_one_order_everywhere(backend: str) -> None:
    class Shuffled(ScriptedParallelEnv):
        """Gives its dicts in another order in every step."""

        def step(self, actions: dict[str, Any]) -> Any:
            self.turn = getattr(self, "turn", 0) + 1
            return tuple(self._mixed(table) for table in super().step(actions))

        def _mixed(self, table: dict[str, Any]) -> dict[str, Any]:
            names = list(table)
            k = self.turn % max(1, len(names))
            return {name: table[name] for name in names[k:] + names[:k]}

    with (
        marlvec.make(Shuffled, num_envs=4, backend=backend) as envs,
        marlvec.make(ScriptedParallelEnv, num_envs=4, backend="sync") as plain,
    ):
        assert envs.agents == ("agent_0", "agent_1", "agent_2")
        assert [envs.agents.index(name) for name in envs.agents] == [0, 1, 2]
        assert envs.groups == {"agent": (0, 1, 2)}
        envs.reset(seed=0)
        plain.reset(seed=0)
        for _ in range(40):
            for got, expected in zip(
                envs.step(np.ones((4, 3), np.int64))[:4], plain.step(np.ones((4, 3), np.int64))[:4], strict=True
            ):
                assert got.tobytes() == expected.tobytes()


class Intruder(CounterEnv):
    def step(self, actions: dict[str, Any]) -> Any:
        obs, *rest = super().step(actions)
        return {**obs, "nobody": next(iter(obs.values()))}, *rest


@pytest.mark.checklist(9)
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_unknown_agent_is_named(backend: str) -> None:
    with marlvec.make(Intruder, num_envs=2, backend=backend) as envs:
        envs.reset(seed=0)
        with pytest.raises(ContractError, match="env 0.*unknown agent 'nobody'.*'agent_0', 'agent_1', 'agent_2'"):
            envs.step(np.ones((2, 3), np.int64))


@pytest.mark.parametrize("env", [CounterEnv, TurnEnv, SingleEnv, KeyedEnv])
def test_all_four_kinds_of_env_run_whole_episodes(env: Any) -> None:
    with marlvec.make(env, num_envs=3) as envs:
        envs.reset(seed=0)
        ended = 0
        for _ in range(60):
            envs.send(np.zeros((3, envs.agent_num), np.int64))
            ended += int(envs.recv().done.sum())
        assert ended >= 9


def test_wrong_settings_are_refused_before_anything_starts() -> None:
    for settings, words in (
        ({"backend": "cloud"}, "backend must be 'async' or 'sync', got 'cloud'"),
        ({"num_envs": 0}, "at least 1, got 0"),
        ({"num_workers": 3}, "num_workers must be from 1 to num_envs=2, got 3"),
        ({"num_workers": 0}, "num_workers must be from 1 to num_envs=2, got 0"),
        ({"backend": "sync", "num_workers": 2}, "num_workers is for worker processes"),
        ({"autoreset_mode": "never"}, "autoreset_mode must be one of"),
        ({"validate": "maybe"}, "validate must be one of"),
        ({"context": "thread"}, "context must be one of"),
    ):
        with pytest.raises(ArgumentError, match=re.escape(words)):
            marlvec.make(CounterEnv, **{"num_envs": 2, **settings})
    with pytest.raises(ArgumentError, match="expected something that builds envs"):
        marlvec.make(CounterEnv(), num_envs=2)
