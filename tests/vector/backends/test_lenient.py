"""Parallel envs that leave things out, with ``lenient=True``: what a plain loop gives, on every backend."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

import marlvec
from marlvec.envs import adapt
from marlvec.errors import ArgumentError, ContractError, EnvFault
from marlvec.interop.pettingzoo import ParallelView
from marlvec.testing import CounterEnv
from tests.faults.harness.spoilt import FORMS, Spoil
from tests.vector.support.incomplete_env import INCOMPLETE, IncompleteEnv
from tests.vector.support.kinds import Factories
from tests.vector.support.reference import MODES, record, replay

N = 3


def factories(form: str) -> Factories:
    return [partial(IncompleteEnv, env_index=i, **INCOMPLETE[form]) for i in range(N)]


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick="each")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", INCOMPLETE)
def test_sync_is_the_plain_loop(form: str, mode: str) -> None:
    with marlvec.make(factories(form), backend="sync", autoreset_mode=mode, lenient=True) as envs:
        replay(envs, record(factories(form), mode, episodes=5))


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=2)
@pytest.mark.parametrize("backend", ["thread", "async"])
@pytest.mark.parametrize("form", INCOMPLETE)
def test_threads_and_processes_are_the_plain_loop(form: str, backend: str) -> None:
    mode = MODES[(len(form) + len(backend)) % 3]
    with marlvec.make(factories(form), backend=backend, num_workers=2, autoreset_mode=mode, lenient=True) as envs:
        replay(envs, record(factories(form), mode, episodes=5))


@pytest.mark.parametrize("form", ["gone", "observed"])
def test_a_last_observation_that_the_env_did_not_give_is_marked(form: str) -> None:
    plain = IncompleteEnv(**INCOMPLETE[form])
    with marlvec.make(partial(IncompleteEnv, **INCOMPLETE[form]), backend="sync", lenient=True) as envs:
        envs.reset(seed=[0])
        plain.reset(seed=0)
        missing = 0
        for _ in range(30):
            before = list(plain.agents)
            actions = envs.random_action()
            obs, *_ = plain.step({name: actions[0, a] for a, name in enumerate(envs.agents) if name in before})
            infos = envs.step(actions)[-1]
            gone = [name in before and name not in plain.agents and name not in obs for name in envs.agents]
            got = infos.get("final_observation_missing", np.zeros((1, 3), bool))
            assert got.tolist() == [gone]
            missing += sum(gone)
            if not plain.agents:
                plain.reset()
    assert (missing > 0) is (form == "gone")


@pytest.mark.parametrize("form", INCOMPLETE)
def test_by_default_each_is_refused_and_told_of_lenient(form: str) -> None:
    with (
        pytest.raises((ContractError, EnvFault), match="lenient=True"),
        marlvec.make(factories(form), backend="sync") as envs,
    ):
        envs.reset(seed=0)
        for _ in range(9):
            envs.step(envs.random_action())


def test_the_view_plays_it_too() -> None:
    plain = IncompleteEnv(**INCOMPLETE["all"])
    plain.reset()
    view = ParallelView.make(partial(IncompleteEnv, **INCOMPLETE["all"]), lenient=True)
    for seed in (3, None, None):
        obs, _ = view.reset(seed=seed)
        assert obs.keys() == plain.reset(seed=seed)[0].keys()
        while view.agents:
            assert view.agents == plain.agents
            actions = {agent: int(obs[agent]["action_mask"].argmax()) for agent in view.agents}
            obs = view.step(actions)[0]
            plain.step(actions)
        assert plain.agents == []
    view.close()


def test_an_agent_that_left_does_not_come_back() -> None:
    class Returning(CounterEnv):
        def step(self, actions: dict[str, Any]) -> Any:
            self.agents = self.possible_agents[:]
            result = super().step({agent: actions.get(agent, 0) for agent in self.agents})
            if self.world.t == 2:
                self.agents = self.agents[1:]
                for table in result:
                    del table["agent_0"]
            return result

    envs = marlvec.make(Returning, backend="sync", lenient=True)
    envs.reset(seed=0)
    envs.step(envs.random_action())
    _, _, terminated, truncated, infos = envs.step(envs.random_action())
    assert truncated.tolist() == [[True, False, False]]
    assert not terminated.any()
    assert infos["alive"].tolist() == [[False, True, True]]
    with pytest.raises(EnvFault, match=r"agent_0.*has ended and cannot come back"):
        envs.step(envs.random_action())
    envs.close()


class Looks:
    """A Parallel env by its looks alone."""

    def observation_space(self, agent: str) -> Box:
        return Box(0, 1, (2,))

    def action_space(self, agent: str) -> Discrete:
        return Discrete(2)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = ["left", "right"]
        return {agent: np.zeros(2, np.float32) for agent in self.agents}, {}

    def step(self, actions: dict[str, Any]) -> Any:
        self.agents = []
        return {}, {}, {}, {}, {}


def test_an_env_that_only_looks_like_one() -> None:
    assert adapt(Looks(), lenient=True).agents == ("left", "right")
    with marlvec.make(Looks, 2, backend="sync", lenient=True) as envs:
        envs.reset(seed=0)
        assert envs.step(envs.random_action())[3].all()
    with pytest.raises(ContractError, match=r"Looks.possible_agents: missing.*lenient=True"):
        adapt(Looks())


ODD = [
    *(Spoil("reward", value, "2.0") for value in (np.full(1, 2.0), np.full((1, 1), 2, np.int8), np.array(2))),
    *(Spoil("terminated", value, "0.0") for value in (0, np.int8(0), np.zeros(1, bool), np.array(0))),
    *(Spoil("truncated", value, "1.0") for value in (1, np.uint8(1), np.ones((1, 1), int), np.array(True))),
]


@pytest.mark.parametrize("form", FORMS)
def test_arrays_of_one_element_and_ints_are_taken_for_rewards_and_flags(form: str) -> None:
    with marlvec.make(partial(FORMS[form], ODD, True), backend="sync", lenient=True) as envs:
        whose = envs.agents.index({"single": "agent_0", "turns": "ann"}.get(form, "bob"))
        for k, spoil in enumerate(ODD):
            envs.reset(seed=0, options={"spoil": k})
            envs.step(envs.random_action())
            _, rewards, terminated, truncated, _ = envs.step(envs.random_action())
            got = {"reward": rewards, "terminated": terminated, "truncated": truncated}[spoil.place]
            assert got[0, whose] == float(spoil.words)


def test_an_env_behind_an_adapter_takes_no_lenient() -> None:
    with pytest.raises(ArgumentError, match="has an adapter already"):
        adapt(adapt(CounterEnv()), lenient=True)
    with pytest.raises(ArgumentError, match="lenient=True"):
        marlvec.make("simple_spread", backend="native", lenient=True)
