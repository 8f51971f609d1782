"""Checks of learner connectors: finished batches, in which each fragment is independent."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium.spaces import Space

from marlvec.connectors._support.leaf_spaces import space_summary
from marlvec.connectors.connector import LearnerConnector
from marlvec.connectors.rows import Rows
from marlvec.testing.connector_checks._support.difference import Difference, difference, summed
from marlvec.testing.connector_checks._support.report import Report
from marlvec.testing.connector_checks._support.story import ColumnLike, transitions
from marlvec.testing.connector_checks.config import read_back
from marlvec.testing.connector_checks.memory import plain_state, refuses_foreign
from marlvec.trees import map_tree, tree_leaves

__all__ = ["check_learner"]

_BATCHES = 3
_ACROSS = "one whose rows depend on other fragments sets across_agents"


@dataclass
class _Trial:
    """A learner connector, and batches for it.

    Attributes:
        report: Where to say what is wrong.
        build: Makes a new one.
        draw: Draws batches, the same ones each time.
        batches: Those.
    """

    report: Report
    build: Callable[[], LearnerConnector]
    draw: Callable[[], list[Rows]]
    batches: list[Rows] = field(init=False)

    def __post_init__(self) -> None:
        self.batches = self.draw()

    def piece(self) -> LearnerConnector:
        """A new one."""
        with self.report.asking("making one"):
            return self.build()

    def call(self, piece: LearnerConnector, rows: Rows) -> Rows:
        """Show it a batch and have it transform that."""
        with self.report.asking("see_batch()"):
            piece.see_batch({"main": rows})
        with self.report.asking("the call"):
            out = piece(rows)
        if not isinstance(out, Rows):
            self.report.broken("what the call returns", "Rows", type(out).__name__)
        if len(out) != len(rows) and not piece.changes_length:
            hint = "one that may do so sets changes_length"
            self.report.broken(f"the number of rows that come out of {len(rows)}", str(len(rows)), str(len(out)), hint)
        return out

    def same(self, expected: Rows, got: Rows, subject: str, hint: str = "", *, near: bool = False) -> None:
        """Refuse rows that are not what they were, one by one."""
        if differs := difference(expected, got, close=summed if near else None):
            self.report.broken(f"{subject}, {_place(differs)}", differs.expected, differs.got, hint)


def check_learner(
    build: Callable[[], LearnerConnector],
    obs: Space[Any],
    action: Space[Any],
    columns: Mapping[str, ColumnLike],
    num_envs: int,
    num_agents: int,
    seed: int,
) -> None:
    """Check a learner connector.

    Raises:
        ContractError: It broke its contract.
    """
    report = Report(build().name, f"batches with obs {space_summary(obs)}")

    def draw() -> list[Rows]:
        return [transitions(obs, action, columns, num_envs, num_agents, seed + k) for k in range(_BATCHES)]

    trial = _Trial(report, build, draw)
    for name, check in _CHECKS.items():
        report.check = name
        check(trial)


def _check_rows(trial: _Trial) -> None:
    piece = trial.piece()
    for rows in trial.batches:
        out = trial.call(piece, rows)
        if piece.changes_length:
            continue
        for name in ("env_id", "agent_index", "eps_id", "t", "unroll_id"):
            if name not in out or not np.array_equal(out[name], rows[name]):
                trial.report.broken(f"column {name!r}", "the rows in their order", "other values")


def _check_repeat(trial: _Trial) -> None:
    one, two = trial.piece(), trial.piece()
    for k, rows in enumerate(trial.batches):
        hint = "share nothing between instances"
        trial.same(trial.call(one, rows), trial.call(two, rows), f"batch {k}, from one made alike", hint)


def _check_inputs(trial: _Trial) -> None:
    piece, quiet = trial.piece(), trial.piece()
    for k, rows in enumerate(trial.draw()):
        given = _own(rows)
        expected = trial.call(quiet, _own(rows))
        out = trial.call(piece, given)
        names, others = list(rows.keys()), list(given.keys())
        if names != others:
            trial.report.broken(f"batch {k}, the columns that were given", str(names), str(others))
        trial.same(rows, given, f"batch {k}, what was given", "copy an array before you write to it")
        trial.same(expected, _own(out), f"batch {k}, whatever became of earlier ones", "keep copies of arrays")
        for _, column in given.items():
            for _, leaf in tree_leaves(column):
                leaf[...] = None if leaf.dtype == object else np.asarray(101).astype(leaf.dtype)


def _check_outputs(trial: _Trial) -> None:
    piece = trial.piece()
    first = trial.call(piece, trial.batches[0])
    held = _own(first)
    trial.call(piece, trial.batches[1])
    trial.same(held, first, "what was returned, after a later call", "return copies of what is remembered")


def _check_empty(trial: _Trial) -> None:
    piece = trial.piece()
    out = trial.call(piece, trial.batches[0])
    none = trial.call(piece, trial.batches[0].take(slice(0, 0)))
    if len(none):
        trial.report.broken("the rows that come out of none", "none", str(len(none)))
    expected, got = ({name: map_tree(_form, c) for name, c in rows.items()} for rows in (out, none))
    trial.report.same(expected, got, "the columns of no rows")


def _check_batched(trial: _Trial) -> None:
    whole, single = trial.piece(), trial.piece()
    if whole.across_agents:
        return
    for k, rows in enumerate(trial.batches):
        expected = trial.call(whole, rows)
        parts = [trial.call(single, rows.take(rows.unroll_id == unroll)) for unroll in _unrolls(rows)]
        apart = _joined(trial, parts, k)
        trial.same(apart, expected, f"batch {k}, each fragment as in a call of its own", _ACROSS, near=True)


def _check_order(trial: _Trial) -> None:
    whole, turned = trial.piece(), trial.piece()
    for k, rows in enumerate(trial.batches):
        unrolls = _unrolls(rows)
        turn = [np.flatnonzero(rows.unroll_id == unroll) for unroll in unrolls[::-1]]
        expected, got = trial.call(whole, rows), trial.call(turned, rows.take(np.concatenate(turn)))
        if "unroll_id" not in expected or expected["unroll_id"].shape[:1] != (len(expected),):
            return  # nothing says which row is which
        number = [out["unroll_id"].reshape(len(out), -1)[:, 0] for out in (expected, got)]
        back = [np.concatenate([np.flatnonzero(ids == unroll) for unroll in unrolls]) for ids in number]
        hint = "the order of fragments means nothing"
        subject = f"batch {k}, with its fragments in another order"
        trial.same(expected.take(back[0]), got.take(back[1]), subject, hint, near=True)


def _check_state(trial: _Trial) -> None:
    piece, other = trial.piece(), trial.piece()
    trial.call(piece, trial.batches[0])
    state = plain_state(trial.report, piece)
    held = copy.deepcopy(state)
    if state:
        with trial.report.asking("load_state_dict()"):
            other.load_state_dict(state)
    _go_on(trial, piece, other, "from one that has loaded the state", "state_dict() must hold all that it remembers")
    trial.report.same(held, state, "a state that was taken, later", "it must be a copy, and loading must copy it")
    refuses_foreign(trial.report, piece)


def _check_copy(trial: _Trial) -> None:
    piece = trial.piece()
    trial.call(piece, trial.batches[0])
    with trial.report.asking("copy.deepcopy()"):
        twin = copy.deepcopy(piece)
    _go_on(trial, piece, twin, "from a deep copy", "a copy must share nothing that changes with the original")


def _check_config(trial: _Trial) -> None:
    piece = trial.piece()
    if (built := read_back(trial.report, piece)) is not None:
        assert isinstance(built, LearnerConnector)  # it is of the same class
        _go_on(trial, piece, built, "from one built from the config", "")


def _go_on(trial: _Trial, piece: LearnerConnector, other: LearnerConnector, subject: str, hint: str) -> None:
    outs = [trial.call(other, rows) for rows in trial.batches[1:]]
    for k, (rows, out) in enumerate(zip(trial.batches[1:], outs, strict=True)):
        trial.same(trial.call(piece, rows), out, f"batch {k + 1}, {subject}", hint)


def _joined(trial: _Trial, parts: list[Rows], k: int) -> Rows:
    try:
        return Rows.concat(parts)
    except ValueError as error:
        trial.report.broken(f"batch {k}, fragments in calls of their own", "columns of one form", str(error), _ACROSS)


def _unrolls(rows: Rows) -> list[int]:
    return list(dict.fromkeys(rows.unroll_id.tolist()))


def _own(rows: Rows) -> Rows:
    return Rows({name: map_tree(np.array, column) for name, column in rows.items()})


def _form(array: Any) -> tuple[str, tuple[int, ...]]:
    return str(array.dtype), tuple(array.shape[1:])


def _place(differs: Difference) -> str:
    row = f", row {differs.at[0]}" if differs.at else ""
    return f"column {differs.path!r}{row}" if differs.path else "the columns"


_CHECKS: dict[str, Callable[[_Trial], None]] = {
    "rows": _check_rows,
    "repeat": _check_repeat,
    "inputs": _check_inputs,
    "outputs": _check_outputs,
    "empty": _check_empty,
    "batched": _check_batched,
    "order": _check_order,
    "state": _check_state,
    "copy": _check_copy,
    "config": _check_config,
}
