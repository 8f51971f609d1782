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
    """A change of policies."""

    content: Any  # the engine's reference to the `PolicyChange`
    added: Any = None  # reference to the first collector's result; None for the first collector, or without a result


@dataclass(frozen=True, slots=True)
class GetState:
    """Return the state that the next answers depend on."""


@dataclass(frozen=True, slots=True)
class CheckState:
    """Check that a state, given by the engine's reference, fits this collector."""

    state: Any


@dataclass(frozen=True, slots=True)
class Start:
    """Build a collector."""

    place: Place
    build: bytes  # the caller's function, pickled by value
    merged: Any  # statistics so far; None before the first merge
    wants_weights: bool  # to return the policies' weights
    changes: tuple[Change, ...] = ()  # all since the first collectors were built, in order
    state: Any = None  # reference to a `GetState` answer to continue from
    weights: Any = None  # reference to the weights saved with it, for policies whose only state are weights


@dataclass(frozen=True, slots=True)
class Started:
    """Reply to `Start`: the collector is built."""

    pid: int | None  # None in the head's process
    agents: tuple[str, ...]  # of its metrics when built, before any change, as are `policies`
    policies: tuple[str, ...]
    count_by: str  # unit of its ``collect(1000)``
    policies_to_train: Any
    weights: Mapping[str, Any] | None  # by policy id, if requested, of policies with weights


@dataclass(frozen=True, slots=True)
class Request:
    """Collect rows."""

    id: int
    index: int
    epoch: int
    goal: SampleTarget
    base: int  # version of the weights to decide with
    weights: Any  # the engine's reference
    merged: Any  # statistics to install first; None: nothing new
    hands_over: bool  # connectors' statistics, after collecting
    wants_pipelines: bool  # copies of the pipelines, which the head merges with


@dataclass(frozen=True, slots=True)
class Command:
    """Do something other than collecting, in order with requests."""

    id: int
    index: int
    epoch: int
    content: Change | GetState | CheckState


@dataclass(frozen=True, slots=True)
class HandedOver:
    """Statistics of a collector's connectors."""

    # policy id → states of its agent and action connectors, for policies whose spaces are known
    states: Mapping[str, tuple[Any, ...]]
    pipelines: bytes | None  # policy id → those pipelines, pickled, if requested


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception of the user's code, sent to the head."""

    summary: str  # type and text
    notes: tuple[str, ...]  # its notes, and its traceback in the collector's process
    pickled: bytes | None  # None if it cannot be pickled

    @classmethod
    def of(cls, error: BaseException, where: str) -> Raised:
        """Pack an exception; `where` says what the server was doing, for a note."""
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
    """Answer to a request."""

    id: int
    epoch: int
    # the rows, in consecutive pieces; empty if the collector raised, and for commands
    parts: tuple[MultiAgentBatch, ...] = ()
    delta: MetricsDelta | None = None  # metrics since the previous answer
    handed: HandedOver | None = None  # connectors' statistics, if requested
    raised: Raised | None = None  # its rows come with the collector's next answer
    value: Any = None  # result of a command
    seconds: tuple[float, float] = (0.0, 0.0)  # for which the collector waited for the request, and worked on it
