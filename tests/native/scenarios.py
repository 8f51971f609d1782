"""The scenarios of mpe2, with arguments that are not the defaults, and how to play them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import marlvec
from marlvec import VectorEnv
from marlvec.registry import resolve_all

ARGUMENTS: dict[str, list[dict[str, Any]]] = {
    "simple": [{}],
    "simple_spread": [
        {},
        {"N": 1},
        {"N": 5, "local_ratio": 0.3},
        {"N": 2, "terminate_on_success": True, "curriculum": True, "local_ratio": 1},
        {"N": 4, "num_agent_neighbors": 2, "num_landmark_neighbors": 6},
    ],
    "simple_tag": [
        {},
        {"num_good": 3, "num_adversaries": 2, "num_obstacles": 4},
        {"num_good": 2, "num_adversaries": 5, "num_obstacles": 0, "terminate_on_success": True, "curriculum": True},
        {"num_agent_neighbors": 2},
        {"num_good": 2, "num_agent_neighbors": 6, "num_landmark_neighbors": 1},
        {"num_obstacles": 0, "num_landmark_neighbors": 2},
    ],
    "simple_push": [{}],
    "simple_adversary": [{}, {"N": 1}, {"N": 4}, {"N": 5, "num_agent_neighbors": 2, "num_landmark_neighbors": 3}],
    "simple_reference": [{}, {"local_ratio": 0.8}],
    "simple_speaker_listener": [{}],
    "simple_crypto": [{}],
    "simple_world_comm": [
        {},
        {"num_good": 1, "num_adversaries": 2, "num_obstacles": 3, "num_food": 1, "num_forests": 0},
        {"num_good": 3, "num_adversaries": 1, "num_forests": 5},
    ],
    "simple_line": [{}, {"N": 1}, {"N": 9, "terminate_on_success": True}],
    "simple_formation": [{}, {"N": 1, "terminate_on_success": True}, {"N": 10}],
    "collect_treasure": [
        {},
        {"num_collectors": 9, "num_deposits": 1, "num_treasures": 9},
        {"num_collectors": 2, "num_deposits": 4, "num_treasures": 3},
    ],
}
"""Per scenario: the default, and others that reach other branches."""

CASES = [
    (name, {**kwargs, "continuous_actions": continuous})
    for name, found in ARGUMENTS.items()
    for kwargs in found
    for continuous in (False, True)
]


def words(case: tuple[str, dict[str, Any]]) -> str:
    """A case as the name of a test."""
    name, kwargs = case
    return " ".join([name, *(f"{key}={value}" for key, value in kwargs.items())])


def factories(name: str, num_envs: int, **kwargs: Any) -> list[Callable[[], Any]]:
    """One factory per env, of mpe2's own."""
    return [factory.with_kwargs(**kwargs) for factory in resolve_all(name, num_envs)]


def native(name: str, num_envs: int, **options: Any) -> VectorEnv:
    return marlvec.make(name, num_envs, backend="native", **options)


def maker(name: str, num_envs: int, **options: Any) -> Callable[..., VectorEnv]:
    return partial(native, name, num_envs, **options)
