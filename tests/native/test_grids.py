"""Grid games: foraging and the warehouse beside lbforaging and rware, Overcooked's rules by hand."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import gymnasium
import numpy as np
import pytest

pytest.importorskip("numba", reason="the extra `native` is not installed")

import marlvec
from marlvec import NativeVectorEnv
from marlvec.errors import ArgumentError, UnknownEnvError
from marlvec.native.grids.foraging import Foraging
from marlvec.native.grids.overcooked import Overcooked
from marlvec.testing import check_native_env
from tests.native.support import FORAGING, SMALL, WAREHOUSE, case, grid_of
from tests.vector.support.reference import refused

# Foraging and the warehouse are lbforaging's and rware's, bit for bit: each kind of id, over whole episodes.


PLAYS = "plays many episodes of the reference"
COMPILES = "compiles kernels"
FIELD, ROOM = FORAGING.ids[0], WAREHOUSE.ids[0]
KINDS = [*FORAGING.ids, *WAREHOUSE.ids]
MANY_GOALS = {"layout": SMALL, "n_agents": 4, "max_steps": 30, "request_queue_size": 3, "reward_type": "two_stage"}


@pytest.mark.parametrize("env_id", [case(FIELD), case(ROOM, slow=COMPILES)])
def test_two_envs_are_the_reference(env_id: str) -> None:
    grid = grid_of(env_id)
    check = {"num_envs": 2, "episodes": grid.episodes // 2, "env_kwargs": grid.short}
    assert check_native_env(env_id, env_id, seeds=[1], actions=grid.actions, **check).env_steps > 400


@pytest.mark.parametrize("env_id", [case(env_id, slow=PLAYS) for env_id in KINDS])
def test_every_kind_of_id_is_the_reference(env_id: str) -> None:
    """More than 6,000 env steps of each package's, in all modes; half of foraging's with few loads."""
    grid = grid_of(env_id)
    check = {"num_envs": 2, "episodes": grid.episodes, "env_kwargs": grid.short}
    played = [
        check_native_env(env_id, env_id, seeds=[seed], actions=actions, **check)
        for seed, actions in (*([(3, "random")] if grid is FORAGING else []), (4, grid.actions))
    ]
    assert sum(one.env_steps for one in played) > 6_000 / len(grid.ids)


@pytest.mark.soak
@pytest.mark.time_limit(10_800)
@pytest.mark.parametrize("env_id", [case(env_id) for env_id in KINDS])
def test_many_steps_are_the_reference(env_id: str) -> None:
    """10^6 env steps of each package's ids together."""
    grid, steps, seed = grid_of(env_id), 0, 0
    while steps < 1_000_000 / len(grid.ids):
        seed += 1
        check = {"num_envs": 4, "episodes": 3 * grid.episodes, "seeds": [seed], "actions": grid.actions}
        steps += check_native_env(env_id, env_id, **check).env_steps


@pytest.mark.parametrize("env_id", [case(FIELD), case(ROOM, slow=COMPILES)])
def test_no_adapter_stands_between(env_id: str) -> None:
    """The package's own env, stepped by hand, without anything of marlvec's."""
    grid, rng = grid_of(env_id), np.random.default_rng(2)
    name = f"{grid.package}:{env_id.partition('/')[2]}"
    env = gymnasium.make(name, disable_env_checker=True, **grid.busy).unwrapped
    with marlvec.make(env_id, 2, backend="native", **grid.busy) as envs:
        obs, _ = envs.reset(seed=[0, 2**63])
        shown, _ = env.reset(seed=2**63)
        for _ in range(300):
            assert obs[1].tobytes() == np.stack(shown).tobytes()
            actions = grid.actions(envs, rng)
            obs, rewards, terminated, truncated, infos = envs.step(actions)
            shown, gained, over, _, _ = env.step(actions[1].tolist())
            assert rewards[1].tobytes() == np.array(gained, float).tobytes()
            assert terminated[1].tolist() == [over, over]
            assert not truncated.any()
            if over:
                assert infos["final_observation"][1].tobytes() == np.stack(shown).tobytes()
                shown, _ = env.reset()


@pytest.mark.parametrize(
    ("env_id", "name"),
    [
        case(FIELD, "Foraging-8x9-2p-3f-v3"),
        case(FIELD, "Foraging-8x8-2p-3f-v2"),
        case(FIELD, "Foraging-8x8-2p-v3"),
        case(FIELD, "foraging-8x8-2p-3f-v3"),
        case(FIELD, "x"),
        case(ROOM, "rware-huge-2ag-v2"),
        case(ROOM, "rware-tiny-2ag-v1"),
        case(ROOM, "rware-2x3-4h-2ag-v2"),
        case(ROOM, "rware-tiny-v2"),
    ],
)
def test_other_names_are_unknown(env_id: str, name: str) -> None:
    family = env_id.partition("/")[0]
    refused(UnknownEnvError, rf"{family}/{name}'.*e\.g\. {env_id}", marlvec.make, f"{family}/{name}", 2)


@pytest.mark.parametrize(
    ("env_id", "options"),
    [
        case(FIELD, {}),
        case(FORAGING.ids[-1], {}),
        case(ROOM, {}, slow=COMPILES),
        case(ROOM, {"msg_bits": 2, "sensor_range": 2}, slow=COMPILES),
    ],
)
def test_specs_are_those_of_the_reference(env_id: str, options: dict[str, Any]) -> None:
    with marlvec.make(env_id, backend="native", **options) as a, marlvec.make(env_id, backend="sync", **options) as b:
        assert a.spec.difference(b.spec) is None
        assert (a.spec.name, a.metadata, a.groups) == (b.spec.name, b.metadata, b.groups)
        assert (a.observation_space, a.action_space) == (b.observation_space, b.action_space)


@pytest.mark.parametrize(
    ("env_id", "options"), [case(FIELD, {}), case(FORAGING.ids[-1], {}), case(ROOM, MANY_GOALS, slow=COMPILES)]
)
def test_a_reference_built_from_an_env_goes_on_as_the_env_does(env_id: str, options: dict[str, Any]) -> None:
    """Over the ends of episodes, too: all that there is, random stream and time come along."""
    play, rng = grid_of(env_id).actions, np.random.default_rng(0)
    with marlvec.make(env_id, 2, backend="native", **options) as envs:
        (fresh,) = envs.exec_func(lambda env: env.reference(), [1])
        assert np.stack(fresh.reset()[0]).tobytes() == envs.reset()[0][1].tobytes()
        for _ in range(25):
            envs.step(play(envs, rng))
        (env,) = envs.exec_func(lambda env: env.reference(), [1])
        for _ in range(120):
            actions = play(envs, rng)
            obs, rewards, terminated, _, _ = envs.step(actions)
            shown, gained, over, _, _ = env.step(actions[1].tolist())
            assert (rewards[1].tolist(), terminated[1].all()) == ([float(one) for one in gained], over)
            if over:
                shown, _ = env.reset()
            assert obs[1].tobytes() == np.stack(shown).tobytes()


@pytest.mark.parametrize(
    ("env_id", "options", "backend", "shape"),
    [
        case(FIELD, {"sight": 2, "max_num_food": 1}, "native", (2, 2, 9)),
        case(FIELD, {"players": 33}, "async", (2, 33, 108)),
        case(ROOM, {"sensor_range": 2}, "native", (2, 2, 183), slow=COMPILES),
        case("rware/rware-img-tiny-2ag-v2", {}, "async", (2, 2, 5, 3, 3), slow=COMPILES),
    ],
)
def test_auto_takes_it_where_it_can_and_arguments_go_over_those_of_the_id(
    env_id: str, options: dict[str, Any], backend: str, shape: tuple[int, ...]
) -> None:
    with marlvec.make(env_id, 2, backend="auto", num_workers=1, **options) as envs:
        assert envs.backend == backend
        assert envs.reset(seed=0)[0].shape == shape


DRAW = """
import sys, pyglet
try:
    import pyglet.window
except Exception as error:
    print(error)
    raise SystemExit(77)
import numpy as np
import marlvec
made = dict(num_envs=2, render_mode="rgb_array")
with marlvec.make(sys.argv[1], backend="native", **made) as a, marlvec.make(sys.argv[1], backend="sync", **made) as b:
    for envs in (a, b):
        envs.reset(seed=0)
    rng = np.random.default_rng(0)
    for _ in range(8):
        for first, second in zip(a.render(), b.render(), strict=True):
            assert first.tobytes() == second.tobytes()
            assert len(np.unique(first)) > 10
        actions = rng.integers(0, 5, (2, 2))
        a.step(actions), b.step(actions)
    # one of each env here, one for all compiled ones
    print(len([window for window in pyglet.app.windows if window.width > 1]))
"""


@pytest.mark.parametrize("env_id", [case(FIELD, slow="draws"), case(ROOM, slow="draws")])
def test_a_frame_is_the_one_that_the_reference_draws(env_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of several envs in one process. It runs in a process of its own: pyglet reads PYGLET_HEADLESS only once."""
    monkeypatch.setenv("PYGLET_HEADLESS", "1")
    result = subprocess.run([sys.executable, "-c", DRAW, env_id], capture_output=True, text=True)
    if result.returncode == 77:
        pytest.skip(f"pyglet has nothing to draw with: {result.stdout}")
    assert (result.returncode, result.stderr, result.stdout) == (0, "", "3\n")


def test_a_window_goes_from_one_reference_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a window holds of the memory is never given back."""

    class Drawn:
        viewer: object = None
        _rendering_initialized = False

        def render(self) -> Any:
            if not self._rendering_initialized:
                self.viewer, self._rendering_initialized = object(), True
            windows.append(self.viewer)
            return np.zeros((1, 1, 3), np.uint8)

    windows: list[object] = []
    monkeypatch.setattr(Foraging, "reference", lambda env, i, render_mode=None: Drawn())
    with marlvec.make(FIELD, 2, backend="native", render_mode="rgb_array") as envs:
        envs.reset(seed=0)
        envs.render()
        envs.render()
    assert len(windows) == 4
    assert len(set(windows)) == 1


WRONG: list[tuple[str, str, dict[str, Any]]] = [
    (FIELD, "players: expected an int of at least 1, got 0", {"players": 0}),
    (FIELD, "sight: expected an int of at least 1, got 0", {"sight": 0, "grid_observation": True}),
    (FIELD, "max_num_food: expected an int of at least 1, got 2.5", {"max_num_food": 2.5}),
    (FIELD, r"field_size: expected \(rows, columns\), got 8", {"field_size": 8}),
    (FIELD, "field_size: rows: expected an int of at least 3, got 2", {"field_size": (2, 8)}),
    (FIELD, "min_player_level: expected no more than max_player_level, got 3 and 2", {"min_player_level": 3}),
    (FIELD, r"max_player_level: expected one int, or 2, got \[1, 2, 3\]", {"max_player_level": [1, 2, 3]}),
    (FIELD, "penalty: expected a number, got 'high'", {"penalty": "high"}),
    (FIELD, "players=33 on 8 × 8 cells.*backend='async' does", {"players": 33}),
    (FIELD, "min_food_level=3 .*may come to 2.*backend='async' does", {"min_food_level": 3}),
    (FIELD, r"field_size=\(9, 8\) with sight=8.*backend='async' does", {"field_size": (9, 8)}),
    (ROOM, "n_agents: expected an int of at least 1, got 0", {"n_agents": 0}),
    (ROOM, "n_agents: expected no more than the 110 cells, got 111", {"n_agents": 111}),
    (ROOM, "shelf_columns: expected an odd number, got 2", {"shelf_columns": 2}),
    (ROOM, "max_steps: expected an int, got 1.5", {"max_steps": 1.5}),
    (ROOM, "reward_type: expected one of .*got 'shared'", {"reward_type": "shared"}),
    (ROOM, "layout: expected lines of one length", {"layout": "x.g\n..", "request_queue_size": 1}),
    (ROOM, "layout: expected a goal", {"layout": "x..\n...", "request_queue_size": 1}),
    (ROOM, "request_queue_size=32 of 32 shelves.*backend='async' does", {"request_queue_size": 32}),
    (ROOM, "observation_type='image'.*backend='async' does", {"observation_type": "image"}),
    (
        ROOM,
        "normalised_coordinates=True on 1 × 3 cells",
        {"normalised_coordinates": True, "layout": "xxg", "n_agents": 1, "request_queue_size": 1},
    ),
]


@pytest.mark.parametrize(("env_id", "text", "options"), [case(*wrong) for wrong in WRONG])
def test_wrong_arguments_are_told(env_id: str, text: str, options: dict[str, Any]) -> None:
    refused(ArgumentError, text, marlvec.make, env_id, 2, backend="native", **options)


# Overcooked by hand, in a kitchen that is drawn here; beside overcooked-ai: tests/interop/test_overcooked.py.


GRID = """XXPXX
          O1  S
          XD2XX"""
NORTH, SOUTH, EAST, WEST, STAY, USE = range(6)
FILL = [WEST, USE, EAST, NORTH, USE]  # an onion into the pot
FETCH = [WEST, SOUTH, USE, EAST, NORTH]  # a dish, and back before the pot
COOKING = 20  # steps


@pytest.fixture
def kitchens(monkeypatch: pytest.MonkeyPatch) -> Any:
    told = {"grid": GRID}
    monkeypatch.setattr("marlvec.native.grids.overcooked.read_layout", lambda layout, params: told)
    with NativeVectorEnv(Overcooked(2, "drawn_here", shaping=1.0, horizon=99)) as envs:
        envs.reset()
        yield envs


def play(envs: Any, script: list[int]) -> list[list[float]]:
    """Let the first player of env 1 act alone; returns the rewards of its two players."""
    rewards = []
    for action in script:
        rewards.append(envs.step(np.array([[STAY, STAY], [action, STAY]]))[1])
        assert not rewards[-1][0].any(), "env 0 is another kitchen"
    return [row[1].tolist() for row in rewards]


@pytest.mark.slow("compiles kernels")
def test_a_soup_cooks_for_its_time_and_is_paid_when_it_is_served(kitchens: Any) -> None:
    filled = play(kitchens, FILL * 3)
    assert filled == [[3.0 if t % 5 == 4 else 0.0, 0.0] for t in range(15)]
    fetched = play(kitchens, [USE, *FETCH])  # the pot is lit, and a dish is of use from now on
    assert fetched == [[3.0 if t == 3 else 0.0, 0.0] for t in range(6)]
    waited = play(kitchens, [USE] * (COOKING - len(FETCH)))
    assert waited == [[0.0, 0.0]] * (len(waited) - 1) + [[5.0, 0.0]], "no player gets a soup that is not done"
    assert play(kitchens, [EAST, EAST, USE]) == [[0.0, 0.0], [0.0, 0.0], [20.0, 20.0]]


@pytest.mark.slow("compiles kernels")
def test_players_that_would_meet_stay_and_turn(kitchens: Any) -> None:
    kitchens.step(np.array([[EAST, STAY], [EAST, NORTH]]))
    at, facing = zip(*kitchens.exec_func(lambda env: (env.cells.tolist(), env.facing.tolist())), strict=True)
    start = [1 * 3 + 1, 2 * 3 + 2]  # x * height + y
    assert at == ([2 * 3 + 1, start[1]], start)
    assert facing == ([EAST, NORTH], [EAST, NORTH])
