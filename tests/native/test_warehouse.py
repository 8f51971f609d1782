"""The multi-robot warehouse is rware's, bit for bit: who goes where several want to, deliveries, the random stream."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

pytest.importorskip("numba", reason="the extra `native` is not installed")
pytest.importorskip("rware", reason="the extra `rware` is not installed")

import rware

import marlvec
from marlvec.envs.grids.warehouse import Warehouse as Reference
from marlvec.errors import ArgumentError, UnknownEnvError
from marlvec.native.grids.warehouse import Warehouse, _regular
from marlvec.registry import resolve
from marlvec.testing import check_native_env
from tests.vector.support.reference import MODES

IDS = [
    "rware/rware-tiny-2ag-v2",
    "rware/rware-tiny-4ag-hard-v2",
    "rware/rware-small-10ag-easy-v2",
    "rware/rware-2s-small-3h-19ag-v2",
    "rware/rware-1x3-2h-12ag-5req-twostage-v2",
    "rware/rware-2x3-1h-6ag-4req-global-v2",
]
DEFAULT: dict[str, Any] = dict(resolve(IDS[0]).entry.kwargs)
SMALL = """
    .....
    gx.xg
    .....
    .x.x.
    """  # where chance delivers


def forward(envs: marlvec.VectorEnv, rng: np.random.Generator) -> Any:
    """Mostly forward, so that many want to the same places, and now and then something is taken up or put down."""
    shape = (envs.num_envs, envs.agent_num)
    actions = rng.choice(5, shape, p=[0.05, 0.6, 0.1, 0.1, 0.15])
    messages = envs.action_space.shape[2:]
    if not messages:
        return actions
    return np.concatenate([actions[..., None], rng.integers(0, 2, (*shape, messages[0] - 1))], axis=2)


@pytest.mark.slow("compiles kernels")
def test_two_envs_are_the_reference() -> None:
    played = check_native_env(
        IDS[0], IDS[0], seeds=[1], num_envs=2, episodes=1, actions=forward, env_kwargs={"max_steps": 60}
    )
    assert played.env_steps > 300


@pytest.mark.slow("plays many episodes of the reference")
@pytest.mark.parametrize("env_id", IDS)
def test_every_kind_of_id_is_the_reference(env_id: str) -> None:
    """More than 20,000 env steps of all together, in all modes."""
    kwargs = {"max_steps": 100}
    check = {"num_envs": 3, "episodes": 2, "actions": forward, "env_kwargs": kwargs}
    assert sum(check_native_env(env_id, env_id, seeds=[seed], **check).env_steps for seed in (3, 4)) > 3_400


@pytest.mark.soak
@pytest.mark.time_limit(10_800)
@pytest.mark.parametrize("env_id", IDS)
def test_many_steps_are_the_reference(env_id: str) -> None:
    """10^6 env steps of all ids together."""
    steps, seed = 0, 0
    while steps < 170_000:
        seed += 1
        steps += check_native_env(env_id, env_id, num_envs=4, episodes=3, seeds=[seed], actions=forward).env_steps


@pytest.mark.slow("plays many episodes of the reference")
@pytest.mark.parametrize("reward", ["global", "individual", "two_stage"])
def test_deliveries_are_the_reference(reward: str) -> None:
    """On a field so small that there are many; the next request is drawn from the env's stream."""
    kwargs = {**DEFAULT, "layout": SMALL, "n_agents": 3, "request_queue_size": 3, "reward_type": reward}
    kwargs |= {"max_steps": 200, "max_inactivity_steps": 90}
    check_native_env(Warehouse, Reference, env_kwargs=kwargs, num_envs=2, seeds=[1, 2], actions=forward)
    with marlvec.make(IDS[0], 20, backend="native", env_kwargs=kwargs) as envs:
        envs.reset(seed=0)
        rng, found = np.random.default_rng(0), []
        for _ in range(400):
            found += np.unique(envs.step(forward(envs, rng))[1]).tolist()
    assert set(found) >= {0.0, 0.5 if reward == "two_stage" else 1.0}
    assert sum(one > 0 for one in found) > 30


@st.composite
def arguments(draw: Any) -> dict[str, Any]:
    drawn = draw(st.booleans())
    columns, rows, height = draw(st.sampled_from([1, 3])), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    shelves = 4 if drawn else int((~_regular(columns, rows, height)[0]).sum())
    assume(shelves)
    return {
        **DEFAULT,
        "shelf_columns": columns,
        "shelf_rows": rows,
        "column_height": height,
        "layout": SMALL if drawn else None,
        "n_agents": draw(st.integers(1, 12)),
        "msg_bits": draw(st.integers(0, 3)),
        "sensor_range": draw(st.integers(0, 3)),
        "request_queue_size": draw(st.integers(0, min(shelves - 1, 6))),
        "max_inactivity_steps": draw(st.sampled_from([None, 0, 7])),
        "max_steps": draw(st.integers(1, 40)),
        "reward_type": draw(st.sampled_from(list(rware.warehouse.RewardType))),
        "normalised_coordinates": draw(st.booleans()),
    }


@pytest.mark.slow("plays many episodes of the reference")
@pytest.mark.filterwarnings("ignore:.*precision lowered by casting:UserWarning")  # rware's own space, normalised
@settings(max_examples=40)
@given(arguments(), st.sampled_from(MODES), st.integers(0, 2**63), st.sampled_from([None, 5]))
def test_any_arguments_are_the_reference(kwargs: dict[str, Any], mode: str, seed: int, limit: int | None) -> None:
    check_native_env(
        Warehouse,
        Reference,
        env_kwargs=kwargs,
        num_envs=2,
        episodes=2,
        seeds=[seed],
        autoreset_modes=[mode],
        actions=forward,
        max_episode_steps=limit,
    )


@pytest.mark.slow("plays many episodes of the reference")
@pytest.mark.parametrize("agents", [3, 5, 8, 13, 20, 40])
def test_crowds_go_as_networkx_lets_them(agents: int) -> None:
    """Of equally long lines it goes by the order of a set, whose table grows with what is in it."""
    kwargs = {**DEFAULT, "column_height": 2, "n_agents": agents, "request_queue_size": 2, "max_steps": 40}

    def ahead(envs: marlvec.VectorEnv, rng: np.random.Generator) -> Any:
        return rng.choice(5, (envs.num_envs, envs.agent_num), p=[0.01, 0.85, 0.05, 0.05, 0.04])

    check_native_env(Warehouse, Reference, env_kwargs=kwargs, num_envs=2, actions=ahead, seeds=[agents], episodes=2)


@pytest.mark.slow("compiles kernels")
def test_no_adapter_stands_between() -> None:
    """rware's own env, stepped by hand, without anything of marlvec's."""
    kinds = rware.warehouse.RewardType.INDIVIDUAL, rware.warehouse.ObservationType.FLATTENED
    own = {**DEFAULT, "reward_type": kinds[0], "observation_type": kinds[1], "layout": SMALL, "max_steps": 50}
    env = rware.warehouse.Warehouse(**{**own, "request_queue_size": 2})
    rng = np.random.default_rng(2)
    with marlvec.make(IDS[0], 2, backend="native", layout=SMALL, max_steps=50, request_queue_size=2) as envs:
        obs, _ = envs.reset(seed=[0, 2**63])
        shown, _ = env.reset(seed=2**63)
        for _ in range(300):
            assert obs[1].tobytes() == np.stack(shown).tobytes()
            actions = forward(envs, rng)
            obs, rewards, terminated, _, infos = envs.step(actions)
            shown, gained, over, _, _ = env.step(actions[1].tolist())
            assert rewards[1].tobytes() == np.array(gained, float).tobytes()
            assert terminated[1].tolist() == [over, over]
            if over:
                assert infos["final_observation"][1].tobytes() == np.stack(shown).tobytes()
                shown, _ = env.reset()


def test_every_id_of_rware_stands_for_its_arguments() -> None:
    """Those that are registered at once, those with images, and some of the rest, which are millions."""
    before = dict(gymnasium.envs.registration.registry)
    try:
        rware.image_registration()
        found = {
            name: dict(spec.kwargs)
            for name, spec in gymnasium.envs.registration.registry.items()
            if str(spec.entry_point).startswith("rware.")
        }
    finally:
        gymnasium.envs.registration.registry.clear()
        gymnasium.envs.registration.registry.update(before)
    assert len(found) > 1_000
    for name, kwargs in found.items():
        read = resolve(f"rware/{name}").entry.kwargs
        for key, value in read.items():
            theirs = kwargs.get(key, {"observation_type": "flattened", "image_observation_directional": True}.get(key))
            assert value == (theirs.name.lower() if hasattr(theirs, "name") else theirs), (name, key)
        assert kwargs.keys() <= read.keys()
    read = resolve("rware/rware-img-Nd-3s-2x5-4h-7ag-9req-twostage-v2").entry.kwargs
    assert (read["shelf_rows"], read["shelf_columns"], read["column_height"], read["n_agents"]) == (2, 5, 4, 7)
    assert (read["sensor_range"], read["request_queue_size"], read["reward_type"]) == (3, 9, "two_stage")
    assert (read["observation_type"], read["image_observation_directional"]) == ("image", False)


@pytest.mark.parametrize("name", ["rware-huge-2ag-v2", "rware-tiny-2ag-v1", "rware-2x3-4h-2ag-v2", "rware-tiny-v2"])
def test_other_names_are_unknown(name: str) -> None:
    with pytest.raises(UnknownEnvError, match=rf"rware/{name}'.*e\.g\. rware/rware-tiny-2ag-v2"):
        marlvec.make(f"rware/{name}", 2)


@pytest.mark.slow("compiles kernels")
def test_specs_are_those_of_the_reference() -> None:
    for options in ({}, {"msg_bits": 2, "sensor_range": 2}):
        with (
            marlvec.make(IDS[0], backend="native", **options) as a,
            marlvec.make(IDS[0], backend="sync", **options) as b,
        ):
            assert a.spec.difference(b.spec) is None
            assert (a.spec.name, a.metadata, a.groups) == (b.spec.name, b.metadata, b.groups)
            assert a.action_space == b.action_space


@pytest.mark.slow("compiles kernels")
def test_a_reference_built_from_an_env_goes_on_as_the_env_does() -> None:
    rng = np.random.default_rng(0)
    options = {"layout": SMALL, "n_agents": 4, "max_steps": 30, "request_queue_size": 3, "reward_type": "two_stage"}
    with marlvec.make(IDS[0], 2, backend="native", **options) as envs:
        (fresh,) = envs.exec_func(lambda env: env.reference(), [1])
        assert np.stack(fresh.reset()[0]).tobytes() == envs.reset()[0][1].tobytes()
        for _ in range(25):
            envs.step(forward(envs, rng))
        (env,) = envs.exec_func(lambda env: env.reference(), [1])
        for _ in range(100):
            actions = forward(envs, rng)
            obs, rewards, terminated, _, _ = envs.step(actions)
            shown, gained, over, _, _ = env.step(actions[1].tolist())
            assert (rewards[1].tolist(), terminated[1].all()) == ([float(one) for one in gained], over)
            if over:
                shown, _ = env.reset()
            assert obs[1].tobytes() == np.stack(shown).tobytes()


@pytest.mark.slow("compiles kernels")
def test_auto_takes_it_and_images_go_to_the_reference() -> None:
    with marlvec.make(IDS[0], 3, backend="auto", sensor_range=2) as envs:
        assert envs.backend == "native"
    with marlvec.make("rware/rware-img-tiny-2ag-v2", 2, backend="auto", num_workers=1) as envs:
        assert envs.backend == "async"
        assert envs.reset(seed=0)[0].shape == (2, 2, 5, 3, 3)


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("n_agents: expected an int of at least 1, got 0", {"n_agents": 0}),
    ("n_agents: expected no more than the 110 cells, got 111", {"n_agents": 111}),
    ("shelf_columns: expected an odd number, got 2", {"shelf_columns": 2}),
    ("max_steps: expected an int, got 1.5", {"max_steps": 1.5}),
    ("reward_type: expected one of .*got 'shared'", {"reward_type": "shared"}),
    ("layout: expected lines of one length", {"layout": "x.g\n.."}),
    ("layout: expected a goal", {"layout": "x..\n..."}),
    ("request_queue_size=32 of 32 shelves.*backend='async' does", {"request_queue_size": 32}),
    ("observation_type='image'.*backend='async' does", {"observation_type": "image"}),
    ("normalised_coordinates=True on 1 × 3 cells", {"normalised_coordinates": True, "layout": "xxg", "n_agents": 1}),
]


@pytest.mark.parametrize(("text", "options"), WRONG, ids=[text for text, _ in WRONG])
def test_wrong_arguments_are_told(text: str, options: dict[str, Any]) -> None:
    options = {"request_queue_size": 1, **options} if "layout" in options else options
    with pytest.raises(ArgumentError, match=text):
        marlvec.make(IDS[0], 2, backend="native", **options)
