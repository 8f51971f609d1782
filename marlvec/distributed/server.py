"""`CollectorServer`: owns one collector, and answers the head's messages; `Place` describes the collector to build."""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, TypeAlias

import cloudpickle
import numpy as np

from marlvec.collect import Collector, MultiAgentBatch
from marlvec.collect.background import SampleTarget
from marlvec.collect.episodes import PolicyMapping
from marlvec.collect.metrics import MetricsDelta
from marlvec.collect.policies import PoliciesToTrain
from marlvec.connectors import Pipeline
from marlvec.errors import ArgumentError, RemoteCause, SerialisationError, StateError
from marlvec.serialization.saved import State, check_fields

_STREAM = 0x706C616365  # "place"


@dataclass(frozen=True, slots=True)
class Place:
    """The collector to build; each incarnation has its own stream and seed.

    Attributes:
        index: Number of the collector, from 0 to ``num_collectors - 1``.
        incarnation: Number of earlier builds.
        stream: Prefix of its ``eps_id`` and ``unroll_id``; pass it to `marlvec.Collector`.
        seed: Seed for envs and policies, computed from the head's seed, the index and the incarnation.
        num_collectors: Number of collectors.
    """

    index: int
    incarnation: int
    stream: int
    seed: int
    num_collectors: int


def seed_at(entropy: int, index: int, incarnation: int) -> int:
    """Return the seed of a place."""
    sequence = np.random.SeedSequence(entropy, spawn_key=(_STREAM, index, incarnation))
    return int(sequence.generate_state(1, np.uint64)[0])


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
class CollectRequest:
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
class CollectorCommand:
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


@dataclass(frozen=True, slots=True)
class Added:
    """The first collector's new policy, from which all others build an equal policy."""

    weights: Any  # None without weights
    chains: bytes | None  # its agent, action and learner connectors, pickled, if copied from another policy


@dataclass(frozen=True, slots=True)
class AddPolicy:
    """Add a policy, as `marlvec.Collector.add_policy` does.

    `content` are the policy and its agent, action and learner connectors, pickled together, so that connectors that
    refer to the policy refer to the added object.
    """

    policy_id: str
    content: bytes
    like: str | None
    frozen: bool
    mapping: bytes | None = None  # pickled, of episodes that begin from then on; None: keep the current one

    def apply(self, collector: Collector, added: Added | None) -> Added:
        """Add the policy to a collector. `added` is the first collector's result; None for the first collector."""
        policy, *own = pickle.loads(self.content)
        like = self.like
        if added is not None and added.chains is not None:
            own, like = pickle.loads(added.chains), None
        names = ("agent_connectors", "action_connectors", "learner_connectors")
        collector.add_policy(
            self.policy_id, policy, like=like, frozen=self.frozen, **dict(zip(names, own, strict=True))
        )
        try:
            check_learner_chain(collector, self.policy_id)
            _change_mapping(collector, self.mapping)
        except (ArgumentError, StateError):
            collector.remove_policy(self.policy_id)
            raise
        policy = collector.policies[self.policy_id]
        if added is None:
            return Added(policy.get_weights(), self._copied(collector) if like is not None else None)
        if added.weights:
            policy.set_weights(added.weights)
        return added

    def _copied(self, collector: Collector) -> bytes:
        """Pickle the new policy's connectors; their statistics are now shared by all, not one collector's own."""
        sides = collector.agent_connectors, collector.action_connectors, collector.learner_connectors
        chains = [side[self.policy_id] for side in sides]
        for chain in chains[:2]:
            if chain.bound:
                chain.take_merged(chain.merge_states([chain.hand_over()]))
        return bytes(cloudpickle.dumps(chains))


@dataclass(frozen=True, slots=True)
class RemovePolicy:
    """Remove a policy, once it plays in no running episode of a collector."""

    policy_id: str
    mapping: bytes | None = None  # pickled, without the policy; None: the current mapping does not name it

    def apply(self, collector: Collector) -> bool:
        """Set the mapping; remove the policy if no running episode uses it.

        Return whether it was removed; if not, call `retry` between other calls. `StateError`: a fixed mapping names it.
        """
        _change_mapping(collector, self.mapping)
        return self.retry(collector)

    def retry(self, collector: Collector) -> bool:
        """Remove the policy if no running episode uses it; return whether it was removed."""
        try:
            collector.remove_policy(self.policy_id)
        except StateError:
            if not callable(collector.policy_mapping):
                raise
            return False
        return True


@dataclass(frozen=True, slots=True)
class MapPolicies:
    """Set the policy mapping, pickled, of episodes that begin."""

    mapping: bytes

    def apply(self, collector: Collector) -> None:
        """Set the mapping; `StateError` if the collector's mapping is fixed."""
        _change_mapping(collector, self.mapping)


@dataclass(frozen=True, slots=True)
class TrainPolicies:
    """Set the trained policies, a pickled value for `marlvec.Collector.policies_to_train`."""

    given: bytes

    def apply(self, collector: Collector) -> None:
        """Set them."""
        given: PoliciesToTrain = pickle.loads(self.given)
        collector.policies_to_train = given


PolicyChange: TypeAlias = AddPolicy | RemovePolicy | MapPolicies | TrainPolicies


def _change_mapping(collector: Collector, mapping: bytes | None) -> None:
    if mapping is not None:
        function: PolicyMapping = pickle.loads(mapping)
        collector.policy_mapping = function


def check_learner_chain(collector: Collector, policy_id: str) -> None:
    """Raise for learner connectors that need the whole batch: a collector sees only its part."""
    if across := [piece.name for piece in collector.learner_connectors[policy_id] if piece.across_agents]:
        raise ArgumentError(
            f"learner connectors {across} of policy {policy_id!r} look across a batch, and each collector sees its own "
            f"part of it alone: give them to Collectors(learner_connectors=...)"
        )


def pickled(value: Any, name: str, hint: str = "") -> bytes:
    """Pickle a caller's value, functions and classes by value; `SerialisationError` names it."""
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise SerialisationError(f"{name} cannot be pickled ({error}){hint}") from error


class CollectorServer:
    """Builds a collector, and answers requests one after the other. `fetch` takes references of the engine."""

    def __init__(self, fetch: Callable[[Any], Any], *, reports_pid: bool) -> None:
        self._fetch, self._reports_pid = fetch, reports_pid
        self.collector: Collector | None = None
        self._version = -1
        self._idle_since = 0.0
        self._added: set[str] = set()  # trained policies that were added later
        self._leaving: list[RemovePolicy] = []  # removals of policies that still play

    def answer(self, message: Start | CollectRequest | CollectorCommand) -> Started | Answer | Raised:
        """Execute a message and return its answer; exceptions of the user's code are answers, too."""
        before, began = self._idle_since, perf_counter()
        if isinstance(message, Start):
            started = self._start(message)
            self._idle_since = perf_counter()
            return started
        answer = self._run(message) if isinstance(message, CollectRequest) else self._obey(message)
        self._idle_since = perf_counter()
        return replace(answer, seconds=(began - before, self._idle_since - began))

    def close(self) -> None:
        """Close the envs, which the server owns."""
        collector, self.collector = self.collector, None
        if collector is not None:
            collector.envs.close()

    def _start(self, start: Start) -> Started | Raised:
        try:
            collector = self.collector = self._built(start)
            metrics, weights = collector.metrics, None
            if start.wants_weights:
                found = {name: policy.get_weights() for name, policy in collector.policies.items()}
                weights = {name: own for name, own in found.items() if own}
            pid = os.getpid() if self._reports_pid else None
            trained = collector.policies_to_train
            started = Started(pid, metrics.agents, metrics.policies, collector.count_by, trained, weights)
            for change in start.changes:
                self._change(change)
            if start.merged is not None:
                self._take_merged(start.merged)
            metrics.take_delta()  # deltas are relative to this
            if start.state is not None:
                self._set_state(self._fetch(start.state), self._fetch(start.weights))
        except Exception as error:
            return Raised.of(error, f"in build({start.place})")
        return started

    def _built(self, start: Start) -> Collector:
        collector = pickle.loads(start.build)(start.place)
        if not isinstance(collector, Collector):
            raise ArgumentError(f"build(place) must return a marlvec.Collector, got {collector!r:.200}")
        if collector.stream != start.place.stream:
            collector.stream = start.place.stream
        for name in collector.policies:
            check_learner_chain(collector, name)
        return collector

    def _run(self, request: CollectRequest) -> Answer:
        collector = self.collector
        assert collector is not None  # `Start` came first
        try:
            self._prepare(request, collector)
            batch = collector.collect(**{request.goal.unit: request.goal.amount})
            handed = self._hand_over(wants_pipelines=request.wants_pipelines) if request.hands_over else None
        except Exception as error:
            where = f"in collector {request.index}, incarnation {request.epoch}; its rows come with its next answer"
            return Answer(request.id, request.epoch, raised=Raised.of(error, where))
        return Answer(request.id, request.epoch, (batch,), collector.metrics.take_delta(), handed)

    def _obey(self, command: CollectorCommand) -> Answer:
        try:
            return Answer(command.id, command.epoch, value=self._done(command.content))
        except Exception as error:
            where = f"in collector {command.index}, incarnation {command.epoch}"
            return Answer(command.id, command.epoch, raised=Raised.of(error, where))

    def _done(self, content: Change | GetState | CheckState) -> Any:
        if isinstance(content, Change):
            return self._change(content)
        if isinstance(content, GetState):
            return self._get_state()
        return self._check_state(self._fetch(content.state))

    def _get_state(self) -> State:
        collector = self.collector
        assert collector is not None  # `Start` came first
        self._leaving = [content for content in self._leaving if not content.retry(collector)]
        if self._leaving:
            raise StateError(
                f"the policies {[content.policy_id for content in self._leaving]} were removed, and play in running "
                f"episodes yet: collect until these are over"
            )
        return {"collector": collector.get_state(), "version": self._version}

    def _check_state(self, state: State) -> None:
        """Check that a state fits this collector, whatever place it was saved at."""
        collector = self.collector
        assert collector is not None  # `Start` came first
        own = check_fields(state, ("collector", "version"), "the state of a collector")["collector"]
        if isinstance(own, Mapping) and isinstance(belongs_to := own.get("belongs_to"), Mapping):
            own = {**own, "belongs_to": {**belongs_to, "stream": collector.stream}}
        collector.check_state(own)

    def _set_state(self, state: State, weights: Mapping[str, Any]) -> None:
        collector = self.collector
        assert collector is not None  # `Start` came first
        with collector.updating():
            for name, own in weights.items():
                collector.policies[name].set_weights(own)
        collector.set_state(state["collector"])
        self._version = state["version"]

    def _change(self, change: Change) -> Any:
        collector = self.collector
        assert collector is not None  # `Start` came first
        content: PolicyChange = self._fetch(change.content)
        if isinstance(content, AddPolicy):
            added = content.apply(collector, None if change.added is None else self._fetch(change.added))
            if not content.frozen:
                self._added.add(content.policy_id)
                collector.policies[content.policy_id].version = max(self._version, 0)
            return added
        if isinstance(content, RemovePolicy):
            if not content.apply(collector):
                self._leaving.append(content)
            return None
        return content.apply(collector)

    def _prepare(self, request: CollectRequest, collector: Collector) -> None:
        self._leaving = [content for content in self._leaving if not content.retry(collector)]
        if request.merged is not None:
            self._take_merged(request.merged)
        if request.base == self._version:
            return
        weights = self._fetch(request.weights)
        with collector.updating():
            for name in [name for name in collector.policies if name in weights or name in self._added]:
                policy = collector.policies[name]
                if name in weights:
                    policy.set_weights(weights[name])
                policy.version = request.base
        self._version = request.base

    def _chains(self) -> dict[str, tuple[Pipeline[Any], ...]]:
        """Return agent and action connectors of policies whose spaces are known."""
        assert self.collector is not None  # `Start` came first
        sides = self.collector.agent_connectors, self.collector.action_connectors
        return {
            name: (chain, sides[1][name]) for name, chain in sides[0].items() if chain.bound and sides[1][name].bound
        }

    def _hand_over(self, *, wants_pipelines: bool) -> HandedOver:
        chains = self._chains()
        pipelines = cloudpickle.dumps(chains) if wants_pipelines else None
        return HandedOver({name: tuple(chain.hand_over() for chain in own) for name, own in chains.items()}, pipelines)

    def _take_merged(self, merged: Mapping[str, tuple[Any, ...]]) -> None:
        for name, own in self._chains().items():
            for chain, state in zip(own, merged.get(name, ()), strict=False):  # None before the first merge
                chain.take_merged(state)
