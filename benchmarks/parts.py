"""What single things cost: checks, large observations, a slow env, a worker's own share of an env step.

Run ``python benchmarks/parts.py``. As in `limit`, contestants take turns in short rounds, ratios are taken inside a
round, and medians over rounds are quoted with their quartiles.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from rich.console import Console
from rich.progress import track
from rich.table import Table
from yardsticks import usable_cores

import marlvec
from marlvec.testing import NoOpEnv

Run = Callable[[int], float]
"""Takes so many vector steps; seconds they took."""


class Images(NoOpEnv):
    """Four agents, each with a stack of four 84 x 84 pictures that never change."""

    def __init__(self) -> None:
        super().__init__(agent_num=4)
        self._spaces = Box(0, 255, (84, 84, 4), np.uint8), Discrete(5)
        rng = np.random.default_rng(0)
        obs = {name: rng.integers(0, 256, (84, 84, 4), np.uint8) for name in self.possible_agents}
        self._first = obs, self._first[1]
        self._step = (obs, *self._step[1:])


class Sleeper(NoOpEnv):
    """Waits, as for a simulator, before it does nothing."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def step(self, actions: dict[str, Any]) -> Any:
        time.sleep(self._seconds)
        return super().step(actions)


def _stepping(envs: marlvec.VectorEnv) -> Run:
    envs.reset(seed=0)
    actions = [envs.random_action(seed) for seed in range(16)]

    def run(vector_steps: int) -> float:
        start = time.perf_counter()
        for t in range(vector_steps):
            envs.step(actions[t & 15])
        return time.perf_counter() - start

    return run


def _copying(nbytes: int) -> Run:
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)

    def run(vector_steps: int) -> float:
        start = time.perf_counter()
        for _ in range(vector_steps):
            np.copyto(target, source)
        return time.perf_counter() - start

    return run


def _others(envs: marlvec.VectorEnv, slow: int) -> Run:
    """Seconds per 15 steps of the envs other than ``slow``, which goes on at its own pace beside them."""
    envs.reset(seed=0)
    actions = envs.random_action(0)
    envs.send(actions)

    def run(vector_steps: int) -> float:
        start = time.perf_counter()
        left = vector_steps * 15
        while left > 0:
            step = envs.recv(min_envs=8)
            left -= int(np.count_nonzero(step.env_ids != slow))
            envs.send(actions[step.env_ids], step.env_ids)
        return time.perf_counter() - start

    return run


def _own_share() -> tuple[Run, Run]:
    """A worker's share of a vector step of 16 envs that do nothing, and what their own steps take of it."""
    envs = marlvec.SyncVectorEnv([NoOpEnv] * 16)
    envs.reset(seed=0)
    shard = envs._shard
    raws = [env.unwrapped for env in shard.envs]
    script = dict.fromkeys(raws[0].possible_agents, 0)

    def whole(vector_steps: int) -> float:
        start = time.perf_counter()
        for _ in range(vector_steps):
            shard.step(shard.everyone)
        return time.perf_counter() - start

    def bare(vector_steps: int) -> float:
        start = time.perf_counter()
        for _ in range(vector_steps):
            for raw in raws:
                raw.step(script)
        return time.perf_counter() - start

    return whole, bare


def measure(runs: dict[str, Run], rounds: int, seconds: float, label: str) -> dict[str, Any]:
    """Seconds per vector step, (rounds,) per contestant."""
    steps = {}
    for name, run in runs.items():
        count = 4
        while (took := run(count)) < seconds / 4:
            count *= 2
        steps[name] = max(1, round(count * seconds / took))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for r in track(range(rounds), description=label, transient=True):
        for name in list(runs) if r % 2 == 0 else reversed(list(runs)):
            times[name].append(runs[name](steps[name]) / steps[name])
    return {name: np.array(values) for name, values in times.items()}


def report(console: Console, title: str, times: dict[str, Any], yardstick: str) -> None:
    """Print the table of one question; rates are shares of the yardstick's."""
    table = Table(title=title)
    for heading in ("", "µs per vector step", f"rate / {yardstick}"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, seconds in times.items():
        low, middle, high = np.percentile(times[yardstick] / seconds, [25, 50, 75])
        table.add_row(name, f"{np.median(seconds) * 1e6:,.1f}", f"{middle:.3f} [{low:.3f}, {high:.3f}]")
    console.print(table)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=0.12, help="of each contestant in each round")
    args = parser.parse_args()
    console = Console(width=110)
    console.print(f"Python {platform.python_version()}, {usable_cores()} usable cores, {args.rounds} rounds\n")

    def ask(title: str, envs: dict[str, marlvec.VectorEnv], runs: dict[str, Run], yardstick: str) -> None:
        try:
            report(console, title, measure(runs, args.rounds, args.seconds, title), yardstick)
        finally:
            for each in envs.values():
                each.close()

    for backend in ("sync", "async"):
        made = {
            mode: marlvec.make(partial(gymnasium.make, "CartPole-v1"), num_envs=16, backend=backend, validate=mode)
            for mode in ("off", "sample", "strict")
        }
        ask(
            f"checks of values: CartPole x 16, {backend}",
            made,
            {name: _stepping(envs) for name, envs in made.items()},
            "off",
        )
    whole, bare = _own_share()
    ask("a worker's share: 16 envs that do nothing", {}, {"worker": whole, "the envs": bare}, "worker")
    for num_envs in (16, 64, 128):
        nbytes = num_envs * 4 * 84 * 84 * 4
        made = {
            "step()": marlvec.make(Images, num_envs=num_envs),
            "step(), copy=False": marlvec.make(Images, num_envs=num_envs, copy=False),
            "the same of agents that see nothing": marlvec.make(
                partial(NoOpEnv, agent_num=4), num_envs=num_envs, copy=False
            ),
        }
        runs = {f"one copy of {nbytes / 1e6:.1f} MB": _copying(nbytes)} | {n: _stepping(e) for n, e in made.items()}
        ask(f"large observations: {num_envs} x 4 x (84, 84, 4) uint8", made, runs, next(iter(runs)))
    quick, slow = partial(Sleeper, 0.002), partial(Sleeper, 0.1)
    made = {
        "15 envs": marlvec.make(quick, num_envs=15, num_workers=15),
        "and one 50 times slower": marlvec.make([*[quick] * 15, slow], num_workers=16),
        "and one like them": marlvec.make(quick, num_envs=16, num_workers=16),
    }
    runs = {name: _others(envs, 15) for name, envs in made.items()}
    ask("recv(min_envs=8), envs that wait 2 ms: 15 steps of the first 15", made, runs, "15 envs")


if __name__ == "__main__":
    main()
