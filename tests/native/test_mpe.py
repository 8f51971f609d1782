"""Every scenario is mpe2's, bit for bit: observations, rewards, flags, infos and states, over whole episodes."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba", reason="the extra `native` is not installed")

from marlvec import VectorEnv
from tests.native.support import ARGUMENTS, CASES, factories, native, words
from tests.vector.support.reference import MODES, record, replay

SHORT = 7


@pytest.mark.slow("compiles, and plays whole games")
@pytest.mark.parametrize("case", CASES, ids=words)
def test_whole_episodes_are_the_reference(case: tuple[str, dict[str, Any]]) -> None:
    """Three episodes each, with resets of some in the middle, seeded and not."""
    name, kwargs = case
    number = CASES.index(case)
    mode = MODES[number % 3]
    calls = record(factories(name, 2, max_cycles=SHORT, **kwargs), mode, seed=number, interrupt=0.1)
    with native(name, 2, max_cycles=SHORT, autoreset_mode=mode, **kwargs) as envs:
        replay(envs, calls)


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES, ids=words)
def test_twenty_seeds_of_full_length_are_the_reference(case: tuple[str, dict[str, Any]]) -> None:
    name, kwargs = case
    for seed in range(20):
        mode = MODES[seed % 3]
        calls = record(factories(name, 3, **kwargs), mode, seed=seed, interrupt=0.02)
        with native(name, 3, autoreset_mode=mode, **kwargs) as envs:
            replay(envs, calls)


COUNTS = st.integers(1, 4)
SOME = st.one_of(st.none(), st.integers(1, 5))
NEAR = {"num_agent_neighbors": SOME, "num_landmark_neighbors": SOME}
HYPOTHETICAL = {
    "simple_spread": st.fixed_dictionaries(
        {"N": COUNTS, "local_ratio": st.floats(0, 1), "terminate_on_success": st.booleans(), **NEAR}
    ),
    "simple_tag": st.fixed_dictionaries(
        {"num_good": COUNTS, "num_adversaries": COUNTS, "num_obstacles": COUNTS, **NEAR}
    ),
    "simple_adversary": st.fixed_dictionaries({"N": COUNTS, **NEAR}),
    "simple_line": st.fixed_dictionaries({"N": COUNTS, "terminate_on_success": st.booleans()}),
    "simple_formation": st.fixed_dictionaries({"N": COUNTS, "terminate_on_success": st.booleans()}),
    "collect_treasure": st.fixed_dictionaries(
        {"num_collectors": COUNTS, "num_deposits": COUNTS, "num_treasures": COUNTS}
    ),
    "simple_reference": st.fixed_dictionaries({"local_ratio": st.floats(0, 1)}),
    "simple_world_comm": st.fixed_dictionaries(
        {
            "num_good": COUNTS,
            "num_adversaries": COUNTS,
            "num_obstacles": COUNTS,
            "num_food": COUNTS,
            "num_forests": COUNTS,
        }
    ),
}


@pytest.mark.slow("compiles, and plays whole games")
@settings(max_examples=25)
@given(st.data(), st.sampled_from(sorted(ARGUMENTS)), st.integers(0, 2**64 - 1), st.sampled_from(MODES))
def test_any_arguments_and_seeds_are_the_reference(data: Any, name: str, seed: int, mode: str) -> None:
    kwargs = data.draw(HYPOTHETICAL.get(name, st.just({})))
    options = st.fixed_dictionaries({"max_cycles": st.integers(1, 7), "continuous_actions": st.booleans()})
    kwargs = {**kwargs, **data.draw(options)}
    calls = record(factories(name, 2, **kwargs), mode, seed=seed, interrupt=0.2)
    with native(name, 2, autoreset_mode=mode, **kwargs) as envs:
        replay(envs, calls)


@pytest.mark.slow("compiles every scenario")
@pytest.mark.parametrize("continuous", [False, True], ids=["discrete", "continuous"])
@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_no_adapter_stands_between(name: str, continuous: bool) -> None:
    """The same without any of marlvec's adapters: mpe2's own parallel env, stepped by hand."""
    rng = np.random.default_rng(5)
    options = {"continuous_actions": continuous, "max_cycles": SHORT}
    with native(name, 1, autoreset_mode="disabled", state=True, **options) as envs:
        env = importlib.import_module(f"mpe2.{envs.spec.name}").parallel_env(**options)
        for seed in (7, None, 2**63, None):
            obs, infos = envs.reset(seed=[seed])
            told, _ = env.reset(seed=seed)
            check_views(envs, obs, infos, told, env)
            while env.agents:
                actions = {agent: draw(env.action_space(agent), rng) for agent in env.agents}
                rows = {
                    group: np.array([[actions[envs.agents[a]] for a in members]])
                    for group, members in envs.groups.items()
                }
                obs, rewards, terminated, truncated, infos = envs.step(
                    rows if envs.grouped else next(iter(rows.values()))
                )
                told, paid, terminations, truncations, _ = env.step(actions)
                check_views(envs, obs, infos, told, env)
                assert rewards[0].tobytes() == np.array([paid[agent] for agent in envs.agents], float).tobytes()
                assert terminated[0].tolist() == [terminations[agent] for agent in envs.agents]
                assert truncated[0].tolist() == [truncations[agent] for agent in envs.agents]
        env.close()


def draw(space: Any, rng: np.random.Generator) -> Any:
    return rng.random(space.shape, np.float32) if isinstance(space, Box) else int(rng.integers(space.n))


def check_views(envs: VectorEnv, obs: Any, infos: dict[str, Any], told: dict[str, Any], env: Any) -> None:
    """Hold all agents' observations, and the state, against mpe2's."""
    parts = obs if envs.grouped else {next(iter(envs.groups)): obs}
    for group, members in envs.groups.items():
        for j, a in enumerate(members):
            assert parts[group][0, j].tobytes() == told[envs.agents[a]].tobytes(), envs.agents[a]
    assert infos["state"][0].tobytes() == env.state().tobytes()


@pytest.mark.slow("compiles kernels")
def test_episodes_that_reach_their_goal_are_terminated() -> None:
    """Put by hand where the goal is: chance does not get there within a test."""
    kwargs = {"N": 2, "terminate_on_success": True}
    with native("simple_spread", 2, **kwargs) as envs:
        envs.reset(seed=0)

        def cover(world: Any) -> None:
            world.pos[:2] = world.pos[2:]

        envs.exec_func(cover, [1])
        _, _, terminated, truncated, _ = envs.step(np.zeros((2, 2), np.int64))
        assert terminated.tolist() == [[False, False], [True, True]]
        assert not truncated.any()


@pytest.mark.slow("compiles every scenario")
@pytest.mark.parametrize("case", CASES, ids=words)
def test_a_reference_built_from_a_world_goes_on_as_the_world_does(case: tuple[str, dict[str, Any]]) -> None:
    """Over the end of the episode, too: goals, random stream and time come along."""
    name, kwargs = case
    with native(name, 2, max_cycles=SHORT, state=True, **kwargs) as envs:
        envs.reset(seed=11)
        for t in range(4):
            envs.step(envs.random_action(seed=t))
        (env,) = envs.exec_func(lambda world: world.reference(), [1])
        assert env.state().tobytes() == envs.state()[1].tobytes()
        while env.agents:
            actions = envs.random_action()
            parts = actions if envs.grouped else {next(iter(envs.groups)): actions}
            own = {
                envs.agents[a]: parts[group][1, j]
                for group, members in envs.groups.items()
                for j, a in enumerate(members)
            }
            *_, infos = envs.step(actions)
            env.step(own if kwargs["continuous_actions"] else {agent: int(action) for agent, action in own.items()})
            assert env.state().tobytes() == infos["state" if env.agents else "final_state"][1].tobytes()
        env.reset()
        assert env.state().tobytes() == infos["state"][1].tobytes()
