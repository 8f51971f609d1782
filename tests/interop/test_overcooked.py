"""Overcooked is overcooked-ai's, bit for bit: both encodings, rewards and flags, over whole episodes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

pytest.importorskip("overcooked_ai_py", reason="the extra `overcooked` is not installed")
pytest.importorskip("numba", reason="the extra `native` is not installed")

import overcooked_ai_py
import pygame

import marlvec
from marlvec import VectorEnv
from marlvec.errors import ArgumentError, EnvArgumentError
from marlvec.native.grids.overcooked import Overcooked, read_recipes
from marlvec.testing import check_native_env, check_vector_env
from tests.vector.support.reference import MODES

FOLDER = Path(overcooked_ai_py.__file__).parent / "data" / "layouts"
OTHERS = {"cramped_room_single", "multiplayer_schelling", "tutorial_1", "tutorial_3"}  # refused
LAYOUTS = sorted({path.stem for path in FOLDER.glob("*.layout")} - OTHERS)
KINDS = ("lossless", "features")
ONIONS = ["onion", "onion", "onion"]


def busy(envs: VectorEnv, rng: np.random.Generator) -> np.ndarray:
    """Random actions, of which a third are `interact`."""
    shape = (envs.num_envs, 2)
    return np.where(rng.random(shape) < 1 / 3, 5, rng.integers(0, 5, shape))


def compare(layout: str, episodes: int = 3, seeds: tuple[int, ...] = (0,), modes: Any = MODES, **kwargs: Any) -> int:
    """Play both; returns how many env steps."""
    name = f"overcooked/{layout}"
    match = check_native_env(
        name, name, episodes=episodes, seeds=seeds, autoreset_modes=modes, actions=busy, env_kwargs=kwargs
    )
    return match.env_steps


@pytest.mark.slow("compiles, and plays whole episodes")
@pytest.mark.parametrize("featurization", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_the_reference(layout: str, featurization: str) -> None:
    """300 env steps of each kind and layout, more than 20,000 in all."""
    assert compare(layout, featurization=featurization, horizon=33, shaping=0.5) >= 300


@pytest.mark.soak
@pytest.mark.parametrize("featurization", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_million_steps_are_the_reference(layout: str, featurization: str) -> None:
    steps, seed = 0, 100
    while steps < 1_000_000 // (2 * len(LAYOUTS)):
        steps += compare(layout, seeds=(seed,), featurization=featurization, horizon=66, shaping=0.5)
        seed += 1


SOUPS = st.lists(st.sampled_from(["onion", "tomato"]), min_size=1, max_size=3).map(sorted).map(tuple)
NUMBERS = st.one_of(st.integers(-50, 50), st.floats(-50, 50))


@st.composite
def parameters(draw: Any) -> dict[str, Any]:
    """What may stand in a layout about recipes, orders and shaped rewards."""
    orders = draw(st.lists(SOUPS, min_size=1, max_size=5, unique=True))
    found: dict[str, Any] = {
        "start_all_orders": [{"ingredients": list(soup)} for soup in orders],
        "start_bonus_orders": [{"ingredients": list(soup)} for soup in orders if draw(st.booleans())],
        "order_bonus": draw(NUMBERS),
    }
    values = draw(st.sampled_from(["none", "one", "each", "parts"]))
    times = draw(st.sampled_from(["none", "one", "each", "parts"]))
    few = st.integers(0, 6)
    if values == "one":
        found["delivery_reward"] = draw(NUMBERS)
    if values == "each":
        found["recipe_values"] = [draw(NUMBERS) for _ in orders]
    if times == "one":
        found["cook_time"] = draw(few)
    if times == "each":
        found["recipe_times"] = [draw(few) for _ in orders]
    if values == "parts":
        found |= {"onion_value": draw(NUMBERS), "tomato_value": draw(NUMBERS)}
    if times == "parts":
        found |= {"onion_time": draw(few), "tomato_time": draw(few)}
    if draw(st.booleans()):
        names = ("PLACEMENT_IN_POT_REW", "DISH_PICKUP_REWARD", "SOUP_PICKUP_REWARD")
        found["rew_shaping_params"] = {name: draw(NUMBERS) for name in names}
    return found


@pytest.mark.slow("compiles, and plays whole episodes")
@settings(max_examples=20, deadline=None)
@given(
    parameters(),
    st.sampled_from(KINDS),
    st.sampled_from(MODES),
    st.integers(1, 60),
    st.integers(1, 3),
    st.floats(-2, 2),
    st.integers(0, 2**32),
)
def test_any_arguments_are_the_reference(
    params: dict[str, Any], kind: str, mode: str, horizon: int, num_pots: int, shaping: float, seed: int
) -> None:
    """In a layout that has tomatoes, and leaves values and times open."""
    try:
        read_recipes(params)
    except ArgumentError:  # no order is worth more than 0
        reject()
    compare(
        "simple_tomato",
        episodes=1,
        seeds=(seed,),
        modes=[mode],
        featurization=kind,
        horizon=horizon,
        num_pots=num_pots,
        shaping=shaping,
        **params,
    )


def scatter(env: Overcooked, i: int, rng: np.random.Generator) -> None:
    """Put players, objects and soups anywhere they may be."""
    kitchen, objects = env._kitchen, env.objects
    c = len(kitchen.terrain)
    env.cells[i] = rng.choice(np.flatnonzero(kitchen.terrain == 0), 2, replace=False)
    env.facing[i] = rng.integers(0, 4, 2)
    for serving in np.flatnonzero(kitchen.terrain == 6):  # player 0 stands before it
        for k in range(4):
            before = kitchen.beside[serving, k]
            if kitchen.terrain[before] == 0 and before != env.cells[i, 1]:
                env.cells[i, 0], env.facing[i, 0] = before, k ^ 1
    for at in (*np.flatnonzero(np.isin(kitchen.terrain, (1, 2))), c, c + 1):
        in_pot = at < c and kitchen.terrain[at] == 2
        kind = int(rng.choice([0, 4, 4] if in_pot or at == c else [0, 1, 2, 3, 4]))
        onions = int(rng.integers(0, 4)) if kind == 4 else 0
        tomatoes = int(rng.integers(onions == 0, 4 - onions)) if kind == 4 and onions < 3 else 0
        time = int(env._recipes.times[onions, tomatoes])
        tick = -1 if kind != 4 else int(rng.choice([-1, 0, max(time - 2, 0), time])) if in_pot else time
        for part, value in zip(objects, (kind, onions, tomatoes, tick), strict=True):
            part[i, at] = value


@pytest.mark.slow("compiles kernels")
@pytest.mark.parametrize("featurization", KINDS)
@pytest.mark.parametrize(
    "layout", ["cramped_room", "cramped_corridor", "asymmetric_advantages_tomato", "simple_tomato"]
)
def test_kitchens_full_of_objects_are_the_reference(layout: str, featurization: str) -> None:
    """What random play rarely comes to: soups of all kinds that are picked up, put down and served."""
    rng = np.random.default_rng(0)
    served = 0
    orders: dict[str, Any] = {"start_all_orders": [], "start_bonus_orders": [{"ingredients": ONIONS}]}
    make = partial(marlvec.make, f"overcooked/{layout}", 20, featurization=featurization, shaping=0.25, **orders)
    with make(backend="native", num_workers=1) as envs:
        for _ in range(3):
            envs.reset(seed=0)
            for i in range(20):
                scatter(envs._env, i, rng)  # type: ignore[attr-defined]  # of native envs
            plain = envs.exec_func(lambda env: env.reference())
            for _ in range(10):
                actions = busy(envs, rng)
                obs, rewards, *_ = envs.step(actions)
                for i, env in enumerate(plain):
                    seen, expected, *_ = env.step(dict(zip(envs.agents, actions[i].tolist(), strict=True)))
                    assert obs[i].tobytes() == np.stack([seen[agent] for agent in envs.agents]).tobytes()
                    assert rewards[i].tolist() == [expected[agent] for agent in envs.agents]
                served += int((rewards.min(axis=1) >= 10).sum())
    assert served > 0


@pytest.fixture
def _quiet_pygame() -> Iterator[None]:
    """overcooked-ai starts all of pygame where it draws; its sound keeps two sockets open."""
    yield
    pygame.quit()


@pytest.mark.slow("compiles kernels, and draws")
@pytest.mark.usefixtures("_quiet_pygame")
def test_a_reference_built_from_an_env_goes_on_and_looks_as_the_env() -> None:
    make = partial(marlvec.make, "overcooked/cramped_room", 2, render_mode="rgb_array", cook_time=5, horizon=90)
    rng = np.random.default_rng(1)
    with make(backend="native") as a, make(backend="sync") as b:
        a.reset(seed=0)
        b.reset(seed=0)
        for _ in range(80):
            actions = busy(a, rng)
            a.step(actions)
            b.step(actions)
        for first, second in zip(a.render(), b.render(), strict=True):
            assert first.tobytes() == second.tobytes()
        (env,) = a.exec_func(lambda env: env.reference(), [1])
        while env.agents:
            actions = busy(a, rng)
            obs, *_, infos = a.step(actions)
            seen, *_ = env.step(dict(zip(a.agents, actions[1].tolist(), strict=True)))
            expected = np.stack([seen[agent] for agent in a.agents])
            assert (obs if env.agents else infos["final_observation"])[1].tobytes() == expected.tobytes()


@pytest.mark.slow("compiles kernels")
@pytest.mark.parametrize("featurization", KINDS)
def test_it_keeps_the_contract(featurization: str) -> None:
    make = partial(marlvec.make, "overcooked/cramped_room", 3, backend="native", featurization=featurization, horizon=9)
    assert len(check_vector_env(make)) == 12


def test_envs_of_two_layouts_in_one_process_keep_their_own_recipes() -> None:
    """Recipes are settings of a class of overcooked-ai's."""
    names = ["overcooked/cramped_room", "overcooked/cramped_room_tomato"]
    rng = np.random.default_rng(0)

    def play(name: list[str]) -> list[Any]:
        with marlvec.make(name, backend="sync", env_kwargs=[{"cook_time": 2}, {}][: len(name)]) as envs:
            envs.reset(seed=0)
            return [envs.step(np.repeat(script[t], len(name), axis=0))[0][0] for t in range(150)]

    script = np.where(rng.random((150, 1, 2)) < 0.4, 5, rng.integers(0, 5, (150, 1, 2)))
    for one, other in zip(play(names[:1] * 2), play(names), strict=True):
        assert one.tobytes() == other.tobytes()


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("layout: expected one of .*cramped_room.*got 'kitchen'", {"layout": "kitchen"}),
    ("does not support layout 'tutorial_1', which has a start_state.*backend='async'", {"layout": "tutorial_1"}),
    ("does not support layout 'tutorial_3', which says more than numbers", {"layout": "tutorial_3"}),
    ("expected one with two players, got 1", {"layout": "cramped_room_single"}),
    ("horizon: expected an int of at least 1, got 0", {"horizon": 0}),
    ("num_pots: expected an int of at least 1, got 2.0", {"num_pots": 2.0}),
    ("featurization must be one of 'lossless', 'features'", {"featurization": "pixels"}),
    ("shaping: expected a finite number, got None", {"shaping": None}),
    ("times: expected ints .*got 2.5", {"cook_time": 2.5}),
    ("tomato_time and onion_time: expected both or none", {"onion_time": 3}),
    ("recipe_values: expected none beside delivery_reward", {"recipe_values": [1], "delivery_reward": 3}),
    ("recipe_times: expected one for each", {"recipe_times": [1, 2]}),
    ("start_all_orders: expected dicts", {"start_all_orders": [{"ingredients": ["fish"]}]}),
    ("start_all_orders: expected no order twice", {"start_all_orders": [{"ingredients": ONIONS}] * 2}),
    ("start_bonus_orders: expected some of", {"start_bonus_orders": [{"ingredients": ["onion"]}]}),
    ("rew_shaping_params: expected .*got no DISH_PICKUP_REWARD", {"rew_shaping_params": {"PLACEMENT_IN_POT_REW": 1}}),
    ("values: expected an order that is worth more than 0", {"order_bonus": 1, "delivery_reward": -1}),
    (r"order_bonus: expected numbers up to 2\*\*40, got 'two'", {"order_bonus": "two"}),
]


@pytest.mark.parametrize(("text", "kwargs"), REFUSED, ids=[" ".join(kwargs) for _, kwargs in REFUSED])
def test_unsupported_arguments_are_refused_by_name(text: str, kwargs: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=text):
        Overcooked(2, **{"layout": "cramped_room", **kwargs})


def test_arguments_that_there_are_not_are_refused() -> None:
    with pytest.raises(EnvArgumentError, match="flavour"):
        marlvec.make("overcooked/cramped_room", 2, backend="native", flavour=3)


@pytest.mark.slow("compiles kernels")
def test_auto_takes_it_where_it_can() -> None:
    with marlvec.make("overcooked/cramped_room", 2, backend="auto") as envs:
        assert envs.backend == "native"
    with marlvec.make("overcooked/cramped_room", 2, backend="auto", num_workers=1, max_num_ingredients=3) as envs:
        assert envs.backend == "async"
