"""The ledger of requests to collectors, and the plans: what to request next, and which answers make a batch.

Rows of several collectors are joined into the learner's batch; answers are cut into pieces that Ray copies fast.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

from marlvec.collect import MultiAgentBatch, SampleBatch
from marlvec.collect.background import SampleTarget
from marlvec.collect.batch_files import named_leaves
from marlvec.collect.metrics import CollectorStats
from marlvec.connectors import LearnerPipeline
from marlvec.distributed.server import Answer, Raised, Started
from marlvec.errors import ArgumentError, ProtocolError, StateError
from marlvec.serialization.records import PositiveCount, field_types, from_plain, read_fields
from marlvec.serialization.saved import State


@dataclass(frozen=True, slots=True)
class Accounting:
    """Amounts requested from collectors, and their fate; always ``requested == delivered + lost + outstanding``.

    Amounts are requested amounts, in the request's unit. What a killed process had collected since its last answer
    is unknown; it is at most the requested amount, plus rows that waited in the process.

    Attributes:
        requested: Requested amount.
        delivered: The amount in returned batches.
        lost: The amount that will never arrive; it is requested again.
        outstanding: The amount on its way, or on the head and in no batch yet.
        requests_requested: Number of requests. Requests that change policies or fetch a state bring no rows: their
            amount is 0.
        requests_delivered: Requests whose rows are in returned batches.
        requests_lost: Lost requests.
        requests_outstanding: The remaining requests.
        lost_by: Lost requests by reason: ``"died"``, ``"unreachable"`` (the node is gone, or its state is unknown),
            ``"timeout"``, ``"object_lost"`` (the answer was made, then lost), ``"after_a_loss"`` (a request before it
            was lost), ``"raised"`` (the collector raised; its rows come with its next answer), ``"closed"``,
            ``"interrupted"`` (Ctrl-C came while it was noted; its collector is rebuilt, which is not counted as a
            restart).
        restarts: Number of restarts of collectors.
        refused: Answers to no outstanding request; they are dropped.
        max_lag: Greatest lag of a fragment, in weight versions between its request and its delivery.
        max_row_lag: Greatest lag of a row; above ``max_lag`` if a decision's outcome came in a later fragment.
    """

    requested: int = 0
    delivered: int = 0
    lost: int = 0
    outstanding: int = 0
    requests_requested: int = 0
    requests_delivered: int = 0
    requests_lost: int = 0
    requests_outstanding: int = 0
    lost_by: Mapping[str, int] = field(default_factory=dict)
    restarts: int = 0
    refused: int = 0
    max_lag: int = 0
    max_row_lag: int = 0


LostReason = Literal["died", "unreachable", "timeout", "object_lost", "after_a_loss", "raised", "closed", "interrupted"]
"""Why a request is lost; see `Accounting.lost_by`."""


class Entry(NamedTuple):
    """One request that is neither delivered nor lost."""

    id: int
    collector: int
    epoch: int  # incarnation of the collector
    amount: int  # 0: the request brings no rows
    base: int  # version of the weights when it was issued
    held: int | None = None  # arrival number of its answer on the head; None: no answer yet


class LedgerState(NamedTuple):
    """Immutable state of a ledger: each event builds a new state, and one assignment publishes it. See `Accounting`."""

    entries: Mapping[int, Entry]  # by request id, in the order of requests
    requested: tuple[int, int] = (0, 0)  # amount and number of requests, as are the next two
    delivered: tuple[int, int] = (0, 0)
    lost: tuple[int, int] = (0, 0)
    lost_by: Mapping[str, int] = {}  # never mutated
    arrivals: int = 0  # answers that ever arrived
    refused: int = 0
    restarts: int = 0
    max_lag: int = 0
    max_row_lag: int = 0

    def get_state(self) -> State:
        """Return the state as plain data."""
        return {**self._asdict(), "entries": [list(entry) for entry in self.entries.values()]}

    @classmethod
    def from_state(cls, state: State) -> LedgerState:
        """Rebuild a ledger state from the result of `get_state`; `ArgumentError` also if its sums do not balance."""
        values = read_fields(state, "the ledger", **{**field_types(LedgerState), "entries": list[Entry]})
        found = cls(**{**values, "entries": {entry.id: entry for entry in values["entries"]}})
        gone = found.delivered[0] + found.lost[0], found.delivered[1] + found.lost[1]
        if found.requested != _more(gone, found.entries.values()):
            raise ArgumentError("the ledger: expected requested == delivered + lost + outstanding")
        return found


_SUMS = "requested", "delivered", "lost"


class Ledger:
    """Counts every request to a collector once.

    The caller reports events. A request is *outstanding* until its answer reaches the head; then it is *held*, which
    still counts as outstanding; when its batch is returned, it is *delivered*. Or it is *lost*.
    """

    def __init__(self) -> None:
        self.state = LedgerState({})

    def __len__(self) -> int:
        return len(self.state.entries)

    def __iter__(self) -> Iterator[Entry]:
        """Iterate over outstanding requests, held ones included, in the order of requests."""
        return iter(tuple(self.state.entries.values()))

    def __contains__(self, request_id: int) -> bool:
        return request_id in self.state.entries

    def __getitem__(self, request_id: int) -> Entry:
        return self.state.entries[request_id]

    @property
    def fragments(self) -> list[Entry]:
        """Outstanding requests that bring rows, in the order of requests."""
        return [entry for entry in self if entry.amount]

    @property
    def held(self) -> list[Entry]:
        """Held requests, in order of arrival."""
        return sorted((entry for entry in self if entry.held is not None), key=lambda entry: entry.held or 0)

    def waiting_of(self, index: int) -> list[Entry]:
        """Return one collector's unanswered requests, oldest first."""
        return [entry for entry in self if entry.collector == index and entry.held is None]

    def issue(self, index: int, epoch: int, amount: int, base: int) -> Entry:
        """Record a request, before it is sent."""
        state = self.state
        entry = Entry(state.requested[1], index, epoch, amount, base)
        self.state = state._replace(
            entries={**state.entries, entry.id: entry}, requested=_more(state.requested, [entry])
        )
        return entry

    def hold(self, request_id: int, epoch: int) -> None:
        """Record that an answer has reached the head.

        `ProtocolError`: it answers no outstanding request, or not its collector's oldest one. It is counted as refused,
        and must not be used.
        """
        state = self.state
        entry = state.entries.get(request_id)
        if entry is None or entry.epoch != epoch or self.waiting_of(entry.collector)[:1] != [entry]:
            self.state = state._replace(refused=state.refused + 1)
            raise ProtocolError(f"an answer to request {request_id} of incarnation {epoch}, which is not outstanding")
        held = entry._replace(held=state.arrivals)
        self.state = state._replace(entries={**state.entries, request_id: held}, arrivals=state.arrivals + 1)

    def lose(self, request_ids: Collection[int], reason: LostReason) -> list[Entry]:
        """Record that requests are lost; return those that were outstanding."""
        state = self.state
        gone = [state.entries[request_id] for request_id in request_ids if request_id in state.entries]
        entries = {key: entry for key, entry in state.entries.items() if entry not in gone}
        lost_by = {**state.lost_by, reason: state.lost_by.get(reason, 0) + len(gone)} if gone else state.lost_by
        self.state = state._replace(entries=entries, lost=_more(state.lost, gone), lost_by=lost_by)
        return gone

    def record_restart(self) -> None:
        """Count a restart of a collector."""
        self.state = self.state._replace(restarts=self.state.restarts + 1)

    def after_delivery(self, request_ids: Collection[int], version: int, row_lag: int = 0) -> LedgerState:
        """Return the state after delivery of some held requests; assign it to `state` to deliver.

        `row_lag`: the greatest lag of their rows at the present `version` of the weights.
        """
        state = self.state
        taken = [state.entries[request_id] for request_id in request_ids]
        if any(entry.held is None for entry in taken):
            raise ProtocolError("a request whose answer is not on the head cannot be delivered")
        return state._replace(
            entries={key: entry for key, entry in state.entries.items() if key not in request_ids},
            delivered=_more(state.delivered, taken),
            max_lag=max([state.max_lag, *(version - entry.base for entry in taken)]),
            max_row_lag=max(state.max_row_lag, row_lag),
        )

    @property
    def accounting(self) -> Accounting:
        """Return the sums."""
        state = self.state
        pairs = {name: getattr(state, name) for name in _SUMS}
        pairs["outstanding"] = _more((0, 0), state.entries.values())
        return Accounting(
            **{name: amount for name, (amount, _) in pairs.items()},
            **{f"requests_{name}": number for name, (_, number) in pairs.items()},
            lost_by=dict(state.lost_by),
            restarts=state.restarts,
            refused=state.refused,
            max_lag=state.max_lag,
            max_row_lag=state.max_row_lag,
        )


def _more(pair: tuple[int, int], entries: Collection[Entry]) -> tuple[int, int]:
    return pair[0] + sum(entry.amount for entry in entries), pair[1] + len(entries)


class Pacing(NamedTuple):
    """Limits outstanding fragments, and picks the fragments of each batch; every batch makes one weight version.

    A fragment's lag is the version at its delivery minus the version at its request. It is bounded without dropping
    fragments: the plan waits for fragments that would get too old. It must wait early enough: the remaining fragments
    must fit into the batches that come before they are too old.
    """

    fragments: int  # per batch, F
    max_lag: int | None  # L; None: no bound

    @property
    def most(self) -> int | None:
        """Most outstanding fragments, held ones included, before a batch is returned; None: no limit."""
        return None if self.max_lag is None else self.fragments * (self.max_lag + 1)

    def pick(self, ready: Sequence[int], bases: Sequence[int], version: int) -> list[int] | None:
        """Choose the fragments of the next batch: by arrival, as long as the rest stays within the bound.

        `bases` are the versions at the requests of all outstanding fragments, `ready` the positions there of held ones,
        in order of arrival. Return positions in `bases`, or None if the batch must wait.
        """
        if len(ready) < self.fragments:
            return None
        chosen: list[int] = []
        for i in range(0 if self.max_lag is None else self.max_lag + 1):
            # Fragments of this base and older ones must fit into this batch and the next i.
            base = version + i - (self.max_lag or 0)
            due = sum(b <= base for b in bases) - self.fragments * i - sum(bases[k] <= base for k in chosen)
            old = [k for k in ready if bases[k] <= base and k not in chosen]
            chosen += old[: max(0, min(due, self.fragments - len(chosen)))]
            if len(old) < due and len(chosen) < self.fragments:
                return None
        chosen += [k for k in ready if k not in chosen][: self.fragments - len(chosen)]
        return [k for k in ready if k in chosen]


def may_publish(bases: Sequence[int], version: int, max_lag: int | None) -> bool:
    """Return whether a new weight version keeps outstanding fragments, requested at `bases`, within the bound."""
    return max_lag is None or all(base > version - max_lag for base in bases)


_WHERE = "the plan of batches"


class Shares:
    """Each collector's share of every batch, joined in the order of collectors: the same numbers each time.

    If Ctrl-C or an error leaves a batch unfinished, the next call finishes it; it must request the same amount.
    """

    max_lag: int | None = 0  # greatest lag of outstanding fragments, in versions

    def __init__(self) -> None:
        self._goal: SampleTarget | None = None
        self._shares: list[tuple[int, int]] = []  # (collector index, amount)

    def begin(self, goal: SampleTarget, active: Sequence[int]) -> None:
        """Begin a batch; `StateError`: another batch is unfinished; `ArgumentError`: no batches of this amount."""
        if self._goal is None:
            each, more = divmod(goal.amount, len(active))
            self._shares = [(index, each + (k < more)) for k, index in enumerate(active) if each or k < more]
            self._goal = goal
        elif goal != self._goal:
            raise StateError(
                f"a batch of {self._goal.amount} {self._goal.unit} is unfinished, and parts of it are there: ask for "
                f"as much, then for what you like"
            )

    def asked(self, active: Sequence[int]) -> Sequence[int]:
        """Return the collectors that take part in the batch; small batches need fewer than all."""
        return [index for index, _ in self._shares if index in active]

    def requests(self, ledger: Ledger, active: Sequence[int]) -> list[tuple[int, int]]:
        """Return what to request now, for this batch and the next ones: (collector index, amount), in order."""
        outstanding = Counter((entry.collector, entry.amount) for entry in ledger.fragments)
        lacking = []
        for k, share in enumerate(self._shares):
            if outstanding[share]:
                outstanding[share] -= 1
                continue
            if share[0] not in active:  # other collectors deliver its share
                share = self._shares[k] = min(active, key=lambda index: (self._amount_of(index), index)), share[1]
            lacking.append(share)
        return lacking

    def _amount_of(self, index: int) -> int:
        return sum(amount for owner, amount in self._shares if owner == index)

    def chosen(self, ledger: Ledger, version: int) -> list[int] | None:
        """Return the requests that make the next batch, in order; None if it must wait."""
        held = [entry for entry in ledger.fragments if entry.held is not None]
        if len(held) < len(self._shares):
            return None
        return [entry.id for entry in sorted(held, key=lambda entry: entry.collector)]

    def end(self) -> None:
        """End the batch: it was returned."""
        self._goal = None  # one assignment, so that Ctrl-C cannot split it

    @property
    def settings(self) -> State:
        """Arguments of the plan."""
        return {"sync": True}

    def get_state(self) -> State:
        """Return the state of the unfinished batch, or of coming batches."""
        if self._goal is None:
            return {"goal": None, "shares": []}
        return {"goal": [self._goal.unit, self._goal.amount], "shares": [list(share) for share in self._shares]}

    def prepare(self, state: State) -> Callable[[], None]:
        """Validate a state from `get_state` of a plan with equal settings; return a function that installs it."""
        found = read_fields(state, _WHERE, goal=SampleTarget | None, shares=list[list[Any]])
        pairs = [share[:2] for share in found["shares"]]  # earlier versions saved the request's id, too
        shares = from_plain(list[tuple[int, int]], pairs, f"{_WHERE}: shares")
        return partial(vars(self).update, _goal=found["goal"], _shares=shares)


class FragmentPlan:
    """Fragments of one size, in order of arrival, within the bound on lag; see `Pacing`.

    Without `fragment`, their size is the first batch's amount divided by the number of collectors.
    """

    def __init__(self, fragment: int | None, max_in_flight: int, max_lag: int | None) -> None:
        self._given = self._fragment = fragment
        self._most, self.max_lag = max_in_flight, max_lag
        self._unit = ""
        self._pacing = Pacing(1, max_lag)

    def begin(self, goal: SampleTarget, active: Sequence[int]) -> None:
        fragment = self._fragment
        if fragment is None:
            fragment, rest = divmod(goal.amount, len(active))
            if rest:
                raise ArgumentError(
                    f"{goal.amount} {goal.unit} cannot be shared by {len(active)} collectors: ask for "
                    f"{(fragment + 1) * len(active)}, or give a fragment=... that it is a multiple of"
                )
        if goal.amount % fragment:
            raise ArgumentError(
                f"{goal.amount} {goal.unit} are no multiple of fragment={fragment}: ask for "
                f"{(goal.amount // fragment + 1) * fragment}"
            )
        if self._unit not in ("", goal.unit):
            raise ArgumentError(
                f"collect(): outstanding fragments are of {self._unit}: expected an amount of these, got {goal.unit}"
            )
        self._fragment, self._unit = fragment, goal.unit
        self._pacing = Pacing(goal.amount // fragment, self.max_lag)

    def asked(self, active: Sequence[int]) -> Sequence[int]:
        return active

    def requests(self, ledger: Ledger, active: Sequence[int]) -> list[tuple[int, int]]:
        assert self._fragment is not None  # `begin` was called
        waiting = {index: len(ledger.waiting_of(index)) for index in active}
        most = self._pacing.most
        if most is None:  # bounds the number of held answers
            most = len(active) * self._most + self._pacing.fragments
        found: list[tuple[int, int]] = []
        for _ in range(most - len(ledger.fragments)):
            index = min(active, key=lambda index: (waiting[index], index))  # the least busy one
            if waiting[index] >= self._most:
                break
            waiting[index] += 1
            found.append((index, self._fragment))
        return found

    def chosen(self, ledger: Ledger, version: int) -> list[int] | None:
        entries = ledger.fragments
        places = {entry.id: k for k, entry in enumerate(entries)}
        found = self._pacing.pick([places[entry.id] for entry in ledger.held], [e.base for e in entries], version)
        return None if found is None else [entries[k].id for k in found]

    def end(self) -> None:
        pass

    @property
    def settings(self) -> State:
        return {"sync": False, "fragment": self._given, "max_in_flight": self._most, "max_policy_lag": self.max_lag}

    def get_state(self) -> State:
        return {"fragment": self._fragment, "unit": self._unit, "fragments": self._pacing.fragments}

    def prepare(self, state: State) -> Callable[[], None]:
        found = read_fields(state, _WHERE, fragment=PositiveCount | None, unit=str, fragments=PositiveCount)
        pacing = Pacing(found["fragments"], self.max_lag)
        return partial(vars(self).update, _fragment=found["fragment"], _unit=found["unit"], _pacing=pacing)


Plan = Shares | FragmentPlan
"""Decides how much to request of each collector, and which answers make the next batch; see `Shares`."""


def joined(
    parts: Sequence[MultiAgentBatch], learner_connectors: Mapping[str, LearnerPipeline], known: Sequence[str]
) -> MultiAgentBatch:
    """Join all rows into one batch, in the order of parts; run the head's learner connectors.

    Rows of policies without a pipeline stay unchanged. If a connector raises, no rows are lost.
    """
    batch = MultiAgentBatch.concat(parts)
    found = dict(batch.items())
    chains = [(name, learner_connectors[name]) for name in found if len(learner_connectors.get(name, ()))]
    for _, chain in chains:
        chain.see_batch(batch)
    for name, chain in chains:
        try:
            found[name] = SampleBatch(chain(batch[name]))
        except Exception as error:
            error.add_note(f"in the learner connectors of policy {name!r}; no row is lost: call collect() again")
            raise
    return MultiAgentBatch(found, env_steps=batch.env_steps, known=tuple(known), agent_steps=batch.agent_steps)


def stats_after(
    known: Sequence[CollectorStats],
    restarts: Mapping[int, int],
    entries: Sequence[Entry],
    answers: Sequence[Answer],
    version: int,
) -> tuple[CollectorStats, ...]:
    """Return each collector's statistics after the delivery of answers, whose ledger entries are in the same order.

    `restarts`: of each existing collector, by index.
    """
    before = {stats.index: stats for stats in known}
    found = {i: replace(before.get(i, CollectorStats(i)), restarts=count) for i, count in restarts.items()}
    lags: dict[int, int] = {}
    for entry, answer in zip(entries, answers, strict=True):
        index, (waited, worked) = entry.collector, answer.seconds
        if index not in found:  # the collector has left
            continue
        lags[index] = max(lags.get(index, 0), version - entry.base)
        stats = found[index]
        found[index] = replace(
            stats,
            lag=lags[index],
            env_steps=stats.env_steps + sum(part.env_steps for part in answer.parts),
            seconds_waiting=stats.seconds_waiting + waited,
            seconds_working=stats.seconds_working + worked,
        )
    return tuple(found.values())


def oldest_row(parts: Sequence[MultiAgentBatch], policies: Sequence[str]) -> int | None:
    """Return the lowest weight version that decided a row of these policies; None without rows."""
    found = [
        int(part[name].policy_version.min())
        for part in parts
        for name in policies
        if name in part and len(part[name]) and "policy_version" in part[name]
    ]
    return min(found, default=None)


def in_pieces(reply: Started | Answer | Raised, limit: int) -> Started | Answer | Raised:
    """Return the reply with its rows cut so that no column exceeds ``limit`` bytes.

    Rows are not copied. The head copies all pieces into one batch, like the answers of several collectors.
    """
    if not isinstance(reply, Answer):
        return reply
    return replace(reply, parts=tuple(piece for part in reply.parts for piece in _cut(part, limit)))


def _cut(batch: MultiAgentBatch, limit: int) -> list[MultiAgentBatch]:
    cut = {name: _slices(rows, limit) for name, rows in batch.items()}
    count = max(map(len, cut.values()), default=1)
    return [
        MultiAgentBatch(
            {name: slices[i] for name, slices in cut.items() if i < len(slices)},
            env_steps=0 if i else batch.env_steps,  # the head sums the counts
            known=batch.known,
            agent_steps=0 if i else batch.agent_steps,
        )
        for i in range(count)
    ]


def _slices(rows: SampleBatch, limit: int) -> list[SampleBatch]:
    number = len(rows)
    largest = max(leaf.nbytes for _, leaf in named_leaves(dict(rows.items())))
    count = min(-(-largest // limit), number)
    if count <= 1:
        return [rows]
    size = -(-number // count)
    return [rows.slice(start, start + size) for start in range(0, number, size)]
