"""Pursuit is PettingZoo's, bit for bit: observations, rewards, flags and states, over whole episodes."""

from __future__ import annotations

from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba", reason="the extra `native` is not installed")
pytest.importorskip("scipy", reason="the extra `sisl` is not installed")

import marlvec
from marlvec.envs.builtin_ids import pettingzoo_env
from marlvec.errors import ArgumentError, ContractError, EnvArgumentError
from marlvec.native.grids.pursuit import MOST, Pursuit, pairwise_sum
from marlvec.native.kernels import seed_envs
from marlvec.testing import check_vector_env
from tests.native.support import Table, factories, maker, native, words
from tests.vector.support.reference import MODES, record, refused, replay

SMALL = {"x_size": 6, "y_size": 5, "n_pursuers": 3, "n_evaders": 2, "obs_range": 5}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("pursuit", kwargs)
    for kwargs in [  # in each of them there is a cell for every agent, wherever the others are
        {"max_cycles": 60},
        {"max_cycles": 40, "shared_reward": False, "constraint_window": 0.7, "n_evaders": 8},
        {**SMALL, "max_cycles": 30, "n_pursuers": 5},
        {**SMALL, "surround": False, "n_catch": 1},  # ends before its time
        {**SMALL, "surround": False, "shared_reward": False, "obs_range": 4, "max_cycles": 40},
        {
            **SMALL,
            "x_size": 3,
            "y_size": 4,
            "n_pursuers": 2,
            "n_evaders": 1,
            "obs_range": 9,
            "shared_reward": 0.3,
            "max_cycles": 99,
        },
        {**SMALL, "freeze_evaders": True, "tag_reward": 1, "catch_reward": -3, "urgency_reward": 0, "max_cycles": 40},
        {"x_size": 2, "y_size": 9, "n_pursuers": 1, "n_evaders": 3, "obs_range": 1, "max_cycles": 50},
        {**SMALL, "x_size": 9, "y_size": 9, "n_pursuers": 9, "obs_range": 2, "max_cycles": 9},
        {**SMALL, "x_size": 1, "y_size": 4, "n_pursuers": 2, "n_evaders": 1, "n_catch": 0, "surround": False},
    ]
]
IN_ALL = 8_000  # env steps


def play(case: tuple[str, dict[str, Any]], env_steps: int, first_seed: int) -> None:
    """Play runs of whole episodes against the plain loop, in one mode after another, with resets in the middle."""
    name, kwargs = case
    steps = 0
    for seed in count(first_seed):
        mode = MODES[seed % 3]
        calls = record(factories(name, 3, **kwargs), mode, seed=seed, interrupt=0.02)
        with native(name, 3, autoreset_mode=mode, **kwargs) as envs:
            replay(envs, calls)
        steps += 3 * sum(call.kind == "step" for call in calls)
        if steps >= env_steps and seed >= first_seed + len(MODES) - 1:
            return


@pytest.mark.slow("compiles, and plays whole episodes")
@pytest.mark.parametrize("case", CASES, ids=words)
def test_whole_episodes_are_the_reference(case: tuple[str, dict[str, Any]]) -> None:
    play(case, IN_ALL // len(CASES), CASES.index(case))


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES, ids=words)
def test_a_million_steps_are_the_reference(case: tuple[str, dict[str, Any]]) -> None:
    play(case, 1_000_000 // len(CASES), 1_000)


@st.composite
def arguments(draw: Any) -> dict[str, Any]:
    """Any arguments with which the reference finds a cell for each agent, wherever its window is."""
    x_size, y_size = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    window = draw(st.sampled_from([1.0, 1, 0.9, 0.75, 0.5]))
    columns, rows = int(x_size * window), int(y_size * window)
    free = columns * rows - sum(map(sum, wall(x_size, y_size)))
    most = max(0, free - 1) // 5 + 1 if min(free, columns, rows) > 0 else 0
    if not most:
        x_size, y_size, window, most = 8, 8, 1.0, 8
    numbers = st.one_of(st.integers(-5, 5), st.floats(-1e9, 1e9), st.sampled_from([0.0, -0.0, 1e300, 5e-324]))
    return {
        "x_size": x_size,
        "y_size": y_size,
        "constraint_window": window,
        "n_pursuers": draw(st.integers(1, min(most, 12))),
        "n_evaders": draw(st.integers(1, min(most, 12))),
        "obs_range": draw(st.integers(1, 13)),
        "n_catch": draw(st.integers(-1, 4)),
        "max_cycles": draw(st.integers(1, 12)),
        "shared_reward": draw(st.one_of(st.booleans(), st.floats(-1, 2))),
        "freeze_evaders": draw(st.booleans()),
        "surround": draw(st.booleans()),
        "tag_reward": draw(numbers),
        "catch_reward": draw(numbers),
        "urgency_reward": draw(numbers),
    }


def wall(x_size: int, y_size: int) -> Any:
    from pettingzoo.sisl.pursuit.utils.two_d_maps import rectangle_map

    return (rectangle_map(x_size, y_size) == -1).tolist()


@pytest.mark.slow("compiles, and plays whole episodes")
@settings(max_examples=40)
@given(arguments(), st.integers(0, 2**64 - 1), st.sampled_from(MODES))
def test_any_arguments_and_seeds_are_the_reference(kwargs: dict[str, Any], seed: int, mode: str) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        calls = record(factories("pursuit", 2, **kwargs), mode, seed=seed, interrupt=0.2)
    with native("pursuit", 2, autoreset_mode=mode, **kwargs) as envs:
        replay(envs, calls)


@pytest.mark.slow("compiles kernels")
def test_no_adapter_stands_between() -> None:
    """The same without any of marlvec's adapters: PettingZoo's own parallel env, stepped by hand."""
    kwargs = {**SMALL, "surround": False, "max_cycles": 20}
    rng = np.random.default_rng(3)
    env = pettingzoo_env("sisl/pursuit_v5", "parallel", **kwargs)
    with native("pursuit", 1, autoreset_mode="disabled", state=True, **kwargs) as envs:
        for seed in (7, None, 2**63, None, None):
            obs, infos = envs.reset(seed=[seed])
            seen, _ = env.reset(seed=seed)
            while True:
                assert obs[0].tobytes() == np.stack([seen[agent] for agent in envs.agents]).tobytes()
                assert infos["state"][0].tobytes() == env.state().tobytes()
                if not env.agents:
                    break
                actions = rng.integers(0, 5, (1, len(envs.agents)))
                obs, rewards, terminated, truncated, infos = envs.step(actions)
                given = dict(zip(envs.agents, actions[0].tolist(), strict=True))
                seen, expected, ended, cut, _ = env.step(given)
                assert rewards[0].tobytes() == np.array([expected[agent] for agent in envs.agents], float).tobytes()
                assert terminated[0].tolist() == [ended[agent] for agent in envs.agents]
                assert truncated[0].tolist() == [cut[agent] for agent in envs.agents]
    env.close()


@pytest.mark.slow("compiles kernels")
@pytest.mark.parametrize("surround", [True, False])
def test_episodes_end_when_all_evaders_are_caught(surround: bool) -> None:
    """Put there by hand: pursuers beside the only evader, in a corner, or on it."""
    kwargs = {**SMALL, "n_evaders": 1, "freeze_evaders": True, "surround": surround}
    with native("pursuit", 2, autoreset_mode="disabled", **kwargs) as envs:
        envs.reset(seed=0)

        def corner(env: Any) -> None:
            env.evaders[:] = 0
            env.pursuers[:] = (1, 6, 29) if surround else (0, 0, 29)

        envs.exec_func(corner, [1])
        _, rewards, terminated, truncated, _ = envs.step(np.full((2, 3), 4))
        assert terminated.tolist() == [[False] * 3, [True] * 3]
        assert not truncated.any()
        assert rewards[1, 0] > 3 > rewards[0, 0]
        assert envs.get_attr("gone", [1])[0].tolist() == [True]


@pytest.mark.slow("compiles kernels, and draws")
@pytest.mark.parametrize("case", CASES, ids=words)
def test_a_reference_built_from_an_env_goes_on_as_the_env_does(case: tuple[str, dict[str, Any]]) -> None:
    """Over the end of the episode, too: the random stream, time, and who is gone come along."""
    name, kwargs = case
    with native(name, 2, state=True, **{**kwargs, "max_cycles": 25}) as envs:
        envs.reset(seed=11)
        for t in range(4):
            envs.step(envs.random_action(seed=t))
        (env,) = envs.exec_func(lambda env: env.reference(), [1])
        assert env.state().tobytes() == envs.state()[1].tobytes()
        while env.agents:
            actions = envs.random_action()
            *_, infos = envs.step(actions)
            env.step(dict(zip(envs.agents, actions[1].tolist(), strict=True)))
            assert env.state().tobytes() == infos["state" if env.agents else "final_state"][1].tobytes()
        env.reset()
        assert env.state().tobytes() == infos["state"][1].tobytes()


@pytest.mark.filterwarnings("ignore:The system font 'Comic Sans MS' couldn't be found:UserWarning")  # of pygame
@pytest.mark.slow("compiles kernels, and draws")
def test_a_frame_is_the_one_that_the_reference_draws() -> None:
    make = partial(marlvec.make, "pursuit", 2, render_mode="rgb_array", surround=False, n_catch=1)
    with make(backend="native") as a, make(backend="sync") as b:
        for envs in (a, b):
            envs.reset(seed=5)
            for t in range(6):
                envs.step(envs.random_action(seed=t))
        assert any(gone.any() for gone in a.get_attr("gone"))
        for first, second in zip(a.render(), b.render(), strict=True):
            assert first.tobytes() == second.tobytes()


@pytest.mark.slow("compiles kernels")
@pytest.mark.parametrize("workers", [1, 3])
def test_it_keeps_the_contract(workers: int) -> None:
    assert len(check_vector_env(maker("pursuit", 5, num_workers=workers, max_cycles=9, **SMALL))) == 12


@pytest.mark.parametrize("kwargs", [kwargs for _, kwargs in CASES[:2]], ids=str)
def test_an_env_is_described_as_the_reference_is(kwargs: dict[str, Any]) -> None:
    from marlvec.envs import adapt

    reference = adapt(pettingzoo_env("sisl/pursuit_v5", "parallel", **kwargs)).spec()
    spec = Pursuit(1, **kwargs).spec()
    assert spec.difference(reference) is None
    assert (spec.name, spec.metadata) == (reference.name, reference.metadata)


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("does not support evader_controller=.*backend='async'", {"evader_controller": object()}),
    ("does not support pursuer_controller=.*backend='async'", {"pursuer_controller": object()}),
    ("does not support n_pursuers=129.*backend='async'", {"n_pursuers": 129}),
    ("x_size: expected an int of at least 1, got 0", {"x_size": 0}),
    ("y_size: expected an int of at least 1, got 4.0", {"y_size": 4.0}),
    ("n_evaders: expected an int of at least 1, got 0", {"n_evaders": 0}),
    ("max_cycles: expected an int of at least 1, got 0", {"max_cycles": 0}),
    ("obs_range: expected an int of at least 1, got None", {"obs_range": None}),
    ("n_catch: expected an int, got True", {"n_catch": True}),
    ("constraint_window: expected a part .*0.0625 to 1, got 0.05", {"constraint_window": 0.05}),
    ("constraint_window: expected a part .* got 1.5", {"constraint_window": 1.5}),
    ("tag_reward: expected a finite int or float, got inf", {"tag_reward": float("inf")}),
    ("catch_reward: expected a finite int or float, got None", {"catch_reward": None}),
    (r"urgency_reward: expected at most 2\*\*40", {"urgency_reward": 2**60}),
    ("shared_reward: expected a finite int or float, got 'no'", {"shared_reward": "no"}),
]


@pytest.mark.parametrize(("text", "kwargs"), REFUSED, ids=[next(iter(kwargs)) for _, kwargs in REFUSED])
def test_unsupported_arguments_are_refused_by_name(text: str, kwargs: dict[str, Any]) -> None:
    refused(ArgumentError, f"pursuit_v5.*{text}", Pursuit, 2, **kwargs)


def test_arguments_that_there_are_not_are_refused() -> None:
    refused(EnvArgumentError, "train_pursuit", native, "pursuit", 2, train_pursuit=True)


@pytest.mark.slow("compiles kernels")
def test_auto_takes_it_where_it_can() -> None:
    with marlvec.make("pursuit", 2, backend="auto", **SMALL) as envs:
        assert envs.backend == "native"
    from pettingzoo.sisl.pursuit.utils.controllers import SingleActionPolicy

    still = {**SMALL, "evader_controller": SingleActionPolicy(4)}
    with marlvec.make("pursuit", 2, backend="auto", num_workers=1, **still) as envs:
        assert envs.backend == "async"


@pytest.mark.slow("compiles kernels")
def test_agents_that_do_not_fit_are_an_error_and_no_endless_loop() -> None:
    """One of four cells is wall; of the other three, no three agents have cells that are not beside each other."""
    table = Table(Pursuit(3, x_size=2, y_size=2, n_pursuers=1, n_evaders=3))
    with pytest.raises(ContractError, match="env 1: expected a free cell for each agent, got none"):
        table.reset(np.array([1, 2]), [0, 1])


@pytest.mark.slow("compiles kernels")
@pytest.mark.parametrize("num_pursuers", [7, 8, 9, 16, 23, 128])
def test_means_of_many_rewards_are_numpys(num_pursuers: int) -> None:
    rng = np.random.default_rng(num_pursuers)
    assert num_pursuers <= MOST
    for _ in range(200):
        values = rng.normal(size=num_pursuers) * 10.0 ** rng.integers(-9, 9, num_pursuers)
        assert pairwise_sum(values) == values.sum()
        assert pairwise_sum(values) / num_pursuers == values.mean()


@pytest.mark.slow("compiles kernels")
def test_the_random_stream_is_the_references_at_every_end() -> None:
    """Not only what is seen of it: the very state of the generator, with the half of a draw that is kept."""
    kwargs = {**SMALL, "surround": False, "n_catch": 1, "max_cycles": 15}
    env = pettingzoo_env("sisl/pursuit_v5", "parallel", **kwargs)
    table = Table(Pursuit(2, **kwargs))
    rng, ids = np.random.default_rng(0), np.array([1])
    seed_envs(table.env.rng, ids, [9])
    env.reset(seed=9)
    table.reset(ids)
    for _ in range(200):
        actions = rng.integers(0, 5, (2, 3))
        table.step(ids, actions)
        env.step(dict(zip(env.possible_agents, actions[1].tolist(), strict=True)))
        if table.rows.done[1]:
            assert not env.agents
            env.reset()
            table.reset(ids)
        (twin,) = [table.env.reference(1)]
        ours, theirs = twin.unwrapped.env.np_random, env.unwrapped.env.np_random
        assert ours.bit_generator.state == theirs.bit_generator.state
        twin.close()
    env.close()
