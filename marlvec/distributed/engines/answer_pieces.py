"""Cuts an answer's rows into pieces of the size that Ray copies fastest."""

from __future__ import annotations

from dataclasses import replace

from marlvec.collect import MultiAgentBatch, SampleBatch
from marlvec.collect.batch.batch_columns import named_leaves
from marlvec.distributed.engines.engine import Reply
from marlvec.distributed.server.messages import Answer

__all__ = ["in_pieces"]


def in_pieces(reply: Reply, limit: int) -> Reply:
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
