"""`Collector(stream=)`: ids of its own, and nothing else is different."""

from __future__ import annotations

from typing import Any

import pytest

from marlvec.collect import Collector, MultiAgentBatch
from marlvec.errors import ArgumentError, StateError
from tests.collect.helpers.players import KINDS, EchoPolicy, sync
from tests.collect.scheduling.test_overlap import same_batch

LAST = 2**20 - 1


def local(batch: MultiAgentBatch, stream: int) -> MultiAgentBatch:
    """The batch with the ids it would have in stream 0."""
    first = stream << 43
    return batch.map(lambda rows: rows.replace(eps_id=rows.eps_id - first, unroll_id=rows.unroll_id - first))


@pytest.mark.parametrize("batch_mode", ["truncate", "complete"])
@pytest.mark.parametrize("kind", KINDS)
def test_another_stream_has_the_same_rows_and_ids_that_are_moved(kind: str, batch_mode: Any) -> None:
    with sync(kind, 3, 2) as envs, sync(kind, 3, 2) as others:
        plain = Collector(envs, EchoPolicy(), seed=1, batch_mode=batch_mode)
        moved = Collector(others, EchoPolicy(), seed=1, batch_mode=batch_mode)
        moved.stream = LAST
        for amount in (6, 30, 7):
            same_batch(local(moved.collect(env_steps=amount), LAST), plain.collect(env_steps=amount))
        for collector in (plain, moved):
            collector.reset(seed=2)
        same_batch(local(moved.collect(agent_steps=20), LAST), plain.collect(agent_steps=20))
        ids = [[record.eps_id for record in one.metrics.episodes] for one in (plain, moved)]
        assert ids[0]
        assert ids[1] == [eps_id + (LAST << 43) for eps_id in ids[0]]


def test_a_stream_that_has_no_ids_is_refused() -> None:
    with sync("parallel", 1, 1) as envs:
        for stream in (-1, LAST + 1, 0.5, True, None):
            with pytest.raises(ArgumentError, match=r"stream must be an integer from 0 to 2\*\*20 - 1"):
                Collector(envs, EchoPolicy(), stream=stream)  # type: ignore[arg-type]


def test_a_stream_is_set_before_anything_was_collected() -> None:
    with sync("parallel", 1, 1) as envs:
        collector = Collector(envs, EchoPolicy(), stream=3)
        assert collector.collect(env_steps=2)["main"].eps_id[0] == 3 << 43
        with pytest.raises(StateError, match=r"has collected with stream=3; give Collector\(stream=4\)"):
            collector.stream = 4
        assert collector.stream == 3
