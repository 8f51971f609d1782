"""`choose_backend`: sync or async for ``make(backend="auto")``, by the time that a step takes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from marlvec.envs.making.recipe import EnvRecipe
from marlvec.vector.backends.process import AsyncVectorEnv
from marlvec.vector.processes.worker import WorkerLink
from marlvec.vector.settings import SettingsArguments
from marlvec.vector.shards.partition import usable_cores

__all__ = ["choose_backend"]

_OVERHEAD = 100e-6  # seconds that two worker processes add to a step, compared to this process; docs/benchmarks.md
_STEPS = 64  # with one env, and with two
_MAX_SECONDS = 2.0  # slow envs need fewer steps for a good estimate
_WAITS = 3.0  # an env whose wall time exceeds this many times its processor time waits for something


def choose_backend(recipes: Sequence[EnvRecipe], settings: SettingsArguments) -> tuple[str, str]:
    """Time steps of two of the envs in a temporary worker process; return ``"sync"`` or ``"async"``, and the reason.

    In this process a step over N envs costs N times one env's step; over W workers ceil(N / W) times, and the messages.
    An env's cost is its processor time, so that load on the machine does not matter; for an env that mostly waits (for
    a simulator, a socket) it is its wall clock time.
    """
    num_envs = len(recipes)
    workers = min(num_envs, usable_cores())
    share = -(-num_envs // workers)
    if workers == 1:
        return ("sync", "one core, or one env: no envs could run in parallel")
    seconds = _seconds_of_a_step(recipes[:2], settings)
    saved = (num_envs - share) * seconds
    which = (
        f"a step of one env takes {_readable(seconds)}; {workers} worker processes would save {_readable(saved)} a step"
    )
    if saved < _OVERHEAD:
        return ("sync", f"{which}, and cost about {_readable(_OVERHEAD)}")
    return ("async", which)


def _seconds_of_a_step(recipes: Sequence[EnvRecipe], settings: SettingsArguments) -> float:
    """Return the seconds that a second env adds to a step; the messages' cost cancels out."""
    plain: SettingsArguments = {**settings, "copy": False, "on_fault": "raise", "autoreset_mode": "same_step"}
    with AsyncVectorEnv(recipes, num_workers=1, worker=_serve_timed, **plain) as envs:
        envs.reset()
        began = time.perf_counter()
        for _ in range(_STEPS):
            for ids in ([0], [0, 1]):
                envs.send(envs.random_action(env_ids=ids), ids)
                envs.recv(min_envs=len(ids))
            if time.perf_counter() - began > _MAX_SECONDS:
                break
        times: list[tuple[int, float, float]] = envs.exec_func(_timed, [0])[0]
    cpu, wall = (
        median(times[i][column] for i in range(1, len(times), 2))
        - median(times[i][column] for i in range(0, len(times), 2))
        for column in (1, 2)
    )
    return max(wall if wall > _WAITS * cpu else cpu, 0.0)


_TIMES: list[tuple[int, float, float]] = []  # in the worker process: number of envs, processor time, wall clock time


def _serve_timed(link: WorkerLink) -> None:
    for request in link.requests():
        cpu, wall = time.thread_time(), time.perf_counter()
        link.answer(request)
        if request.operation == "send":
            _TIMES.append((len(request.ids), time.thread_time() - cpu, time.perf_counter() - wall))


def _timed(_env: Any) -> list[tuple[int, float, float]]:
    return _TIMES


def _readable(seconds: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e6:.3g} µs"
