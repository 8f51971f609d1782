"""How much `Collector.collect` is asked for."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

from marlvec.collect.metrics import EpisodeRecord
from marlvec.errors import ArgumentError

__all__ = ["MEASURES", "Unit", "goal_of"]

Unit: TypeAlias = Literal["env_steps", "agent_steps", "episodes"]

MEASURES: dict[Unit, Callable[[EpisodeRecord], int]] = {
    "env_steps": lambda record: record.length,
    "agent_steps": lambda record: int(record.lengths_A.sum()),
    "episodes": lambda record: 1,
}
"""How much of each an episode is."""


def goal_of(amounts: Mapping[Unit, int | None], steps: int | None, count_by: Unit) -> tuple[Unit, int]:
    """Which of the amounts was given, and how much.

    Args:
        amounts: What was given of each.
        steps: What was given of ``count_by``.
        count_by: What is counted where nothing else is said.

    Raises:
        ArgumentError: Not exactly one positive amount.
    """
    given = [(unit, amount) for unit, amount in amounts.items() if amount is not None]
    if steps is not None:
        given.append((count_by, steps))
    if len(given) != 1:
        raise ArgumentError("collect() wants exactly one of steps, env_steps, agent_steps, episodes")
    unit, amount = given[0]
    try:
        number = operator.index(amount)
    except TypeError:
        number = 0
    if number < 1 or isinstance(amount, bool):
        raise ArgumentError(f"collect({unit}={amount!r}): expected an integer of at least 1")
    return unit, number
