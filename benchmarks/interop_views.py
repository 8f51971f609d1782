"""What marlvec's views cost beside the envs of the libraries that they are for, the same raw envs in the same run.

Run ``python benchmarks/interop_views.py``. Libraries that are not installed are named and left out; those with
benchmarks of their own are in `interop_sb3`, `interop_torchrl` and `interop_rllib`. All contestants of a table step the
same raw envs with random actions. They take turns in short rounds, ratios are taken inside a round, and medians over
rounds are quoted with their quartiles: the library's own time divided by the view's, so 2.00 is twice as fast.

* Gymnasium, CleanRL: CartPole-v1 x 16; its own vector envs, for CleanRL with ``RecordEpisodeStatistics``.
* SuperSuit: simple_spread x 16, both calls of its chain.
* PettingZoo: one simple_spread, and one tic-tac-toe by turns; the raw env itself is what it is measured by.
* Tianshou: simple_spread x 16, agents one after the other; its ``PettingZooEnv`` in a ``DummyVectorEnv``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from mpe2 import simple_spread_v3
from rich.console import Console
from rich.progress import track
from rich.table import Table
from yardsticks import usable_cores

import marlvec

ENVS = 16

Walk = Iterator[None]
"""Makes a step each time it is asked for the next item."""


def gymnasium_rows(envs: Any, choices: int) -> Walk:
    """A vector env of Gymnasium's kind, with so many choices: one call for all rows."""
    actions = np.random.default_rng(0).integers(choices, size=(64, envs.num_envs))
    envs.reset(seed=0)
    while True:
        for chosen in actions:
            envs.step(chosen)
            yield


def parallel(env: Any) -> Walk:
    """A Parallel env: dicts of agents."""
    rng = np.random.default_rng(0)
    while True:
        env.reset()
        while env.agents:
            env.step(dict(zip(env.agents, rng.integers(5, size=len(env.agents)).tolist(), strict=True)))
            yield


def turns(env: Any) -> Walk:
    """An AEC env, a move at a time."""
    rng = np.random.default_rng(0)
    while True:
        env.reset()
        for _ in env.agent_iter():
            obs, _, terminated, truncated, _ = env.last()
            if terminated or truncated:
                env.step(None)
                continue
            env.step(int(rng.choice(np.flatnonzero(obs["action_mask"]))))
            yield


def tianshou_rows(envs: Any) -> Walk:
    """A vector env of Tianshou's kind, whose collector resets what has ended."""
    actions = np.random.default_rng(0).integers(5, size=(64, ENVS))
    envs.reset()
    while True:
        for chosen in actions:
            _, _, terminated, truncated, _ = envs.step(chosen)
            over = np.flatnonzero(terminated | truncated)
            if len(over):
                envs.reset(over)
            yield


def of_gymnasium(kind: str) -> Any:
    """Gymnasium's own."""
    return gymnasium.make_vec("CartPole-v1", ENVS, vectorization_mode=kind)


def for_gymnasium(backend: str) -> Any:
    """Ours, in the mode that Gymnasium's own have by default."""
    from marlvec.interop.gymnasium import GymnasiumVectorEnv

    return GymnasiumVectorEnv(marlvec.make("CartPole-v1", ENVS, backend=backend, autoreset_mode="next_step"))


def of_cleanrl(kind: str) -> Any:
    """What CleanRL's scripts build."""
    from gymnasium.wrappers.vector import RecordEpisodeStatistics

    mode = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}
    return RecordEpisodeStatistics(gymnasium.make_vec("CartPole-v1", ENVS, vectorization_mode=kind, vector_kwargs=mode))


def for_cleanrl(backend: str) -> Any:
    """Ours."""
    from marlvec.interop.cleanrl import CleanRLVectorEnv

    return CleanRLVectorEnv(marlvec.make("CartPole-v1", ENVS, backend=backend))


def of_supersuit(num_cpus: int, base_class: str = "gymnasium") -> Any:
    """SuperSuit's chain; its ``base_class`` is whose vector env it is to be."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import supersuit
    rows = supersuit.pettingzoo_env_to_vec_env_v1(simple_spread_v3.parallel_env())
    return supersuit.concat_vec_envs_v1(rows, ENVS, num_cpus=num_cpus, base_class=base_class)


def for_supersuit(num_cpus: int) -> Any:
    """The same two calls, ours."""
    from marlvec.interop.supersuit import concat_vec_envs_v1, pettingzoo_env_to_vec_env_v1

    rows = pettingzoo_env_to_vec_env_v1(simple_spread_v3.parallel_env())
    return concat_vec_envs_v1(rows, ENVS, num_cpus=num_cpus, base_class="gymnasium")


def for_parallel(backend: str) -> Any:
    """One env, Parallel."""
    from marlvec.interop.pettingzoo import ParallelView

    return ParallelView.make("simple_spread", backend=backend)


def of_turns() -> Any:
    """PettingZoo's own."""
    from pettingzoo.classic import tictactoe_v3

    return tictactoe_v3.env()


def for_turns(backend: str) -> Any:
    """One env, by turns."""
    from marlvec.interop.pettingzoo import AECView

    return AECView.make("tictactoe", backend=backend)


def of_tianshou() -> Any:
    """Tianshou's own."""
    from pettingzoo.utils.conversions import parallel_to_aec
    from tianshou.env import DummyVectorEnv, PettingZooEnv

    return DummyVectorEnv([lambda: PettingZooEnv(parallel_to_aec(simple_spread_v3.parallel_env()))] * ENVS)


def for_tianshou(backend: str) -> Any:
    """Ours."""
    from marlvec.interop.tianshou import TianshouTurnVectorEnv

    return TianshouTurnVectorEnv.make("simple_spread", ENVS, backend=backend)


# What is measured, how it is stepped, and who takes part; the first is what the others are measured by.
Makers = dict[str, Callable[[], Any]]
TABLES: dict[str, tuple[Callable[[Any], Walk], Makers]] = {
    "Gymnasium": (
        partial(gymnasium_rows, choices=2),
        {
            "SyncVectorEnv": partial(of_gymnasium, "sync"),
            "AsyncVectorEnv": partial(of_gymnasium, "async"),
            "view, sync": partial(for_gymnasium, "sync"),
            "view, async": partial(for_gymnasium, "async"),
        },
    ),
    "CleanRL": (
        partial(gymnasium_rows, choices=2),
        {
            "SyncVectorEnv and RecordEpisodeStatistics": partial(of_cleanrl, "sync"),
            "view, sync": partial(for_cleanrl, "sync"),
        },
    ),
    "SuperSuit": (
        partial(gymnasium_rows, choices=5),
        {
            "one process": partial(of_supersuit, 0),
            "2 processes": partial(of_supersuit, 2),
            "ours, one process": partial(for_supersuit, 0),
            "ours, 2 processes": partial(for_supersuit, 2),
        },
    ),
    "PettingZoo, Parallel": (
        parallel,
        {
            "the raw env": simple_spread_v3.parallel_env,
            "view, sync": partial(for_parallel, "sync"),
            "view, native": partial(for_parallel, "native"),
        },
    ),
    "PettingZoo, AEC": (
        turns,
        {
            "the raw env, as PettingZoo wraps it": of_turns,
            "view, sync": partial(for_turns, "sync"),
            "view, native": partial(for_turns, "native"),
        },
    ),
    "Tianshou": (
        tianshou_rows,
        {
            "PettingZooEnv in a DummyVectorEnv": of_tianshou,
            "view, sync": partial(for_tianshou, "sync"),
            "view, async": partial(for_tianshou, "async"),
            "view, native": partial(for_tianshou, "native"),
        },
    ),
}


def seconds(walk: Walk, steps: int) -> float:
    """How long so many steps take."""
    began = time.perf_counter()
    for _ in range(steps):
        next(walk)
    return time.perf_counter() - began


def measure(name: str, rounds: int, steps: int, console: Console) -> dict[str, list[float]]:
    """Seconds of each round, by contestant; see `TABLES`. What cannot be had is named and left out."""
    (step, makers), envs = TABLES[name], {}
    for label, make in makers.items():
        try:
            envs[label] = make()
        except ImportError as error:
            console.print(f"{name}, {label}: left out, {error}", markup=False)
    walks = {label: step(env) for label, env in envs.items()}
    found: dict[str, list[float]] = {label: [] for label in walks}
    for walk in walks.values():
        seconds(walk, max(5, steps // 4))
    for number in track(range(rounds), name, transient=True):
        for label in list(walks) if number % 2 else reversed(walks):
            found[label].append(seconds(walks[label], steps))
    for env in envs.values():
        env.close()
    # SuperSuit's close() leaves its processes behind, and the end of this one would wait for them for ever.
    for process in multiprocessing.active_children():
        process.terminate()
    return found


def main() -> None:
    """Measure, and print a table for each library."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=200, help="of each contestant in a round")
    parser.add_argument("--only", nargs="*", choices=list(TABLES), default=list(TABLES))
    args = parser.parse_args()
    console = Console()
    warnings.simplefilter("ignore")
    libraries = ("gymnasium", "pettingzoo", "supersuit", "tianshou", "numpy")
    have = {dist.metadata["Name"].lower() for dist in importlib.metadata.distributions()}
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in libraries if name in have)
    console.print(f"{usable_cores()} cores; {versions}")
    for name in args.only:
        found = measure(name, args.rounds, args.steps, console)
        base = np.array(found.get(next(iter(TABLES[name][1])), ()))
        if not len(base):  # its own is not there
            continue
        table = Table("through", "µs a step", "own time : its", "quartiles", title=name)
        for label, times in found.items():
            low, median, high = np.percentile(base / np.array(times), [25, 50, 75])
            each = 1e6 * float(np.median(times)) / args.steps
            table.add_row(label, f"{each:,.1f}", f"{median:.2f}", f"{low:.2f} – {high:.2f}")
        console.print(table)


if __name__ == "__main__":
    main()
