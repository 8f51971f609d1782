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
from marlvec.native.grids.warehouse import Warehouse, _regular
from marlvec.registry import resolve
from marlvec.testing import check_native_env
from tests.native.support import SMALL, WAREHOUSE, forward
from tests.vector.support.reference import MODES

DEFAULT: dict[str, Any] = dict(resolve(WAREHOUSE.ids[0]).entry.kwargs)


@pytest.mark.slow("plays many episodes of the reference")
@pytest.mark.parametrize("reward", ["global", "individual", "two_stage"])
def test_deliveries_are_the_reference(reward: str) -> None:
    """On a field so small that there are many; the next request is drawn from the env's stream."""
    kwargs = {**DEFAULT, "layout": SMALL, "n_agents": 3, "request_queue_size": 3, "reward_type": reward}
    kwargs |= {"max_steps": 200, "max_inactivity_steps": 90}
    check_native_env(Warehouse, Reference, env_kwargs=kwargs, num_envs=2, seeds=[1, 2], actions=forward)
    with marlvec.make(WAREHOUSE.ids[0], 20, backend="native", env_kwargs=kwargs) as envs:
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
