"""How well a collector keeps a slow policy busy: fake answers of 50 to 500 ms, 16 at a time, beside a loop by hand.

Run ``python benchmarks/slow_policies.py``. Two players take turns in a small game in text. Utilisation is the time of
all answers, divided by 16 times the time until the last one of 320 has come: 1 is the best possible. The loop by hand
uses ``send`` and ``recv`` in about 15 lines and collects nothing. Collectors play on: what is under way when the last
batch is there counts as far as it has come. Processor time is that of the whole process, env included, for one
answer: in the first table of a process that sleeps most of the time, in the second of one whose answers come at once.
There ``act`` answers the rows of all envs in one call; what the others take above it is the price of requests and of
smaller steps. ``ask`` returns futures that are done, and ``async def`` runs in the event loop's thread.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import queue
import random
import time
from collections import deque
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import marlvec
from marlvec.policies import AsyncPolicy
from marlvec.spaces import AnyText

IN_FLIGHT, ANSWERS = 16, 320
SHORTEST, LONGEST = 0.05, 0.5  # seconds


class Talk:
    """Two players answer by turns, five to nine times; each sees what was said."""

    possible_agents = ("player_0", "player_1")

    def __init__(self) -> None:
        self.observation_spaces = dict.fromkeys(self.possible_agents, AnyText())
        self.action_spaces = dict.fromkeys(self.possible_agents, AnyText())
        self.random = random.Random(0)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, str], dict[str, Any]]:
        if seed is not None:
            self.random = random.Random(seed)
        self.said: list[str] = []
        self.length = self.random.randint(5, 9)
        return {"player_0": "You are first."}, {}

    def step(self, actions: dict[str, str]) -> Any:
        self.said += actions.values()
        done = len(self.said) == self.length
        text = "\n".join(self.said)
        seen = self.possible_agents if done else self.possible_agents[len(self.said) % 2 :][:1]
        rewards = {"player_0": float(done), "player_1": -float(done)}
        return dict.fromkeys(seen, text), rewards, {"__all__": done}, {"__all__": False}, {}


class Server:
    """Answers after a while; notes for how long its seats were taken."""

    def __init__(self, *, at_once: bool = False) -> None:
        self.draw, self.at_once = random.Random(1), at_once
        self.begun: dict[int, float] = {}
        self.busy, self.number = 0.0, 0

    async def answer(self, row: Any) -> str:
        if self.at_once:
            return "I say so."
        number, self.number = self.number, self.number + 1
        self.begun[number] = time.perf_counter()
        await asyncio.sleep(self.draw.uniform(SHORTEST, LONGEST))
        self.busy += time.perf_counter() - self.begun.pop(number)
        return "I say so."

    def used(self) -> float:
        """Seconds of seats until now."""
        now = time.perf_counter()
        return self.busy + sum(now - begun for begun in tuple(self.begun.values()))


class AtOnce:
    """Answers by ``ask`` that are there when it returns."""

    def ask(self, row: Any) -> Future[str]:
        future: Future[str] = Future()
        future.set_result("I say so.")
        return future


class Act(marlvec.Policy):
    """Answers all rows in one call."""

    def act(self, rows: Any) -> Any:
        return np.full(len(rows), "I say so.", object)


def processor_time(policy: Any, num_envs: int) -> float:
    """Microseconds of processor time of an answer; the least of five batches."""
    envs = marlvec.make(Talk, num_envs=num_envs, backend="sync")
    collector = marlvec.Collector(envs, policy, seed=0, overlap=not isinstance(policy, Act))
    best = math.inf
    for _ in range(6):
        before = time.process_time()
        answers = collector.collect(env_steps=2000).agent_steps
        best = min(best, (time.process_time() - before) / answers)
    return best * 1e6


class Figures:
    """Utilisation, seconds, and processor time of an answer in microseconds."""

    def __init__(self, server: Server) -> None:
        self.server, self.wall, self.processor = server, time.perf_counter(), time.process_time()

    def of(self, answers: int) -> tuple[float, float, float]:
        wall, processor = time.perf_counter() - self.wall, time.process_time() - self.processor
        return self.server.used() / (IN_FLIGHT * wall), wall, processor / answers * 1e6


def by_hand(num_envs: int, server: Server) -> tuple[float, float, float]:
    """A loop over ``send`` and ``recv``: it asks for 320 answers, and collects nothing."""
    from marlvec.policies.answers import run_later  # an event loop in a thread, as collectors use it

    envs = marlvec.make(Talk, num_envs=num_envs, backend="sync")
    envs.reset(seed=0)
    figures, waiting, flying = Figures(server), deque(range(num_envs)), {}
    asked = 0
    come: Any = queue.SimpleQueue()
    while True:
        while waiting and len(flying) < IN_FLIGHT and asked < ANSWERS:
            env_id, asked = waiting.popleft(), asked + 1
            flying[env_id] = run_later(server, server.answer, None)
            flying[env_id].add_done_callback(lambda _, env_id=env_id: come.put(env_id))
        if not flying:
            break
        env_id = come.get()
        actions = np.full((1, 2), flying.pop(env_id).result(), object)
        envs.send(actions, [env_id])
        envs.recv(1)
        waiting.append(env_id)
    return figures.of(ANSWERS)


def collected(num_envs: int, server: Server, *, batches: int = 1, **settings: Any) -> tuple[float, float, float]:
    """Collect about 320 answers, ``batches`` times."""
    envs = marlvec.make(Talk, num_envs=num_envs, backend="sync")
    policy = AsyncPolicy(server.answer, max_in_flight=IN_FLIGHT)
    collector = marlvec.Collector(envs, policy, seed=0, **settings)
    figures, answers = Figures(server), 0
    for _ in range(batches):
        answers += collector.collect(env_steps=ANSWERS).agent_steps
    found = figures.of(answers)
    with collector.updating():  # answers under way
        pass
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", type=int, nargs="+", default=[16, 64])
    args = parser.parse_args()
    table = Table("", "envs", "utilisation", "seconds", "µs an answer")
    ways: dict[str, Any] = {
        "loop by hand": by_hand,
        "whole games, overlap": partial(collected, batch_mode="complete", overlap=True),
        "env steps, overlap": partial(collected, overlap=True),
        "whole games": partial(collected, batch_mode="complete"),
        "env steps": collected,
    }
    for num_envs in args.envs:
        for name, way in ways.items():
            utilisation, seconds, processor = way(num_envs, Server())
            table.add_row(name, str(num_envs), f"{utilisation:.2f}", f"{seconds:.1f}", f"{processor:.0f}")
    Console(width=100).print(table)
    costs = Table("answers at once, µs an answer", *(f"{num_envs} envs" for num_envs in args.envs))
    policies: dict[str, Any] = {
        "act": Act,
        "ask": lambda: AsyncPolicy(AtOnce(), max_in_flight=IN_FLIGHT),
        "async def": lambda: AsyncPolicy(Server(at_once=True).answer, max_in_flight=IN_FLIGHT),
    }
    for name, make in policies.items():
        costs.add_row(name, *(f"{processor_time(make(), num_envs):.0f}" for num_envs in args.envs))
    Console(width=100).print(costs)


if __name__ == "__main__":
    main()
