"""Level-based foraging is lbforaging's, bit for bit: any arguments, whole episodes, one random stream through all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba", reason="the extra `native` is not installed")
pytest.importorskip("lbforaging", reason="the extra `lbf` is not installed")

import lbforaging

import marlvec
from marlvec.envs.grids.foraging import ForagingEnv
from marlvec.errors import ArgumentError, UnknownEnvError
from marlvec.native.grids.foraging import Foraging
from marlvec.registry import resolve
from marlvec.testing import check_native_env
from tests.vector.support.reference import MODES

IDS = [
    "lbf/Foraging-8x8-2p-3f-v3",
    "lbf/Foraging-2s-8x8-2p-2f-coop-v3",
    "lbf/Foraging-15x15-4p-5f-v3",
    "lbf/Foraging-2s-10x10-3p-3f-v3",
    "lbf/Foraging-5x5-9p-4f-v3",
    "lbf/Foraging-6x6-3p-2f-ind-pen-v3",
    "lbf/Foraging-grid-8x8-3p-2f-coop-v3",
    "lbf/Foraging-grid-2s-7x7-4p-3f-v3",
]
DEFAULT: dict[str, Any] = dict(resolve(IDS[0]).entry.kwargs)


def loads(envs: marlvec.VectorEnv, rng: np.random.Generator) -> Any:
    """Random actions, of which many load: by chance few foods are."""
    actions = rng.integers(0, 6, (envs.num_envs, envs.agent_num))
    actions[rng.random(actions.shape) < 0.4] = 5
    return actions


def test_two_envs_are_the_reference() -> None:
    assert check_native_env(IDS[0], IDS[0], seeds=[1], episodes=2, actions=loads).env_steps > 500


@pytest.mark.slow("plays many episodes of the reference")
@pytest.mark.parametrize("env_id", IDS)
def test_every_kind_of_id_is_the_reference(env_id: str) -> None:
    """More than 20,000 env steps of all together, in all modes; half of them with many loads."""
    played = [
        check_native_env(env_id, env_id, num_envs=4, episodes=6, seeds=[seed], actions=actions)
        for seed, actions in ((3, "random"), (4, loads))
    ]
    assert sum(one.env_steps for one in played) > 2_000


@pytest.mark.soak
@pytest.mark.time_limit(10_800)
@pytest.mark.parametrize("env_id", IDS)
def test_many_steps_are_the_reference(env_id: str) -> None:
    """10^6 env steps of all ids together."""
    steps, seed = 0, 0
    while steps < 125_000:
        seed += 1
        steps += check_native_env(env_id, env_id, num_envs=8, episodes=40, seeds=[seed], actions=loads).env_steps


LEVELS = st.tuples(st.integers(0, 3), st.integers(0, 3)).map(sorted)


@st.composite
def arguments(draw: Any) -> dict[str, Any]:
    rows, columns = draw(st.integers(3, 9)), draw(st.integers(3, 9))
    grid = draw(st.booleans())
    if not grid:
        columns = rows
    p, f = draw(st.integers(1, min(6, rows * columns // 2))), draw(st.integers(1, 5))
    levels = [draw(LEVELS) for _ in range(p)]
    one = draw(st.booleans())
    foods = [draw(LEVELS) for _ in range(f)]
    has_most, coop = draw(st.booleans()), draw(st.booleans())
    least = [low for low, _ in foods]
    if not has_most and not coop:  # else lbforaging may raise
        own = [levels[0][0]] * p if one else [low for low, _ in levels]
        least = [min(low, sum(sorted(own)[:3])) for low in least]
    return {
        "players": p,
        "min_player_level": levels[0][0] if one else [low for low, _ in levels],
        "max_player_level": levels[0][1] if one else [high for _, high in levels],
        "min_food_level": least,
        "max_food_level": [high for _, high in foods] if has_most else None,
        "field_size": (rows, columns),
        "max_num_food": f,
        "sight": draw(st.integers(1 if grid else 0, 10)),
        "max_episode_steps": draw(st.integers(1, 30)),
        "force_coop": coop,
        "normalize_reward": draw(st.booleans()),
        "grid_observation": grid,
        "observe_agent_levels": draw(st.booleans()),
        "penalty": draw(st.sampled_from([0.0, 0.1, 2])),
    }


@pytest.mark.slow("plays many episodes of the reference")
@settings(max_examples=50)
@given(arguments(), st.sampled_from(MODES), st.integers(0, 2**63), st.sampled_from([None, 5]))
def test_any_arguments_are_the_reference(kwargs: dict[str, Any], mode: str, seed: int, limit: int | None) -> None:
    check_native_env(
        Foraging,
        ForagingEnv,
        env_kwargs=kwargs,
        episodes=4,
        seeds=[seed],
        autoreset_modes=[mode],
        actions=loads,
        max_episode_steps=limit,
    )


def test_no_adapter_stands_between() -> None:
    """lbforaging's own env, stepped by hand, without anything of marlvec's."""
    env = lbforaging.foraging.ForagingEnv(**DEFAULT)
    rng = np.random.default_rng(2)
    with marlvec.make(IDS[0], 2, backend="native") as envs:
        obs, _ = envs.reset(seed=[0, 2**63])
        shown, _ = env.reset(seed=2**63)
        for _ in range(300):
            assert obs[1].tobytes() == np.stack(shown).tobytes()
            actions = loads(envs, rng)
            obs, rewards, terminated, truncated, infos = envs.step(actions)
            shown, gained, over, _, _ = env.step(actions[1].tolist())
            assert rewards[1].tobytes() == np.array(gained, float).tobytes()
            assert terminated[1].tolist() == [over, over]
            assert not truncated.any()
            if over:
                assert infos["final_observation"][1].tobytes() == np.stack(shown).tobytes()
                shown, _ = env.reset()


def registered() -> Iterator[tuple[str, dict[str, Any]]]:
    lbforaging.register_grid_envs()
    for name, spec in gymnasium.envs.registration.registry.items():
        if str(spec.entry_point).startswith("lbforaging."):
            yield name, dict(spec.kwargs)


def test_every_id_of_lbforaging_stands_for_its_arguments() -> None:
    before = dict(gymnasium.envs.registration.registry)
    try:
        found = dict(registered())
    finally:
        gymnasium.envs.registration.registry.clear()
        gymnasium.envs.registration.registry.update(before)
    assert len(found) > 10_000
    for name, kwargs in found.items():
        assert {**resolve(f"lbf/{name}").entry.kwargs} == {"penalty": 0.0, **kwargs}


@pytest.mark.parametrize(
    "name", ["Foraging-8x9-2p-3f-v3", "Foraging-8x8-2p-3f-v2", "Foraging-8x8-2p-v3", "foraging-8x8-2p-3f-v3", "x"]
)
def test_other_names_are_unknown(name: str) -> None:
    with pytest.raises(UnknownEnvError, match=rf"lbf/{name}'.*e\.g\. lbf/Foraging-8x8-2p-3f-v3"):
        marlvec.make(f"lbf/{name}", 2)


@pytest.mark.parametrize("env_id", [IDS[0], IDS[-1]])
def test_specs_are_those_of_the_reference(env_id: str) -> None:
    with marlvec.make(env_id, backend="native") as a, marlvec.make(env_id, backend="sync") as b:
        assert a.spec.difference(b.spec) is None
        assert (a.spec.name, a.metadata, a.groups) == (b.spec.name, b.metadata, b.groups)
        assert a.observation_space == b.observation_space


@pytest.mark.parametrize("env_id", [IDS[0], IDS[-1]])
def test_a_reference_built_from_an_env_goes_on_as_the_env_does(env_id: str) -> None:
    """Over the ends of episodes, too: levels, foods, random stream and time come along."""
    rng = np.random.default_rng(0)
    with marlvec.make(env_id, 2, backend="native") as envs:
        (fresh,) = envs.exec_func(lambda env: env.reference(), [1])
        assert np.stack(fresh.reset()[0]).tobytes() == envs.reset()[0][1].tobytes()
        for _ in range(20):
            envs.step(loads(envs, rng))
        (env,) = envs.exec_func(lambda env: env.reference(), [1])
        for _ in range(120):
            actions = loads(envs, rng)
            obs, rewards, terminated, _, _ = envs.step(actions)
            shown, gained, over, _, _ = env.step(actions[1].tolist())
            assert (rewards[1].tolist(), terminated[1].all()) == ([float(one) for one in gained], over)
            if over:
                shown, _ = env.reset()
            assert obs[1].tobytes() == np.stack(shown).tobytes()


def test_auto_takes_it_and_arguments_go_over_those_of_the_id() -> None:
    with marlvec.make(IDS[0], 3, backend="auto", sight=2, max_num_food=1) as envs:
        assert envs.backend == "native"
        assert envs.observation_space.shape == (3, 2, 9)
    with marlvec.make(IDS[0], 2, backend="auto", num_workers=1, players=33) as envs:
        assert envs.backend == "async"


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("players: expected an int of at least 1, got 0", {"players": 0}),
    ("sight: expected an int of at least 1, got 0", {"sight": 0, "grid_observation": True}),
    ("max_num_food: expected an int of at least 1, got 2.5", {"max_num_food": 2.5}),
    (r"field_size: expected \(rows, columns\), got 8", {"field_size": 8}),
    ("field_size: rows: expected an int of at least 3, got 2", {"field_size": (2, 8)}),
    ("min_player_level: expected no more than max_player_level, got 3 and 2", {"min_player_level": 3}),
    (r"max_player_level: expected one int, or 2, got \[1, 2, 3\]", {"max_player_level": [1, 2, 3]}),
    ("penalty: expected a number, got 'high'", {"penalty": "high"}),
    ("players=33 on 8 × 8 cells.*backend='async' does", {"players": 33}),
    ("min_food_level=3 .*may come to 2.*backend='async' does", {"min_food_level": 3}),
    (r"field_size=\(9, 8\) with sight=8.*backend='async' does", {"field_size": (9, 8)}),
]


@pytest.mark.parametrize(("text", "options"), WRONG, ids=[text for text, _ in WRONG])
def test_wrong_arguments_are_told(text: str, options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=text):
        marlvec.make(IDS[0], 2, backend="native", **options)
