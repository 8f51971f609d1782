"""`CollectorGroup`: collectors' processes, requests and answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from marlvec.distributed.accounting import Entry, Ledger, LostReason
from marlvec.distributed.engines.engine import Engine, LostError, UnsentError
from marlvec.distributed.merge_rounds import MergeRounds
from marlvec.distributed.place import Place, seed_at
from marlvec.distributed.policy_log import PolicyLog
from marlvec.distributed.server.messages import (
    Answer,
    CheckState,
    Command,
    GetState,
    Raised,
    Request,
    Start,
    Started,
)
from marlvec.errors import ArgumentError, CollectorDied, CollectorTimeout, ProtocolError
from marlvec.serialization.state_fields import State, check_fields, flag_field, number_field
from marlvec.vector.faults.restarts import RestartBudget, RestartLimit

__all__ = ["CollectorGroup", "LostCollector", "RemoteCollector"]

_LOG = logging.getLogger("marlvec")
_LATE_ANSWERS = 2.0  # seconds to fetch the last answers of a lost collector


@dataclass(slots=True)
class RemoteCollector:
    """One collector."""

    index: int
    epoch: int = -1  # number of earlier builds
    place: Place | None = None  # None before its first start
    handle: Any = None  # the engine's; None while it does not run
    pid: int | None = None
    tickets: dict[int, Any] = field(default_factory=dict)  # by request id, oldest first
    since: float = 0.0  # time when its oldest request began to run, as far as known
    is_masked: bool = False  # it is never restarted
    is_reported: bool = False  # the caller got an error for its loss
    why: tuple[LostReason, str] | None = None  # reason of its end; None while it runs, or if Ctrl-C ended it
    merged: int = 0  # number of the last merged state sent to it
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
                self._note_loss(collector, lost.reason, f"while it was built: {lost}", 0)
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
        self._ledger.note_restart()
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
            self.ask(entry, Command(entry.id, index, collector.epoch, self._log[change]))

    def question(self, index: int, content: GetState | CheckState) -> None:
        """Send a collector a question; its reply will be in `replies`."""
        entry = self.issue(index, 0, 0)
        self._commands[entry.id] = None
        self.ask(entry, Command(entry.id, index, entry.epoch, content))

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

    def ask(self, entry: Entry, request: Request | Command) -> None:
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
            self._note_loss(collector, reason, text, len(gone))
        self._rounds.take(collector.index, None)
        collector.in_doubt = False

    def _note_loss(self, collector: RemoteCollector, reason: LostReason, text: str, requests: int) -> None:
        self._engine.kill(collector.handle)
        collector.handle, collector.pid = None, None
        collector.why = None if reason == "interrupted" else (reason, text)
        assert collector.place is not None  # it was begun
        _LOG.warning("collector %d, incarnation %d, is lost: %s", collector.index, collector.epoch, text)
        self.losses.append(LostCollector(collector.place, reason, requests))

    # --- saved

    def get_state(self, states: Mapping[int, Any]) -> State:
        """Return the group's state, with the given states of its collectors by index."""
        places = [[p.index, p.incarnation, p.stream, p.seed, p.num_collectors] for p in self._streams.values()]
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
        return {"entropy": self._entropy, "places": places, "collectors": collectors}

    def prepare(
        self, state: State, answers: dict[int, Answer], stored: Mapping[int, tuple[Any, Any]]
    ) -> Callable[[], None]:
        """Validate a state; return a function that ends all collectors, and has the state's collectors be built.

        `stored`: by index, the engine's references to each collector's state and to the saved weights.
        """
        where = "the collectors"
        check_fields(state, ("entropy", "places", "collectors"), where)
        entropy = number_field(state, "entropy", where)
        try:
            streams = {place[2]: Place(*place) for place in state["places"]}
            if list(streams) != list(range(len(streams))):
                raise ValueError("places must be in the order of their streams")
            found = {index: self._prepare(index, one, streams) for index, one in enumerate(state["collectors"])}
        except (TypeError, ValueError, LookupError) as error:
            raise ArgumentError(f"{where}: expected a state from get_state(): {error!r:.200}") from error

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
        where = f"collector {index}"
        check_fields(state, ("epoch", "stream", "is_masked", "why", "merged", "state"), where)
        place = None if state["stream"] is None else streams[state["stream"]]
        found = RemoteCollector(index, number_field(state, "epoch", where, least=-1), place)
        if place is not None and (place.index, place.incarnation) != (index, found.epoch):
            raise ValueError(f"{where} was built {found.epoch} times before, and is at {place}")
        found.is_masked, found.merged = flag_field(state, "is_masked", where), number_field(state, "merged", where)
        if state["why"] is not None:
            reason, text = state["why"]
            found.why = reason, str(text)
        return found

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
