"""Overcooked by hand, in a kitchen that is drawn here; beside overcooked-ai: tests/interop/test_overcooked.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba", reason="the extra `native` is not installed")

from marlvec import NativeVectorEnv
from marlvec.native.grids.overcooked import Overcooked

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
