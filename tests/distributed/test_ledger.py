"""The ledger alone: what it refuses. That each request ends once, whatever happens, is in test_exactness.py."""

from __future__ import annotations

import pytest

from marlvec.distributed.accounting import Ledger
from marlvec.errors import ProtocolError


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
