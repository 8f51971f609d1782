"""`CollectorServer`: owns one collector, and answers the head's messages."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from time import perf_counter
from typing import Any

import cloudpickle

from marlvec.collect import Collector
from marlvec.connectors import Pipeline
from marlvec.distributed.server.messages import (
    Answer,
    Change,
    CheckState,
    Command,
    GetState,
    HandedOver,
    Raised,
    Request,
    Start,
    Started,
)
from marlvec.distributed.server.policy_changes import AddPolicy, PolicyChange, RemovePolicy, check_learner_chain
from marlvec.errors import ArgumentError, StateError
from marlvec.serialization.state_fields import State, check_fields

__all__ = ["CollectorServer"]


class CollectorServer:
    """Builds a collector, and answers requests one after the other. `fetch` takes references of the engine."""

    def __init__(self, fetch: Callable[[Any], Any], *, reports_pid: bool) -> None:
        self._fetch, self._reports_pid = fetch, reports_pid
        self.collector: Collector | None = None
        self._version = -1
        self._idle_since = 0.0
        self._added: set[str] = set()  # trained policies that were added later
        self._leaving: list[RemovePolicy] = []  # removals of policies that still play

    def answer(self, message: Start | Request | Command) -> Started | Answer | Raised:
        """Execute a message and return its answer; exceptions of the user's code are answers, too."""
        before, began = self._idle_since, perf_counter()
        if isinstance(message, Start):
            started = self._start(message)
            self._idle_since = perf_counter()
            return started
        answer = self._run(message) if isinstance(message, Request) else self._obey(message)
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

    def _run(self, request: Request) -> Answer:
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

    def _obey(self, command: Command) -> Answer:
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

    def _prepare(self, request: Request, collector: Collector) -> None:
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
