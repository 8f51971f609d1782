"""How close marlvec comes to the physical limit, on a real env and on one that does nothing.

Run ``make bench``, or ``python benchmarks/limit.py --rounds 40``. Cores change speed unseen, so all contestants take
turns in short rounds; ratios are taken inside a round, and medians over rounds are quoted with their quartiles.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table
from yardsticks import Bare, Contestant, HandLoop, Lockstep, spread, usable_cores

import marlvec
from marlvec.testing import NoOpEnv


def make_spread() -> Any:
    """Three agents that must cover three landmarks: mpe2's simple_spread_v3."""
    from mpe2 import simple_spread_v3

    return simple_spread_v3.parallel_env()


ENVS: dict[str, Callable[[], Any]] = {"simple_spread": make_spread, "no-op": NoOpEnv}


class _Stepping:
    """A `VectorEnv` under step()."""

    def __init__(self, make_env: Callable[[], Any], num_envs: int, **settings: Any) -> None:
        self._envs = marlvec.make(make_env, num_envs=num_envs, **settings)
        self._envs.reset(seed=0)
        self._actions = np.random.default_rng(0).integers(0, 5, (64, num_envs, self._envs.agent_num))
        self._t = 0

    def run(self, vector_steps: int) -> float:
        start = time.perf_counter()
        for _ in range(vector_steps):
            self._t += 1
            self._envs.step(self._actions[self._t & 63])
        return time.perf_counter() - start

    def close(self) -> None:
        self._envs.close()


class _Halves(_Stepping):
    """The same under send() and recv(): whichever half of the envs is ready first."""

    def __init__(self, make_env: Callable[[], Any], num_envs: int, **settings: Any) -> None:
        super().__init__(make_env, num_envs, **settings)
        self._half = num_envs // 2
        self._envs.send(self._actions[0])

    def run(self, vector_steps: int) -> float:
        start = time.perf_counter()
        left = vector_steps * self._envs.num_envs
        while left > 0:
            step = self._envs.recv(min_envs=self._half)
            self._t += 1
            self._envs.send(self._actions[self._t & 63, step.env_ids], step.env_ids)
            left -= len(step)
        return time.perf_counter() - start


class _Collecting:
    """A `Collector` with a random policy."""

    def __init__(self, make_env: Callable[[], Any], num_envs: int, **settings: Any) -> None:
        self._envs = marlvec.make(make_env, num_envs=num_envs)
        self._collector = marlvec.Collector(self._envs, marlvec.RandomPolicy(), seed=0, **settings)

    def run(self, vector_steps: int) -> float:
        start = time.perf_counter()
        self._collector.collect(env_steps=vector_steps * self._envs.num_envs)
        return time.perf_counter() - start

    def close(self) -> None:
        self._envs.close()


def contestants(make_env: Callable[[], Any], num_envs: int) -> dict[str, Contestant]:
    """Everybody who takes part, in the order of the table; the forked ones first, before there are threads."""
    return {
        "P: bare loop on every core": Bare(make_env, num_envs),
        "L: lockstep bound": Lockstep(make_env, num_envs),
        "hand-written loop, 1 process": HandLoop(make_env, num_envs),
        "sync step()": _Stepping(make_env, num_envs, backend="sync"),
        "async step()": _Stepping(make_env, num_envs, backend="async"),
        "async step(), copy=False": _Stepping(make_env, num_envs, backend="async", copy=False),
        "async send/recv by halves": _Halves(make_env, num_envs, backend="async"),
        "collect(), default connectors": _Collecting(make_env, num_envs),
        "collect(), four connectors": _Collecting(
            make_env,
            num_envs,
            agent_connectors=[
                marlvec.connectors.FlattenObs(),
                marlvec.connectors.NormalizeObs(),
                marlvec.connectors.FrameStack(4),
                marlvec.connectors.AgentIndicator(),
            ],
        ),
    }


def measure(make_env: Callable[[], Any], num_envs: int, rounds: int, seconds: float, label: str) -> dict[str, Any]:
    """Seconds per vector step, (rounds,) per contestant."""
    everybody = contestants(make_env, num_envs)
    try:
        steps = {name: _calibrate(one, seconds) for name, one in everybody.items()}
        times: dict[str, list[float]] = {name: [] for name in everybody}
        for r in track(range(rounds), description=label, transient=True):
            names = list(everybody)
            for name in names if r % 2 == 0 else reversed(names):
                times[name].append(everybody[name].run(steps[name]) / steps[name])
    finally:
        for one in everybody.values():
            one.close()
    return {name: np.array(values) for name, values in times.items()}


def _calibrate(one: Contestant, seconds: float) -> int:
    """Vector steps that take about so many seconds."""
    steps = 8
    while (took := one.run(steps)) < seconds / 4:
        steps *= 2
    return max(1, round(steps * seconds / took))


def report(console: Console, title: str, num_envs: int, times: dict[str, Any]) -> None:
    """Print the table of one env."""
    table = Table(title=title)
    for heading in ("", "µs per vector step", "env steps/s", "share of P", "share of L", "time / hand loop"):
        table.add_column(heading, justify="left" if not heading else "right")
    names = list(times)
    for name, seconds in times.items():
        table.add_row(
            name,
            f"{np.median(seconds) * 1e6:,.0f}",
            f"{num_envs / np.median(seconds):,.0f}",
            spread(times[names[0]] / seconds),
            spread(times[names[1]] / seconds),
            spread(seconds / times[names[2]]),
        )
    console.print(table)
    ratio = spread(times["async step()"] / times["collect(), default connectors"])
    console.print(f"collect() with the default connectors against async step(): {ratio}\n")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=0.12, help="of each contestant in each round")
    parser.add_argument("--env", choices=list(ENVS), default=None, help="only this one")
    args = parser.parse_args()
    console = Console(width=150)
    console.print(
        f"Python {platform.python_version()}, {platform.machine()}, {usable_cores()} usable cores; "
        f"{args.num_envs} envs, {args.rounds} rounds of {args.seconds} s; medians \\[quartiles]\n"
    )
    for name in [args.env] if args.env else list(ENVS):
        report(console, name, args.num_envs, measure(ENVS[name], args.num_envs, args.rounds, args.seconds, name))


if __name__ == "__main__":
    main()
