"""What `collect()` costs beside a careful loop written by hand, and beside `step()` alone, in processor time.

Run ``python benchmarks/collect_cost.py``. All three run the same envs with the same actions, in turns, one batch each;
figures are medians over the turns of ``time.process_time()``, which waiting and other programs do not change, a tick of
all envs. The loop by hand fills arrays for the six columns that every learner wants and puts them into the collector's
order; that they are the collector's to the bit is checked first. It keeps no episode statistics, and knows one policy
and no connectors. A second table has what most learners have: a policy that answers with ``logp`` and ``values``,
without connectors and behind `NormalizeObs`, `FrameStack` and `AgentIndicator`; the loop does the same. Last, the peak
memory of a batch of pictures.
"""

from __future__ import annotations

import argparse
import gc
import platform
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import numpy as np
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray
from pettingzoo import ParallelEnv
from prepared_obs import FRAMES, PreparedObs
from rich.console import Console
from rich.table import Table
from yardsticks import usable_cores

import marlvec
from marlvec.connectors import AgentIndicator, FrameStack, NormalizeObs
from marlvec.testing import NoOpEnv

EXTRAS = ("logp", "values")
COLUMNS = ("obs", "actions", "rewards", "next_obs", "terminated", "truncated")
Batch = dict[str, NDArray[Any]]


class Fixed(marlvec.Policy):
    """Costs nothing: the action is the row's place among the agents."""

    def __init__(self, num_envs: int, agent_num: int) -> None:
        self.actions = np.tile(np.arange(agent_num), num_envs)

    def act(self, rows: Any, *, explore: bool = True) -> Any:
        return self.actions


class Answering(Fixed):
    """Also answers with two numbers a row."""

    def __init__(self, num_envs: int, agent_num: int) -> None:
        super().__init__(num_envs, agent_num)
        self.numbers = np.arange(num_envs * agent_num, dtype=np.float32)

    def act(self, rows: Any, *, explore: bool = True) -> Any:
        rows["obs"]  # as a network does
        return self.actions, dict.fromkeys(EXTRAS, self.numbers)


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
    """Steps envs and keeps what a learner wants; ``answers``: of a policy like `Answering`, too."""

    def __init__(self, envs: marlvec.VectorEnv, ticks: int, *, answers: bool = False, prepared: bool = False) -> None:
        self.envs, self.ticks = envs, ticks
        n, a = envs.num_envs, envs.agent_num
        self.actions_NA = np.tile(np.arange(a), (n, 1))
        self.numbers_NA = np.arange(n * a, dtype=np.float32).reshape(n, a) if answers else None
        obs, _ = envs.reset(seed=0)
        self.prepare = PreparedObs(n * a, obs.shape[2]) if prepared else None
        self.agents_L = np.tile(np.eye(a, dtype=np.float32), (n, 1))
        self.obs_NA = self._seen(np.arange(n * a), obs.reshape(n * a, -1), np.ones(n * a, np.bool_)).reshape(n, a, -1)

    def _seen(self, lanes: NDArray[Any], obs: NDArray[Any], first: NDArray[Any]) -> NDArray[Any]:
        if self.prepare is None:
            return obs
        return np.concatenate([self.prepare(lanes, obs, first), self.agents_L[lanes]], axis=1)

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
        if self.numbers_NA is not None:
            batch |= {name: np.empty(lead, np.float32) for name in EXTRAS}
        every = np.arange(obs.shape[0] * obs.shape[1])
        for t in range(ticks):
            batch["obs"][t], batch["actions"][t] = obs, self.actions_NA
            if self.numbers_NA is not None:
                for name in EXTRAS:
                    batch[name][t] = self.numbers_NA
            raw, rewards, terminated, truncated, infos = envs.step(self.actions_NA)
            batch["rewards"][t], batch["terminated"][t], batch["truncated"][t] = rewards, terminated, truncated
            ended = terminated | truncated
            lanes = np.flatnonzero(ended) if ended.any() else None
            if lanes is not None:
                final = self._seen(lanes, infos["final_obs"][ended], np.zeros(len(lanes), np.bool_))
            obs = raw
            if self.prepare is not None:
                obs = self._seen(every, raw.reshape(len(every), -1), ended.ravel()).reshape(*lead[1:], -1)
            batch["next_obs"][t] = obs
            if lanes is not None:
                batch["next_obs"][t][ended] = final
        self.obs_NA = obs
        # By env, agent and time.
        return {name: x.transpose(1, 2, 0, *range(3, x.ndim)).reshape(-1, *x.shape[3:]) for name, x in batch.items()}


def check_same(collected: Any, by_hand: Batch, *, prepared: bool) -> None:
    """Make sure that the two batches are the same; sums of squares are rounded in another order."""
    for name, column in by_hand.items():
        error = 1e-4 if prepared and name.endswith("obs") else 0
        assert collected[name].dtype == column.dtype, name
        np.testing.assert_allclose(collected[name], column, 0, error, err_msg=name)


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
    table: Table,
    title: str,
    make: Callable[[], marlvec.VectorEnv],
    ticks: int,
    turns: int,
    *,
    answers: bool = False,
    prepared: bool = False,
) -> None:
    """One row of a table."""
    with make() as collecting, make() as looping, make() as stepping:
        n, a = stepping.num_envs, stepping.agent_num
        policy = (Answering if answers else Fixed)(n, a)
        connectors = [NormalizeObs(), FrameStack(FRAMES), AgentIndicator()] if prepared else None
        collector = marlvec.Collector(collecting, policy, agent_connectors=connectors, seed=0)
        by_hand = ByHand(looping, ticks, answers=answers, prepared=prepared)
        actions = np.tile(np.arange(a), (n, 1))
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
            check_same(*[run() for run in list(runs.values())[:2]], prepared=prepared)
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(turns):
            for name, run in runs.items():
                began = time.process_time()
                run()
                seconds[name].append(time.process_time() - began)
    whole, hand, bare = (np.array(seconds[name]) / ticks * 1e6 for name in runs)
    ratios = np.percentile(whole / hand, [25, 50, 75])
    table.add_row(
        title,
        *(f"{np.median(each):,.0f}" for each in (whole, hand, bare, whole - hand)),
        f"{ratios[1]:.2f} ({ratios[0]:.2f}–{ratios[2]:.2f})",
    )


def spread(num_envs: int) -> marlvec.VectorEnv:
    """Native simple_spread."""
    return marlvec.make("simple_spread", num_envs=num_envs, backend="native")


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
    columns = ("collect() µs", "by hand µs", "step() µs", "above by hand µs", "collect() / by hand")
    table = Table("envs", *columns)
    for n, ticks in ((16, 200), (64, 100)):
        make = partial(marlvec.make, NoOpEnv, num_envs=n, backend="sync")
        compare(table, f"that do nothing × {n}, sync", make, ticks, args.turns)
    for n, ticks in ((1024, 64), (16384, 16)):
        compare(table, f"simple_spread × {n:,}, native", partial(spread, n), ticks, args.turns)
    console.print(table)
    table = Table("native simple_spread, logp and values", *columns)
    for prepared in (False, True):
        for n, ticks in ((16, 200), (64, 100), (1024, 64)):
            title = f"× {n:,}, three connectors" if prepared else f"× {n:,}"
            compare(table, title, partial(spread, n), ticks, args.turns, answers=True, prepared=prepared)
    console.print(table)
    memory(console)


if __name__ == "__main__":
    main()
