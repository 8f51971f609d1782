"""Converts answers that are on the head and in no batch yet to plain data and back."""

from __future__ import annotations

from typing import Any

from marlvec.collect import MultiAgentBatch
from marlvec.collect.metrics.episode_table import EpisodeTable
from marlvec.collect.metrics.metrics import MetricsDelta
from marlvec.collect.state.batch_state import batch_from, get_batch_state
from marlvec.distributed.server.messages import Answer
from marlvec.errors import ArgumentError
from marlvec.serialization.state_fields import State, check_fields, number_field

__all__ = ["answer_from", "get_answer_state"]

_FIELDS = ("id", "epoch", "batch", "delta", "seconds")
_DELTA = ("agents", "policies", "episodes", "counters", "timers", "values")


def get_answer_state(answer: Answer) -> State:
    """Return the part of an answer that its future batch needs; connectors' statistics are not part of it.

    Raises:
        SerialisationError: A column of its rows holds objects along more axes than one.
    """
    return {
        "id": answer.id,
        "epoch": answer.epoch,
        "batch": get_batch_state(MultiAgentBatch.concat(answer.parts)) if answer.parts else None,
        "delta": None if answer.delta is None else _get_delta_state(answer.delta),
        "seconds": list(answer.seconds),
    }


def answer_from(state: Any) -> Answer:
    """Rebuild an answer from its state.

    Raises:
        ArgumentError: The data is not from `get_answer_state`.
    """
    where = "an answer that waits"
    check_fields(state, _FIELDS, where)
    try:
        delta = None if state["delta"] is None else _delta_from(state["delta"])
        waited, worked = map(float, state["seconds"])
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        raise ArgumentError(f"{where}: expected a state from get_state(): {error!r:.200}") from error
    return Answer(
        number_field(state, "id", where),
        number_field(state, "epoch", where),
        () if state["batch"] is None else (batch_from(state["batch"], {}),),
        delta,
        seconds=(waited, worked),
    )


def _get_delta_state(delta: MetricsDelta) -> State:
    table = EpisodeTable(len(delta.agents), max(1, len(delta.episodes)))
    table.add(delta.episodes)
    return {
        "agents": list(delta.agents),
        "policies": list(delta.policies),
        "episodes": table.get_state(),
        "counters": dict(delta.counters),
        "timers": {name: list(timer) for name, timer in delta.timers.items()},
        "values": [list(value) for value in delta.values],
    }


def _delta_from(state: Any) -> MetricsDelta:
    check_fields(state, _DELTA, "metrics of an answer")
    agents = tuple(map(str, state["agents"]))
    table = EpisodeTable(len(agents), max(1, state["episodes"]["size"]))
    table.prepare(state["episodes"], {})()
    return MetricsDelta(
        agents,
        tuple(map(str, state["policies"])),
        table.last(),
        {str(name): int(number) for name, number in state["counters"].items()},
        {str(name): (float(seconds), int(calls)) for name, (seconds, calls) in state["timers"].items()},
        tuple((str(name), float(value)) for name, value in state["values"]),
    )
