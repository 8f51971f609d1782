"""What it costs to be driven from outside: an action for a simulator in a thread, against plainer ways to the same.

Run ``python benchmarks/external.py``. Each round times all ways, one right after the other, in the same process; a
figure is the median of the rounds. The policy is the same, and it does next to nothing; so does the simulator. It is
the processor's time that counts, of all threads together, so that other processes do not.

* *call*: ``policy.act`` alone, with rows that are there already: what cannot be done without.
* *inside*: the same env in a sync vectorizer, stepped by a collector: what the road costs without a second thread.
* *outside*: ``get_action`` and ``log_returns`` of an `ExternalEnv` in a thread, and the collector in another.

A row in and an action out are two wake-ups of a thread; *hand-over* is those alone: two threads that hand each other
nothing through a pair of queues.
"""

from __future__ import annotations

import argparse
import queue
import threading
import time
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete
from rich.console import Console
from rich.table import Table

import marlvec
from marlvec import external
from marlvec.connectors import Rows
from marlvec.external import ExternalEnv

__all__ = ["measure"]

OBS, ACTION = Box(-1, 1, (8,), np.float32), Discrete(4)
LENGTH = 100  # steps an episode


def agents_of(num: int) -> list[str]:
    """Names of agents."""
    return [f"agent_{a}" for a in range(num)]


def make_policy() -> marlvec.Policy:
    """Always does the same."""
    return marlvec.FunctionPolicy(lambda rows: np.zeros(len(rows), np.int64))


class Simulator:
    """A PettingZoo Parallel env that does next to nothing."""

    def __init__(self, num: int) -> None:
        self.possible_agents = self.agents = agents_of(num)
        self.metadata = {"name": "nothing"}
        self._obs = {agent: np.zeros(8, np.float32) for agent in self.agents}
        self._paid = dict.fromkeys(self.agents, 1.0)
        self._no, self._yes = dict.fromkeys(self.agents, False), dict.fromkeys(self.agents, True)
        self._t = 0

    def observation_space(self, agent: str) -> Box:
        """One agent's."""
        return OBS

    def action_space(self, agent: str) -> Discrete:
        """One agent's."""
        return ACTION

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        """Begin."""
        self._t, self.agents = 0, self.possible_agents
        return self._obs, {}

    def step(self, actions: Any) -> Any:
        """Count."""
        self._t += 1
        over = self._t == LENGTH
        self.agents = [] if over else self.possible_agents
        return self._obs, self._paid, self._no, self._yes if over else self._no, {}


class Driver(ExternalEnv):
    """Runs one simulator."""

    def run(self) -> None:
        """Play until it is stopped."""
        simulator = Simulator(len(self.gateway.agents))
        while not self.stopping:
            episode = self.start_episode()
            obs, _ = simulator.reset()
            while simulator.agents:
                obs, rewards, *_ = simulator.step(self.get_action(episode, obs))
                self.log_returns(episode, rewards)
            self.end_episode(episode, obs, truncated=True)


def time_call(num: int, steps: int) -> float:
    """Seconds an action of all agents, from the policy alone."""
    policy = make_policy()
    policy.setup(OBS, ACTION, seed=0)
    rows = Rows({"obs": np.zeros((num, 8), np.float32), "env_id": np.zeros(num, int), "agent_index": np.arange(num)})
    began = time.process_time()
    for _ in range(steps):
        policy.act(rows)
    return (time.process_time() - began) / steps


def time_collect(envs: marlvec.VectorEnv, steps: int) -> float:
    """Seconds an env step of a collector."""
    collector = marlvec.Collector(envs, make_policy(), seed=0)
    collector.collect(env_steps=200)
    began = time.process_time()
    collector.collect(env_steps=steps)
    return (time.process_time() - began) / steps


def time_hand_over(steps: int) -> float:
    """Seconds from one thread to another and back."""
    there: queue.SimpleQueue[bool] = queue.SimpleQueue()
    back: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def echo() -> None:
        while there.get():
            back.put(True)

    thread = threading.Thread(target=echo)
    thread.start()
    began = time.process_time()
    for _ in range(steps):
        there.put(True)
        back.get()
    seconds = (time.process_time() - began) / steps
    there.put(False)
    thread.join()
    return seconds


def measure(num: int, drivers: int, steps: int, rounds: int) -> dict[str, float]:
    """Medians of seconds an action of all agents of one env, each way.

    Args:
        num: Agents.
        drivers: Simulators at a time, each in its thread.
        steps: Actions a round.
        rounds: Rounds.
    """
    spaces = dict.fromkeys(agents_of(num), (OBS, ACTION))
    with (
        external.make(spaces, num_envs=drivers) as outside,
        marlvec.make(lambda: Simulator(num), num_envs=drivers, backend="sync") as inside,
    ):
        found = []
        for _ in range(rounds):
            call, road, hand_over = time_call(num, steps), time_collect(inside, steps), time_hand_over(steps)
            threads = [Driver(outside).start() for _ in range(drivers)]
            found.append((call, road, hand_over, time_collect(outside, steps)))
            for driver in threads:
                driver.stop()
    return dict(zip(("call", "inside", "hand-over", "outside"), np.median(found, axis=0).tolist(), strict=True))


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3_000)
    parser.add_argument("--agents", type=int, default=3)
    options = parser.parse_args()
    ways = ("call", "inside", "hand-over", "outside")
    table = Table("simulators", *(f"{way}, µs" for way in ways), "outside / inside", "get_action costs, µs")
    for drivers in (1, 4, 16):
        found = measure(options.agents, drivers, options.steps, options.rounds)
        costs = (found["outside"] - found["call"]) * 1e6
        figures = [f"{found[name] * 1e6:.1f}" for name in ways]
        table.add_row(str(drivers), *figures, f"{found['outside'] / found['inside']:.2f}", f"{costs:.0f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
