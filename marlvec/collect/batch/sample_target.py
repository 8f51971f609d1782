"""`SampleTarget` and `BatchSchedule`: the size of one batch, and of a series of batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from marlvec.arguments import count_from
from marlvec.collect.batch import MultiAgentBatch
from marlvec.errors import ArgumentError

__all__ = ["BatchSchedule", "SampleTarget", "Unit", "sample_target"]

Unit: TypeAlias = Literal["env_steps", "agent_steps", "episodes"]


@dataclass(frozen=True, slots=True)
class SampleTarget:
    """The amount of one batch, at least 1 unit."""

    unit: Unit
    amount: int


def sample_target(
    amounts: Mapping[Unit, int | None], steps: int | None, count_by: Unit, call: str = "collect"
) -> SampleTarget:
    """Return the size of a batch from a call's arguments, of which exactly one is given; ``steps`` are ``count_by``."""
    given = [(unit, amount) for unit, amount in amounts.items() if amount is not None]
    if steps is not None:
        given.append((count_by, steps))
    if len(given) != 1:
        names = [unit for unit, _ in given] if steps is None else ["steps", *(unit for unit, _ in given[:-1])]
        raise ArgumentError(
            f"{call}(): expected exactly one of steps, env_steps, agent_steps, episodes, got {names or 'none'}; write "
            f"{call}(env_steps=4096)"
        )
    unit, amount = given[0]
    return SampleTarget(unit, count_from(amount, f"{call}({unit}={amount!r})"))


class BatchSchedule:
    """A series of batches of size ``goal``, up to a total in the same unit (None: no end); the last has the rest."""

    def __init__(self, goal: SampleTarget, total: int | None) -> None:
        self._goal, self.total, self.done = goal, total, 0

    @property
    def next_goal(self) -> SampleTarget | None:
        """Return the size of the next batch; None if the total is reached."""
        if self.total is None:
            return self._goal
        left = min(self._goal.amount, self.total - self.done)
        return SampleTarget(self._goal.unit, left) if left > 0 else None

    def done_with(self, goal: SampleTarget, batch: MultiAgentBatch) -> int:
        """Return the amount delivered after this batch, which was collected for ``goal``."""
        amounts = {"env_steps": batch.env_steps, "agent_steps": batch.agent_steps, "episodes": goal.amount}
        return self.done + amounts[goal.unit]
