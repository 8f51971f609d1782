"""What is built, an engine whose hosts die, and what must be true of all that was handed out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

import marlvec
from marlvec.collect import Collector, MultiAgentBatch
from marlvec.connectors import EpsilonGreedy, NormalizeObs, NormalizeReward, Rows
from marlvec.distributed import Collectors, Place
from marlvec.distributed.engine import LostError, SyncEngine
from marlvec.policies import Policy
from marlvec.testing.scripted import KeyedEnv, ScriptedParallelEnv, TurnEnv
from marlvec.vector.in_process import SyncVectorEnv

MANY = marlvec.RestartLimit(10_000, backoff=0.0)


class Shift(Policy):
    """Has one weight, which it echoes in a column."""

    def __init__(self, shift: float = 0.0) -> None:
        self.shift = np.array([shift])

    def act(self, rows: Rows, *, explore: bool = True) -> Any:
        actions = (np.abs(rows["obs"]).sum(axis=1) * 7 + self.shift[0]).astype(np.int64) % 5
        return actions, {"weight": np.full(len(rows), self.shift[0])}

    def get_weights(self) -> dict[str, Any]:
        return {"shift": self.shift.copy()}

    def set_weights(self, weights: Any) -> None:
        self.shift = np.array(weights["shift"])


def either(agent: str, episode: Any) -> str:
    return "ab"[int(episode.rng.integers(2))]


def named_by(ids: Sequence[str]) -> Any:
    """A mapping that draws one of these."""

    def mapping(agent: str, episode: Any) -> str:
        return ids[int(episode.rng.integers(len(ids)))]

    return mapping


def envs_of(kind: str, n: int, seed: int, *, exact: bool = False) -> Any:
    """Envs of a kind; exact ones are saved with a collector's state, as those of the kind native always are."""
    saved: Any = {"env_state": "deepcopy"} if exact else {}
    if kind == "native":
        return marlvec.make("simple_spread", n, backend="native", max_cycles=7)
    if kind == "python":
        return marlvec.make("simple_spread", n, backend="sync", max_cycles=7, **saved)
    cls: Any = {"turns": TurnEnv, "parallel": ScriptedParallelEnv, "keyed": KeyedEnv}[kind]
    return SyncVectorEnv([lambda i=i: cls(agent_num=2, env_index=i, longest=6) for i in range(n)], **saved)


def plain(place: Place, kind: str = "parallel", *, exact: bool = False, **options: Any) -> Collector:
    """A collector without connectors, of one policy."""
    chains = {"agent_connectors": [], "action_connectors": []}
    return Collector(
        envs_of(kind, 2, place.seed, exact=exact), {"main": Shift()}, seed=place.seed, **(chains | options)
    )


def learning(place: Place, kind: str = "python", *, exact: bool = False, **options: Any) -> Collector:
    """Two policies, one mapped by a function; statistics and exploration on both sides."""
    pieces: Any = [NormalizeObs(), NormalizeReward()]
    return Collector(
        envs_of(kind, 3, place.seed, exact=exact),
        {"a": Shift(), "b": Shift(1)},
        either,
        seed=place.seed,
        agent_connectors=pieces,
        action_connectors=[EpsilonGreedy(0.5, final=0.1, decay_steps=20, seed=0)],
        **options,
    )


def same_batch(got: MultiAgentBatch, want: MultiAgentBatch) -> None:
    assert (got.env_steps, got.agent_steps, sorted(got)) == (want.env_steps, want.agent_steps, sorted(want))
    for policy, rows in want.items():
        assert list(got[policy].keys()) == list(rows.keys())
        for name, column in rows.items():
            np.testing.assert_array_equal(got[policy][name], column, err_msg=name, strict=True)


def check_rows(batches: Sequence[MultiAgentBatch]) -> dict[tuple[int, int], int]:
    """No (episode, agent, t) twice, and none missing before another; rows by (episode, agent)."""
    rows = [np.stack([own.eps_id, own.agent_index, own.t], 1) for batch in batches for own in batch.values()]
    every = np.concatenate([np.zeros((0, 3), np.int64), *rows])
    assert len(np.unique(every, axis=0)) == len(every), "a row came twice"
    found: dict[tuple[int, int], int] = {}
    order = every[np.lexsort(every.T[::-1])]
    for eps_id, agent, t in order.tolist():
        count = found.get((eps_id, agent), 0)
        assert t == count, f"before row {t} of agent {agent} in episode {eps_id:x} some are missing"
        found[eps_id, agent] = count + 1
    return found


def check_metrics(collectors: Collectors, batches: Sequence[MultiAgentBatch], *, raw: bool = True) -> None:
    """Rows are whole, episodes of the metrics are those whose last rows came, and their numbers a recount."""
    check_rows(batches)
    returns: dict[tuple[int, int], float] = {}
    ended: set[int] = set()
    for batch in batches:
        for rows in batch.values():
            for eps_id, agent, reward, end in zip(
                rows.eps_id.tolist(),
                rows.agent_index.tolist(),
                rows.rewards.tolist(),
                (rows.terminated | rows.truncated).tolist(),
                strict=True,
            ):
                returns[eps_id, agent] = returns.get((eps_id, agent), 0.0) + reward
                if end:
                    ended.add(eps_id)
    metrics = collectors.metrics
    records = metrics.episodes
    ids = [record.eps_id for record in records]
    assert len(set(ids)) == len(ids) == metrics.episodes_total, "the window is long enough for this check"
    assert set(ids) <= ended
    for record in records:
        for agent in np.flatnonzero(record.lengths_A).tolist() if raw else ():
            assert np.isclose(record.returns_A[agent], returns[record.eps_id, agent])
    sums = collectors.accounting
    assert sums.requested == sums.delivered + sums.lost + sums.outstanding
    assert sums.requests_requested == sums.requests_delivered + sums.requests_lost + sums.requests_outstanding


class FaultyEngine(SyncEngine):
    """Hosts die at any moment: while they are built, before, while and after they answer, with what they answered.

    Args:
        seed: What happens follows from it.
        rate: How likely a death is, each time somebody waits.
    """

    def __init__(self, seed: int, rate: float) -> None:
        super().__init__()
        self.random, self.rate = random.Random(seed), rate
        self.lost: set[int] = set()
        self.kept: list[Any] = []
        self.deaths = 0
        self.puts = 0

    def put(self, value: Any) -> bytes:
        self.puts += 1
        return super().put(value)

    def ready(self, tickets: Sequence[Any], timeout: float) -> list[Any]:
        random, some = self.random, list(tickets)
        random.shuffle(some)
        self.kept += some
        if random.random() < self.rate and not some[0].handle.is_gone:
            victim = some[0].handle
            for ticket in list(victim.queue)[: random.randint(0, 2)]:
                self._work(ticket)
                if random.random() < 0.5:
                    self.lost.add(id(ticket))  # the answer goes with its node
            self.deaths += 1
            victim.is_gone = True
            victim.server.close()
            return [some[0]]
        if random.random() < self.rate / 4 and timeout > 5:
            return []  # it hangs
        for ticket in some[: random.randint(1, len(some))]:
            if not self._is_ready(ticket):
                self._work(ticket)
        return [ticket for ticket in some if self._is_ready(ticket)]

    def take(self, ticket: Any, timeout: float) -> Any:
        if id(ticket) in self.lost:
            raise LostError("object_lost", "it went with its node")
        if ticket.handle.is_gone and ticket.reply is None:
            raise LostError("died", "it was killed")
        return super().take(ticket, timeout)
