"""The ledger alone: whatever happens in whatever order, each request ends once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from marlvec.distributed.accounting import Entry, Ledger, Pacing, may_publish
from marlvec.errors import ProtocolError

AMOUNT = 5


class LedgerState(RuleBasedStateMachine):
    """Issue, answer, die, time out, hand out, publish, resize; beside plain lists of what should be known."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger, self.pacing = Ledger(), Pacing(2, 1)
        self.version, self.epochs = 0, [0, 0]
        self.delivered: list[Entry] = []
        self.lost: list[Entry] = []
        self.issued = 0

    @rule(data=st.data())
    def issue(self, data: Any) -> None:
        if len(self.ledger) < self.pacing.most:  # type: ignore[operator]  # there is a bound
            index = data.draw(st.integers(0, len(self.epochs) - 1))
            entry = self.ledger.issue(index, self.epochs[index], AMOUNT, self.version)
            assert entry.id == self.issued
            self.issued += 1

    @rule(data=st.data())
    def answer(self, data: Any) -> None:
        index = data.draw(st.integers(0, len(self.epochs) - 1))
        if waiting := self.ledger.waiting_of(index):
            self.ledger.hold(waiting[0].id, waiting[0].epoch)
            assert self.ledger.held[-1].id == waiting[0].id

    @rule(data=st.data(), reason=st.sampled_from(["died", "timeout", "unreachable"]))
    def end(self, data: Any, reason: Any) -> None:
        """A collector dies; of what it had been asked for, the first may have come, and what follows is lost."""
        index = data.draw(st.integers(0, len(self.epochs) - 1))
        waiting = self.ledger.waiting_of(index)
        came = data.draw(st.integers(0, len(waiting)))
        for entry in waiting[:came]:
            self.ledger.hold(entry.id, entry.epoch)
        self.lost += self.ledger.lose([entry.id for entry in waiting[came : came + 1]], reason)
        self.lost += self.ledger.lose([entry.id for entry in waiting[came + 1 :]], "after_a_loss")
        self.ledger.note_restart()
        self.epochs[index] += 1
        for entry in waiting[came:]:  # it answers all the same
            before = self.ledger.state
            with pytest.raises(ProtocolError, match="which is not outstanding"):
                self.ledger.hold(entry.id, entry.epoch)
            assert self.ledger.state == before._replace(refused=before.refused + 1)

    @rule()
    def hand_out(self) -> None:
        entries = list(self.ledger)
        ready = [entries.index(entry) for entry in self.ledger.held]
        chosen = self.pacing.pick(ready, [entry.base for entry in entries], self.version)
        if chosen is not None:
            taken = [entries[k] for k in chosen]
            before = self.ledger.accounting
            after = self.ledger.after_delivery([entry.id for entry in taken], self.version)
            assert self.ledger.accounting == before, "nothing moves before it is stored"
            self.ledger.state = after
            self.delivered += taken

    @rule()
    def publish(self) -> None:
        if may_publish([entry.base for entry in self.ledger], self.version, self.pacing.max_lag):
            self.version += 1

    @rule()
    def grow(self) -> None:
        self.epochs.append(0)

    @precondition(lambda self: len(self.epochs) > 1)
    @rule()
    def shrink(self) -> None:
        index = len(self.epochs) - 1
        self.lost += self.ledger.lose([entry.id for entry in self.ledger.waiting_of(index)], "closed")
        if not any(entry.collector == index for entry in self.ledger):
            self.epochs.pop()

    @invariant()
    def accounting_balances(self) -> None:
        sums, out = self.ledger.accounting, list(self.ledger)
        assert sums.requested == sums.delivered + sums.lost + sums.outstanding == AMOUNT * self.issued
        assert sums.requests_requested == sums.requests_delivered + sums.requests_lost + sums.requests_outstanding
        assert (sums.requests_delivered, sums.requests_lost) == (len(self.delivered), len(self.lost))
        assert sum(sums.lost_by.values()) == len(self.lost)
        every = [entry.id for entry in [*self.delivered, *self.lost, *out]]
        assert sorted(every) == list(range(self.issued)), "each once"
        assert sums.max_lag <= 1
        assert all(self.version - entry.base <= 1 for entry in out)

    @invariant()
    def a_collectors_answers_are_handed_out_in_the_order_of_its_requests(self) -> None:
        for index in range(len(self.epochs)):
            ids = [entry.id for entry in self.delivered if entry.collector == index]
            assert ids == sorted(ids)


LedgerState.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestBooks = LedgerState.TestCase


def test_what_is_not_held_is_not_delivered_and_nothing_is_taken_out_of_order() -> None:
    ledger = Ledger()
    first, second = ledger.issue(0, 0, 1, 0), ledger.issue(0, 0, 1, 0)
    with pytest.raises(ProtocolError, match="not on the head"):
        ledger.after_delivery([first.id], 0)
    with pytest.raises(ProtocolError, match="not outstanding"):
        ledger.hold(second.id, 0)
    with pytest.raises(ProtocolError, match="not outstanding"):
        ledger.hold(first.id, 1)
    assert ledger.accounting.refused == 2
    assert ledger.lose([99], "died") == []
    assert first.id in ledger
    assert ledger[first.id] == first
