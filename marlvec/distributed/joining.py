"""Joins the rows of several collectors into the learner's batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from marlvec.collect import MultiAgentBatch, SampleBatch
from marlvec.collect.metrics.metrics import CollectorStats
from marlvec.connectors import LearnerPipeline
from marlvec.distributed.accounting import Entry
from marlvec.distributed.server.messages import Answer

__all__ = ["joined", "oldest_row", "stats_after"]


def joined(
    parts: Sequence[MultiAgentBatch], learner_connectors: Mapping[str, LearnerPipeline], known: Sequence[str]
) -> MultiAgentBatch:
    """Join all rows into one batch, in the order of parts; run the head's learner connectors.

    Args:
        parts: The collectors' batches; at least one.
        learner_connectors: Pipeline by policy id; rows of other policies stay unchanged.
        known: Ids of all policies.

    Raises:
        ArgumentError: The parts differ in their columns.
        Exception: A learner connector raised it, with a note. No rows are lost.
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
    """Return each collector's statistics after the delivery of some answers.

    Args:
        known: The statistics before.
        restarts: Restarts of each existing collector, by index.
        entries: The ledger's entries of the answers.
        answers: The answers, in the same order.
        version: Current version of the weights.
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
