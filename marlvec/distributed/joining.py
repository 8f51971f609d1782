"""Joining what several collectors brought into the batch that a learner takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from marlvec.collect import MultiAgentBatch, SampleBatch
from marlvec.collect.metrics.collector_stats import CollectorStats
from marlvec.connectors import LearnerPipeline
from marlvec.distributed.accounting.ledger import Entry
from marlvec.distributed.server.messages import Answer

__all__ = ["joined", "oldest_row", "stats_after"]


def joined(
    parts: Sequence[MultiAgentBatch], learner_connectors: Mapping[str, LearnerPipeline], known: Sequence[str]
) -> MultiAgentBatch:
    """All rows in one batch, in the order of the parts, and through the learner connectors of the head.

    Args:
        parts: What collectors brought; at least one.
        learner_connectors: Pipeline by policy id; a policy that has none is left as it is.
        known: Ids of all policies.

    Raises:
        ArgumentError: The parts differ in their columns.
        Exception: What a learner connector raises, with a note. Nothing is lost.
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
    """What each collector did, once these answers are handed out.

    Args:
        known: What they did before.
        restarts: Of each collector that there is, by its index.
        entries: The ledger's entries of the answers.
        answers: The answers, in the same order.
        version: The present version of the weights.
    """
    before = {stats.index: stats for stats in known}
    found = {i: replace(before.get(i, CollectorStats(i)), restarts=count) for i, count in restarts.items()}
    lags: dict[int, int] = {}
    for entry, answer in zip(entries, answers, strict=True):
        index, (waited, worked) = entry.collector, answer.seconds
        if index not in found:  # it has left
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
    """The least version of the weights that decided a row of these policies; None: there is no row."""
    found = [
        int(part[name].policy_version.min())
        for part in parts
        for name in policies
        if name in part and len(part[name]) and "policy_version" in part[name]
    ]
    return min(found, default=None)
