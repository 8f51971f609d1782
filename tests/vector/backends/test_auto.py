"""``make(backend="auto")``: where envs run is measured, said, and changes no number."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import marlvec
from marlvec.errors import EnvRaised
from marlvec.testing import NoOpEnv
from marlvec.vector import async_env as auto


class Slow(NoOpEnv):
    """A hundred times the work at which processes pay, or a wait that takes as long."""

    def __init__(self, waits: bool = False) -> None:
        super().__init__()
        self._waits = waits

    def step(self, actions: dict[str, Any]) -> Any:
        until = time.thread_time() + 0.01
        if self._waits:
            time.sleep(0.01)
        while not self._waits and time.thread_time() < until:
            pass
        return super().step(actions)


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "usable_cores", lambda: 2)


@pytest.mark.slow("plays whole episodes in worker processes")
@pytest.mark.parametrize("waits", [False, True], ids=["works", "waits"])
def test_envs_with_much_to_do_go_to_processes(waits: bool) -> None:
    with marlvec.make(Slow, num_envs=2, backend="auto", waits=waits) as envs:
        assert envs.backend == "async"
        assert "worker processes would save" in repr(envs)


def test_envs_with_nothing_to_do_stay_here() -> None:
    with marlvec.make(NoOpEnv, num_envs=2, backend="auto") as envs:
        assert (envs.backend, envs.autoreset_mode) == ("sync", "same_step")
        assert "backend='sync' (a step of one env takes" in repr(envs)


@pytest.mark.parametrize(
    ("options", "backend", "reason"),
    [
        ({"num_workers": 2}, "async", "num_workers"),
        ({"step_timeout": 60.0}, "async", "worker processes"),
        ({}, "sync", "one core, or one env"),
    ],
)
def test_nothing_is_measured_where_nothing_is_to_choose(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], backend: str, reason: str
) -> None:
    monkeypatch.setattr(auto, "usable_cores", lambda: 1)
    monkeypatch.setattr(auto, "_seconds_of_a_step", lambda *_: pytest.fail("measured"))
    with marlvec.make(NoOpEnv, num_envs=2, backend="auto", **options) as envs:
        assert envs.backend == backend
        assert reason in envs.backend_reason


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=2)
@pytest.mark.parametrize(("seconds", "backend"), [(1e-6, "sync"), (1e-3, "async")])
@pytest.mark.parametrize("mode", ["same_step", "next_step", "disabled"])
def test_numbers_are_those_of_the_backend_that_is_asked_for_by_name(
    monkeypatch: pytest.MonkeyPatch, seconds: float, backend: str, mode: str
) -> None:
    monkeypatch.setattr(auto, "_seconds_of_a_step", lambda *_: seconds)
    seen: list[list[Any]] = []
    for name in ("auto", "sync"):
        env = "mpe2.simple_spread_v3:parallel_env"  # by an id it would be native
        with marlvec.make(env, num_envs=3, backend=name, autoreset_mode=mode, max_cycles=7) as envs:
            assert envs.backend == (backend if name == "auto" else "sync")
            rows = [envs.reset(seed=3)[0]]
            for t in range(30):
                over = envs.step(np.full((3, 3), t % 5))[3].all(axis=1)
                if mode == "disabled" and over.any():
                    rows.append(envs.reset()[0])
            seen.append([*rows, envs.step(np.zeros((3, 3), np.int64))[0]])
    assert len(seen[0]) == len(seen[1])
    assert all(np.array_equal(a, b) for a, b in zip(*seen, strict=True))


def test_an_env_that_raises_says_so_and_leaves_nothing_behind() -> None:
    class Broken(NoOpEnv):
        def step(self, actions: dict[str, Any]) -> Any:
            raise RuntimeError("gears")

    with pytest.raises(EnvRaised, match="gears"):
        marlvec.make(Broken, num_envs=2, backend="auto")
