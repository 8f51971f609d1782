"""What TorchRL's envs cost: simple_spread x 16 through marlvec's view, and through TorchRL's own, in one run.

Run ``python benchmarks/interop_torchrl.py``, or ``--quick`` for a short look. Needs torchrl. All get the same random
actions, drawn beforehand, and step by ``step_and_maybe_reset``; they take turns, and ratios are taken within a turn.

* envs: marlvec's vectorizer by itself, without TorchRL.
* view: the same in a `TorchRLEnv`; sync, async and native.
* ParallelEnv, SerialEnv: TorchRL's own, over its PettingZooWrapper.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import marlvec

__all__ = ["CONTESTANTS", "measure"]

N, A = 16, 3

Run = Callable[[int], float]


def bare(backend: str) -> tuple[Run, Callable[[], None]]:
    """The vectorizer by itself."""
    envs = marlvec.make("simple_spread", N, backend=backend)
    envs.reset(seed=0)
    actions = np.random.default_rng(0).integers(5, size=(64, N, A))

    def run(steps: int) -> float:
        began = time.perf_counter()
        for t in range(steps):
            envs.step(actions[t % 64])
        return time.perf_counter() - began

    return run, envs.close


def torchrl(make: Callable[[], Any]) -> tuple[Run, Callable[[], None]]:
    """An env of TorchRL's."""
    import torch

    torch.set_num_threads(1)
    env = make()
    env.set_seed(0)
    td = env.reset()
    actions = torch.randint(5, (64, N, A), generator=torch.Generator().manual_seed(0))

    def run(steps: int) -> float:
        nonlocal td
        began = time.perf_counter()
        for t in range(steps):
            td["agent", "action"] = actions[t % 64]
            _, td = env.step_and_maybe_reset(td)
        return time.perf_counter() - began

    return run, env.close


def view(backend: str) -> Any:
    """Ours."""
    from marlvec.interop.torchrl import TorchRLEnv

    return TorchRLEnv.make("simple_spread", N, backend=backend)


def wrapped() -> Any:
    """One env as TorchRL wraps it."""
    from mpe2 import simple_spread_v3
    from torchrl.envs import PettingZooWrapper

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it was tested with PettingZoo 1.24.3 only, it says
        return PettingZooWrapper(simple_spread_v3.parallel_env())


def theirs(kind: str) -> Any:
    """TorchRL's own."""
    from torchrl import envs

    return getattr(envs, kind)(N, wrapped)


CONTESTANTS: dict[str, Callable[[], tuple[Run, Callable[[], None]]]] = {
    "envs, sync": lambda: bare("sync"),
    "view, sync": lambda: torchrl(lambda: view("sync")),
    "envs, async": lambda: bare("async"),
    "view, async": lambda: torchrl(lambda: view("async")),
    "view, native": lambda: torchrl(lambda: view("native")),
    "TorchRL SerialEnv": lambda: torchrl(lambda: theirs("SerialEnv")),
    "TorchRL ParallelEnv": lambda: torchrl(lambda: theirs("ParallelEnv")),
}


def measure(names: list[str], rounds: int, steps: int) -> dict[str, list[float]]:
    """Microseconds per vector step, one figure a round; in a round all have their turn.

    Args:
        names: Which of `CONTESTANTS`.
        rounds: How many.
        steps: Vector steps of a turn.
    """
    running = {name: CONTESTANTS[name]() for name in names}
    try:
        for run, _ in running.values():
            run(5)
        times = [[run(steps) / steps * 1e6 for run, _ in running.values()] for _ in range(rounds)]
        return dict(zip(names, np.array(times).T.tolist(), strict=True))
    finally:
        for _, close in running.values():
            close()


def main() -> None:
    """Measure all, and say it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    logging.disable(logging.INFO)
    found = measure(list(CONTESTANTS), rounds=3 if quick else 10, steps=20 if quick else 100)
    own = np.array(found["TorchRL ParallelEnv"])
    table = Table("simple_spread x 16", "µs a vector step", "env steps/s", "ParallelEnv's time : its")
    for name, times in found.items():
        times = np.array(times)
        table.add_row(
            name, f"{np.median(times):,.0f}", f"{N * 1e6 / np.median(times):,.0f}", f"{np.median(own / times):.1f}"
        )
    Console().print(table)


if __name__ == "__main__":
    main()
