"""Joins the rows of several collectors into the learner's batch, and cuts answers into pieces that Ray copies fast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from marlvec.collect import MultiAgentBatch, SampleBatch
from marlvec.collect.batch.batch_columns import named_leaves
from marlvec.collect.metrics.metrics import CollectorStats
from marlvec.connectors import LearnerPipeline
from marlvec.distributed.accounting import Entry
from marlvec.distributed.server.messages import Answer, Raised, Started

__all__ = ["joined", "oldest_row", "stats_after", "in_pieces"]


def joined(
    parts: Sequence[MultiAgentBatch], learner_connectors: Mapping[str, LearnerPipeline], known: Sequence[str]
) -> MultiAgentBatch:
    """Join all rows into one batch, in the order of parts; run the head's learner connectors.

    Rows of policies without a pipeline stay unchanged. If a connector raises, no rows are lost.
    """
    batch = MultiAgentBatch.concat(parts)
    found = dict(batch.items())
    chains = [(name, learner_connectors[name]) for name in found if len(learner_connectors.get(name, ()))]
    for _, chain in chains:
        chain.see_batch(batch)
    for name, chain in chains:
        try:
            found[name] = SampleBatch(chain(batch[name]))
        except Exception as error:
            error.add_note(f"in the learner connectors of policy {name!r}; no row is lost: call collect() again")
            raise
    return MultiAgentBatch(found, env_steps=batch.env_steps, known=tuple(known), agent_steps=batch.agent_steps)


def stats_after(
    known: Sequence[CollectorStats],
    restarts: Mapping[int, int],
    entries: Sequence[Entry],
    answers: Sequence[Answer],
    version: int,
) -> tuple[CollectorStats, ...]:
    """Return each collector's statistics after the delivery of answers, whose ledger entries are in the same order.

    `restarts`: of each existing collector, by index.
    """
    before = {stats.index: stats for stats in known}
    found = {i: replace(before.get(i, CollectorStats(i)), restarts=count) for i, count in restarts.items()}
    lags: dict[int, int] = {}
    for entry, answer in zip(entries, answers, strict=True):
        index, (waited, worked) = entry.collector, answer.seconds
        if index not in found:  # the collector has left
            continue
        lags[index] = max(lags.get(index, 0), version - entry.base)
        stats = found[index]
        found[index] = replace(
            stats,
            lag=lags[index],
            env_steps=stats.env_steps + sum(part.env_steps for part in answer.parts),
            seconds_waiting=stats.seconds_waiting + waited,
            seconds_working=stats.seconds_working + worked,
        )
    return tuple(found.values())


def oldest_row(parts: Sequence[MultiAgentBatch], policies: Sequence[str]) -> int | None:
    """Return the lowest weight version that decided a row of these policies; None without rows."""
    found = [
        int(part[name].policy_version.min())
        for part in parts
        for name in policies
        if name in part and len(part[name]) and "policy_version" in part[name]
    ]
    return min(found, default=None)


def in_pieces(reply: Started | Answer | Raised, limit: int) -> Started | Answer | Raised:
    """Return the reply with its rows cut so that no column exceeds ``limit`` bytes.

    Rows are not copied. The head copies all pieces into one batch, like the answers of several collectors.
    """
    if not isinstance(reply, Answer):
        return reply
    return replace(reply, parts=tuple(piece for part in reply.parts for piece in _cut(part, limit)))


def _cut(batch: MultiAgentBatch, limit: int) -> list[MultiAgentBatch]:
    cut = {name: _slices(rows, limit) for name, rows in batch.items()}
    count = max(map(len, cut.values()), default=1)
    return [
        MultiAgentBatch(
            {name: slices[i] for name, slices in cut.items() if i < len(slices)},
            env_steps=0 if i else batch.env_steps,  # the head sums the counts
            known=batch.known,
            agent_steps=0 if i else batch.agent_steps,
        )
        for i in range(count)
    ]


def _slices(rows: SampleBatch, limit: int) -> list[SampleBatch]:
    number = len(rows)
    largest = max(leaf.nbytes for _, leaf in named_leaves(dict(rows.items())))
    count = min(-(-largest // limit), number)
    if count <= 1:
        return [rows]
    size = -(-number // count)
    return [rows.slice(start, start + size) for start in range(0, number, size)]
