"""Whatever is called, in whatever order: what a batch holds is what was said, and every wrong call is refused."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from hypothesis import given, settings
from hypothesis import strategies as st

from marlvec import Collector, FunctionPolicy, external
from marlvec.errors import EpisodesFull, MarlvecError
from marlvec.external import EpisodeGateway, ExternalEpisode

AGENTS = ("a", "b", "c")
OBS = Box(-1, 10_000, (3,), np.float32)  # episode, agent, time
SLOTS = 2
FINAL, MISSING, MOST = 9_000, -1, 1_000

WHO = st.frozensets(st.sampled_from(AGENTS), min_size=1)
ACT = st.tuples(st.sampled_from(["ask", "log", "log"]), WHO)
PAY = st.tuples(st.just("pay"), WHO, st.integers(-3, 3))
END = st.tuples(st.sampled_from(["end_agents", "end"]), st.frozensets(st.sampled_from(AGENTS)), st.booleans())
OTHER = st.tuples(st.sampled_from(["abandon", "wrong", "begin"]))
SLOT = st.integers(0, SLOTS)
# A handful of plain steps, then one that may end something; a new episode begins where none runs.
ROUNDS = st.lists(
    st.tuples(
        st.lists(st.tuples(SLOT, st.one_of(ACT, ACT, PAY)), min_size=2, max_size=10), SLOT, st.one_of(END, OTHER)
    ),
    min_size=2,
    max_size=5,
)
ORDERS = ROUNDS.map(lambda rounds: [call for steps, k, last in rounds for call in (*steps, (k, last))])


class Told:
    """One episode, and what a batch must hold of it.

    Args:
        number: Its number.
        episode: The episode.
    """

    def __init__(self, number: int, episode: ExternalEpisode) -> None:
        self.number, self.episode = number, episode
        self.t = 0
        self.gone: set[str] = set()
        self.alive: set[str] = set()
        self.owed = Counter[str]()
        self.open: dict[str, tuple[Any, ...]] = {}
        self.ending: dict[str, tuple[int, bool, bool]] = {}  # until the next row
        self.rows: list[tuple[Any, ...]] = []

    def obs(self, who: Any, t: int) -> dict[str, list[int]]:
        return {agent: [self.number, AGENTS.index(agent), t] for agent in who}

    def act(self, who: Any, *, logged: bool) -> None:
        self.flush()
        for agent in who:
            if agent in self.open:
                self.close(agent, self.t, False, False)
            self.open[agent] = (self.number, AGENTS.index(agent), self.t, (self.t + logged) % 5, logged)
        self.alive |= who
        self.t += 1

    def close(self, agent: str, t: int, terminated: bool, truncated: bool) -> None:
        self.rows.append((*self.open.pop(agent), self.owed.pop(agent, 0), t, terminated, truncated))

    def end(self, who: Any, final: Any, truncated: bool) -> None:
        for agent in who:
            self.ending[agent] = (FINAL if agent in final else MISSING, not truncated, truncated)
        self.gone |= who
        self.alive -= who

    def flush(self) -> None:
        for agent, how in self.ending.items():
            if agent in self.open:
                self.close(agent, *how)
        self.ending.clear()


def call(told: Told, kind: str, *what: Any) -> bool:
    """Make one call, and note what it means; whether the episode is over. Raises what the episode raises."""
    episode = told.episode
    if kind == "ask":
        (who,) = what
        box: queue.SimpleQueue[Any] = queue.SimpleQueue()
        t = told.t
        episode.ask(told.obs(who, t), answer=box.put)
        assert box.get(timeout=20) == dict.fromkeys(who, t % 5)
        told.act(who, logged=False)
    elif kind == "log":
        (who,) = what
        episode.wait_for_room(20)
        episode.log_action(told.obs(who, told.t), dict.fromkeys(who, (told.t + 1) % 5))
        told.act(who, logged=True)
    elif kind == "pay":
        who, amount = what
        episode.log_returns(dict.fromkeys(who, amount))
        for agent in who:
            told.owed[agent] += amount
    elif kind == "end_agents":
        who, truncated = what
        episode.end_agents(told.obs(who, FINAL), truncated=truncated)
        told.end(who, who, truncated)
    elif kind == "end":
        final, truncated = what
        episode.end(told.obs(final, FINAL), truncated=truncated)
        told.end(told.alive | final, final, truncated)
        told.flush()
        return True
    elif kind == "abandon":
        episode.abandon(RuntimeError("on purpose"))
        told.rows.clear()
        return True
    else:
        episode.ask({"a": [0, 0]}, answer=print)
    return False


def is_refused(told: Told, kind: str, who: Any) -> bool:
    """Whether such a call has to be refused."""
    if kind == "wrong" or (kind in ("ask", "log") and not who):
        return True
    if kind in ("end_agents", "end") and who and not told.t:
        return True
    return kind != "abandon" and bool(who & told.gone - (told.ending.keys() if kind == "pay" else set()))


def carry_out(order: Any, gateway: EpisodeGateway) -> tuple[list[Told], int]:
    """Make these calls, then end what runs. Episodes, and how many of them a collector has to meet."""
    running: dict[int, Told] = {}
    every: list[Told] = []
    ended = 0
    for k, (kind, *what) in [*order, *((k, ("end", frozenset(), True)) for k in range(SLOTS + 1))]:
        told = running.get(k)
        if told is None and k in range(SLOTS + 1) and len(every) < MOST:
            try:
                told = running[k] = Told(len(every), gateway.begin())
            except EpisodesFull:
                assert len(running) == SLOTS
            else:
                every.append(told)
        if told is not None and kind != "begin":
            refused = is_refused(told, kind, what[0] if what else None)
            try:
                over = call(told, kind, *what)
            except MarlvecError:
                assert refused, (kind, what)
                continue
            assert not refused, (kind, what)
            if over:
                del running[k]
                ended += kind == "end" and told.t > 0
    return every, ended


@pytest.mark.slow("many clients and connections")
@settings(max_examples=50, deadline=None)
@given(ORDERS)
def test_what_was_said_is_what_a_batch_holds(order: Any) -> None:
    policy = FunctionPolicy(lambda rows: rows["obs"][:, 2].astype(int) % 5)
    found: list[tuple[Any, ...]] = []
    wanted: list[float] = [float("inf")]
    met = 0
    with external.make(dict.fromkeys(AGENTS, (OBS, Discrete(5))), num_envs=SLOTS, batch_wait=0.0) as envs:
        collector = Collector(envs, policy, batch_mode="complete", seed=0)

        def collect() -> None:
            nonlocal met
            with suppress(MarlvecError):  # closed, because the test has failed
                while met < wanted[0]:
                    found.extend(rows_of(collector.collect(episodes=1)))
                    met += 1

        thread = threading.Thread(target=collect)
        thread.start()
        every, ended = carry_out(order, envs.gateway)
        wanted[0] = ended + 1
        last = Told(len(every), envs.gateway.begin(timeout=20))  # it wakes the collector up
        call(last, "log", frozenset("a"))
        call(last, "end", frozenset(), False)
        thread.join(20)
        assert not thread.is_alive(), f"{met} of {ended + 1} episodes have arrived"
        assert envs.gateway.episodes == ()
    assert Counter(found) == Counter(row for told in [*every, last] for row in told.rows)


def rows_of(batch: Any) -> list[tuple[Any, ...]]:
    if "main" not in batch:
        return []
    rows = batch["main"]
    following = np.where(rows.next_obs_missing, MISSING, rows.next_obs[:, 2])
    logged = rows["off_policy"] if "off_policy" in rows else np.zeros(len(rows), np.bool_)
    columns = (*rows.obs.T, rows.actions, logged, rows.rewards, following, rows.terminated, rows.truncated)
    return [tuple(row) for row in zip(*(column.tolist() for column in columns), strict=True)]
