"""Check: a call does not modify its input, and its output lies in the declared space."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.connectors.rows import Rows
from marlvec.testing.connector_checks.report import outsider, place
from marlvec.testing.connector_checks.story import Moment
from marlvec.testing.connector_checks.trial import EpisodeTrial, Trial
from marlvec.trees import map_tree, tree_leaves

__all__ = ["check_empty", "check_inputs", "check_inside", "check_outputs", "check_repeat", "check_rows", "form_of"]


def check_rows(trial: Trial) -> None:
    """The output has the input's rows."""
    for training in trial.both:
        trial.player(training=training).watch(trial.moments())


def check_inside(trial: EpisodeTrial) -> None:
    """The output lies in the declared space: observations in output_space(), actions in the env's space."""
    column, space = ("actions_for_env", trial.space) if trial.acts else ("obs", trial.outer)
    for training in trial.both:
        player = trial.player(training=training)
        for k, moment in enumerate(trial.moments()):
            out = player.see(moment)
            if column not in out:
                trial.report.broken("the columns that come out", f"{column!r} among them", str(list(out.keys())))
            found = outsider(space, out[column], len(out), exact=not trial.acts)
            if found:
                found = found._replace(path=f"{column}/{found.path}" if found.path else column)
                hint = "" if trial.acts else "output_space() must say what comes out"
                trial.report.broken(f"moment {k}, {place(found, out)}", found.expected, found.got, hint)


def check_inputs(trial: Trial) -> None:
    """Input arrays are neither written to nor kept: the caller may overwrite them after the call."""
    hint = "copy an array before you write to it"
    player, quiet = trial.player(), trial.player()
    for k, moment in enumerate(trial.fresh_moments()):
        expected = quiet.see(Moment(_copy_rows(moment.rows), _copy_rows(moment.answer), moment.over))
        rows = _copy_rows(moment.rows)
        out = player.call(rows)
        _untouched(trial, moment.rows, rows, k, hint)
        held = _copy_rows(out)
        _overwrite(rows)
        trial.report.compare(expected, held, k, "whatever became of earlier calls' arrays", "keep copies of arrays")
        answered = player.answered(held, moment)
        rows = _copy_rows(answered)
        player.show_answer(rows)
        _untouched(trial, answered, rows, k, hint)
        _overwrite(rows)
        if moment.over:
            player.reset(list(moment.over))


def _untouched(trial: Trial, before: Rows, after: Rows, k: int, hint: str) -> None:
    names, others = list(before.keys()), list(after.keys())
    if names != others:
        trial.report.broken(f"moment {k}, the columns that were given", str(names), str(others), "call rows.replace()")
    trial.report.compare(before, after, k, "as it was given", hint)


def check_outputs(trial: Trial) -> None:
    """Later calls do not write to returned arrays."""
    player = trial.player()
    before: list[tuple[Rows, Rows]] = []
    for moment in trial.moments():
        for k, (out, held) in enumerate(before):
            trial.report.compare(held, out, k, "as when it was returned", "return copies of what is remembered")
        out = player.see(moment)
        before.append((out, _copy_rows(out)))


def check_repeat(trial: Trial) -> None:
    """Two equal connectors with the same input return the same, bit for bit."""
    for training in trial.both:
        one, two = (trial.player(training=training) for _ in range(2))
        for k, moment in enumerate(trial.moments()):
            hint = "draw random numbers with RowRandom, and share nothing between instances"
            trial.report.compare(one.see(moment), two.see(moment), k, "from one made alike", hint)


def check_empty(trial: EpisodeTrial) -> None:
    """A call without rows returns none, in the same columns, and changes nothing."""
    player = trial.player()
    for moment in trial.moments():
        out = player.see(moment)
        state = player.piece.state_dict()
        none = player.call(moment.rows.take(np.zeros(0, np.int64)))
        for name, column in out.items():
            if name not in none:
                trial.report.broken("the columns of no rows", f"{name!r} among them", str(list(none.keys())))
            trial.report.same(map_tree(form_of, column), map_tree(form_of, none[name]), f"column {name!r} of no rows")
        trial.report.same(state, player.piece.state_dict(), "the state after a call without rows")


def form_of(array: Any) -> tuple[str, tuple[int, ...]]:
    """Return dtype and shape of one row of a column."""
    return str(array.dtype), tuple(array.shape[1:])


def _copy_rows(rows: Rows) -> Rows:
    return Rows({name: map_tree(np.array, column) for name, column in rows.items()})


def _overwrite(rows: Rows) -> None:
    for _, column in rows.items():
        for _, leaf in tree_leaves(column):
            _overwrite_array(leaf)


def _overwrite_array(array: NDArray[Any]) -> None:
    if array.dtype == object:
        array[...] = None
    else:
        array[...] = np.asarray(101).astype(array.dtype)
