"""Every defect that was shown in the vectorizers before this one has a test that would catch it here.

They were found by running OpenRL, Gymnasium, PettingZoo and SuperSuit. `DEFECTS` names the test for each; the ones that
nothing else covers are below.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from pettingzoo import ParallelEnv

from marlvec import infos_to_list
from marlvec.errors import ArgumentError, ContractError
from marlvec.testing import check_env
from marlvec.testing.scripted import CounterEnv, ScriptedParallelEnv, draw
from tests.interop.envs import parallel_seed_test
from tests.vector.support.kinds import BACKENDS, vectorize

DEFECTS = {
    # OpenRL, sync and async
    "Discrete observations fail, or have another shape with shared memory": (
        "tests.properties.test_programs:test_in_this_process"
    ),
    # OpenRL, async
    "agents that end in a mixture of ways never reset": (
        "shards.test_done_on:test_an_episode_is_over_when_every_agent_has_ended_in_any_mixture"
    ),
    "a reset that gives the observation alone fails": (
        "tests.faults.test_returns:test_four_values_and_observations_alone_are_the_older_api"
    ),
    "the final observation is overwritten by an env that reuses its buffer": "shards.test_autoreset:test_same_step",
    "a timeout, and the next fetch brings a stale reply": (
        "api.test_state_machine:test_a_fetch_that_times_out_loses_nothing_and_brings_nothing_stale"
    ),
    "a short batch of actions is taken": "validation.test_actions:test_wrong_actions_raise_before_anything_is_sent",
    "get_attr calls what it finds": "api.test_controls:test_names_are_found_on_the_layer_that_owns_them",
    "exec_func takes no lambda": "api.test_controls:test_functions_of_any_kind_run_where_the_env_lives",
    "a numpy integer is no seed": "api.test_seeding:test_an_int_is_spread_and_a_list_is_taken_as_it_is",
    "seed() does nothing": "faults.test_known_defects:test_there_is_one_way_to_seed_and_it_works",
    "an exception with two arguments becomes a TypeError": (
        "faults.test_faults:test_an_exception_arrives_whatever_it_is"
    ),
    "one error of an env, and nothing works any more": (
        "faults.test_faults:test_an_env_that_raised_is_reset_and_its_neighbours_never_notice"
    ),
    "a worker is killed, and close() raises": (
        "processes.test_deaths:test_a_worker_that_dies_in_a_step_is_reported_at_once"
    ),
    # OpenRL, sync
    "the env's name is None": "faults.test_known_defects:test_envs_have_a_name",
    # Gymnasium, vector envs
    "a step after a timeout returns the rewards of the step before": (
        "api.test_state_machine:test_a_fetch_that_times_out_loses_nothing_and_brings_nothing_stale"
    ),
    "an explicit reset leaves an autoreset pending without shared memory": (
        "tests.properties.test_programs:test_in_this_process"
    ),
    "a worker's death is an EOFError without env or exit code": (
        "processes.test_deaths:test_a_worker_killed_while_idle_is_noticed_by_the_next_call"
    ),
    "the caller's options are altered": "tests.properties.test_programs:test_in_this_process",
    "one bad get_attr, and nothing works any more": "api.test_controls:test_what_fails_is_told_and_costs_nothing",
    # PettingZoo
    "the seed test passes an env that does not keep to its seed": (
        "faults.test_known_defects:test_an_env_that_strays_after_its_first_step_is_found_out"
    ),
    # SuperSuit
    "infos of all envs are one dict": "faults.test_known_defects:test_infos_of_envs_share_nothing",
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_the_test_is_there(defect: str) -> None:
    module, _, name = DEFECTS[defect].partition(":")
    test = getattr(import_module(module if module.startswith("tests.") else f"tests.vector.{module}"), name)
    assert inspect.isfunction(test)
    assert not [mark for mark in getattr(test, "pytestmark", ()) if mark.name in ("skip", "skipif", "xfail", "soak")]


@pytest.mark.parametrize("backend", BACKENDS)
def test_there_is_one_way_to_seed_and_it_works(backend: str) -> None:
    with vectorize(backend, [partial(CounterEnv, 3, agent_num=2, env_index=i) for i in range(2)]) as envs:
        assert not hasattr(envs, "seed")
        with pytest.raises(ArgumentError, match=r"use reset\(seed="):
            envs.call("seed", 3)
        drawn = [[draw(row[0]) for row in envs.reset(seed=seed)[0]] for seed in (3, 3, 4)]
        assert drawn[0] == drawn[1] != drawn[2]


class Plain(gymnasium.Env[Any, Any]):
    """Says nothing of its name."""

    observation_space = gymnasium.spaces.Discrete(2)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return 0, {}

    def step(self, action: Any) -> Any:
        return 1, 0.0, False, False, {}


@pytest.mark.parametrize("backend", BACKENDS)
def test_envs_have_a_name(backend: str) -> None:
    names = {
        "scripted_parallel": partial(ScriptedParallelEnv, agent_num=2),  # from its metadata
        "CartPole-v1": partial(gymnasium.make, "CartPole-v1"),  # from its spec
        "Plain": Plain,  # from its class
    }
    for name, factory in names.items():
        with vectorize(backend, [factory, factory]) as envs:
            assert envs.spec.name == name
            assert name in repr(envs)


def containers(value: Any) -> Iterator[Any]:
    """Everything that can be changed in a tree of infos, itself included."""
    if isinstance(value, (dict, list, np.ndarray)):
        yield value
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from containers(part)


class Chatty(CounterEnv):
    """Has one and the same info for everyone, all the time."""

    said = {"marks": np.arange(3), "nested": {"list": [1, [2]]}}

    def _infos(self, agents: list[str]) -> dict[str, Any]:
        return {**dict.fromkeys(agents, self.said), "common": self.said}


@pytest.mark.parametrize("backend", BACKENDS)
def test_infos_of_envs_share_nothing(backend: str) -> None:
    """What one does to one env's infos is not seen in another's, nor in those of another step."""
    with vectorize(backend, [partial(Chatty, 3, agent_num=2, env_index=i) for i in range(3)]) as envs:
        results = [envs.reset(seed=0)[1]] + [envs.step(np.ones((3, 2), np.int64))[4] for _ in range(7)]
        lists = [infos_to_list(infos, envs.agents, 3) for infos in results]
        lists += [infos_to_list(infos["final_info"], envs.agents, 3) for infos in results if "final_info" in infos]
        rows = [row for rows in lists for row in rows if row]
        assert len(rows) == 8 * 3 + 2 * 3
        owners: dict[int, int] = {}
        for k, row in enumerate(rows):
            for part in containers(row):
                assert owners.setdefault(id(part), k) == k
        for part in containers(rows[0]):
            part.clear() if isinstance(part, dict) else part.__setitem__(0, 99)
        assert not rows[0]
        for row in rows[1:]:
            assert row["agent_1"]["nested"] == {"list": [1, [2]]}
            assert row["__common__"]["common"]["marks"].tolist() == [0, 1, 2]


class StrayingEnv(ParallelEnv):  # type: ignore[misc]  # pettingzoo has no type information
    """Keeps to its seed up to some step of some episode, and not a bit longer.

    Args:
        episode: In which it strays, counted from 0; None: in none.
        t: In which step of it, counted from 1.
    """

    metadata = {"name": "straying", "render_modes": []}

    def __init__(self, episode: int | None, t: int) -> None:
        self.possible_agents = ["red", "blue"]
        self.agents: list[str] = []
        self.render_mode = None
        self._spaces = {who: (Box(0, 1, (2,), np.float64), Discrete(3)) for who in self.possible_agents}
        self._strays = episode, t
        self._rng = np.random.default_rng()
        self._episode, self._t = -1, 0

    def observation_space(self, agent: str) -> Any:
        return self._spaces[agent][0]

    def action_space(self, agent: str) -> Any:
        return self._spaces[agent][1]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if seed is not None:
            self._rng, self._episode = np.random.default_rng(seed), -1
        self._episode, self._t = self._episode + 1, 0
        self.agents = self.possible_agents[:]
        return self._look(), {who: {} for who in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        self._t += 1
        obs, over = self._look(), self._t == 4
        flags = dict.fromkeys(self.agents, False), dict.fromkeys(self.agents, over)
        rewards, infos = dict.fromkeys(self.agents, 0.0), {who: {} for who in self.agents}
        self.agents = [] if over else self.agents
        return obs, rewards, *flags, infos

    def _look(self) -> dict[str, Any]:
        strays = (self._episode, self._t) == self._strays
        rng = np.random.default_rng() if strays else self._rng
        return {who: rng.random(2) for who in self.agents}


@pytest.mark.fault("C18")
@pytest.mark.parametrize(("episode", "t"), [(0, 2), (0, 4), (1, 0), (1, 3), (2, 4)])
def test_an_env_that_strays_after_its_first_step_is_found_out(episode: int, t: int) -> None:
    """PettingZoo's test ends after one step: it looks at the keys of the flags, and names are true."""
    parallel_seed_test(partial(StrayingEnv, episode, t))
    with pytest.raises(ContractError, match=rf"episode {episode + 1}.*expected the same for the same seed"):
        check_env(partial(StrayingEnv, episode, t))


@pytest.mark.fault("C18")
def test_an_env_that_keeps_to_its_seed_passes() -> None:
    check_env(partial(StrayingEnv, None, 0))
