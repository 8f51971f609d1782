"""What `collect()` costs beside a careful loop written by hand, and beside `step()` alone, in processor time.

Run ``python benchmarks/collect_cost.py``. All three run the same envs with the same actions, in turns, one batch each;
figures are medians over the turns of ``time.process_time()``, which waiting and other programs do not change, a tick of
all envs. The loop by hand fills arrays for the six columns that every learner wants and puts them into the collector's
order; that they are the collector's to the bit is checked first. It keeps no episode statistics, and knows one policy
and no connectors. Last, the peak memory of a batch of pictures.
"""

from __future__ import annotations

import argparse
import gc
import platform
import time
import tracemalloc
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray
from pettingzoo import ParallelEnv
from rich.console import Console
from rich.table import Table
from yardsticks import usable_cores

import marlvec
from marlvec.testing import NoOpEnv

COLUMNS = ("obs", "actions", "rewards", "next_obs", "terminated", "truncated")
Batch = dict[str, NDArray[Any]]


class Fixed(marlvec.Policy):
    """Costs nothing: the action is the row's place among the agents."""

    def __init__(self, num_envs: int, agent_num: int) -> None:
        self.actions = np.tile(np.arange(agent_num), num_envs)

    def act(self, rows: Any, *, explore: bool = True) -> Any:
        return self.actions


class Pictures(ParallelEnv):
    """Four agents that see one picture each."""

    metadata: ClassVar = {"name": "pictures"}
    possible_agents: ClassVar = ["a", "b", "c", "d"]

    def observation_space(self, agent: str) -> Box:
        return Box(0, 255, (84, 84, 4), np.uint8)

    def action_space(self, agent: str) -> Discrete:
        return Discrete(4)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = list(self.possible_agents)
        self.told = {agent: np.full((84, 84, 4), k, np.uint8) for k, agent in enumerate(self.agents)}
        return self.told, {agent: {} for agent in self.agents}

    def step(self, actions: Any) -> Any:
        never = dict.fromkeys(self.agents, False)
        return self.told, dict.fromkeys(self.agents, 1.0), never, never, {agent: {} for agent in self.agents}


class ByHand:
    """Steps envs and keeps what a learner wants."""

    def __init__(self, envs: marlvec.VectorEnv, ticks: int) -> None:
        self.envs, self.ticks = envs, ticks
        self.actions_NA = np.tile(np.arange(envs.agent_num), (envs.num_envs, 1))
        self.obs_NA, _ = envs.reset(seed=0)

    def __call__(self) -> Batch:
        """One batch."""
        envs, obs, ticks = self.envs, self.obs_NA, self.ticks
        lead = ticks, envs.num_envs, envs.agent_num
        batch = {
            "obs": np.empty((*lead, *obs.shape[2:]), obs.dtype),
            "actions": np.empty(lead, np.int64),
            "rewards": np.empty(lead),
            "next_obs": np.empty((*lead, *obs.shape[2:]), obs.dtype),
            "terminated": np.empty(lead, np.bool_),
            "truncated": np.empty(lead, np.bool_),
        }
        for t in range(ticks):
            batch["obs"][t], batch["actions"][t] = obs, self.actions_NA
            obs, rewards, terminated, truncated, infos = envs.step(self.actions_NA)
            batch["rewards"][t], batch["terminated"][t], batch["truncated"][t] = rewards, terminated, truncated
            batch["next_obs"][t] = obs
            ended = terminated | truncated
            if ended.any():
                batch["next_obs"][t][ended] = infos["final_obs"][ended]
        self.obs_NA = obs
        # By env, agent and time.
        return {name: x.transpose(1, 2, 0, *range(3, x.ndim)).reshape(-1, *x.shape[3:]) for name, x in batch.items()}


def check_same(console: Console, collected: Any, by_hand: Batch) -> None:
    """Make sure that the two batches are the same."""
    for name in COLUMNS:
        if collected[name].dtype != by_hand[name].dtype or not np.array_equal(collected[name], by_hand[name]):
            raise SystemExit(f"column {name!r} differs")


def read(batch: Any) -> Any:
    """A batch whose columns are all made, as the loop's by hand are; `next_obs` is made when it is read."""
    for name in COLUMNS:
        batch[name]
    return batch


def memory(console: Console, num_envs: int = 16, ticks: int = 64) -> None:
    """Peak memory of a batch of pictures, of which a learner with values of its own reads no successors."""
    with (
        marlvec.make(Pictures, num_envs=num_envs, backend="sync") as collecting,
        marlvec.make(Pictures, num_envs=num_envs, backend="sync") as looping,
    ):
        collector = marlvec.Collector(collecting, Fixed(num_envs, 4), seed=0)
        collector.collect(env_steps=num_envs)
        obs, _ = looping.reset(seed=0)
        actions = np.tile(np.arange(4), (num_envs, 1))

        def by_hand(obs: Any = obs) -> Any:
            kept = np.empty((num_envs, 4, ticks, *obs.shape[2:]), obs.dtype)
            for t in range(ticks):
                kept[:, :, t] = obs
                obs = looping.step(actions)[0]
            return kept, obs

        one = num_envs * ticks * obs[0].nbytes
        peaks = []
        for run in (lambda: collector.collect(env_steps=num_envs * ticks), by_hand):
            gc.collect()
            tracemalloc.start()
            held = run()
            peaks.append(tracemalloc.get_traced_memory()[1] / one)
            tracemalloc.stop()
            del held
    console.print(
        f"{num_envs} envs x 4 agents x (84, 84, 4) x {ticks} steps, peak memory in copies of the observations: "
        f"collect() {peaks[0]:.2f}, by hand without next_obs {peaks[1]:.2f}"
    )


def compare(
    console: Console, table: Table, title: str, make: Callable[[], marlvec.VectorEnv], ticks: int, turns: int
) -> None:
    """One row of the table."""
    with make() as collecting, make() as looping, make() as stepping:
        n, a = stepping.num_envs, stepping.agent_num
        collector = marlvec.Collector(collecting, Fixed(n, a), seed=0)
        by_hand, actions = ByHand(looping, ticks), np.tile(np.arange(a), (n, 1))
        stepping.reset(seed=0)

        def step() -> None:
            for _ in range(ticks):
                stepping.step(actions)

        runs: dict[str, Callable[[], Any]] = {
            "collect()": lambda: read(collector.collect(env_steps=n * ticks)["main"]),
            "by hand": by_hand,
            "step()": step,
        }
        for _ in range(3):
            check_same(console, *[run() for run in list(runs.values())[:2]])
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(turns):
            for name, run in runs.items():
                began = time.process_time()
                run()
                seconds[name].append(time.process_time() - began)
    whole, hand, bare = (np.array(seconds[name]) for name in runs)
    ratios = np.percentile(whole / hand, [25, 50, 75])
    table.add_row(
        title,
        *(f"{np.median(each) / ticks * 1e6:,.0f}" for each in (whole, hand, bare)),
        f"{np.median(whole) / np.median(hand):.2f} ({ratios[0]:.2f}–{ratios[2]:.2f})",
        f"{np.median(bare) / np.median(whole):.2f}",
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15)
    args = parser.parse_args()
    console = Console(width=110)
    console.print(
        f"Python {platform.python_version()}, NumPy {np.__version__}, {usable_cores()} usable cores, "
        f"{args.turns} turns\n"
    )
    table = Table("envs", "collect() µs", "by hand µs", "step() µs", "collect() / by hand", "step() / collect()")
    for n, ticks in ((16, 200), (64, 100)):
        title = f"that do nothing × {n}, sync"
        compare(console, table, title, lambda n=n: marlvec.make(NoOpEnv, num_envs=n, backend="sync"), ticks, args.turns)
    for n, ticks in ((1024, 64), (16384, 16)):
        title = f"simple_spread × {n:,}, native"
        compare(
            console,
            table,
            title,
            lambda n=n: marlvec.make("simple_spread", num_envs=n, backend="native"),
            ticks,
            args.turns,
        )
    console.print(table)
    memory(console)


if __name__ == "__main__":
    main()
