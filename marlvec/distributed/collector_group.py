"""`CollectorGroup`: the processes of collectors, their requests and their answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from marlvec.distributed.accounting.ledger import Entry, Ledger, LostReason
from marlvec.distributed.engines.engine import Engine, LostError, UnsentError
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
_LATE_ANSWERS = 2.0  # seconds to fetch what a collector had answered before it was lost


@dataclass(slots=True)
class RemoteCollector:
    """One collector.

    Attributes:
        index: Its number.
        epoch: How often it was built before.
        place: Where it is; None before it was first begun.
        handle: The engine's; None: there is none now.
        pid: Its process, where it has one.
        tickets: By request, oldest first.
        since: When the oldest request began to run, as far as is known.
        is_masked: Whether it stays away.
        is_reported: Whether its loss was raised to the caller.
        why: What ended it; None: nothing has since it was last begun, or Ctrl-C has, which is not its fault.
        merged: Number of the last merged state that it was sent.
        changes: Numbers of the changes of policies that it was sent.
        differs: Why its policies are not those of others, where they are not, and it must be restarted.
        resume: Where the engine finds the state, and the weights, that it is to be built with next, at the place that
            it has; None: it begins.
        in_doubt: Whether a request to it, or an answer, is being noted. Where that is so later, Ctrl-C came meanwhile,
            and what it was asked for, or has answered, is not known.
    """

    index: int
    epoch: int = -1
    place: Place | None = None
    handle: Any = None
    pid: int | None = None
    tickets: dict[int, Any] = field(default_factory=dict)
    since: float = 0.0
    is_masked: bool = False
    is_reported: bool = False
    why: tuple[LostReason, str] | None = None
    merged: int = 0
    changes: set[int] = field(default_factory=set)
    differs: LostReason | None = None
    resume: tuple[Any, Any] | None = None
    in_doubt: bool = False


@dataclass(frozen=True, slots=True)
class LostCollector:
    """A collector that was lost.

    Attributes:
        place: Which.
        why: The reason, as in `Accounting.lost_by`.
        requests: How many requests were lost with it.
    """

    place: Place
    why: LostReason
    requests: int


class CollectorGroup:
    """Builds collectors, sends them requests, takes their answers in order, and ends those that are hung.

    Args:
        engine: Where they run.
        build: The caller's function, pickled.
        ledger: The accounting of requests.
        entropy: What seeds follow from.
        timeout: Seconds a request may run.
        limit: How often one of them may be restarted.
        merged: Asked for what all have learnt together, and the number of that state.
        log: The changes of policies that all of them make.

    Attributes:
        collectors: By index.
        started: What the first one said when it was built.
        answers: By request, of those that are held.
        replies: What collectors have last replied to `question`, by index.
        losses: Collectors lost since callbacks were last called.
        builds: Places built since callbacks were last called.
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
        merged: Callable[[], tuple[Any, int]],
        log: PolicyLog,
    ) -> None:
        self._engine, self._build, self._ledger = engine, build, ledger
        self._entropy, self._timeout, self._merged = entropy, timeout, merged
        self._budget, self._log = RestartBudget(limit), log
        self._commands: dict[int, int | None] = {}  # number of a change by request; None of a question
        self._streams: dict[int, Place] = {}
        self.collectors: dict[int, RemoteCollector] = {}
        self.started: Started | None = None
        self.answers: dict[int, Answer] = {}
        self.replies: dict[int, Answer] = {}
        self.losses: list[LostCollector] = []
        self.builds: list[Place] = []

    @property
    def active(self) -> list[int]:
        """Indices of the collectors that take requests."""
        return [collector.index for collector in self.collectors.values() if not collector.is_masked]

    def place_of(self, stream: int) -> Place:
        """The place that has a stream of ids.

        Raises:
            KeyError: No place has it.
        """
        return self._streams[stream]

    # --- building

    def new(self, index: int) -> RemoteCollector:
        """A collector to be built. Where one of its number has left it counts on, or seeds would come again."""
        built = (place.incarnation for place in self._streams.values() if place.index == index)
        return RemoteCollector(index, max(built, default=-1))

    def build(self, collectors: list[RemoteCollector], num_collectors: int) -> None:
        """Build these, all at once.

        Raises:
            CollectorDied: One has died too often.
            Exception: What ``build`` raised; others are built, and the next call tries again.
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
        finally:  # also after Ctrl-C: those that have not started are built once more
            for collector in unready.values():
                if collector.handle is not None:
                    self._engine.kill(collector.handle)
                    collector.handle = None
        if errors:
            raise errors[0]

    def _begin(self, collector: RemoteCollector, num_collectors: int) -> Any:
        collector.why, collector.differs = None, None
        place, resume = collector.place, collector.resume
        state, merged = self._merged()
        if place is None or resume is None:
            collector.epoch, collector.merged, resume = collector.epoch + 1, merged, (None, None)
            seed = seed_at(self._entropy, collector.index, collector.epoch)
            place = Place(collector.index, collector.epoch, len(self._streams), seed, num_collectors)
            collector.place = self._streams[place.stream] = place
        collector.tickets.clear()
        collector.handle = self._engine.start(place)
        wants = collector.index == min(self.collectors) and (self.started is None or self.started.weights is None)
        changes = self._log.unsent(())
        collector.changes = set(changes)
        replayed = tuple(self._log[number] for number in changes)
        return self._engine.submit(collector.handle, Start(place, self._build, state, wants, replayed, *resume))

    def _await_start(self, collector: RemoteCollector, ticket: Any, num_collectors: int) -> Started | Raised:
        """What a collector says when it is built; where it dies meanwhile, the next one in its place.

        Raises:
            CollectorDied: Too often, also where the limit's seconds are less than a few timeouts take: one that no
                machine has room for would be begun for ever.
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
            assert isinstance(reply, Started | Raised)  # that is what was asked
            return reply
        raise AssertionError  # it counts without an end

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
        """Count one more incarnation, and wait as long as the limit says.

        Raises:
            CollectorDied: That were too many.
        """
        _, text = collector.why or ("died", "")
        pause = self._budget.try_restart(collector.index, text)
        if pause is None:
            raise self.death(collector, self._budget.history(collector.index))
        self._ledger.note_restart()
        collector.why = None  # it is counted, also where Ctrl-C comes now
        time.sleep(pause)

    def death(self, collector: RemoteCollector, more: str = "") -> CollectorDied:
        """The error that says what happened to it."""
        reason, text = collector.why or ("died", "")
        kind = CollectorTimeout if reason == "timeout" else CollectorDied
        return kind(
            f"collector {collector.index}, incarnation {collector.epoch}: {text} {more}".rstrip(), collector.index
        )

    # --- asking

    def send_changes(self, index: int, number: int | None = None) -> None:
        """Send what a collector has not been sent of the changes of policies.

        Args:
            index: Its index. One that is lost is sent them when it is built.
            number: One more change, which no collector has made yet.
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
        """Ask a collector something; what it says will be in `replies`."""
        entry = self.issue(index, 0, 0)
        self._commands[entry.id] = None
        self.ask(entry, Command(entry.id, index, entry.epoch, content))

    @property
    def has_commands(self) -> bool:
        """Whether a change of policies, or a question, is outstanding."""
        self._commands = {key: number for key, number in self._commands.items() if key in self._ledger}
        return bool(self._commands)

    def issue(self, index: int, amount: int, base: int) -> Entry:
        """Note a request, which `ask` is to send."""
        collector = self.collectors[index]
        collector.in_doubt = True
        return self._ledger.issue(index, collector.epoch, amount, base)

    def ask(self, entry: Entry, request: Request | Command) -> None:
        """Send a request that was noted."""
        collector = self.collectors[entry.collector]
        if not collector.tickets:
            collector.since = time.monotonic()
        collector.tickets[entry.id] = self._engine.submit(collector.handle, request)
        collector.in_doubt = False

    def end_doubtful(self, take: Callable[[int, Answer | None], None]) -> list[BaseException]:
        """End those at which Ctrl-C has come between two stores. They are built once more, which is no restart.

        Args:
            take: As for `receive`.

        Returns:
            What collectors raised.
        """
        raised: list[BaseException] = []
        for collector in self.collectors.values():
            if collector.in_doubt:
                raised += self._end(collector, "interrupted", "Ctrl-C came while it was asked, or had answered", take)
        return raised

    @property
    def is_awaited(self) -> bool:
        """Whether there is something to `receive`."""
        return any(collector.tickets for collector in self.collectors.values())

    def receive(self, take: Callable[[int, Answer | None], None]) -> list[BaseException]:
        """Wait until a collector has answered, has died, or has timed out.

        Args:
            take: Called with the index of a collector and its answer, once that is held; with None where it raised.

        Returns:
            What collectors raised.
        """
        oldest = {
            collector.index: next(iter(collector.tickets.items()))
            for collector in self.collectors.values()
            if collector.tickets
        }
        now = time.monotonic()
        left = min(self.collectors[index].since + self._timeout - now for index in oldest)
        tickets = [ticket for _, ticket in oldest.values()]
        ready = set(map(id, self._engine.ready(tickets, max(left, 0.0))))
        now, raised = time.monotonic(), []
        for index, (request_id, ticket) in oldest.items():
            collector = self.collectors[index]
            if id(ticket) in ready:
                try:
                    raised += self._hold(collector, request_id, self._engine.take(ticket, self._timeout), take)
                except UnsentError as unsent:
                    raised += self._take_unsent(collector, request_id, unsent, take)
                except LostError as lost:
                    raised += self._end(collector, lost.reason, str(lost), take)
                except ProtocolError as wrong:
                    raised += self._end(collector, "object_lost", str(wrong), take)
                if collector.differs is not None and collector.handle is not None:
                    raised += self._end(collector, collector.differs, "its policies are not those of others", take)
            elif now - collector.since >= self._timeout:
                text = f"a request has run for more than {self._timeout:g} s"
                raised += self._end(collector, "timeout", text, take)
        return raised

    def _take_unsent(
        self,
        collector: RemoteCollector,
        request_id: int,
        unsent: UnsentError,
        take: Callable[[int, Answer | None], None],
    ) -> list[BaseException]:
        """What a command said is gone; where rows are, those that follow would follow on a gap, and it ends."""
        if request_id in self._commands:
            return self._hold(collector, request_id, Answer(request_id, collector.epoch, raised=unsent.raised), take)
        return [unsent.raised.exception(), *self._end(collector, unsent.reason, str(unsent), take)]

    def _hold(
        self, collector: RemoteCollector, request_id: int, answer: Any, take: Callable[[int, Answer | None], None]
    ) -> list[BaseException]:
        assert isinstance(answer, Answer)  # that is what was asked
        collector.since, was_in_doubt, collector.in_doubt = time.monotonic(), collector.in_doubt, True
        raised = self._note(collector, request_id, answer, take)
        collector.in_doubt = was_in_doubt
        return raised

    def _note(
        self, collector: RemoteCollector, request_id: int, answer: Answer, take: Callable[[int, Answer | None], None]
    ) -> list[BaseException]:
        if answer.raised is None and request_id not in self._commands:
            self.answers[request_id] = answer  # before the ledger says that it is held
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
            else:
                if not self._log.take(number, answer):  # it could not make a change, or Ctrl-C has undone one
                    collector.differs = "interrupted" if answer.raised is None else "raised"
            return []
        if answer.raised is None:
            take(collector.index, answer)
            return []
        self._ledger.lose([answer.id], "raised")
        take(collector.index, None)
        return [answer.raised.exception()]

    def _end(
        self, collector: RemoteCollector, reason: LostReason, text: str, take: Callable[[int, Answer | None], None]
    ) -> list[BaseException]:
        """End a collector. What it had answered before is kept; what follows on a lost answer is lost, too."""
        may_be_late = reason != "timeout" and not collector.in_doubt
        collector.in_doubt = True
        if collector.handle is not None:  # else Ctrl-C has come here before
            self._engine.kill(collector.handle)
        raised: list[BaseException] = []
        while collector.tickets and may_be_late:
            request_id, ticket = next(iter(collector.tickets.items()))
            try:
                raised += self._hold(collector, request_id, self._engine.take(ticket, _LATE_ANSWERS), take)
            except (LostError, ProtocolError):
                break
        # Also a command whose answer was not noted to the end: it is held for a moment.
        own = (entry for entry in self._ledger if entry.collector == collector.index)
        first, *rest = [*(entry.id for entry in own if entry.held is None or not entry.amount), -1]
        gone = self._ledger.lose([first], reason) + self._ledger.lose(rest, "after_a_loss")
        collector.tickets.clear()
        if collector.handle is not None:
            self._note_loss(collector, reason, text, len(gone))
        take(collector.index, None)
        collector.in_doubt = False
        return raised

    def _note_loss(self, collector: RemoteCollector, reason: LostReason, text: str, requests: int) -> None:
        self._engine.kill(collector.handle)
        collector.handle, collector.pid = None, None
        collector.why = None if reason == "interrupted" else (reason, text)
        assert collector.place is not None  # it was begun
        _LOG.warning("collector %d, incarnation %d, is lost: %s", collector.index, collector.epoch, text)
        self.losses.append(LostCollector(collector.place, reason, requests))

    # --- saved

    def get_state(self, states: Mapping[int, Any]) -> State:
        """All but what is in the collectors themselves.

        Args:
            states: What these have said, by index.
        """
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
        """Look at what `get_state` gave; returns what ends all collectors, and has those of the state be built next.

        Args:
            state: That.
            answers: Those that were held.
            stored: By index, where the engine finds each collector's own state, and the weights of that moment.

        Raises:
            ArgumentError: It is none.
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
            raise ArgumentError(f"{where}: expected what get_state() returned: {error!r:.200}") from error

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
        """A collector that has nothing to do is not needed any more."""
        collector = self.collectors.pop(index)
        if collector.handle is not None:
            self._engine.stop(collector.handle)

    def close(self) -> None:
        """End all of them."""
        for index in list(self.collectors):
            self.leave(index)
        self._engine.close()

    def forget_delivered(self) -> None:
        """Drop answers that the ledger does not have any more."""
        self.answers = {key: answer for key, answer in self.answers.items() if key in self._ledger}
