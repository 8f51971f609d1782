"""Two plays of one seed, held against each other."""

from __future__ import annotations

from collections.abc import Sequence

from marlvec.envs.checks.player import Moment
from marlvec.envs.checks.trees import first_difference, leaf

__all__ = ["check_equal"]


def check_equal(first: Sequence[Moment], again: Sequence[Moment], who: str) -> None:
    """Refuse two plays of one seed that differ anywhere.

    Args:
        first: The one.
        again: The other.
        who: Which env played it, for messages.

    Raises:
        ContractError: Names the first step in which they differ, what differs there, and how.
    """
    for before, now in zip(first, again, strict=False):
        if before.facts.keys() != now.facts.keys():
            told, others = (sorted(moment.facts) for moment in (before, now))
            now.place.broken("what it brings", f"the same for the same seed, {told}", f"{others} from {who}")
        for subject, fact in before.facts.items():
            if changed := first_difference(fact, now.facts[subject]):
                where = leaf(subject, changed.path)
                now.place.broken(where, f"the same for the same seed, {changed.before}", f"{changed.after} from {who}")
    if len(first) != len(again):
        longer = max(first, again, key=len)[min(len(first), len(again))]
        longer.place.broken("the episodes", f"{len(first)} calls in all for the same seed", f"{len(again)} from {who}")
