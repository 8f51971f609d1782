"""Plays whole episodes on a vectorizer with actions that depend only on the seed, the env and its step count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, Protocol

import numpy as np

from marlvec.testing.env_checks.findings import Place, first_difference, leaf
from marlvec.trees import map_tree, zip_trees
from marlvec.vector.vector_env import VectorEnv

__all__ = ["MakeEnvs", "VectorPlace", "actions_for", "compare", "play", "record", "row_of"]

_ARRAYS = ("alive", "acting", "action_mask", "reset_mask", "state", "final_observation", "_final_observation")


class MakeEnvs(Protocol):
    """Builds the vectorizer to check."""

    def __call__(self, *, autoreset_mode: str = ..., copy: bool = ...) -> VectorEnv: ...


class VectorPlace(Place):
    """One check; ``call`` is its name."""

    def __str__(self) -> str:
        return f"{self.env}: {self.call}"


def play(envs: VectorEnv, seed: int, steps: int) -> list[Any]:
    """Return copies of the results of a seeded reset and ``steps`` steps."""
    trace = [record(envs.reset(seed=seed))]
    trace += [record(envs.step(actions_for(envs, seed, [t] * envs.num_envs))) for t in range(steps)]
    return trace


def record(result: Sequence[Any]) -> dict[str, Any]:
    """Return copies of all arrays of a reset or step, by name."""
    names = ("obs", "rewards", "terminated", "truncated") if len(result) == 5 else ("obs",)
    parts = dict(zip(names, result[:-1], strict=True))
    infos: Mapping[str, Any] = result[-1]
    results: dict[str, Any] = deepcopy({**parts, **{name: infos[name] for name in _ARRAYS if name in infos}})
    return results


def actions_for(envs: VectorEnv, seed: int, counts: Sequence[int], env_ids: Sequence[int] | None = None) -> Any:
    """Return random legal actions that depend only on the seed, each chosen env's index and its step count."""
    ids = range(envs.num_envs) if env_ids is None else env_ids
    drawn = [
        envs.random_action(seed=seed * 1_000_003 + 10_007 * i + count, env_ids=[i])
        for i, count in zip(ids, counts, strict=True)
    ]
    return zip_trees(np.concatenate, drawn)


def row_of(tree: Any, i: int | tuple[int, ...]) -> Any:
    """Return a copy of one row of every array in a tree."""
    return map_tree(lambda leaf: deepcopy(leaf[i]), tree)


def compare(place: VectorPlace, where: str, expected: Any, got: Any) -> None:
    """Report values that are not equal bit for bit; name the first difference."""
    if changed := first_difference(expected, got):
        place.broken(leaf(where, changed.path), changed.expected, changed.got)
