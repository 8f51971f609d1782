"""What marlvec's own work beside the envs costs in one process, in processor time: the bounds of cheap envs.

Run ``python benchmarks/step_cost.py``. Each line has two contestants who step the same envs with the same actions, in
turns of some milliseconds; a ratio is taken inside each pair of turns, and its median over all is quoted with its
quartiles: the other's time divided by ours, so 1.00 is equal and more is better. It is processor time
(`time.process_time`), so that others on the machine disturb it little.

* CartPole-v1 x 16: Gymnasium's ``SyncVectorEnv`` beside ``make(backend="sync").step()``, in both autoreset modes, and
  beside `GymnasiumVectorEnv`; with ``RecordEpisodeStatistics`` beside `CleanRLVectorEnv`.
* Three agents that do nothing x 16: a careful hand-written loop that fills (N, A, …) arrays beside ``step()``.
* One simple_spread: the raw Parallel env beside `ParallelView`.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
from interop_views import ENVS, Walk, for_cleanrl, for_gymnasium, for_parallel, gymnasium_rows, of_cleanrl, parallel
from rich.console import Console
from rich.table import Table
from yardsticks import HandLoop, spread, usable_cores

import marlvec
from marlvec.testing import NoOpEnv


def of_gymnasium(mode: str) -> Walk:
    """Gymnasium's own in one process."""
    chosen = {"autoreset_mode": gymnasium.vector.AutoresetMode[mode.upper()]}
    envs = gymnasium.make_vec("CartPole-v1", ENVS, vectorization_mode="sync", vector_kwargs=chosen)
    return gymnasium_rows(envs, 2)


def stepping(env: Any, choices: int, **settings: Any) -> Walk:
    """Our ``step()``."""
    envs = marlvec.make(env, ENVS, backend="sync", **settings)
    envs.reset(seed=0)
    actions = np.random.default_rng(0).integers(choices, size=(64, ENVS, envs.agent_num))
    while True:
        for chosen in actions:
            envs.step(chosen)
            yield


def by_hand() -> Walk:
    """The hand-written loop over envs that do nothing."""
    loop = HandLoop(NoOpEnv, ENVS)
    actions = np.random.default_rng(0).integers(5, size=(64, ENVS, 3))
    while True:
        for chosen in actions:
            loop.step(chosen)
            yield


def raw_spread() -> Walk:
    """One raw env."""
    from mpe2 import simple_spread_v3

    return parallel(simple_spread_v3.parallel_env())


PAIRS: dict[str, tuple[Callable[[], Walk], Callable[[], Walk]]] = {
    "CartPole, step(), next_step": (
        lambda: of_gymnasium("next_step"),
        lambda: stepping("CartPole-v1", 2, autoreset_mode="next_step"),
    ),
    "CartPole, step(), same_step": (lambda: of_gymnasium("same_step"), lambda: stepping("CartPole-v1", 2)),
    "CartPole, GymnasiumVectorEnv": (
        lambda: of_gymnasium("next_step"),
        lambda: gymnasium_rows(for_gymnasium("sync"), 2),
    ),
    "CartPole, CleanRLVectorEnv": (
        lambda: gymnasium_rows(of_cleanrl("sync"), 2),
        lambda: gymnasium_rows(for_cleanrl("sync"), 2),
    ),
    "no-op, step()": (by_hand, lambda: stepping(NoOpEnv, 5)),
    "simple_spread, ParallelView": (raw_spread, lambda: parallel(for_parallel("sync"))),
}


def seconds(walk: Iterator[None], steps: int) -> float:
    """Processor time of so many steps."""
    began = time.process_time()
    for _ in range(steps):
        next(walk)
    return time.process_time() - began


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--steps", type=int, default=20, help="of each contestant in a turn")
    parser.add_argument("--only", nargs="*", default=list(PAIRS), help="parts of names")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    table = Table("what", "the other, µs a step", "ours", "other : ours [quartiles]")
    for name, makers in PAIRS.items():
        if not any(part in name for part in args.only):
            continue
        walks = [make() for make in makers]
        for walk in walks:
            seconds(walk, 300)
        found: list[list[float]] = [[], []]
        for number in range(args.rounds):
            for k in (0, 1) if number % 2 else (1, 0):
                found[k].append(seconds(walks[k], args.steps))
        other, ours = np.array(found) / args.steps * 1e6
        table.add_row(name, f"{np.median(other):,.1f}", f"{np.median(ours):,.1f}", spread(other / ours))
    console = Console()
    console.print(f"{usable_cores()} cores; gymnasium {gymnasium.__version__}, numpy {np.__version__}")
    console.print(table)


if __name__ == "__main__":
    main()
