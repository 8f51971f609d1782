"""What collecting costs: `collect()` against `step()` on the same envs, and the memory of a long run.

Run ``python benchmarks/collecting.py``. As in `limit`, contestants take turns in short rounds, ratios are taken inside
a round, and medians over rounds are quoted with their quartiles. On a machine that does other things, look at the CPU
seconds of the envs that do nothing, which waiting does not change.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from parts import Run, Sleeper, _stepping, measure, report
from rich.console import Console
from yardsticks import usable_cores

import marlvec
from marlvec.testing import NoOpEnv


class Ponderer(marlvec.RandomPolicy):
    """Waits 1 ms a row, as for an accelerator, before it acts at random."""

    def act(self, rows: Any, *, explore: bool = True) -> Any:
        time.sleep(1e-3 * len(rows))
        return super().act(rows, explore=explore)


def _collecting(envs: marlvec.VectorEnv, policy: marlvec.Policy, **options: Any) -> Run:
    collector = marlvec.Collector(envs, policy, seed=0, **options)

    def run(vector_steps: int) -> float:
        start = time.perf_counter()
        collector.collect(env_steps=vector_steps * envs.num_envs)
        return time.perf_counter() - start

    return run


def compare(
    console: Console,
    title: str,
    env: Any,
    rounds: int,
    seconds: float,
    policy: type[marlvec.Policy] = marlvec.RandomPolicy,
    **options: Any,
) -> None:
    """`step()`, `collect()`, and `collect()` with overlap, on envs of their own."""
    names = "step()", "collect()", "collect(), overlap=True"
    made = {name: marlvec.make(env, **options) for name in names}
    try:
        runs = {names[0]: _stepping(made[names[0]])}
        runs |= {name: _collecting(made[name], policy(), overlap=name != names[1]) for name in names[1:]}
        report(console, title, measure(runs, rounds, seconds, title), names[0])
    finally:
        for each in made.values():
            each.close()


def per_row(console: Console, num_envs: int, rounds: int, ticks: int = 200) -> None:
    """CPU time of a whole tick on envs that do nothing, in one process, and of its part outside the envs."""
    with (
        marlvec.make(NoOpEnv, num_envs=num_envs, backend="sync") as envs,
        marlvec.make(NoOpEnv, num_envs=num_envs, backend="sync") as bare,
    ):
        collector = marlvec.Collector(envs, marlvec.RandomPolicy(), seed=0)
        collector.collect(env_steps=ticks * num_envs)
        step = _stepping(bare)
        whole, stepping = [], []
        for _ in range(rounds):
            start = time.process_time()
            collector.collect(env_steps=ticks * num_envs)
            middle = time.process_time()
            step(ticks)
            whole.append(middle - start)
            stepping.append(time.process_time() - middle)
        rows = ticks * num_envs * envs.agent_num
        tick, outside = np.median(whole) / rows, np.median(np.subtract(whole, stepping)) / rows
    console.print(
        f"NoOpEnv x {num_envs}, sync, CPU time a row: {tick * 1e6:.2f} µs a whole tick, "
        f"{outside * 1e6:.2f} µs of it beside step()\n"
    )


def _resident() -> float:
    """Resident memory of this process, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 2**20


def memory(console: Console, million_rows: float) -> None:
    """Resident memory while rows come in, in batches of 4,096 env steps; episodes end all the time."""
    with marlvec.make(NoOpEnv, num_envs=64, backend="sync", length=25) as envs:
        collector = marlvec.Collector(envs, marlvec.RandomPolicy(), seed=0)
        sizes: list[tuple[int, float]] = []
        while collector.metrics.agent_steps < million_rows * 1e6:
            collector.collect(env_steps=4096)
            sizes.append((collector.metrics.agent_steps, _resident()))
    warm = next(size for rows, size in sizes if rows >= 100_000)
    console.print(
        f"{sizes[-1][0]:,} agent rows: {warm:.1f} MiB after the first 100,000, at most "
        f"{max(size for rows, size in sizes if rows >= 100_000):.1f} MiB after that, {sizes[-1][1]:.1f} MiB at the end"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=0.3, help="of each contestant in each round")
    parser.add_argument("--million-rows", type=float, default=1.0, help="for the memory")
    args = parser.parse_args()
    console = Console(width=110)
    console.print(f"Python {platform.python_version()}, {usable_cores()} usable cores, {args.rounds} rounds\n")
    spread = "mpe/simple_spread_v3"
    compare(console, "simple_spread x 16, async", spread, args.rounds, args.seconds, num_envs=16)
    for backend in ("sync", "async"):
        title = f"envs that do nothing x 64, {backend}"
        compare(console, title, NoOpEnv, args.rounds, args.seconds, num_envs=64, backend=backend)
    title = "envs that wait 10 ms x 16, 4 workers, a policy that waits 1 ms a row"
    waiting = partial(Sleeper, 0.01)
    compare(console, title, waiting, args.rounds, args.seconds, Ponderer, num_envs=16, num_workers=4)
    per_row(console, 64, args.rounds)
    memory(console, args.million_rows)


if __name__ == "__main__":
    main()
