"""EnvPool under TorchRL: its own `MultiThreadedEnv` beside marlvec, and beside EnvPool bare, in one run.

Run ``python benchmarks/pools_torchrl.py``; needs envpool, torchrl and treevalue. All step the same task with one thread
of EnvPool's; TorchRL's envs by ``step_and_maybe_reset``. They take turns, ratios are taken within a turn, and medians
are told, by the clock and by the processor time of this process. An env whose episode is over is reset by the next
step everywhere but in marlvec's view, whose envs go on in the same step, which is one more call to the pool.

`MultiThreadedEnv` of TorchRL 0.14 knows the spaces of ``gym`` only, and EnvPool 1.2 has those of gymnasium only; so
gymnasium goes by both names here.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from pools import Bare, Ours
from rich.console import Console
from rich.table import Table

TASK = "CartPole-v1"

Step = Callable[[int], Any]


def bare(num_envs: int) -> Step:
    """EnvPool's own ``step()``."""
    return Bare(TASK, num_envs, num_envs, 1).step


def envs(num_envs: int) -> Step:
    """The vectorizer by itself."""
    return Ours(TASK, num_envs, num_envs, 1, autoreset_mode="next_step").step


def view(num_envs: int) -> Step:
    """Ours in the form that TorchRL takes."""
    from marlvec.interop.torchrl import TorchRLEnv

    return _stepping(TorchRLEnv.make(f"envpool/{TASK}", num_envs, num_threads=1))


def theirs(num_envs: int) -> Step:
    """TorchRL's."""
    sys.modules["gym"] = gymnasium
    from torchrl.envs import MultiThreadedEnv

    return _stepping(MultiThreadedEnv(num_envs, TASK, create_env_kwargs={"num_threads": 1}))


def _stepping(env: Any) -> Step:
    import torch

    torch.set_num_threads(1)
    td = env.reset()
    (key,) = env.action_keys
    actions = [env.full_action_spec[key].rand() for _ in range(32)]

    def step(t: int) -> None:
        nonlocal td
        td[key] = actions[t & 31]
        _, td = env.step_and_maybe_reset(td)

    return step


CONTESTANTS: dict[str, Callable[[int], Step]] = {
    "EnvPool bare": bare,
    "marlvec": envs,
    "marlvec's env for TorchRL": view,
    "TorchRL's MultiThreadedEnv": theirs,
}


def turn(step: Step, steps: int) -> tuple[float, float]:
    """Seconds a step, by the clock and of the processor."""
    began = time.perf_counter(), time.process_time()
    for t in range(steps):
        step(t)
    return (time.perf_counter() - began[0]) / steps, (time.process_time() - began[1]) / steps


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    table = Table("envs", "what", "µs a step", "MultiThreadedEnv's time : its, clock", "processor")
    for size in options.sizes:
        steps = max(20, 20_000 // size)
        running = {name: make(size) for name, make in CONTESTANTS.items()}
        for step in running.values():
            turn(step, steps)
        times = np.array([[turn(step, steps) for step in running.values()] for _ in range(options.rounds)])
        ratios = np.median(times[:, -1:] / times, axis=0)
        for name, by_clock, (clock, processor) in zip(running, np.median(times, axis=0)[:, 0], ratios, strict=True):
            table.add_row(str(size), name, f"{1e6 * by_clock:,.0f}", f"{clock:.2f}", f"{processor:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
