"""`SeedStream` makes envs of every kind repeatable; `ClearDeadStepRewards` counts rewards once."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from pettingzoo import AECEnv, ParallelEnv
from pettingzoo.utils import parallel_to_aec

import marlvec
from marlvec.envs import ClearDeadStepRewards, SeedStream
from tests.families.trace import legal_actions


class Forgetful:
    """Draws from a generator of its own, of 31 bits, that goes back to the system's entropy at every reset."""

    def draw(self, seed: int | None) -> np.ndarray[Any, Any]:
        if seed is not None and seed >= 2**31:
            raise OverflowError("seed does not fit a C int")
        self.generator = random.Random(seed)
        self.t = 0
        return self.look()

    def look(self) -> np.ndarray[Any, Any]:
        return np.array([self.generator.random()], np.float32)


class Single(gymnasium.Env[Any, Any], Forgetful):
    observation_space, action_space = Box(0, 1, (1,)), Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self.draw(seed), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return self.look(), self.generator.random(), self.t == 3, False, {}


class Both(ParallelEnv[str, Any, Any], Forgetful):
    metadata = {"name": "both", "is_parallelizable": True, "render_modes": []}
    render_mode = None
    possible_agents = ["a", "b"]

    def observation_space(self, agent: str) -> Any:
        return Single.observation_space

    def action_space(self, agent: str) -> Any:
        return Single.action_space

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.agents = list(self.possible_agents)
        obs = self.draw(seed)
        return dict.fromkeys(self.agents, obs), {agent: {} for agent in self.agents}

    def step(self, actions: Any) -> Any:
        self.t += 1
        said = self.look(), self.generator.random(), self.t == 3, False, {}
        out = [dict.fromkeys(self.agents, value) for value in said]
        if self.t == 3:
            self.agents = []
        return out


class SeededApart(Single):
    """Its reset takes no seed."""

    def reset(self, *, options: dict[str, Any] | None = None) -> Any:  # type: ignore[override]
        self.options = options
        return self.look_again(), {}

    def look_again(self) -> np.ndarray[Any, Any]:
        self.t = 0
        return self.look()


def apart(env: SeededApart, seed: int) -> None:
    env.generator = random.Random(seed)


FORMS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "gymnasium": (Single, lambda: SeedStream(Single())),
    "parallel": (Both, lambda: SeedStream(Both())),
    "aec": (lambda: parallel_to_aec(Both()), lambda: SeedStream(parallel_to_aec(Both()))),
}


def trace(factory: Callable[[], Any], seed: Any) -> list[bytes]:
    out = []
    with marlvec.make(factory, 2, backend="sync") as envs:
        out.append(envs.reset(seed=seed)[0].tobytes())
        for _ in range(20):
            obs, rewards, *_ = envs.step(np.zeros((2, envs.agent_num), np.int64))
            out += [obs.tobytes(), rewards.tobytes()]
    return out


@pytest.mark.parametrize("form", FORMS)
def test_one_seed_determines_all_episodes(form: str) -> None:
    bare, wrapped = FORMS[form]
    small = [3, 4]
    assert trace(bare, small) != trace(bare, small)  # the first episode alone
    assert trace(wrapped, small) == trace(wrapped, small)
    assert trace(wrapped, small)[:3] == trace(bare, small)[:3]  # small seeds are given as they are
    assert trace(wrapped, 2**63) == trace(wrapped, 2**63) != trace(wrapped, 3)
    assert trace(wrapped, None) != trace(wrapped, None)


def test_an_env_without_a_seed_gets_it_by_a_function() -> None:
    def factory() -> Any:
        return SeedStream(SeededApart(), apart)

    assert trace(factory, 3) == trace(factory, 3) != trace(factory, 4)
    env = factory()
    env.reset(seed=1, options={"level": 2})
    assert env.unwrapped.options == {"level": 2}


def test_it_is_a_wrapper_of_the_envs_own_kind() -> None:
    for factory, kind in ((Single, gymnasium.Wrapper), (Both, ParallelEnv), (lambda: parallel_to_aec(Both()), AECEnv)):
        wrapped = SeedStream(factory())
        assert isinstance(wrapped, kind)
        assert isinstance(wrapped, SeedStream)
        assert type(pickle.loads(pickle.dumps(wrapped))) is type(wrapped)
    with pytest.raises(TypeError, match="expected a PettingZoo AEC or Parallel env or a Gymnasium env, got object"):
        SeedStream(object())
    with pytest.raises(TypeError, match="^ClearDeadStepRewards: expected a PettingZoo AEC env, got Both$"):
        ClearDeadStepRewards(Both())


def test_shimmys_envs_pay_once() -> None:
    shimmy = pytest.importorskip("shimmy.openspiel_compatibility", reason="shimmy is not installed")
    pytest.importorskip("pyspiel", reason="OpenSpiel is not installed")

    def bare() -> Any:
        return shimmy.OpenSpielCompatibilityV0(game_name="tic_tac_toe")

    def won(factory: Callable[[], Any]) -> Any:
        rng, total = np.random.default_rng(1), np.zeros((4, 2))
        with marlvec.make(factory, 4, backend="sync", autoreset_mode="disabled") as envs:
            _, infos = envs.reset(seed=0)
            while infos["alive"].all(axis=1).any():
                ids = np.flatnonzero(infos["alive"].all(axis=1))
                if len(ids) < 4:
                    break
                _, rewards, *_, infos = envs.step(legal_actions(envs, infos, rng)[0])
                total += rewards
        return total

    twice, once = won(bare), won(lambda: ClearDeadStepRewards(SeedStream(bare())))
    assert np.abs(twice[:, 1]).max() == 2
    assert (twice[:, 0] == once[:, 0]).all()
    assert (once[:, 0] == -once[:, 1]).all()
    assert once.any()
