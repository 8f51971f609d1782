"""Level-based foraging is lbforaging's, bit for bit, with any arguments, and an id stands for lbforaging's own."""

from __future__ import annotations

from typing import Any

import gymnasium
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba", reason="the extra `native` is not installed")
pytest.importorskip("lbforaging", reason="the extra `lbf` is not installed")

import lbforaging

from marlvec.envs.grids.foraging import ForagingEnv
from marlvec.native.grids.foraging import Foraging
from marlvec.registry import resolve
from marlvec.testing import check_native_env
from tests.native.support import loads
from tests.vector.support.reference import MODES

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


def test_every_id_of_lbforaging_stands_for_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        name: dict(spec.kwargs)
        for name, spec in gymnasium.envs.registration.registry.items()
        if str(spec.entry_point).startswith("lbforaging.")
    }
    # Gymnasium's own registering looks through all names for each, which takes many seconds.
    monkeypatch.setattr(lbforaging, "register", lambda id, entry_point, kwargs: found.update({id: kwargs}))
    lbforaging.register_grid_envs()
    assert len(found) > 10_000
    for name, kwargs in found.items():
        assert {**resolve(f"lbf/{name}").entry.kwargs} == {"penalty": 0.0, **kwargs}
