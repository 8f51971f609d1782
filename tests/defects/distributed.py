"""Defects of many collectors: the ledger, joining, weights."""

from __future__ import annotations

from typing import Any

from marlvec.distributed import accounting as joining
from marlvec.distributed import collectors
from marlvec.distributed.accounting import Ledger
from marlvec.distributed.collectors import Collectors
from tests.defects.registry import Patch, found_by

FAULTS, COLLECTORS = "tests/distributed/test_faults.py", "tests/distributed/test_collectors.py"


@found_by(COLLECTORS)
def ledger_late_answer_taken(patch: Patch) -> None:
    """An answer of a collector that was restarted since is used as if it were the new one's."""
    hold = Ledger.hold

    def any_epoch(ledger: Ledger, request_id: int, epoch: int) -> None:
        entry = ledger.state.entries.get(request_id)
        hold(ledger, request_id, epoch if entry is None else entry.epoch)

    patch.setattr(Ledger, "hold", any_epoch)


@found_by(FAULTS)
def ledger_losses_not_counted(patch: Patch) -> None:
    """What is lost leaves the ledger, and is counted nowhere."""
    lose = Ledger.lose

    def forget(ledger: Ledger, request_ids: Any, reason: Any) -> Any:
        lost = ledger.state.lost
        gone = lose(ledger, request_ids, reason)
        ledger.state = ledger.state._replace(lost=lost)
        return gone

    patch.setattr(Ledger, "lose", forget)


@found_by(COLLECTORS, FAULTS)
def ledger_delivered_twice(patch: Patch) -> None:
    """A request that was delivered stays outstanding."""
    deliver = Ledger.after_delivery

    def keep(ledger: Ledger, request_ids: Any, version: int, row_lag: int = 0) -> Any:
        return deliver(ledger, request_ids, version, row_lag)._replace(entries=ledger.state.entries)

    patch.setattr(Ledger, "after_delivery", keep)


@found_by("tests/distributed/test_state.py::test_learner_connectors_of_the_head_see_each_batch_once")
def joining_skips_the_head_connectors(patch: Patch) -> None:
    """Learner connectors of the head see no batch."""
    joined = joining.joined
    patch.setattr(collectors, "joined", lambda parts, learner_connectors, known: joined(parts, {}, known))


@found_by(COLLECTORS, FAULTS)
def joining_last_part_dropped(patch: Patch) -> None:
    """Of several collectors' parts the last one is dropped."""
    concat = joining.MultiAgentBatch.concat
    patch.setattr(joining.MultiAgentBatch, "concat", lambda parts: concat(list(parts)[: max(1, len(parts) - 1)]))


@found_by(COLLECTORS, FAULTS)
def weights_kept_for_the_next_version(patch: Patch) -> None:
    """New weights reach the collectors one version late."""
    set_weights = Collectors.set_weights
    late: dict[int, Any] = {}

    def one_late(group: Collectors, weights: Any) -> int:
        before = late.get(id(group), weights)
        late[id(group)] = weights
        return set_weights(group, before)

    patch.setattr(Collectors, "set_weights", one_late)
