"""Self-play by turns: a learner against three frozen former selves, drawn anew each episode; native Connect Four.

Run ``python benchmarks/selfplay.py``. Each round times `Collector.collect` and a careful loop written by hand over as
many envs of the same kind, one right after the other, in processor time; the figure is the median of all ratios.

Both play the same games with the same four policies, each of which is asked once a step about all rows that wait for
it, and both give the learner's transitions alone, ordered by env, seat and time: what it saw, did and was allowed, all
it was paid until its next turn, what it saw then, and whether that was the end; the first batches are compared. The
loop by hand knows that there are two players who take turns, that games end in one step for both, and that nobody else
wants to know anything; it keeps no metrics, and gives fewer columns.
"""

from __future__ import annotations

import argparse
import gc
import time
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import marlvec
from marlvec.connectors import Rows
from marlvec.policies import Policy

__all__ = ["HandLoop", "Weights", "by_number", "collector"]

FORMER = 3  # frozen former selves
SIZES = {64: 64, 1024: 32}  # envs to steps of each in one batch


class Weights(Policy):
    """Takes the allowed column that a table likes best; the table has a line for each number of discs on the board."""

    def __init__(self, number: int) -> None:
        self.table = np.random.default_rng(number).random((43, 7))

    def decide(self, obs: Any, mask: Any) -> Any:
        discs = obs.reshape(len(obs), -1).sum(axis=1, dtype=np.int64)
        return (self.table[discs] * mask).argmax(axis=1)

    def act(self, rows: Rows, *, explore: bool = True) -> Any:
        return self.decide(rows["obs"], rows["action_mask"])


def drawn(env_id: Any, number: Any) -> tuple[Any, Any]:
    """Which seat the learner has in an env's n-th episode, and which former self the other has."""
    mixed = (env_id * 2654435761 + number * 40503 + 12345) & 0xFFFF
    return mixed & 1, (mixed >> 3) % FORMER


def by_number(agent: str, episode: Any) -> str:
    """The mapping function that says the same."""
    seat, opponent = drawn(episode.env_id, episode.number)
    return "learner" if agent == f"player_{seat}" else f"former_{opponent}"


def collector(num_envs: int) -> marlvec.Collector:
    """A collector as a user would make it."""
    envs = marlvec.make("connect_four_v3", num_envs=num_envs, backend="native")
    found = marlvec.Collector(envs, {"learner": Weights(0)}, by_number, seed=0)
    for k in range(FORMER):
        found.add_policy(f"former_{k}", Weights(k + 1), frozen=True)
    return found


class HandLoop:
    """The same by hand."""

    def __init__(self, num_envs: int, steps: int) -> None:
        self.envs = marlvec.make("connect_four_v3", num_envs=num_envs, backend="native")
        self.policies = [Weights(k) for k in range(FORMER + 1)]
        self.steps, self.all = steps, np.arange(num_envs)
        self.obs, infos = self.envs.reset(seed=0)
        self.mask, self.acting = infos["action_mask"], infos["acting"]
        self.number = np.zeros(num_envs, np.int64)
        self.seat, former = drawn(self.all, self.number)
        self.other = former + 1
        self.paid = np.zeros(num_envs)
        self.open = np.zeros(num_envs, np.bool_)  # the learner has decided and waits for what comes of it
        n = num_envs
        self.last_obs = np.zeros((n, 6, 7, 2), np.int8)
        self.last_mask = np.zeros((n, 7), np.bool_)
        self.last_action = np.zeros(n, np.int64)

    def run(self) -> dict[str, Any]:
        n, all_, envs = len(self.all), self.all, self.envs
        parts: list[tuple[Any, ...]] = []

        def close(ids: Any, next_obs: Any, over: bool) -> None:
            lanes = ids * 2 + self.seat[ids]
            parts.append(
                (lanes, self.last_obs[ids], self.last_mask[ids], self.last_action[ids], self.paid[ids], next_obs, over)
            )
            self.paid[ids] = 0.0

        for _ in range(self.steps):
            turn = self.acting.argmax(axis=1)
            obs, mask = self.obs[all_, turn], self.mask[all_, turn]
            mine = turn == self.seat
            player = np.where(mine, 0, self.other)
            actions = np.zeros((n, 2), np.int64)
            for k, policy in enumerate(self.policies):
                if len(ids := np.flatnonzero(player == k)):
                    actions[ids, turn[ids]] = chosen = policy.decide(obs[ids], mask[ids])
                    if k == 0:
                        self.last_obs[ids], self.last_mask[ids], self.last_action[ids] = obs[ids], mask[ids], chosen
                        self.open[ids] = True
            self.obs, rewards, terminated, truncated, infos = envs.step(actions)
            self.mask, self.acting = infos["action_mask"], infos["acting"]
            self.paid += rewards[all_, self.seat]
            over = terminated[:, 0] | truncated[:, 0]
            if over.any():
                ended = np.flatnonzero(over)
                if len(told := ended[self.open[ended]]):
                    close(told, infos["final_observation"][told, self.seat[told]], True)
                self.paid[ended], self.open[ended] = 0.0, False
                self.number[ended] += 1
                self.seat[ended], former = drawn(ended, self.number[ended])
                self.other[ended] = former + 1
            if len(back := np.flatnonzero(self.open & self.acting[all_, self.seat])):
                close(back, self.obs[back, self.seat[back]], False)
                self.open[back] = False
        columns = [np.concatenate([part[i] for part in parts]) for i in range(6)]
        terminated = np.concatenate([np.full(len(part[0]), part[6]) for part in parts])
        order = np.argsort(columns[0].astype(np.uint16), kind="stable")
        columns[0] //= 2
        names = ("env_id", "obs", "action_mask", "actions", "rewards", "next_obs")
        return {
            **{name: column[order] for name, column in zip(names, columns, strict=True)},
            "terminated": terminated[order],
        }


def same(rows: Any, columns: dict[str, Any]) -> None:
    """What both give is equal."""
    for name, column in columns.items():
        np.testing.assert_array_equal(rows[name], column, err_msg=name)


def measure(num_envs: int, steps: int, rounds: int) -> list[tuple[float, float]]:
    """Seconds of processor time a step of both."""
    ours, hand = collector(num_envs), HandLoop(num_envs, steps)
    found = []
    for k in range(rounds + 2):
        gc.collect()
        start = time.process_time()
        batch = ours.collect(env_steps=num_envs * steps)
        middle = time.process_time()
        columns = hand.run()
        end = time.process_time()
        if k < 2:
            same(batch["learner"], columns)
        else:
            found.append(((middle - start) / steps, (end - middle) / steps))
    ours.envs.close()
    hand.envs.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--envs", type=int, nargs="+", default=list(SIZES))
    options = parser.parse_args()
    table = Table("envs", "collect, µs a step", "by hand, µs a step", "ratio")
    for num_envs in options.envs:
        found = np.array(measure(num_envs, SIZES.get(num_envs, 32), options.rounds))
        ours, hand = np.median(found, axis=0) * 1e6
        ratio = np.median(found[:, 0] / found[:, 1])
        table.add_row(f"{num_envs:,}", f"{ours:,.0f}", f"{hand:,.0f}", f"{ratio:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
