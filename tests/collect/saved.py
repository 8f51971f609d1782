"""Collectors that can be told apart by their next batches alone, and what holds two runs against each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from marlvec import Collector, MultiAgentBatch
from tests.vector.test_saved_states import same

Amounts = Sequence[dict[str, int]]
"""What each call of `collect` is asked for."""

_CLOCK = {"seconds", "duration", "timers", "taken_timers"}


def without_clock(value: Any) -> Any:
    """The same without what says how long something has taken."""
    if isinstance(value, dict):
        return {key: without_clock(part) for key, part in value.items() if key not in _CLOCK}
    return [without_clock(part) for part in value] if isinstance(value, list) else value


def batches_of(collector: Collector, amounts: Amounts) -> list[dict[str, Any]]:
    """Columns of batches, with what they say of themselves."""
    return [columns_of(collector.collect(**amount)) for amount in amounts]


def columns_of(batch: MultiAgentBatch) -> dict[str, Any]:
    columns = {name: dict(batch[name].items()) for name in sorted(batch)}
    return {"columns": columns, "env_steps": batch.env_steps, "agent_steps": batch.agent_steps}


def counted(collector: Collector) -> dict[str, Any]:
    """Metrics but for times."""
    found: dict[str, Any] = without_clock(collector.metrics.summary())
    return found


def goes_on_alike(
    make: Callable[[], Collector], folder: Path, before: Amounts, after: Amounts, *, twice: bool = True
) -> None:
    """Collect, save, load into another collector, and compare all that comes later with the run that goes on.

    Args:
        make: Builds a collector, always alike.
        folder: Where to save.
        before: What is collected before.
        after: And then.
        twice: Whether the state is to be the same once it was loaded.
    """
    collector = make()
    try:
        batches_of(collector, before)
        collector.save(folder / "one.npz")
        state = without_clock(collector.get_state())
        want = batches_of(collector, after)
        sums, last = counted(collector), without_clock(collector.get_state())
    finally:
        collector.envs.close()
    undisturbed = make()
    try:
        batches_of(undisturbed, before)
        same(batches_of(undisturbed, after), want)
    finally:
        undisturbed.envs.close()
    other = make()
    try:
        other.load(folder / "one.npz")
        if twice:
            same(without_clock(other.get_state()), state)
        got = batches_of(other, after)
        same(got, want)
        same(counted(other), sums)
        same(without_clock(other.get_state()), last)
    finally:
        other.envs.close()
