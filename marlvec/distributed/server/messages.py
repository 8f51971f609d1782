"""Messages between the head and its collectors: plain values, pickled between processes."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle

from marlvec.collect import MultiAgentBatch
from marlvec.collect.batch.sample_target import SampleTarget
from marlvec.collect.metrics.metrics import MetricsDelta
from marlvec.distributed.place import Place
from marlvec.errors import RemoteCause

__all__ = [
    "Answer",
    "Change",
    "CheckState",
    "Command",
    "GetState",
    "HandedOver",
    "Raised",
    "Request",
    "Start",
    "Started",
]


@dataclass(frozen=True, slots=True)
class Change:
    """A change of policies.

    Attributes:
        content: The engine's reference to the `PolicyChange`.
        added: Reference to the first collector's result; None for the first collector, or without a result.
    """

    content: Any
    added: Any = None


@dataclass(frozen=True, slots=True)
class GetState:
    """Return the state that the next answers depend on."""


@dataclass(frozen=True, slots=True)
class CheckState:
    """Check that a state fits this collector.

    Attributes:
        state: The engine's reference to the state.
    """

    state: Any


@dataclass(frozen=True, slots=True)
class Start:
    """Build a collector.

    Attributes:
        place: Place of the collector.
        build: The caller's function, pickled by value.
        merged: The merged statistics so far; None before the first merge.
        wants_weights: Whether to return the policies' weights.
        changes: All policy changes since the first collectors were built, in order.
        state: Reference to the state to continue from, a `GetState` answer; None: start afresh.
        weights: Reference to the weights saved with it, for policies whose only state are weights.
    """

    place: Place
    build: bytes
    merged: Any
    wants_weights: bool
    changes: tuple[Change, ...] = ()
    state: Any = None
    weights: Any = None


@dataclass(frozen=True, slots=True)
class Started:
    """Reply to `Start`: the collector is built.

    Attributes:
        pid: Its process id; None in the head's process.
        agents, policies: Agents and policies of its metrics when built, before any change.
        count_by: Unit of its ``collect(1000)``.
        policies_to_train: The collector's argument.
        weights: Weights by policy id, if requested, of policies with weights.
    """

    pid: int | None
    agents: tuple[str, ...]
    policies: tuple[str, ...]
    count_by: str
    policies_to_train: Any
    weights: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Request:
    """Collect rows.

    Attributes:
        id, index, epoch: Request id, collector's number and incarnation.
        goal: Amount to collect.
        base: Version of the weights to decide with.
        weights: The engine's reference to the weights.
        merged: Merged statistics to install first; None: nothing new.
        hands_over: Whether to hand over connectors' statistics after collecting.
        wants_pipelines: Whether to add copies of the pipelines, which the head merges with.
    """

    id: int
    index: int
    epoch: int
    goal: SampleTarget
    base: int
    weights: Any
    merged: Any
    hands_over: bool
    wants_pipelines: bool


@dataclass(frozen=True, slots=True)
class Command:
    """Do something other than collecting, in order with requests.

    Attributes:
        id, index, epoch: Request id, collector's number and incarnation.
        content: The command.
    """

    id: int
    index: int
    epoch: int
    content: Change | GetState | CheckState


@dataclass(frozen=True, slots=True)
class HandedOver:
    """Statistics of a collector's connectors.

    Attributes:
        states: Policy id to the states of its agent and action connectors, for policies whose spaces are known.
        pipelines: Policy id to those pipelines, pickled, if requested.
    """

    states: Mapping[str, tuple[Any, ...]]
    pipelines: bytes | None


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception of the user's code, sent to the head.

    Attributes:
        summary: Its type and text.
        notes: Its notes, and its traceback in the collector's process.
        pickled: The exception, pickled; None if it cannot be pickled.
    """

    summary: str
    notes: tuple[str, ...]
    pickled: bytes | None

    @classmethod
    def of(cls, error: BaseException, where: str) -> Raised:
        """Pack an exception.

        Args:
            error: The exception.
            where: What the server was doing, for a note.
        """
        notes = (*getattr(error, "__notes__", ()), where, "".join(traceback.format_exception(error)))
        pickled: bytes | None
        try:
            pickled = cloudpickle.dumps(error)
            pickle.loads(pickled)
        except Exception:  # an attribute cannot be pickled: send the text only
            pickled = None
        return cls("".join(traceback.format_exception_only(error)).strip(), notes, pickled)

    def exception(self) -> BaseException:
        """Return the exception with its notes, or a `RemoteCause` if it cannot be unpickled."""
        error: BaseException = RemoteCause(self.summary)
        if self.pickled is not None:
            try:
                error = pickle.loads(self.pickled)
            except Exception:  # its module cannot be imported here
                error = RemoteCause(self.summary)
        error.__notes__ = list(self.notes)
        return error


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to a request.

    Attributes:
        id, epoch: Request id and collector's incarnation.
        parts: The rows, in consecutive pieces; empty if the collector raised, and for commands.
        delta: Metrics since the previous answer.
        handed: Connectors' statistics, if requested.
        raised: The collector's exception; its rows come with its next answer.
        value: Result of a command.
        seconds: Seconds for which the collector waited for the request, and worked on it.
    """

    id: int
    epoch: int
    parts: tuple[MultiAgentBatch, ...] = ()
    delta: MetricsDelta | None = None
    handed: HandedOver | None = None
    raised: Raised | None = None
    value: Any = None
    seconds: tuple[float, float] = (0.0, 0.0)
