"""`StatefulCollectors`: saves and restores the state of many collectors, with answers that are in no batch yet."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from marlvec.collect import MultiAgentBatch
from marlvec.collect.metrics import CollectorStats, Counters, EndedEpisodes, Metrics, MetricsDelta
from marlvec.collect.state import (
    StateLoader,
    batch_from,
    check_identity,
    describe_pipeline,
    get_batch_state,
    has_state,
    state_of,
)
from marlvec.distributed.accounting import Ledger, LedgerState, Plan
from marlvec.distributed.collector_group import CollectorGroup, HeadCallbacks, HeadPolicies, MergeRounds
from marlvec.distributed.engine import Engine
from marlvec.distributed.server import Answer, CheckState, GetState
from marlvec.errors import ArgumentError, StateError
from marlvec.serialization.atomic_file import FilePath
from marlvec.serialization.records import Count, field_types, from_plain, read_fields, to_plain
from marlvec.serialization.saved import State, check_fields, number_field
from marlvec.serialization.values import read_value, write_value

FORMAT = 1
_FIELDS = (
    *("format", "belongs_to", "group", "ledger", "answers", "plan", "rounds", "policies", "metrics", "counters"),
    *("stats", "callbacks"),
)


class StatefulCollectors(ABC):
    """Base of `Collectors` that saves and restores all state that the next batches depend on."""

    metrics: Metrics
    _engine: Engine
    _group: CollectorGroup
    _ledger: Ledger
    _plan: Plan
    _rounds: MergeRounds
    _policies: HeadPolicies
    _callbacks: HeadCallbacks
    _count_by: Any
    _is_half_set = False  # whether a set_state() was cut short

    def get_state(self) -> State:
        """Return all state that the next batches depend on, between two calls of `collect`.

        It waits for all outstanding answers, which are part of the state until they are delivered. Then each collector
        returns its state, see `marlvec.Collector.get_state`; the head adds its ledger, used seeds and ids, merged
        statistics, weights, metrics, and the states of learner connectors and callbacks.

        Returns:
            Plain data: numbers, strings, None, arrays, lists, tuples and dicts, which later calls do not change.

        Raises:
            StateError: A removed policy still plays in a running episode, or still has rows to deliver: collect, then
                try again. Or see `marlvec.Collector.get_state`.
            CollectorDied: See ``on_fault``; the call may be repeated.
            Exception: A collector raised it in an earlier request.
        """
        self._check_open()
        self._check_whole()
        said = self._ask_all(lambda index: GetState())
        group, metrics = self._group, self.metrics
        group.forget_delivered()
        return {
            "format": FORMAT,
            "belongs_to": self._identity,
            "group": group.get_state(said),
            "ledger": self._ledger.state.get_state(),
            "answers": [get_answer_state(group.answers[entry.id]) for entry in self._ledger.held],
            "plan": self._plan.get_state(),
            "rounds": self._rounds.get_state(),
            "policies": self._policies.get_state(),
            "metrics": metrics.get_state(),
            "counters": metrics.state.rollout.counters.get_state(),
            "stats": to_plain(list(metrics.collectors)),
            "callbacks": [[who, state_of(thing)] for who, thing in self._others()],
        }

    def set_state(self, state: State) -> None:
        """Continue from a state of collectors with equal arguments; the next batches are theirs.

        Use the same arguments and policies as the saved collectors, the policies by ``build`` or `add_policy`. All
        collectors are ended and rebuilt at their saved places, with the saved seeds and ids. Outstanding answers here
        are dropped. If envs cannot save their state, new episodes begin, and rows of the old episodes count as lost.

        With ``sync=True``, equal amounts and equal weights, batches are the same bit for bit. With ``sync=False`` each
        collector's rows are the same, but batches again take fragments in order of arrival.

        Args:
            state: The result of `get_state`.

        Raises:
            ArgumentError: It is not a state, or of other collectors; names the difference. Nothing has changed.
            CollectorDied: See ``on_fault``; the call may be repeated.
            Exception: ``build`` raised it, or an env, policy or connector that does not accept its state. The next call
                of any method builds the remaining collectors from the state.
        """
        self._check_open()
        try:
            check_fields(state, _FIELDS, "set_state()")
            if state["format"] != FORMAT:
                raise ArgumentError(f"set_state(): expected a state of format {FORMAT}, got {state['format']!r:.50}")
            check_identity(state["belongs_to"], self._identity, "these collectors have")
            stored = self._store(state)
            loader = StateLoader()
            put_all = self._prepare(state, stored, loader)
        except ArgumentError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ArgumentError(f"set_state(): expected a state from get_state(): {error!r:.200}") from error
        for collector in self._group.collectors.values():
            collector.resume = None  # left over from a set_state() that failed
        self._ask_all(lambda index: CheckState(stored[index][0]) if index in stored else None)
        try:
            loader.load()
        except BaseException:
            loader.undo()
            raise
        self._is_half_set = True
        put_all()
        self._is_half_set = False
        self._restart_missing()

    def save(self, path: FilePath) -> None:
        """Write `get_state` to a file, by convention ``.npz``, atomically; an existing file is replaced.

        Raises:
            SerialisationError: A value cannot be saved in a file; names it.
            OSError: The file cannot be written; an existing file is unchanged.
            Exception: See `get_state`.
        """
        write_value(path, "collectors", self.get_state(), "the collectors' state")

    def load(self, path: FilePath) -> None:
        """Continue from a file of `save`: see `set_state`. Loading executes no code from it.

        Raises:
            CheckpointError: The file is missing, damaged, of another version, or holds something else.
            Exception: See `set_state`.
        """
        self.set_state(read_value(path, "collectors", "collectors"))

    @abstractmethod
    def _check_open(self) -> None: ...

    @abstractmethod
    def _raise(self) -> None: ...

    @abstractmethod
    def _receive(self) -> None: ...

    @abstractmethod
    def _restart_missing(self) -> None: ...

    def _check_whole(self) -> None:
        """Raise if a call of `set_state` was cut short."""
        if self._is_half_set:
            raise StateError("set_state() was ended in the middle: call it again")

    @property
    def _identity(self) -> State:
        chains = self._policies.learner_connectors
        return {
            "num_collectors": len(self._group.collectors),
            "agents": list(self.metrics.agents),
            "policies": sorted(self._policies.ids),
            "count_by": self._count_by,
            "plan": self._plan.settings,
            "sync_states": self._rounds.every,
            "learner_connectors": {name: describe_pipeline(chain) for name, chain in sorted(chains.items())},
        }

    def _ask_all(self, content: Callable[[int], GetState | CheckState | None]) -> dict[int, Any]:
        """Send each collector a question, after its earlier requests; return the replies by index."""
        group = self._group
        group.replies.clear()
        asked: dict[int, int] = {}
        while True:
            self._raise()
            self._restart_missing()
            for index in group.active:
                epoch, what = group.collectors[index].epoch, content(index)
                if asked.get(index) != epoch and what is not None:
                    group.send_changes(index)
                    group.question(index, what)
                asked[index] = epoch
            if not group.is_awaited:
                break
            self._receive()
        replies, group.replies = group.replies, {}
        for reply in replies.values():
            if reply.raised is not None:
                raise reply.raised.exception()
        return {index: reply.value for index, reply in replies.items()}

    def _store(self, state: State) -> dict[int, tuple[Any, Any]]:
        """Store each collector's state, and the weights, in the engine."""
        put, weights = self._engine.put, self._engine.put(state["policies"]["weights"])
        states = enumerate(one["state"] for one in state["group"]["collectors"])
        return {index: (put(own), weights) for index, own in states if own is not None}

    def _prepare(self, state: State, stored: dict[int, tuple[Any, Any]], loader: StateLoader) -> Callable[[], None]:
        """Validate the head's part of a state; return a function that installs it."""
        ledger_state = LedgerState.from_state(state["ledger"])
        answers = {answer.id: answer for answer in map(answer_from, state["answers"])}
        if answers.keys() != ledger_state.entries.keys():
            raise ArgumentError("set_state(): the ledger has other answers than there are")
        put_group = self._group.prepare(state["group"], answers, stored)
        put_plan = self._plan.prepare(state["plan"])
        put_rounds = self._rounds.prepare(state["rounds"])
        put_policies = self._policies.prepare(state["policies"], loader)
        put_metrics = self.metrics.prepare(state["metrics"], state["metrics"]["numbers"])
        counters = from_plain(Counters, state["counters"], "set_state(): counters")
        stats = from_plain(tuple[CollectorStats, ...], state["stats"], "set_state(): stats")
        loader.add_all(self._others(), state["callbacks"])

        def put_all() -> None:
            self._ledger.state = ledger_state
            put_plan()
            put_rounds()
            put_policies()
            put_metrics()
            shown = self.metrics.state
            self.metrics.show(shown._replace(rollout=shown.rollout._replace(counters=counters)))
            self.metrics.collectors = stats
            put_group()

        return put_all

    def _others(self) -> Iterator[tuple[str, Any]]:
        """Return the callbacks that have a state."""
        for i, callback in enumerate(self._callbacks.callbacks):
            if has_state(callback):
                yield f"callbacks[{i}], {type(callback).__name__}", callback


def get_answer_state(answer: Answer) -> State:
    """Return the part of an answer that its future batch needs; connectors' statistics are not part of it."""
    return {
        "id": answer.id,
        "epoch": answer.epoch,
        "batch": get_batch_state(MultiAgentBatch.concat(answer.parts)) if answer.parts else None,
        "delta": None if answer.delta is None else _get_delta_state(answer.delta),
        "seconds": list(answer.seconds),
    }


def answer_from(state: Any) -> Answer:
    """Rebuild an answer from its state."""
    kinds = {"id": Count, "epoch": Count, "batch": Any, "delta": Any, "seconds": tuple[float, float]}
    found = read_fields(state, "an answer that waits", **kinds)
    batch, delta = found.pop("batch"), found.pop("delta")
    parts = () if batch is None else (batch_from(batch, {}),)
    return Answer(**found, parts=parts, delta=None if delta is None else _delta_from(delta))


def _get_delta_state(delta: MetricsDelta) -> State:
    table = EndedEpisodes(len(delta.agents), max(1, len(delta.episodes)))
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
    where = "metrics of an answer"
    found = read_fields(state, where, **{**field_types(MetricsDelta), "episodes": dict[str, Any]})
    table = EndedEpisodes(len(found["agents"]), max(1, number_field(found["episodes"], "size", where)))
    table.prepare(found["episodes"], {})()
    return MetricsDelta(**{**found, "episodes": table.last()})
