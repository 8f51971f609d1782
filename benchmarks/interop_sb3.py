"""simple_spread as a VecEnv of Stable-Baselines3: through marlvec's view, and through SuperSuit's chain, in one run.

Run ``python benchmarks/interop_sb3.py`` in an environment that has stable-baselines3 and supersuit. Both step the same
16 raw envs with the same random actions, 48 rows a step. Contestants take turns in short rounds, ratios are taken
inside a round, and medians over rounds are quoted with their quartiles.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from interop_views import ENVS, of_supersuit
from rich.console import Console
from rich.table import Table
from yardsticks import usable_cores

import marlvec
from marlvec.interop.sb3 import SB3VecEnv


def ours(backend: str) -> Any:
    """The same envs through marlvec's view."""
    return SB3VecEnv(marlvec.make("simple_spread", ENVS, backend=backend))


def seconds(env: Any, actions: np.ndarray, steps: int) -> float:
    """How long so many steps take."""
    begin = time.perf_counter()
    for step in range(steps):
        env.step(actions[step % len(actions)])
    return time.perf_counter() - begin


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=100, help="of each contestant in a round")
    args = parser.parse_args()
    makers: dict[str, Callable[[], Any]] = {
        "SuperSuit, one process": lambda: of_supersuit(0, "stable_baselines3"),
        "SuperSuit, 2 processes": lambda: of_supersuit(2, "stable_baselines3"),
        "marlvec sync": lambda: ours("sync"),
        "marlvec async": lambda: ours("async"),
        "marlvec native": lambda: ours("native"),
    }
    envs, table = {}, Table("through", "rows/s", "x SuperSuit, one process", "quartiles")
    console = Console()
    for name, make in makers.items():
        try:
            envs[name] = make()
        except Exception as error:  # what cannot be had is named and left out
            console.print(f"{name}: left out, {type(error).__name__}: {error}", markup=False)
    actions = np.random.default_rng(0).integers(5, size=(64, 3 * ENVS))
    found: dict[str, list[float]] = {name: [] for name in envs}
    for env in envs.values():
        env.reset()
        seconds(env, actions, args.steps)
    for number in range(args.rounds):
        order = list(envs) if number % 2 else list(reversed(envs))
        for name in order:
            found[name].append(seconds(envs[name], actions, args.steps))
    base = np.array(next(iter(found.values())))
    for name, times in found.items():
        low, median, high = np.percentile(base / np.array(times), [25, 50, 75])
        speed = args.steps * 3 * ENVS / float(np.median(times))
        table.add_row(name, f"{speed:,.0f}", f"{median:.2f}", f"{low:.2f} – {high:.2f}")
    libraries = ("stable-baselines3", "supersuit", "pettingzoo", "numpy")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in libraries)
    console.print(f"simple_spread x {ENVS}, {usable_cores()} cores; {versions}")
    console.print(table)
    for env in envs.values():
        env.close()


if __name__ == "__main__":
    main()
