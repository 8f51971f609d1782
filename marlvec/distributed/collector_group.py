"""`CollectorGroup`: collectors' processes, requests and answers; what the head itself keeps; merged statistics."""

from __future__ import annotations

import copy
import logging
import pickle
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Annotated, Any

import cloudpickle

from marlvec.collect import EpisodeRecord, Metrics, MultiAgentBatch
from marlvec.collect.callbacks import CallbackLike, RunningEpisode, listeners_by_hook
from marlvec.collect.policies import Connectors, PoliciesToTrain, pipelines_for
from marlvec.collect.state import StateLoader
from marlvec.connectors import LearnerPipeline, Pipeline
from marlvec.distributed.accounting import Entry, Ledger, LostReason, may_publish
from marlvec.distributed.engine import Engine, LostError, UnsentError
from marlvec.distributed.server import (
    AddPolicy,
    Answer,
    Change,
    CheckState,
    CollectorCommand,
    CollectRequest,
    GetState,
    HandedOver,
    MapPolicies,
    Place,
    PolicyChange,
    Raised,
    RemovePolicy,
    Start,
    Started,
    TrainPolicies,
    seed_at,
)
from marlvec.errors import ArgumentError, CollectorDied, CollectorTimeout, ProtocolError, SerialisationError, StateError
from marlvec.serialization.records import Count, field_types, read_fields, to_plain
from marlvec.serialization.saved import State, check_fields
from marlvec.vector.settings import RestartBudget, RestartLimit


@dataclass(slots=True, eq=False)
class _Entry:
    content: PolicyChange
    change: Change  # the message to collectors
    on_confirmed: Callable[[], None] | None = None  # to call once it is confirmed; None after the call
    is_confirmed: bool = False  # a collector has made it; from then on all must make it
    error: BaseException | None = None  # the first collector's exception


class PolicyLog:
    """Changes that all collectors make before their next request; restarted collectors before their first.

    The first collector to get a change decides. If it raises, the caller gets the exception, and nothing has changed.
    Once it has made the change, all others must make it; if one cannot, it is restarted, as collectors may not differ.
    """

    def __init__(self, put: Callable[[Any], Any]) -> None:
        self._put = put
        self._entries: dict[int, _Entry] = {}
        self._count = 0

    def add(self, content: PolicyChange, on_confirmed: Callable[[], None]) -> int:
        """Record a change that no collector has made yet; return its number. `call_confirmed` calls `on_confirmed`."""
        number, self._count = self._count, self._count + 1
        self._entries[number] = _Entry(content, Change(self._put(content)), on_confirmed)
        return number

    def drop(self, number: int) -> None:
        """Forget a change that no collector has made."""
        if number in self._entries and not self._entries[number].is_confirmed:
            del self._entries[number]

    def __getitem__(self, number: int) -> Change:
        return self._entries[number].change

    def call_confirmed(self) -> None:
        """Call the head's functions for changes that a collector has made."""
        for entry in self._entries.values():
            if entry.is_confirmed and entry.on_confirmed is not None:
                entry.on_confirmed()
                entry.on_confirmed = None

    def is_confirmed(self, number: int) -> bool:
        """Return whether a collector has made a change; raise the first collector's exception."""
        entry = self._entries[number]
        if entry.error is not None:
            raise entry.error
        return entry.is_confirmed

    def unsent(self, sent: Collection[int]) -> list[int]:
        """Return the changes to send to a collector that has these, in order."""
        return [number for number, entry in self._entries.items() if entry.is_confirmed and number not in sent]

    def take(self, number: int, answer: Answer) -> bool:
        """Record that a collector has made a change, or raised; False: it differs from others: restart it."""
        entry = self._entries.get(number)
        if answer.raised is not None:
            if entry is not None and not entry.is_confirmed:
                entry.error = answer.raised.exception()
            return entry is None or not entry.is_confirmed
        if entry is None:  # the change was dropped meanwhile
            return False
        if not entry.is_confirmed and answer.value is not None:
            entry.change = Change(entry.change.content, self._put(answer.value))
        entry.is_confirmed = True
        return True

    def compact(self) -> None:
        """Forget changes that later changes undo, once all collectors have made all of them."""
        numbers = list(self._entries)
        found = {n: getattr(self._entries[n].content, "mapping", None) for n in numbers}
        mappings: dict[int, bytes] = {n: mapping for n, mapping in found.items() if mapping is not None}
        maps = list(mappings)
        trains = [n for n in numbers if isinstance(self._entries[n].content, TrainPolicies)]
        undone = set(trains[:-1]) | {n for n in maps[:-1] if isinstance(self._entries[n].content, MapPolicies)}
        added: dict[str, int] = {}
        for number in numbers:
            content = self._entries[number].content
            if isinstance(content, TrainPolicies):
                added.clear()  # its mapping may name them
            elif isinstance(content, AddPolicy):
                added[content.policy_id] = number
            elif isinstance(content, RemovePolicy) and content.policy_id in added:
                undone |= {number, added.pop(content.policy_id)}
        if maps and maps[-1] in undone:  # keep its mapping
            mapping = MapPolicies(mappings[maps[-1]])
            self._entries[maps[-1]] = _Entry(mapping, Change(self._put(mapping)), is_confirmed=True)
            undone.remove(maps[-1])
        self._entries = {number: entry for number, entry in self._entries.items() if number not in undone}


class MergeRounds:
    """Runs one round at a time: each collector hands its statistics over once, and all of them are merged.

    If a collector dies before it hands over, its own statistics are lost. A collector built during a round starts with
    the last merged state. Each collector gets the merged state with its next request, so always before it hands
    over again. `every` batches a round begins; None: never.
    """

    def __init__(self, every: int | None) -> None:
        self.every = every
        self._batches = 0
        self._asked: set[int] = set()
        self._unasked: set[int] = set()
        self._came: dict[int, HandedOver] = {}
        self._chains: dict[str, tuple[Pipeline[Any], ...]] = {}
        self._lacks_chains = True
        # policy id → states of its agent and action connectors
        self.merged: Mapping[str, tuple[Any, ...]] | None = None
        self.number = 0  # of merged rounds

    def record_batch(self, indices: Collection[int]) -> None:
        """Record that a batch begins, with requests to these collectors."""
        if self.every is None:
            return
        if self._batches % self.every == 0 and not self._asked and not self._unasked:
            self._unasked = set(indices)
        self._batches += 1

    def ask(self, index: int) -> tuple[bool, bool]:
        """Return whether a collector's next request must hand over statistics, and whether to send its pipelines."""
        if index not in self._unasked:
            return False, False
        self._unasked.discard(index)
        self._asked.add(index)
        return True, self._lacks_chains

    def take(self, index: int, handed: HandedOver | None) -> None:
        """Take a collector's statistics; None if the collector was lost."""
        if handed is None:
            self._unasked.discard(index)
        elif index in self._asked:
            self._came[index] = handed
        self._asked.discard(index)
        if not self._asked and not self._unasked and self._came:
            self._merge()

    def forget(self, policy_id: str) -> None:
        """Forget a removed policy."""
        self._chains.pop(policy_id, None)
        if self.merged is not None:
            self.merged = {name: states for name, states in self.merged.items() if name != policy_id}

    def get_state(self) -> State:
        """Return the state without pipelines, which collectors send again."""
        return {
            "batches": self._batches,
            "asked": sorted(self._asked),
            "unasked": sorted(self._unasked),
            "came": {str(index): dict(handed.states) for index, handed in self._came.items()},
            "merged": None if self.merged is None else dict(self.merged),
            "number": self.number,
        }

    def prepare(self, state: State) -> Callable[[], None]:
        """Validate a state from `get_state`; return a function that installs it."""
        states_of = dict[str, tuple[Any, ...]]  # by policy id
        kinds = {"batches": Count, "asked": set[int], "unasked": set[int], "number": Count}
        found = read_fields(state, "the merging of states", **kinds, came=dict[str, states_of], merged=states_of | None)
        came = {int(index): HandedOver(states, None) for index, states in found.pop("came").items()}
        private = {f"_{name}": found.pop(name) for name in ("batches", "asked", "unasked")}
        return partial(vars(self).update, **found, **private, _came=came, _chains={}, _lacks_chains=True)

    def _merge(self) -> None:
        came = [self._came[index] for index in sorted(self._came)]
        for handed in came:
            if handed.pipelines is not None:
                self._chains = pickle.loads(handed.pipelines) | self._chains
        merged = dict(self.merged or {})
        self._lacks_chains = False
        for name in dict.fromkeys(name for handed in came for name in handed.states):
            if name not in self._chains:  # it hands over the same statistics again
                self._lacks_chains = True
                continue
            sides = zip(*(handed.states[name] for handed in came if name in handed.states), strict=True)
            merged[name] = tuple(
                chain.merge_states(states) for chain, states in zip(self._chains[name], sides, strict=True)
            )
        self._came, self.merged, self.number = {}, merged, self.number + 1  # assignments only: Ctrl-C cannot split them


class HeadPolicies:
    """The policies that all collectors have."""

    def __init__(self, started: Started, learner_connectors: Connectors, put: Callable[[Any], Any]) -> None:
        self._put, self._given = put, learner_connectors
        self.ids = list(started.policies)
        self._removed: set[str] = set()
        self.trained: PoliciesToTrain = started.policies_to_train
        self.learner_connectors: dict[str, LearnerPipeline] = {}  # of policies that have any
        if learner_connectors is not None:
            self.learner_connectors = pipelines_for(
                LearnerPipeline, learner_connectors, self.ids, LearnerPipeline.default
            )
        self.weights: dict[str, Any] = dict(started.weights or {})  # of policies with weights
        self.reference, self.version = put(self.weights), 0

    def set_weights(self, weights: Mapping[str, Any], bases: Sequence[int], max_lag: int | None) -> None:
        """Set new weights of some policies as the next version.

        `StateError`: an outstanding fragment, requested at one of the versions `bases`, would exceed `max_lag`.
        """
        if not isinstance(weights, Mapping):
            raise ArgumentError(f"weights must be a dict by policy id, got {weights!r:.200}")
        if unknown := [name for name in weights if name not in self.ids]:
            raise ArgumentError(f"weights of unknown policies {unknown}; the policies are {self.ids}")
        if not may_publish(bases, self.version, max_lag):
            raise StateError(
                f"fragments that were asked for with version {min(bases)} are on their way, and version "
                f"{self.version + 1} would make them older than max_policy_lag={max_lag}: call collect() first"
            )
        try:  # a copy: later changes to the learner's arrays belong to a later version
            own = pickle.loads(cloudpickle.dumps(dict(weights)))
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            raise SerialisationError(f"weights of {list(weights)} cannot be pickled: {error}") from error
        new = {**self.weights, **own}
        reference = self._put(new)
        self.weights, self.reference, self.version = new, reference, self.version + 1

    # --- policies that come and go

    def find(self, policy_id: str) -> None:
        """Check that a policy exists; the `KeyError` lists the existing policies."""
        if policy_id not in self.ids:
            raise KeyError(f"no policy {policy_id!r}; the policies are {self.ids}")

    def learner_connectors_with(self, policy_id: str, like: str | None) -> dict[str, LearnerPipeline]:
        """Return all pipelines, with a pipeline for a new policy."""
        if not isinstance(policy_id, str):
            raise ArgumentError(f"a policy id must be a string, got {policy_id!r}")
        if policy_id in self.ids or policy_id in self._removed:
            raise ArgumentError(f"there is, or was, a policy {policy_id!r}: choose another id")
        if like is not None:
            self.find(like)
        known = self.learner_connectors
        if self._given is None:
            return known
        if like is not None:
            return {**known, policy_id: copy.deepcopy(known[like])}
        if isinstance(self._given, Mapping):
            return {**known, policy_id: LearnerPipeline.default()}
        raise ArgumentError(
            f"one chain of learner_connectors was given for all policies: name with like= the policy whose connectors "
            f"{policy_id!r} gets copies of, or give Collectors a dict of them by policy id"
        )

    def add(self, policy_id: str, learner_connectors: dict[str, LearnerPipeline]) -> None:
        """Add a policy."""
        self.learner_connectors = learner_connectors
        self.ids = list(dict.fromkeys((*self.ids, policy_id)))

    def remove(self, policy_id: str) -> None:
        """Remove a policy."""
        self._removed.add(policy_id)
        self.ids = [name for name in self.ids if name != policy_id]
        self.weights.pop(policy_id, None)
        self.learner_connectors.pop(policy_id, None)

    # --- saved

    def get_state(self) -> State:
        """Return weights, their version, used ids, and the state of learner connectors."""
        return {
            "version": self.version,
            "weights": copy.deepcopy(self.weights),
            "removed": sorted(self._removed),
            "learner_connectors": {name: chain.state_dict() for name, chain in self.learner_connectors.items()},
        }

    def prepare(self, state: State, loader: StateLoader) -> Callable[[], None]:
        """Validate a state; return a function that installs it. `loader` gets the learner connectors' states."""
        where = "the policies of the head"
        kinds = {"version": Count, "weights": dict[str, Any], "removed": set[str]}
        found = read_fields(state, where, **kinds, learner_connectors=Any)
        weights = found["weights"]
        if unknown := [name for name in weights if name not in self.ids]:
            raise ArgumentError(f"{where}: weights of unknown policies {unknown}; the policies are {self.ids}")
        check_fields(found["learner_connectors"], tuple(self.learner_connectors), f"{where}: learner connectors")
        for name, chain in self.learner_connectors.items():
            loader.add(f"the learner connectors of policy {name!r}", chain, found["learner_connectors"][name])
        new = {"version": found["version"], "weights": weights, "_removed": found["removed"]}
        return partial(vars(self).update, new, reference=self._put(weights))


_HERE = ("on_sample_end", "on_episode_end", "on_collector_start", "on_collector_lost")


class HeadCallbacks:
    """The callbacks of `Collectors`, in calling order; callbacks that have only hooks of collectors are refused."""

    def __init__(self, callbacks: Iterable[CallbackLike]) -> None:
        found = list(callbacks) if not isinstance(callbacks, dict) else callbacks
        self._listeners = listeners_by_hook(found)
        self.callbacks = tuple(found)
        for callback in found:
            own = [hook for hook, listeners in listeners_by_hook([callback]).items() if listeners]
            if own and not set(own) & set(_HERE):
                raise ArgumentError(
                    f"{callback!r} has the hooks {own}, which are called beside the envs: give it to the Collector "
                    f"in build; on the head there are {list(_HERE)}"
                )

    def sample_end(self, records: Iterable[EpisodeRecord], batch: MultiAgentBatch, metrics: Metrics) -> None:
        """Call callbacks for a finished batch and the episodes that end in it; a note names one that raises."""
        if self._listeners["on_episode_end"]:
            for record in records:
                episode = RunningEpisode(record.eps_id, record.env_id, record.number, 0, record.policies)
                episode.custom = dict(record.custom)
                episode.stage = "over"
                self.call("on_episode_end", episode, record)
        self.call("on_sample_end", batch, metrics)

    def call(self, hook: str, *what: Any) -> None:
        """Call this hook of all callbacks."""
        for name, listener in self._listeners[hook]:
            try:
                listener(*what)
            except BaseException as error:
                error.add_note(f"in {hook} of {name}")
                raise


_LOG = logging.getLogger("marlvec")
_LATE_ANSWERS = 2.0  # seconds to fetch the last answers of a lost collector


@dataclass(slots=True)
class RemoteCollector:
    """One collector."""

    index: int
    epoch: Annotated[int, -1] = -1  # number of earlier builds
    place: Place | None = None  # None before its first start
    handle: Any = None  # the engine's; None while it does not run
    pid: int | None = None
    tickets: dict[int, Any] = field(default_factory=dict)  # by request id, oldest first
    since: float = 0.0  # time when its oldest request began to run, as far as known
    is_masked: bool = False  # it is never restarted
    is_reported: bool = False  # the caller got an error for its loss
    why: tuple[LostReason, str] | None = None  # reason of its end; None while it runs, or if Ctrl-C ended it
    merged: Count = 0  # number of the last merged state sent to it
    changes: set[int] = field(default_factory=set)  # numbers of the policy changes sent to it
    differs: LostReason | None = None  # why its policies differ from the other collectors' (it must be restarted)
    # references to state and weights for its next build at its place; None: it starts afresh
    resume: tuple[Any, Any] | None = None
    # True while a request or an answer is recorded. If it is still True later, Ctrl-C came meanwhile, and its requests
    # and answers are unknown.
    in_doubt: bool = False


@dataclass(frozen=True, slots=True)
class LostCollector:
    """A collector that was lost."""

    place: Place
    why: LostReason  # as in `Accounting.lost_by`
    requests: int  # how many were lost with it


class CollectorGroup:
    """Builds collectors, sends requests, receives answers in order, and ends hung collectors.

    A request may run `timeout` seconds; `limit` is the restart limit of one collector; all seeds come from `entropy`.
    """

    def __init__(
        self,
        engine: Engine,
        build: bytes,
        ledger: Ledger,
        *,
        entropy: int,
        timeout: float,
        limit: RestartLimit,
        rounds: MergeRounds,
        log: PolicyLog,
    ) -> None:
        self._engine, self._build, self._ledger = engine, build, ledger
        self._entropy, self._timeout, self._rounds = entropy, timeout, rounds
        self._budget, self._log = RestartBudget(limit), log
        self._commands: dict[int, int | None] = {}  # change number by request id; None for a question
        self._streams: dict[int, Place] = {}
        self.collectors: dict[int, RemoteCollector] = {}
        self.started: Started | None = None  # the first collector's reply
        self.answers: dict[int, Answer] = {}  # held answers by request id
        self.replies: dict[int, Answer] = {}  # last replies to `question`, by index
        self.losses: list[LostCollector] = []  # since the last callbacks
        self.builds: list[Place] = []  # since the last callbacks
        self.raised: list[BaseException] = []  # exceptions of collectors, to be raised

    @property
    def active(self) -> list[int]:
        """Indices of collectors that accept requests."""
        return [collector.index for collector in self.collectors.values() if not collector.is_masked]

    def place_of(self, stream: int) -> Place:
        """Return the place that owns a stream of ids; `KeyError` if no place does."""
        return self._streams[stream]

    # --- building

    def new(self, index: int) -> RemoteCollector:
        """Return an unbuilt collector. It continues the epochs of its number's last collector: seeds never repeat."""
        built = (place.incarnation for place in self._streams.values() if place.index == index)
        return RemoteCollector(index, max(built, default=-1))

    def build(self, collectors: list[RemoteCollector], num_collectors: int) -> None:
        """Build some collectors concurrently.

        `CollectorDied`: a collector died too often. If ``build`` raises, the other collectors are built, and the next
        call retries.
        """
        errors: list[BaseException] = []
        unready = {collector.index: collector for collector in collectors}
        try:
            tickets = {collector.index: self._begin(collector, num_collectors) for collector in collectors}
            for collector in collectors:
                reply = self._await_start(collector, tickets[collector.index], num_collectors)
                if isinstance(reply, Raised):
                    errors.append(reply.exception())
                    continue
                try:
                    self._check_started(collector, reply)
                except ArgumentError as wrong:
                    errors.append(wrong)
                    continue
                del unready[collector.index]
        finally:  # also after Ctrl-C: collectors that have not started are rebuilt
            for collector in unready.values():
                if collector.handle is not None:
                    self._engine.kill(collector.handle)
                    collector.handle = None
        if errors:
            raise errors[0]

    def _begin(self, collector: RemoteCollector, num_collectors: int) -> Any:
        collector.why, collector.differs = None, None
        place, resume = collector.place, collector.resume
        if place is None or resume is None:
            collector.epoch, collector.merged, resume = collector.epoch + 1, self._rounds.number, (None, None)
            seed = seed_at(self._entropy, collector.index, collector.epoch)
            place = Place(collector.index, collector.epoch, len(self._streams), seed, num_collectors)
            collector.place = self._streams[place.stream] = place
        collector.tickets.clear()
        collector.handle = self._engine.start(place)
        wants = collector.index == min(self.collectors) and (self.started is None or self.started.weights is None)
        changes = self._log.unsent(())
        collector.changes = set(changes)
        replayed = tuple(self._log[number] for number in changes)
        return self._engine.submit(
            collector.handle, Start(place, self._build, self._rounds.merged, wants, replayed, *resume)
        )

    def _await_start(self, collector: RemoteCollector, ticket: Any, num_collectors: int) -> Started | Raised:
        """Return a collector's `Started` reply; if it dies first, restart it and wait again.

        Limits with a time window shorter than a few timeouts count, too: a collector that fits on no machine would be
        restarted for ever.
        """
        for begun in count(1):
            try:
                if not self._engine.ready([ticket], self._timeout):
                    text = f"it took more than {self._timeout:g} s; has the cluster room for one more?"
                    raise LostError("timeout", text)
                reply = self._engine.take(ticket, self._timeout)
            except UnsentError as unsent:
                return unsent.raised
            except LostError as lost:
                self._record_loss(collector, lost.reason, f"while it was built: {lost}", 0)
                if begun > self._budget.limit.count:
                    more = f"Gave up: it was begun {begun} times in a row, one more than max_restarts allows."
                    raise self.death(collector, more) from lost
                self.allow_restart(collector)
                ticket = self._begin(collector, num_collectors)
                continue
            assert isinstance(reply, Started | Raised)  # the type of the expected reply
            return reply
        raise AssertionError  # an endless counter

    def _check_started(self, collector: RemoteCollector, started: Started) -> None:
        known = self.started
        if known is not None and (known.agents, set(known.policies)) != (started.agents, set(started.policies)):
            raise ArgumentError(
                f"build({collector.place}) made a collector of the agents {list(started.agents)} and policies "
                f"{list(started.policies)}; others have {list(known.agents)} and {list(known.policies)}"
            )
        if known is None or started.weights is not None:
            self.started = started
        collector.pid = started.pid
        assert collector.place is not None  # it was begun
        collector.is_reported, collector.resume = False, None
        self.builds.append(collector.place)

    def allow_restart(self, collector: RemoteCollector) -> None:
        """Count one more incarnation, and wait the limit's delay; `CollectorDied` at the limit."""
        _, text = collector.why or ("died", "")
        pause = self._budget.try_restart(collector.index, text)
        if pause is None:
            raise self.death(collector, self._budget.history(collector.index))
        self._ledger.record_restart()
        collector.why = None  # counted, even if Ctrl-C comes now
        time.sleep(pause)

    def death(self, collector: RemoteCollector, more: str = "") -> CollectorDied:
        """Return the error that describes a collector's end."""
        reason, text = collector.why or ("died", "")
        kind = CollectorTimeout if reason == "timeout" else CollectorDied
        return kind(
            f"collector {collector.index}, incarnation {collector.epoch}: {text} {more}".rstrip(), collector.index
        )

    # --- requests

    def send_changes(self, index: int, number: int | None = None) -> None:
        """Send a collector its unsent policy changes, and the change `number`, which no collector has made yet.

        A lost collector gets them when it is rebuilt.
        """
        collector = self.collectors[index]
        if collector.handle is None:
            return
        for change in self._log.unsent(collector.changes) + ([] if number is None else [number]):
            entry = self.issue(index, 0, 0)
            self._commands[entry.id] = change
            collector.changes.add(change)
            self.ask(entry, CollectorCommand(entry.id, index, collector.epoch, self._log[change]))

    def question(self, index: int, content: GetState | CheckState) -> None:
        """Send a collector a question; its reply will be in `replies`."""
        entry = self.issue(index, 0, 0)
        self._commands[entry.id] = None
        self.ask(entry, CollectorCommand(entry.id, index, entry.epoch, content))

    @property
    def has_commands(self) -> bool:
        """Whether a policy change or a question is outstanding."""
        self._commands = {key: number for key, number in self._commands.items() if key in self._ledger}
        return bool(self._commands)

    def issue(self, index: int, amount: int, base: int) -> Entry:
        """Record a request, for `ask` to send."""
        collector = self.collectors[index]
        collector.in_doubt = True
        return self._ledger.issue(index, collector.epoch, amount, base)

    def ask(self, entry: Entry, request: CollectRequest | CollectorCommand) -> None:
        """Send a recorded request."""
        collector = self.collectors[entry.collector]
        if not collector.tickets:
            collector.since = time.monotonic()
        collector.tickets[entry.id] = self._engine.submit(collector.handle, request)
        collector.in_doubt = False

    def end_doubtful(self) -> None:
        """End collectors whose records Ctrl-C left unfinished. Rebuilding them does not count as a restart."""
        for collector in self.collectors.values():
            if collector.in_doubt:
                self._end(collector, "interrupted", "Ctrl-C came while it was asked, or had answered")

    @property
    def is_awaited(self) -> bool:
        """Whether an answer is awaited."""
        return any(collector.tickets for collector in self.collectors.values())

    def receive(self) -> None:
        """Wait until a collector has answered, has died, or has timed out."""
        oldest = {
            collector.index: next(iter(collector.tickets.items()))
            for collector in self.collectors.values()
            if collector.tickets
        }
        now = time.monotonic()
        left = min(self.collectors[index].since + self._timeout - now for index in oldest)
        tickets = [ticket for _, ticket in oldest.values()]
        ready = set(map(id, self._engine.ready(tickets, max(left, 0.0))))
        now = time.monotonic()
        for index, (request_id, ticket) in oldest.items():
            collector = self.collectors[index]
            if id(ticket) in ready:
                try:
                    self._hold(collector, request_id, self._engine.take(ticket, self._timeout))
                except UnsentError as unsent:
                    self._take_unsent(collector, request_id, unsent)
                except LostError as lost:
                    self._end(collector, lost.reason, str(lost))
                except ProtocolError as wrong:
                    self._end(collector, "object_lost", str(wrong))
                if collector.differs is not None and collector.handle is not None:
                    self._end(collector, collector.differs, "its policies are not those of others")
            elif now - collector.since >= self._timeout:
                self._end(collector, "timeout", f"a request has run for more than {self._timeout:g} s")

    def _take_unsent(self, collector: RemoteCollector, request_id: int, unsent: UnsentError) -> None:
        """Handle an answer that could not be sent: a command's is dropped; after lost rows the collector ends."""
        if request_id in self._commands:
            self._hold(collector, request_id, Answer(request_id, collector.epoch, raised=unsent.raised))
            return
        self.raised.append(unsent.raised.exception())
        self._end(collector, unsent.reason, str(unsent))

    def _hold(self, collector: RemoteCollector, request_id: int, answer: Any) -> None:
        assert isinstance(answer, Answer)  # the type of the expected reply
        collector.since, was_in_doubt, collector.in_doubt = time.monotonic(), collector.in_doubt, True
        self._note(collector, request_id, answer)
        collector.in_doubt = was_in_doubt

    def _note(self, collector: RemoteCollector, request_id: int, answer: Answer) -> None:
        if answer.raised is None and request_id not in self._commands:
            self.answers[request_id] = answer  # before the ledger lists it as held
        self._ledger.hold(answer.id, answer.epoch)
        collector.tickets.pop(request_id)
        if answer.id in self._commands:
            number = self._commands.pop(answer.id)
            if answer.raised is None or number is None:
                self._ledger.state = self._ledger.after_delivery([answer.id], 0)
            else:
                self._ledger.lose([answer.id], "raised")
            if number is None:
                self.replies[collector.index] = answer
            elif not self._log.take(number, answer):  # it failed to make a change, or Ctrl-C has undone a change
                collector.differs = "interrupted" if answer.raised is None else "raised"
        elif answer.raised is not None:
            self._ledger.lose([answer.id], "raised")
            self._rounds.take(collector.index, None)
            self.raised.append(answer.raised.exception())
        elif answer.handed is not None:
            self._rounds.take(collector.index, answer.handed)

    def _end(self, collector: RemoteCollector, reason: LostReason, text: str) -> None:
        """End a collector. Earlier answers are kept; answers after a lost answer are lost, too."""
        may_be_late = reason != "timeout" and not collector.in_doubt
        collector.in_doubt = True
        if collector.handle is not None:  # else Ctrl-C has interrupted this function before
            self._engine.kill(collector.handle)
        while collector.tickets and may_be_late:
            request_id, ticket = next(iter(collector.tickets.items()))
            try:
                self._hold(collector, request_id, self._engine.take(ticket, _LATE_ANSWERS))
            except (LostError, ProtocolError):
                break
        # Also a command whose answer was not fully recorded: it is briefly held.
        own = (entry for entry in self._ledger if entry.collector == collector.index)
        first, *rest = [*(entry.id for entry in own if entry.held is None or not entry.amount), -1]
        gone = self._ledger.lose([first], reason) + self._ledger.lose(rest, "after_a_loss")
        collector.tickets.clear()
        if collector.handle is not None:
            self._record_loss(collector, reason, text, len(gone))
        self._rounds.take(collector.index, None)
        collector.in_doubt = False

    def _record_loss(self, collector: RemoteCollector, reason: LostReason, text: str, requests: int) -> None:
        self._engine.kill(collector.handle)
        collector.handle, collector.pid = None, None
        collector.why = None if reason == "interrupted" else (reason, text)
        assert collector.place is not None  # it was begun
        _LOG.warning("collector %d, incarnation %d, is lost: %s", collector.index, collector.epoch, text)
        self.losses.append(LostCollector(collector.place, reason, requests))

    # --- saved

    def get_state(self, states: Mapping[int, Any]) -> State:
        """Return the group's state, with the given states of its collectors by index."""
        collectors = [
            {
                "epoch": collector.epoch,
                "stream": None if collector.place is None else collector.place.stream,
                "is_masked": collector.is_masked,
                "why": None if collector.why is None else list(collector.why),
                "merged": collector.merged,
                "state": states.get(index),
            }
            for index, collector in self.collectors.items()
        ]
        return {"entropy": self._entropy, "places": to_plain(list(self._streams.values())), "collectors": collectors}

    def prepare(
        self, state: State, answers: dict[int, Answer], stored: Mapping[int, tuple[Any, Any]]
    ) -> Callable[[], None]:
        """Validate a state; return a function that ends all collectors, and has the state's collectors be built.

        `stored`: by index, the engine's references to each collector's state and to the saved weights.
        """
        saved = read_fields(state, "the collectors", entropy=Count, places=list[Place], collectors=list[Any])
        entropy, streams = saved["entropy"], {place.stream: place for place in saved["places"]}
        if list(streams) != list(range(len(saved["places"]))):
            raise ArgumentError("the collectors: places must be in the order of their streams")
        found = {index: self._prepare(index, one, streams) for index, one in enumerate(saved["collectors"])}

        def put() -> None:
            for index, collector in found.items():
                collector.resume = stored.get(index)
            old, self.collectors = self.collectors, found
            self._entropy, self._streams, self.answers, self._commands = entropy, streams, answers, {}
            for collector in old.values():
                if collector.handle is not None:
                    self._engine.stop(collector.handle)

        return put

    def _prepare(self, index: int, state: State, streams: Mapping[int, Place]) -> RemoteCollector:
        where, kinds = f"collector {index}", field_types(RemoteCollector)
        own = {name: kinds[name] for name in ("epoch", "is_masked", "why", "merged")}
        found = read_fields(state, where, **own, stream=int | None, state=Any)
        place = streams.get(found["stream"])
        if found["stream"] is not None and (
            place is None or (place.index, place.incarnation) != (index, found["epoch"])
        ):
            raise ArgumentError(f"{where} was built {found['epoch']} times before, and is at {place}")
        return RemoteCollector(index, place=place, **{name: found[name] for name in own})

    # --- the end

    def leave(self, index: int) -> None:
        """Stop an idle collector that is no longer needed."""
        collector = self.collectors.pop(index)
        if collector.handle is not None:
            self._engine.stop(collector.handle)

    def close(self) -> None:
        """End all collectors."""
        for index in list(self.collectors):
            self.leave(index)
        self._engine.close()

    def forget_delivered(self) -> None:
        """Drop answers that the ledger no longer holds."""
        self.answers = {key: answer for key, answer in self.answers.items() if key in self._ledger}
