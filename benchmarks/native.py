"""How fast native worlds are: against a bare loop over mpe2's own env, with one thread and two, and against VMAS.

Run ``python benchmarks/native.py``; ``--env simple_tag`` for another scenario. All contestants take turns in short
rounds; ratios are taken inside a round, and medians over rounds are quoted. Against the bare loop what counts is the
processor time of this process, so that other work on the machine does not; one thread against two is by the clock, and
means something on an idle machine alone. Random actions are made outside of the timer. VMAS takes part if it can be
imported here (it needs torch; its dynamics and seeds are its own, so it does other work).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np
from rich.console import Console
from rich.table import Table

import marlvec

SIZES = (16, 1024, 16384)
Clock = Callable[[], float]


class Bare:
    """One raw env of mpe2, stepped in a loop; nothing around it."""

    num_envs = 1

    def __init__(self, name: str) -> None:
        with marlvec.make(name, backend="native") as envs:
            module = importlib.import_module(f"mpe2.{envs.spec.name}")
        self._env = module.parallel_env()
        rng = np.random.default_rng(0)
        spaces = {agent: self._env.action_space(agent) for agent in self._env.possible_agents}
        self._actions = [{agent: int(rng.integers(space.n)) for agent, space in spaces.items()} for _ in range(64)]
        self._env.reset(seed=0)

    def run(self, steps: int, clock: Clock) -> float:
        """Seconds per env step."""
        begin = clock()
        for t in range(steps):
            self._env.step(self._actions[t & 63])
            if not self._env.agents:
                self._env.reset()
        return (clock() - begin) / steps


class Native:
    """Many worlds under ``make(…).step()``."""

    def __init__(self, name: str, num_envs: int, num_workers: int) -> None:
        self.num_envs = num_envs
        self._envs = marlvec.make(name, num_envs, backend="native", num_workers=num_workers)
        self._envs.reset(seed=0)
        self._actions = [self._envs.random_action(seed=t) for t in range(32)]
        self.run(50, time.perf_counter)

    def run(self, steps: int, clock: Clock) -> float:
        """Seconds per env step; ``steps`` counts those of all envs together."""
        begin = clock()
        for t in range(steps):
            self._envs.step(self._actions[t & 31])
        return (clock() - begin) / (steps * self.num_envs)

    def close(self) -> None:
        self._envs.close()


class Vmas:
    """VMAS on the processor, one thread, episodes reset as mpe2's are: every 25 steps."""

    def __init__(self, name: str, num_envs: int) -> None:
        import torch
        import vmas

        torch.set_num_threads(1)
        self.num_envs = num_envs
        self._env = vmas.make_env(name, num_envs=num_envs, device="cpu", continuous_actions=False)
        generator = torch.Generator().manual_seed(0)
        shape = (num_envs,)
        self._actions = [[torch.randint(0, 5, shape, generator=generator) for _ in self._env.agents] for _ in range(32)]
        self._env.reset()
        self._t = 0

    def run(self, steps: int, clock: Clock) -> float:
        """Seconds per env step."""
        begin = clock()
        for t in range(steps):
            self._env.step(self._actions[t & 31])
            self._t += 1
            if self._t % 25 == 0:
                self._env.reset()
        return (clock() - begin) / (steps * self.num_envs)


def compile_times(name: str) -> str:
    """Seconds that the first make() takes in a new process: with nothing on disk, and with what the one before left."""
    code = (
        "import time, marlvec; t = time.perf_counter(), time.process_time();"
        f"marlvec.make({name!r}, 16, backend='native').close();"
        "print(time.perf_counter() - t[0], time.process_time() - t[1])"
    )
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "NUMBA_CACHE_DIR": folder}
        told = [
            subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True).stdout
            for _ in range(2)
        ]
    (first, cpu), (again, cpu_again) = (map(float, line.split()) for line in told)
    return (
        f"first make(): {first:.1f} s ({cpu:.1f} s of processor time); next process: {again:.2f} s ({cpu_again:.2f} s)"
    )


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env", default="simple_spread")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    console = Console()
    console.print(compile_times(options.env))
    bare = Bare(options.env)
    table = Table(title=f"{options.env}, {options.rounds} rounds")
    for heading in ("envs", "µs a step()", "M env steps/s", "× bare mpe2", "2 threads ÷ 1 (clock)", "× VMAS"):
        table.add_column(heading, justify="right")
    for size in SIZES:
        one, two = Native(options.env, size, 1), Native(options.env, size, 2)
        peer = Vmas(options.env, size) if importlib.util.find_spec("vmas") else None
        steps = max(8, 200_000 // size // 10)
        ratios, gains, leads, costs = [], [], [], []
        for _ in range(options.rounds):
            reference = bare.run(200, time.process_time)
            cost = one.run(steps, time.process_time)
            costs.append(cost)
            ratios.append(reference / cost)
            gains.append(one.run(steps, time.perf_counter) / two.run(steps, time.perf_counter))
            if peer is not None:
                leads.append(peer.run(max(2, steps // 10), time.process_time) / cost)
        one.close()
        two.close()
        cost = float(np.median(costs))
        table.add_row(
            f"{size:,}",
            f"{cost * size * 1e6:,.0f}",
            f"{1e-6 / cost:.2f}",
            f"{np.median(ratios):,.0f}",
            f"{np.median(gains):.2f}",
            f"{np.median(leads):,.1f}" if leads else "–",
        )
    console.print(table)


if __name__ == "__main__":
    main()
