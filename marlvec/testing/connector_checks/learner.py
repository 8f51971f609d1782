"""Checks of learner connectors on finished batches, whose fragments are independent."""

from __future__ import annotations

from typing import Any

import numpy as np

from marlvec.connectors.rows import Rows
from marlvec.testing.connector_checks._support.trial import BatchTrial
from marlvec.trees import map_tree

__all__ = ["check_empty_batch", "check_fragments", "check_fragment_order"]

_ACROSS = "one whose rows depend on other fragments sets across_agents"


def check_empty_batch(trial: BatchTrial) -> None:
    """A call without rows returns none, in the same columns."""
    player, rows = trial.player(), trial.moments()[0].rows
    out, none = player.call(rows), player.call(rows.take(slice(0, 0)))
    if len(none):
        trial.report.broken("the rows that come out of none", "none", str(len(none)))
    expected, got = ({name: map_tree(_form, c) for name, c in rows.items()} for rows in (out, none))
    trial.report.same(expected, got, "the columns of no rows")


def check_fragments(trial: BatchTrial) -> None:
    """All fragments in one call give what each gives in a call of its own."""
    whole, single = trial.player(), trial.player()
    if whole.piece.across_agents:
        return
    condition = "each fragment as in a call of its own"
    for k, moment in enumerate(trial.moments()):
        expected = whole.see(moment)
        parts = single.see_parts(moment, [np.flatnonzero(moment.rows.unroll_id == u) for u in _unrolls(moment.rows)])
        try:
            apart = Rows.concat(parts)
        except ValueError as error:
            subject = f"batch {k}, fragments in calls of their own"
            trial.report.broken(subject, "columns of one form", str(error), _ACROSS)
        trial.report.compare(apart, expected, k, condition, _ACROSS, near=True)


def check_fragment_order(trial: BatchTrial) -> None:
    """The order of fragments makes no difference."""
    whole, turned = trial.player(), trial.player()
    for k, moment in enumerate(trial.moments()):
        unrolls = _unrolls(moment.rows)
        turn = [np.flatnonzero(moment.rows.unroll_id == unroll) for unroll in unrolls[::-1]]
        expected, got = whole.see(moment), turned.see(moment.take(np.concatenate(turn)))
        if "unroll_id" not in expected or expected["unroll_id"].shape[:1] != (len(expected),):
            return  # rows cannot be identified
        number = [out["unroll_id"].reshape(len(out), -1)[:, 0] for out in (expected, got)]
        back = [np.concatenate([np.flatnonzero(ids == unroll) for unroll in unrolls]) for ids in number]
        hint = "the order of fragments means nothing"
        condition = "with its fragments in another order"
        trial.report.compare(expected.take(back[0]), got.take(back[1]), k, condition, hint, near=True)


def _unrolls(rows: Rows) -> list[int]:
    return list(dict.fromkeys(rows.unroll_id.tolist()))


def _form(array: Any) -> tuple[str, tuple[int, ...]]:
    return str(array.dtype), tuple(array.shape[1:])
