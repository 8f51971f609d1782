"""Episodes that come and go: ticks of rows as a collector would give them, and what a policy answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

from marlvec.connectors import Connector, Rows
from tests.connectors.helpers.samples import Space, batch, pairs_of, rows_of

Pair = tuple[int, int]

ENVS, AGENTS = 3, 2


@dataclass
class Tick:
    """One call: which pairs have rows, who begins, who ends, and which envs are reset after it."""

    pairs: list[Pair]
    first: list[bool]
    last: list[bool]
    resets: list[int]
    number: int = 0


@dataclass
class Episodes:
    """The plain reference's memory: of every pair the values of its running episode, oldest first."""

    values: dict[Pair, list[Any]] = field(default_factory=dict)

    def begin(self, pair: Pair, *, first: bool) -> list[Any]:
        if first or pair not in self.values:
            self.values[pair] = []
        return self.values[pair]

    def reset(self, envs: list[int]) -> None:
        self.values = {pair: seen for pair, seen in self.values.items() if pair[0] not in envs}


@st.composite
def ticks(draw: st.DrawFn, most: int = 10) -> list[Tick]:
    """Any subset of 3 envs × 2 agents in any order, tick after tick. An agent that ended comes back as first."""
    out: list[Tick] = []
    fresh = set(pairs_of(ENVS, AGENTS))
    for number in range(draw(st.integers(1, most))):
        pairs = draw(st.lists(st.sampled_from(pairs_of(ENVS, AGENTS)), unique=True, max_size=ENVS * AGENTS))
        first = [pair in fresh or draw(st.sampled_from([False] * 5 + [True])) for pair in pairs]
        last = [draw(st.sampled_from([False] * 4 + [True])) for _ in pairs]
        fresh = (fresh - set(pairs)) | {pair for pair, ends in zip(pairs, last, strict=True) if ends}
        resets = sorted(draw(st.sets(st.integers(0, ENVS), max_size=1)))
        if draw(st.booleans()):  # else the reset alone has to begin the episode anew
            fresh |= {pair for pair in pairs_of(ENVS, AGENTS) if pair[0] in resets}
        out.append(Tick(pairs, first, last, resets, number))
    return out


def rows_at(tick: Tick, space: Space, **columns: Any) -> Rows:
    """Rows of a tick; every number is that of its pair and tick, whatever the batch."""
    everyone = pairs_of(ENVS, AGENTS)
    where = np.array([everyone.index(pair) for pair in tick.pairs], np.int64)
    rng = np.random.default_rng(tick.number)
    reward = np.round(rng.normal(size=len(everyone)), 3)
    all_rows = rows_of(everyone, batch(space, len(everyone), 100 + tick.number), rewards=reward)
    rows = all_rows.take(where)
    first = np.array(tick.first, bool)
    return rows.replace(
        first=first, last=np.array(tick.last, bool), rewards=np.where(first, np.nan, rows.rewards), **columns
    )


def answered(rows: Rows, tick: Tick, actions: Space, **columns: Any) -> Rows | None:
    """The rows that a policy answers, all but the last ones, with what it answers; None where there are none."""
    acting = ~np.array(tick.last, bool)
    if not acting.any():
        return None
    everyone = pairs_of(ENVS, AGENTS)
    where = np.array([everyone.index(pair) for pair in tick.pairs], np.int64)
    answers = rows_of(everyone, np.zeros(len(everyone)), actions=batch(actions, len(everyone), 500 + tick.number))
    return rows.replace(actions=answers.take(where)["actions"], **columns).take(acting)


def play(
    piece: Connector, game: list[Tick], space: Space, actions: Space
) -> Iterator[tuple[Tick, Rows, Rows, Rows | None]]:
    """Run a piece through a game: yields each tick, its rows, what came of them and what the policy answered."""
    for tick in game:
        rows = rows_at(tick, space)
        out = piece(rows)
        answer = answered(out, tick, actions) if len(out) == len(rows) else None
        yield tick, rows, out, answer
        if answer is not None:
            piece.on_policy_output(answer)
        piece.reset(tick.resets)
