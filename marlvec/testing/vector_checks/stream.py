"""Checks of receiving envs as they become ready: ``async_reset``, ``send``, ``recv`` and ``drain``."""

from __future__ import annotations

from typing import Any

from marlvec.testing.vector_checks.play import MakeEnvs, VectorPlace, actions_for, compare, record, row_of
from marlvec.vector.vector_step import VectorStep

__all__ = ["check_stream"]

STEPS = 20
_ROWS = ("rewards", "terminated", "truncated", "alive", "acting")


def check_stream(place: VectorPlace, make: MakeEnvs, seed: int) -> None:
    """Each env is received once per request, with its own rows, in any order."""
    with make() as envs, make() as lockstep:
        n = envs.num_envs
        expected = [record(lockstep.reset(seed=seed))]
        for t in range(STEPS):
            expected.append(record(lockstep.step(actions_for(lockstep, seed, [t] * n))))
        envs.async_reset(seed=seed)
        counts, waiting = [-1] * n, set(range(n))
        while min(counts) < STEPS:
            result = envs.recv(min_envs=1)
            got = _taken(place, result, waiting)
            for k, i in enumerate(got):
                counts[i] += 1
                _check_row(place, result, k, i, counts[i], expected[counts[i]])
            waiting -= set(got)
            again = [i for i in got if counts[i] < STEPS]
            if again:
                envs.send(actions_for(envs, seed, [counts[i] for i in again], again), again)
                waiting |= set(again)
        if len(nothing := envs.drain()):
            place.broken("drain() with nothing under way", "no rows", f"those of envs {nothing.env_ids.tolist()}")
        half = set(range(0, n, 2))
        envs.send(envs.random_action(env_ids=sorted(half)), sorted(half))
        if (drained := set(_taken(place, envs.drain(), half))) != half:
            place.broken("drain()", f"all envs under way {sorted(half)}", str(sorted(drained)))
        envs.step(envs.random_action())


def _taken(place: VectorPlace, result: VectorStep, waiting: set[int]) -> list[int]:
    ids: list[int] = result.env_ids.tolist()
    if not ids or len(set(ids)) != len(ids) or not set(ids) <= waiting:
        place.broken("env_ids", f"some of the envs under way {sorted(waiting)}, each once", str(ids))
    if len(result.rewards) != len(ids):
        place.broken("rewards", f"{len(ids)} rows, one for each of envs {ids}", f"{len(result.rewards)}")
    return ids


def _check_row(place: VectorPlace, result: VectorStep, k: int, i: int, t: int, expected: dict[str, Any]) -> None:
    where = f"of env {i} in its step {t}" if t else f"of env {i} at its reset"
    compare(place, f"obs {where}", row_of(expected["obs"], i), row_of(result.obs, k))
    for name in _ROWS if t else _ROWS[3:]:
        compare(place, f"{name} {where}", row_of(expected[name], i), row_of(getattr(result, name), k))
