"""`Ledger`: every request to a collector, until it is delivered or lost; `Accounting`: their sums."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from marlvec.errors import ArgumentError, ProtocolError
from marlvec.serialization.state_fields import State, check_fields

__all__ = ["Accounting", "LedgerState", "Entry", "Ledger", "LostReason"]


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
    """One request that is neither delivered nor lost.

    Attributes:
        id: Unique number of the request.
        collector: Index of the collector.
        epoch: Incarnation of the collector.
        amount: Requested amount; 0: the request brings no rows.
        base: Version of the weights when it was issued.
        held: Arrival number of its answer on the head; None: no answer yet.
    """

    id: int
    collector: int
    epoch: int
    amount: int
    base: int
    held: int | None = None


class LedgerState(NamedTuple):
    """Immutable state of a ledger: each event builds a new state, and one assignment publishes it.

    Attributes:
        entries: Entries by request id, in the order of requests.
        requested, delivered, lost: Amounts and numbers of requests.
        lost_by: Requests lost, by reason.
        arrivals: Number of answers that ever arrived.
        refused, restarts, max_lag, max_row_lag: See `Accounting`.
    """

    entries: Mapping[int, Entry]
    requested: tuple[int, int] = (0, 0)
    delivered: tuple[int, int] = (0, 0)
    lost: tuple[int, int] = (0, 0)
    lost_by: Mapping[str, int] = {}  # never mutated
    arrivals: int = 0
    refused: int = 0
    restarts: int = 0
    max_lag: int = 0
    max_row_lag: int = 0

    def get_state(self) -> State:
        """Return the state as plain data."""
        return {**self._asdict(), "entries": [list(entry) for entry in self.entries.values()]}

    @classmethod
    def from_state(cls, state: State) -> LedgerState:
        """Rebuild a ledger state from the result of `get_state`.

        Raises:
            ArgumentError: ``state`` is not from `get_state`, or its sums do not balance.
        """
        where = "the ledger"
        check_fields(state, cls._fields, where)
        try:
            entries = {int(entry[0]): Entry(*map(_whole, entry)) for entry in state["entries"]}
            sums: dict[str, Any] = {name: (_whole(state[name][0]), _whole(state[name][1])) for name in _SUMS}
            others: dict[str, Any] = {name: _whole(state[name]) for name in _NUMBERS}
            lost_by = {str(reason): _whole(number) for reason, number in state["lost_by"].items()}
        except (TypeError, ValueError, AttributeError, LookupError) as error:
            raise ArgumentError(f"{where}: expected a state from get_state(): {error!r:.200}") from error
        found = cls(entries, **sums, lost_by=lost_by, **others)
        if found.requested != _more(_sum(found.delivered, found.lost), entries.values()):
            raise ArgumentError(f"{where}: expected requested == delivered + lost + outstanding")
        return found


_SUMS = "requested", "delivered", "lost"
_NUMBERS = "arrivals", "refused", "restarts", "max_lag", "max_row_lag"


def _whole(value: Any) -> Any:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise TypeError(f"expected an integer, got {value!r:.200}")
    return value


class Ledger:
    """Counts every request to a collector once.

    The caller reports events. A request is *outstanding* until its answer reaches the head; then it is *held*, which
    still counts as outstanding; when its batch is returned, it is *delivered*. Or it is *lost*.

    Attributes:
        state: The current state.
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

        Raises:
            ProtocolError: It answers no outstanding request, or not its collector's oldest one. It is counted as
                refused, and must not be used.
        """
        state = self.state
        entry = state.entries.get(request_id)
        if entry is None or entry.epoch != epoch or self.waiting_of(entry.collector)[:1] != [entry]:
            self.state = state._replace(refused=state.refused + 1)
            raise ProtocolError(f"an answer to request {request_id} of incarnation {epoch}, which is not outstanding")
        held = entry._replace(held=state.arrivals)
        self.state = state._replace(entries={**state.entries, request_id: held}, arrivals=state.arrivals + 1)

    def lose(self, request_ids: Collection[int], reason: LostReason) -> list[Entry]:
        """Record that requests are lost.

        Returns:
            The requests that were outstanding.
        """
        state = self.state
        gone = [state.entries[request_id] for request_id in request_ids if request_id in state.entries]
        entries = {key: entry for key, entry in state.entries.items() if entry not in gone}
        lost_by = {**state.lost_by, reason: state.lost_by.get(reason, 0) + len(gone)} if gone else state.lost_by
        self.state = state._replace(entries=entries, lost=_more(state.lost, gone), lost_by=lost_by)
        return gone

    def note_restart(self) -> None:
        """Count a restart of a collector."""
        self.state = self.state._replace(restarts=self.state.restarts + 1)

    def after_delivery(self, request_ids: Collection[int], version: int, row_lag: int = 0) -> LedgerState:
        """Return the state after delivery of some requests; assign it to `state` to deliver.

        Args:
            request_ids: Ids of held requests.
            version: The present version of the weights.
            row_lag: The greatest lag of their rows.
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
        outstanding = _more((0, 0), state.entries.values())
        pairs = {"requested": state.requested, "delivered": state.delivered, "lost": state.lost}
        amounts = {name: pair[0] for name, pair in pairs.items()}
        numbers = {f"requests_{name}": pair[1] for name, pair in pairs.items()}
        return Accounting(
            **amounts,
            **numbers,
            outstanding=outstanding[0],
            requests_outstanding=outstanding[1],
            lost_by=dict(state.lost_by),
            restarts=state.restarts,
            refused=state.refused,
            max_lag=state.max_lag,
            max_row_lag=state.max_row_lag,
        )


def _more(pair: tuple[int, int], entries: Collection[Entry]) -> tuple[int, int]:
    return pair[0] + sum(entry.amount for entry in entries), pair[1] + len(entries)


def _sum(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return one[0] + other[0], one[1] + other[1]
