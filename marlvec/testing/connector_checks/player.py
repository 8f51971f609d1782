"""`ConnectorDriver` and `BatchDriver`: feed a connector as a collector would."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np

from marlvec.connectors.connector import ActionConnector, Connector, LearnerConnector, is_left_out
from marlvec.connectors.pipeline import Pipeline
from marlvec.connectors.rows import Rows
from marlvec.spaces.equality import difference
from marlvec.testing.connector_checks.report import Report, keys_of
from marlvec.testing.connector_checks.story import Moment

__all__ = ["BatchDriver", "ConnectorDriver"]

_IDENTITY = ("env_id", "agent_index", "eps_id", "t")
"""Columns that identify a row."""


class ConnectorDriver:
    """Calls a connector, which is set up, as a collector would."""

    def __init__(self, report: Report, piece: Connector) -> None:
        self.report, self.piece = report, piece

    def see(self, moment: Moment) -> Rows:
        """Play one moment in one call; return the rows that came out."""
        return self.see_parts(moment, [np.arange(len(moment.rows))])[0]

    def watch(self, moments: Iterable[Moment]) -> Self:
        """Play moments, each in one call; return this driver."""
        for moment in moments:
            self.see(moment)
        return self

    def see_parts(self, moment: Moment, parts: Sequence[Any]) -> list[Rows]:
        """Play one moment in several calls, each with some of its rows."""
        shares = [moment.take(np.asarray(part, np.int64)) for part in parts]
        outs = [self.call(share.rows) for share in shares]
        for out, share in zip(outs, shares, strict=True):
            self.show_answer(self.answered(out, share))
        if moment.over:
            self.reset(list(moment.over))
        return outs

    def call(self, rows: Rows) -> Rows:
        """Call the connector, which must return these rows."""
        out = self._call(rows)
        for name in _IDENTITY:
            if name not in out:
                self.report.broken("the columns that come out", f"{name!r} among them", str(list(out.keys())))
        kept = self._kept(rows, out)
        for name in _IDENTITY:
            if not np.array_equal(out[name], rows[name][kept]):
                self.report.broken(f"column {name!r}", "the rows in their order", "other values")
        if is_left_out(self.piece) and (differs := difference(rows, out)):
            hint = "is_identity is for one that returns all rows as they are: a pipeline does not call it"
            self.report.broken(str(differs), differs.expected, differs.got, hint)
        return out

    def answered(self, out: Rows, moment: Moment) -> Rows:
        """Return the rows that came out, with the policy's answer; without last rows, on which no agent acts."""
        places = {key: i for i, key in enumerate(keys_of(moment.rows))}
        came = np.array([places[key] for key in keys_of(out)], np.int64)
        acting = ~moment.rows.last[came]
        return out.take(acting).replace(**moment.answer.take(came[acting]))

    def show_answer(self, answered: Rows) -> None:
        """Pass the policy's answer to the connector; the action side does not receive it."""
        if len(answered) and not isinstance(self.piece, ActionConnector):
            with self.report.asking("on_policy_output()"):
                self.piece.on_policy_output(answered)

    def reset(self, env_ids: Any) -> None:
        """Reset the connector's memory of envs."""
        with self.report.asking(f"reset({env_ids})"):
            self.piece.reset(env_ids)

    def _call(self, rows: Rows) -> Rows:
        with self.report.asking("the call"):
            out = self.piece(rows)
        if not isinstance(out, Rows):
            self.report.broken("what the call returns", "Rows", type(out).__name__)
        return out

    def _kept(self, rows: Rows, out: Rows) -> Any:
        """Return the positions of the rows that came out."""
        if len(out) == len(rows):
            return np.arange(len(rows))
        subject = f"the number of rows that come out of {len(rows)}"
        if not self.piece.changes_length:
            self.report.broken(subject, str(len(rows)), str(len(out)), "one that removes rows sets changes_length")
        places = {key: i for i, key in enumerate(keys_of(rows))}
        if unknown := [key for key in keys_of(out) if key not in places]:
            self.report.broken("the rows that come out", "some of those that went in", f"(env, agent) {unknown[0]}")
        kept = np.array([places[key] for key in keys_of(out)], np.int64)
        if (np.diff(kept) <= 0).any():
            self.report.broken("the rows that come out", "their order kept, each once", f"those at {kept.tolist()}")
        if gone := np.setdiff1d(np.flatnonzero(rows.last), kept).tolist():
            key = keys_of(rows)[gone[0]]
            self.report.broken("the last row of an episode", "never removed", f"no row of (env, agent) {key}")
        if not isinstance(self.piece, Pipeline) and not hasattr(self.piece, "noop"):
            hint = 'set it to an action of the policy, to "repeat", or to None'
            self.report.broken("attribute noop of one that removes rows", "what those agents do", "none", hint)
        return kept


class BatchDriver(ConnectorDriver):
    """Calls a learner connector with whole batches, which have no policy answer."""

    def call(self, rows: Rows) -> Rows:
        """Pass a batch to the connector, and call it; it must return these rows."""
        assert isinstance(self.piece, LearnerConnector)  # checked by the caller
        with self.report.asking("see_batch()"):
            self.piece.see_batch({"main": rows})
        out = self._call(rows)
        if self.piece.changes_length:
            return out
        if len(out) != len(rows):
            subject, hint = f"the number of rows that come out of {len(rows)}", "one that may do so sets changes_length"
            self.report.broken(subject, str(len(rows)), str(len(out)), hint)
        for name in (*_IDENTITY, "unroll_id"):
            if name not in out or not np.array_equal(out[name], rows[name]):
                self.report.broken(f"column {name!r}", "the rows in their order", "other values")
        return out

    def answered(self, out: Rows, moment: Moment) -> Rows:
        return out.take(slice(0, 0))

    def show_answer(self, answered: Rows) -> None:
        pass
