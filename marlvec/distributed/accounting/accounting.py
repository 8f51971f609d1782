"""`Accounting`: what was asked for, and what became of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Accounting"]


@dataclass(frozen=True, slots=True)
class Accounting:
    """What collectors were asked for, and what became of it: ``requested == delivered + lost + outstanding``, always.

    Amounts are those asked for, in the unit they were asked for in. What a process that was killed had
    made beyond its last answer is not known; it is no more than it was asked for, and what waited in it.

    Attributes:
        requested: Amount asked for.
        delivered: Of it, what is in batches that were handed out.
        lost: Of it, what never will be; it was, or will be, asked for again.
        outstanding: Of it, what is on its way, or on the head and in no batch yet.
        requests_requested: Number of requests; those that bring no rows, but change policies or ask for a state, are
            of amount 0.
        requests_delivered: Of them, those of which batches were made that were handed out.
        requests_lost: Of them, those that are lost.
        requests_outstanding: Of them, the others.
        lost_by: Requests lost, by reason: ``"died"``, ``"unreachable"`` (its node is gone, or its state is unknown),
            ``"timeout"``, ``"object_lost"`` (the answer was made and is gone), ``"after_a_loss"`` (it would have
            followed on a gap), ``"raised"`` (what a collector raised; its rows come with its next answer),
            ``"closed"``, ``"interrupted"`` (Ctrl-C came just when it was noted; its collector is built
            once more, which is no restart).
        restarts: Collectors restarted.
        refused: Answers that were to no request that is outstanding; they were not delivered.
        max_lag: Greatest lag of a fragment, in versions: from when it was asked for to when it was handed out.
        max_row_lag: Greatest lag of a row. It is more than ``max_lag`` where a decision's outcome came in a later
            fragment.
    """

    requested: int = 0
    delivered: int = 0
    lost: int = 0
    outstanding: int = 0
    requests_requested: int = 0
    requests_delivered: int = 0
    requests_lost: int = 0
    requests_outstanding: int = 0
    lost_by: Mapping[str, int] = field(default_factory=dict)
    restarts: int = 0
    refused: int = 0
    max_lag: int = 0
    max_row_lag: int = 0
