"""What goes between the head and its collectors: plain values, pickled where a process lies between."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle

from marlvec.collect import MultiAgentBatch
from marlvec.collect.batch.sample_target import SampleTarget
from marlvec.collect.metrics.metrics_delta import MetricsDelta
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
        content: Where the engine finds the `PolicyChange`.
        added: Where it finds what the first collector made of it; None: this is the first, or there is nothing.
    """

    content: Any
    added: Any = None


@dataclass(frozen=True, slots=True)
class GetState:
    """Say all that the next answers depend on."""


@dataclass(frozen=True, slots=True)
class CheckState:
    """Say whether a state is of such a collector.

    Attributes:
        state: Where the engine finds it.
    """

    state: Any


@dataclass(frozen=True, slots=True)
class Start:
    """Build a collector.

    Attributes:
        place: Which.
        build: The caller's function, pickled by value.
        merged: What all collectors have learnt together so far; None: nothing yet.
        wants_weights: Whether to return its policies' weights.
        changes: What has changed in all collectors since their first ones were built, in order.
        state: Where the engine finds the state to go on from, as `GetState` was answered; None: it begins.
        weights: Where it finds the weights of that moment, for policies that have no state but these.
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
    """A collector is there.

    Attributes:
        pid: Its process; None: the head's own.
        agents, policies: As its metrics have them once it is built, and nothing has changed yet.
        count_by: What ``collect(1000)`` counts there.
        policies_to_train: As it was built with.
        weights: Weights by policy id, of those that have some, where they were wanted.
    """

    pid: int | None
    agents: tuple[str, ...]
    policies: tuple[str, ...]
    count_by: str
    policies_to_train: Any
    weights: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Request:
    """Collect.

    Attributes:
        id, index, epoch: As in the ledger.
        goal: How much.
        base: Version of the weights to decide with.
        weights: Where the engine finds them.
        merged: What all collectors have learnt together, to be taken over first; None: nothing new.
        hands_over: Whether to hand over what was learnt, once it has collected.
        wants_pipelines: Whether to give copies of the pipelines with it, for the head to merge with.
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
    """Do something else than to collect, in order with requests.

    Attributes:
        id, index, epoch: As in the ledger.
        content: What.
    """

    id: int
    index: int
    epoch: int
    content: Change | GetState | CheckState


@dataclass(frozen=True, slots=True)
class HandedOver:
    """What a collector has learnt.

    Attributes:
        states: Policy id to the states of its agent and its action connectors; of those that know their spaces.
        pipelines: Policy id to those pipelines, pickled, where they were wanted.
    """

    states: Mapping[str, tuple[Any, ...]]
    pipelines: bytes | None


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception of the user's, on its way to the head.

    Attributes:
        summary: Its type and text.
        notes: Its notes, and the traceback where it happened.
        pickled: Itself; None where it cannot be.
    """

    summary: str
    notes: tuple[str, ...]
    pickled: bytes | None

    @classmethod
    def of(cls, error: BaseException, where: str) -> Raised:
        """Pack an exception.

        Args:
            error: The exception.
            where: What was going on, for a note.
        """
        notes = (*getattr(error, "__notes__", ()), where, "".join(traceback.format_exception(error)))
        pickled: bytes | None
        try:
            pickled = cloudpickle.dumps(error)
            pickle.loads(pickled)
        except Exception:  # whatever it holds cannot cross; its text does
            pickled = None
        return cls("".join(traceback.format_exception_only(error)).strip(), notes, pickled)

    def exception(self) -> BaseException:
        """The exception again, or a `RemoteCause` where it cannot be rebuilt; with its notes."""
        error: BaseException = RemoteCause(self.summary)
        if self.pickled is not None:
            try:
                error = pickle.loads(self.pickled)
            except Exception:  # its class lives in a module that cannot be imported here
                error = RemoteCause(self.summary)
        error.__notes__ = list(self.notes)
        return error


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request brought.

    Attributes:
        id, epoch: Of the request.
        parts: The rows, in pieces that follow on each other; none where it raised, and of a command.
        delta: What metrics have counted since the answer before.
        handed: What was learnt, where that was asked for.
        raised: What the collector raised; its rows come with its next answer.
        value: What a command returns.
        seconds: How long the collector has waited for the request, and then worked for it.
    """

    id: int
    epoch: int
    parts: tuple[MultiAgentBatch, ...] = ()
    delta: MetricsDelta | None = None
    handed: HandedOver | None = None
    raised: Raised | None = None
    value: Any = None
    seconds: tuple[float, float] = (0.0, 0.0)
