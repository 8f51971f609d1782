"""How fast native envs are: against a bare loop over the reference, with one thread and two, and beside peers.

Run ``python benchmarks/native.py``; ``--env simple_tag`` for another scenario, ``--env lbf/Foraging-8x8-2p-3f-v3`` for
another family (its reference must be installed). All contestants take turns in short
rounds; ratios are taken inside a round, and medians over rounds are quoted. Against the bare loop what counts is the
processor time of this process, so that other work on the machine does not; one thread against two is by the clock, the
quickest quarter of the steps of each, and means something on an idle machine alone. ``--threads`` measures that and no
more, also where the process may use one core only. Random actions are made outside of the timer. VMAS and JaxMARL
take part if they can be imported here (with torch, with jax; their dynamics and seeds are their own, so they do other
work).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import marlvec
from marlvec.registry import resolve

SIZES = (16, 1024, 16384)
Clock = Callable[[], float]


class Bare:
    """One raw env of the reference, stepped in a loop; nothing around it."""

    num_envs = 1

    def __init__(self, name: str) -> None:
        self._env = resolve(name)()
        rng = np.random.default_rng(0)
        self._joint = not hasattr(self._env, "possible_agents")  # of Gymnasium's kind: actions in a tuple
        if self._joint:
            choices = [int(space.n) for space in self._env.action_space]
            self._actions: list[Any] = [tuple(rng.integers(choices).tolist()) for _ in range(64)]
        else:
            spaces = {agent: self._env.action_space(agent) for agent in self._env.possible_agents}
            self._actions = [{agent: int(rng.integers(space.n)) for agent, space in spaces.items()} for _ in range(64)]
        self._env.reset(seed=0)

    def run(self, steps: int, clock: Clock) -> float:
        """Seconds per env step."""
        begin = clock()
        for t in range(steps):
            _, _, terminated, truncated, _ = self._env.step(self._actions[t & 63])
            if (terminated or truncated) if self._joint else not self._env.agents:
                self._env.reset()
        return (clock() - begin) / steps


class Native:
    """Many envs under ``make(…).step()``."""

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


class JaxMarl:
    """JaxMARL, compiled for the processor, one thread; it resets episodes by itself, every 25 steps."""

    def __init__(self, name: str, num_envs: int) -> None:
        # Read when jax is imported for the first time.
        os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
        os.environ["JAX_PLATFORMS"] = "cpu"
        import jax
        import jaxmarl

        self.num_envs = num_envs
        env = jaxmarl.make(f"MPE_{name}_v3")
        self._key = jax.random.PRNGKey(0)

        def step(key: Any, state: Any, actions: Any) -> Any:
            key, own = jax.random.split(key)
            return key, jax.vmap(env.step)(jax.random.split(own, num_envs), state, actions)

        self._step, self._wait = jax.jit(step), jax.block_until_ready
        rng = np.random.default_rng(0)
        self._actions = [
            {who: jax.numpy.asarray(rng.integers(5, size=num_envs)) for who in env.agents} for _ in range(32)
        ]
        _, self._state = jax.vmap(env.reset)(jax.random.split(self._key, num_envs))
        self.run(2, time.perf_counter)

    def run(self, steps: int, clock: Clock) -> float:
        """Seconds per env step."""
        begin = clock()
        for t in range(steps):
            self._key, (obs, self._state, *told) = self._step(self._key, self._state, self._actions[t & 31])
            self._wait((obs, told))  # a policy has to see them
        return (clock() - begin) / (steps * self.num_envs)


PEERS = {"VMAS": ("vmas", Vmas), "JaxMARL": ("jaxmarl", JaxMarl)}


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


def thread_gain(name: str, size: int, rounds: int, clock: Clock = time.perf_counter) -> tuple[float, float, float]:
    """µs a step() with one thread and with two, and their ratio; the quickest quarter of the steps of each."""
    contestants, steps = [Native(name, size, 1), Native(name, size, 2)], max(8, 60_000 // size)
    times: list[list[float]] = [[], []]
    for _ in range(rounds):
        for contestant, own in zip(contestants, times, strict=True):
            own += [contestant.run(1, clock) * size for _ in range(steps)]
    for contestant in contestants:
        contestant.close()
    one, two = (float(np.quantile(own, 0.25)) for own in times)
    return one * 1e6, two * 1e6, one / two


def thread_gains(name: str, rounds: int) -> Table:
    """Two threads over one: by the clock on all cores, and in processor time where the process may use one core."""
    cores = os.sched_getaffinity(0)
    table = Table(title=f"{name}, {rounds} rounds, load {os.getloadavg()[0]:.1f}")
    for heading in ("cores", "envs", "µs a step(), 1 thread", "2 threads", "2 threads ÷ 1"):
        table.add_column(heading, justify="right")
    for size in SIZES[1:]:
        for own, clock in ((cores, time.perf_counter), ({min(cores)}, time.process_time)):
            os.sched_setaffinity(0, own)
            found = thread_gain(name, size, rounds, clock)
            table.add_row(str(len(own)), f"{size:,}", *(f"{value:,.2f}" for value in found))
    os.sched_setaffinity(0, cores)
    return table


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env", default="simple_spread")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bare", type=int, default=200, help="steps of the reference in a round")
    parser.add_argument("--threads", action="store_true", help="measure two threads against one, and no more")
    options = parser.parse_args()
    console = Console()
    if options.threads:
        console.print(thread_gains(options.env, options.rounds))
        return
    console.print(compile_times(options.env))
    bare = Bare(options.env)
    table = Table(title=f"{options.env}, {options.rounds} rounds")
    for heading in (
        "envs",
        "µs a step()",
        "M env steps/s",
        "× bare reference",
        "2 threads ÷ 1 (clock)",
        *(f"× {name}" for name in PEERS),
    ):
        table.add_column(heading, justify="right")
    for size in SIZES:
        one = Native(options.env, size, 1)
        peers = {
            name: make(options.env, size)
            for name, (module, make) in PEERS.items()
            if importlib.util.find_spec(module) and "/" not in options.env
        }
        steps = max(8, 200_000 // size // 10)
        ratios, costs = [], []
        leads: dict[str, list[float]] = {name: [] for name in peers}
        for _ in range(options.rounds):
            reference = bare.run(options.bare, time.process_time)
            cost = one.run(steps, time.process_time)
            costs.append(cost)
            ratios.append(reference / cost)
            for name, peer in peers.items():
                leads[name].append(peer.run(max(2, steps // 10), time.process_time) / cost)
        one.close()
        cost = float(np.median(costs))
        table.add_row(
            f"{size:,}",
            f"{cost * size * 1e6:,.0f}",
            f"{1e-6 / cost:.2f}",
            f"{np.median(ratios):,.0f}",
            f"{thread_gain(options.env, size, options.rounds)[2]:.2f}",
            *(f"{np.median(leads[name]):,.1f}" if name in leads else "–" for name in PEERS),
        )
    console.print(table)


if __name__ == "__main__":
    main()
