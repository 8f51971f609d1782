"""Foraging and the warehouse: ids of each kind, and how they are played."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import pytest

from marlvec import VectorEnv

SMALL = """
    .....
    gx.xg
    .....
    .x.x.
    """
"""A warehouse in which chance delivers."""


def loads(envs: VectorEnv, rng: np.random.Generator) -> Any:
    """Random actions of foraging, of which many load: by chance few foods are."""
    actions = rng.integers(0, 6, (envs.num_envs, envs.agent_num))
    actions[rng.random(actions.shape) < 0.4] = 5
    return actions


def forward(envs: VectorEnv, rng: np.random.Generator) -> Any:
    """Mostly forward, so that many want to the same places, and now and then something is taken up or put down."""
    shape = (envs.num_envs, envs.agent_num)
    actions = rng.choice(5, shape, p=[0.05, 0.6, 0.1, 0.1, 0.15])
    messages = envs.action_space.shape[2:]
    if not messages:
        return actions
    return np.concatenate([actions[..., None], rng.integers(0, 2, (*shape, messages[0] - 1))], axis=2)


class Grid(NamedTuple):
    """A package's grid envs: ids of each kind, the default first, and how they are played.

    ``short`` are arguments with which an episode is not long, and so many ``episodes`` of some envs are thousands of
    env steps; with ``busy`` much happens, and episodes end.
    """

    package: str
    ids: list[str]
    actions: Callable[[VectorEnv, np.random.Generator], Any]
    short: dict[str, Any]
    episodes: int
    busy: dict[str, Any]


FORAGING = Grid(
    package="lbforaging",
    ids=[
        "lbf/Foraging-8x8-2p-3f-v3",
        "lbf/Foraging-2s-8x8-2p-2f-coop-v3",
        "lbf/Foraging-15x15-4p-5f-v3",
        "lbf/Foraging-2s-10x10-3p-3f-v3",
        "lbf/Foraging-5x5-9p-4f-v3",
        "lbf/Foraging-6x6-3p-2f-ind-pen-v3",
        "lbf/Foraging-grid-8x8-3p-2f-coop-v3",
        "lbf/Foraging-grid-2s-7x7-4p-3f-v3",
    ],
    actions=loads,
    short={},
    episodes=6,
    busy={},
)
WAREHOUSE = Grid(
    package="rware",
    ids=[
        "rware/rware-tiny-2ag-v2",
        "rware/rware-tiny-4ag-hard-v2",
        "rware/rware-small-10ag-easy-v2",
        "rware/rware-2s-small-3h-19ag-v2",
        "rware/rware-1x3-2h-12ag-5req-twostage-v2",
        "rware/rware-2x3-1h-6ag-4req-global-v2",
    ],
    actions=forward,
    short={"max_steps": 100},
    episodes=2,
    busy={"layout": SMALL, "max_steps": 50, "request_queue_size": 2},
)


def grid_of(env_id: str) -> Grid:
    """The grid that an id is of."""
    return FORAGING if env_id.startswith("lbf/") else WAREHOUSE


def case(env_id: str, *more: Any, slow: str = "") -> Any:
    """A case of a test: an id and what else the test takes; skipped where the package is not installed.

    Args:
        env_id: The id.
        more: The test's other arguments.
        slow: Why it is slow, if it is.
    """
    package = grid_of(env_id).package
    marks = [pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")]
    marks += [pytest.mark.slow(slow)] if slow else []
    return pytest.param(env_id, *more, marks=marks)
