"""What marlvec costs over EnvPool bare: whole steps, and a stream of batches, of the same task in the same run.

Run ``python benchmarks/pools.py``; ``--task Pong-v5`` for another task. All contestants take turns in short rounds;
ratios are taken inside a round, and medians over rounds are quoted: bare time divided by ours, so 1.00 is as fast. By
the clock, which means something on an idle machine alone, and by the processor time of this process with all its
threads, so that other work on the machine does not count. Actions are made outside of the timer. All throw away the
same number of actions: an env whose episode is over is reset by the next step, but in the mode ``same_step``, where
ours resets it at once, which is one more call to the pool; what is counted there are steps that are none of those.
"""

from __future__ import annotations

import argparse
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import envpool
import numpy as np
from rich.console import Console
from rich.table import Table

import marlvec

SIZES = (64, 1024, 4096)
Clock = Callable[[], float]


class Contestant(ABC):
    """Counts what it does: env steps that are no resets, and seconds by two clocks."""

    def __init__(self, num_envs: int, batch_size: int) -> None:
        self.num_envs, self.batch_size = num_envs, batch_size

    @abstractmethod
    def step(self, t: int) -> int:
        """Step once, and return how many env steps that were."""

    def run(self, steps: int) -> tuple[float, float]:
        """Seconds per env step, by the clock and of the processor."""
        done = 0
        begin = time.perf_counter(), time.process_time()
        for t in range(steps):
            done += self.step(t)
        done = max(done, 1)  # the first rows of a stream are all resets
        return (time.perf_counter() - begin[0]) / done, (time.process_time() - begin[1]) / done


class Bare(Contestant):
    """EnvPool's ``step()``, or ``recv()`` and ``send()``."""

    def __init__(self, task: str, num_envs: int, batch_size: int, num_threads: int) -> None:
        super().__init__(num_envs, batch_size)
        self._stream = batch_size < num_envs
        sizes = {"num_envs": num_envs, "batch_size": batch_size, "num_threads": num_threads}
        self._pool = envpool.make(task, env_type="gymnasium", seed=list(range(num_envs)), **sizes)
        self._actions = draw(self._pool.action_space, batch_size)
        self._pool.async_reset()
        if not self._stream:
            self._pool.recv()

    def step(self, t: int) -> int:
        if self._stream:
            *_, info = self._pool.recv()
            self._pool.send(self._actions[t & 31], info["env_id"])
        else:
            *_, info = self._pool.step(self._actions[t & 31])
        return int(np.count_nonzero(info["elapsed_step"]))


class Ours(Contestant):
    """The same task under `marlvec.make`."""

    def __init__(self, task: str, num_envs: int, batch_size: int, num_threads: int, **options: Any) -> None:
        super().__init__(num_envs, batch_size)
        self._stream = batch_size < num_envs
        options = {"batch_size": batch_size, "num_threads": num_threads, **options}
        self._envs = marlvec.make(f"envpool/{task}", num_envs, **options)
        space = self._envs.agent_action_space(0)
        self._actions = [actions[:, None] for actions in draw(space, num_envs)]
        if self._stream:
            self._envs.async_reset(seed=0)
        else:
            self._envs.reset(seed=0)

    def step(self, t: int) -> int:
        if self._stream:
            result = self._envs.recv(min_envs=self.batch_size)
            self._envs.send(self._actions[t & 31][: len(result)], result.env_ids)
            return len(result) - int(np.count_nonzero(result.reset_mask))
        *_, infos = self._envs.step(self._actions[t & 31])
        return self.num_envs - int(np.count_nonzero(infos["reset_mask"]))

    def close(self) -> None:
        self._envs.close()


def draw(space: Any, num_envs: int) -> list[Any]:
    """Random actions of 32 steps."""
    space.seed(0)
    return [np.array([space.sample() for _ in range(num_envs)]) for _ in range(32)]


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", default="CartPole-v1")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=0, help="calls in a round; default: about 60,000 env steps")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", ".*precision lowered by casting", UserWarning)
    table = Table(title=f"{options.task}, {options.threads} threads of EnvPool's, {options.rounds} rounds")
    for heading in ("what", "envs", "rows a call", "bare, µs a call", "bare ÷ ours, clock", "bare ÷ ours, processor"):
        table.add_column(heading, justify="right")
    for size in options.sizes:
        cases: list[tuple[str, int, dict[str, Any]]] = [
            ("step, next_step", size, {"autoreset_mode": "next_step"}),
            ("step, next_step, copy=False", size, {"autoreset_mode": "next_step", "copy": False}),
            ("step, same_step", size, {"autoreset_mode": "same_step"}),
            ("recv and send, next_step", size // 2, {"autoreset_mode": "next_step"}),
            ("recv and send, same_step", size // 2, {"autoreset_mode": "same_step"}),
        ]
        for what, batch, settings in cases:
            bare = Bare(options.task, size, batch, options.threads)
            ours = Ours(options.task, size, batch, options.threads, **settings)
            steps = options.steps or max(20, 60_000 // batch)
            bare.run(steps // 4 + 3)
            ours.run(steps // 4 + 3)
            ratios, calls = [], []
            for turn in range(options.rounds):
                first, second = (bare, ours) if turn % 2 else (ours, bare)
                times = {first: first.run(steps), second: second.run(steps)}
                ratios.append([a / b for a, b in zip(times[bare], times[ours], strict=True)])
                calls.append(times[bare][0] * batch)
            by_clock, by_processor = np.median(ratios, axis=0)
            table.add_row(
                what, str(size), str(batch), f"{1e6 * np.median(calls):.0f}", f"{by_clock:.2f}", f"{by_processor:.2f}"
            )
            ours.close()
    Console().print(table)


if __name__ == "__main__":
    main()
