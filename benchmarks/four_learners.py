"""What `collect()` costs with four learners in two groups, beside a loop by hand: native simple_tag, processor time.

Run ``python benchmarks/four_learners.py``. Each agent of simple_tag has a policy of its own: three adversaries, which
share a group of spaces, and the agent they chase. Both run the same envs with the same actions, in turns, one batch
each; the batches are compared first. Figures are medians over the turns, a step of all envs.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prepared_obs import FRAMES, PreparedObs
from rich.console import Console
from rich.table import Table

import marlvec
from marlvec.connectors import FrameStack, NormalizeObs, Rows
from marlvec.policies import Policy

SIZES = {64: 100, 1024: 50}  # envs to steps of each in one batch
COLUMNS = ("obs", "actions", "rewards", "next_obs", "terminated", "truncated")


class Same(Policy):
    """Always acts the same."""

    def __init__(self, action: int) -> None:
        self.action = action

    def act(self, rows: Rows, *, explore: bool = True) -> Any:
        return np.full(len(rows), self.action)


class ByHand:
    """Steps envs and keeps what four learners want."""

    def __init__(self, num_envs: int, ticks: int, prepared: bool) -> None:
        self.envs, self.ticks = marlvec.make("simple_tag", num_envs=num_envs, backend="native"), ticks
        self.groups = {group.name: group.agents for group in self.envs.spec.groups}
        self.actions = {name: np.tile(np.array(agents), (num_envs, 1)) for name, agents in self.groups.items()}
        obs, _ = self.envs.reset(seed=0)
        self.every = np.arange(num_envs)
        self.prepare: dict[int, PreparedObs] = {}
        if prepared:
            self.prepare = {
                a: PreparedObs(num_envs, obs[name].shape[-1]) for name, agents in self.groups.items() for a in agents
            }
        first = np.ones(num_envs, np.bool_)
        self.seen = {
            a: self._seen(a, self.every, obs[name][:, place], first)
            for name, agents in self.groups.items()
            for place, a in enumerate(agents)
        }

    def _seen(self, a: int, ids: NDArray[Any], obs: NDArray[Any], first: NDArray[Any]) -> NDArray[Any]:
        return self.prepare[a](ids, obs, first) if self.prepare else obs

    def __call__(self) -> dict[str, dict[str, NDArray[Any]]]:
        """One batch: agent to column."""
        envs, ticks, n = self.envs, self.ticks, self.envs.num_envs
        found: dict[int, dict[str, NDArray[Any]]] = {
            a: {
                "obs": np.empty((n, ticks, *obs.shape[1:]), obs.dtype),
                "actions": np.full((n, ticks), a),
                "rewards": np.empty((n, ticks)),
                "next_obs": np.empty((n, ticks, *obs.shape[1:]), obs.dtype),
                "terminated": np.empty((n, ticks), np.bool_),
                "truncated": np.empty((n, ticks), np.bool_),
            }
            for a, obs in self.seen.items()
        }
        for t in range(ticks):
            obs, rewards, terminated, truncated, infos = envs.step(self.actions)
            over = terminated | truncated
            any_over = over.any()
            for name, agents in self.groups.items():
                for place, a in enumerate(agents):
                    own, first = found[a], over[:, a]
                    own["obs"][:, t] = self.seen[a]
                    own["rewards"][:, t] = rewards[:, a]
                    own["terminated"][:, t], own["truncated"][:, t] = terminated[:, a], truncated[:, a]
                    if any_over:
                        ended = np.flatnonzero(first)
                        final = self._seen(a, ended, infos["final_obs"][name][ended, place], ~first[ended])
                    seen = self.seen[a] = self._seen(a, self.every, obs[name][:, place], first)
                    own["next_obs"][:, t] = seen
                    if any_over:
                        own["next_obs"][ended, t] = final
        return {
            envs.agents[a]: {name: x.reshape(n * ticks, *x.shape[2:]) for name, x in own.items()}
            for a, own in found.items()
        }


def measure(num_envs: int, ticks: int, turns: int, prepared: bool) -> tuple[float, float]:
    """Microseconds a step of both."""
    by_hand = ByHand(num_envs, ticks, prepared)
    with by_hand.envs, marlvec.make("simple_tag", num_envs=num_envs, backend="native") as envs:
        policies = {name: Same(a) for a, name in enumerate(envs.agents)}
        connectors = [NormalizeObs(), FrameStack(FRAMES)] if prepared else None
        mapping = {name: name for name in envs.agents}
        collector = marlvec.Collector(envs, policies, mapping, agent_connectors=connectors, seed=0)
        ours, hand = [], []
        for k in range(turns + 3):
            began = time.process_time()
            batch = collector.collect(env_steps=num_envs * ticks)
            middle = time.process_time()
            columns = by_hand()
            ended = time.process_time()
            if k < 3:
                for agent, own in columns.items():
                    for name in COLUMNS:
                        exact = not prepared or not name.endswith("obs")  # sums of squares are rounded in another order
                        error = 0 if exact else 1e-4
                        np.testing.assert_allclose(batch[agent][name], own[name], 0, error, err_msg=f"{agent} {name}")
            else:
                ours.append(middle - began)
                hand.append(ended - middle)
    return float(np.median(ours)) / ticks * 1e6, float(np.median(hand)) / ticks * 1e6


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=15)
    args = parser.parse_args()
    table = Table("envs", "connectors", "collect() µs", "by hand µs", "ratio")
    for num_envs, ticks in SIZES.items():
        for prepared in (False, True):
            whole, hand = measure(num_envs, ticks, args.turns, prepared)
            named = "NormalizeObs, FrameStack" if prepared else "none"
            table.add_row(f"{num_envs:,}", named, f"{whole:,.0f}", f"{hand:,.0f}", f"{whole / hand:.2f}")
    Console(width=90).print(table)


if __name__ == "__main__":
    main()
