"""`Moment` and `Answers`: what a log is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.columns.forms import Leaves
from marlvec.collect.storage.block import Block
from marlvec.collect.storage.policy_rows import PolicyRows, copied_rows, part_of
from marlvec.connectors import Rows
from marlvec.env_ids import Where
from marlvec.trees import Tree

__all__ = ["Answers", "Moment"]

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


@dataclass(slots=True)
class Moment:
    """A policy's rows that came together; or the remains of older moments, in which a lane may have several."""

    lanes: IntArray  # (n,) env * A + agent; ascending where they came together
    ticks: IntArray | int  # the round they came in, or (n,)
    env_t: IntArray  # (n,) env steps that their episodes had made by then
    final: BoolArray | bool  # whether they are last rows, or (n,)
    missing: BoolArray | None  # (n,) which last rows have no observation; None where there are no last rows
    columns: Mapping[str, Tree]  # last rows may lack some that connectors add; empty where they are in a block
    part: slice | None = None  # which rows of the columns these are; None: all
    block: Block | None = None  # where the columns are, at step t
    t: int = 0
    places: Where | None = None  # the lanes as a faster index
    spare: Rows | None = None  # the same rows in arrays that no other code has, which the policy is given once

    @classmethod
    def none(cls) -> Moment:
        """No rows."""
        nothing = np.zeros(0, np.int64)
        return cls(nothing, 0, nothing, False, None, {})

    @property
    def where(self) -> Where:
        """The lanes as an index."""
        return self.lanes if self.places is None else self.places

    @property
    def rows(self) -> Rows:
        """The rows; nothing may write into their arrays."""
        if self.block is not None:
            return self.block.read_rows(self.t)
        return Rows.of_length({name: part_of(self.columns[name], self.part) for name in self.columns}, len(self.lanes))

    def given(self) -> Rows:
        """The rows for a policy, which may write into their arrays; each call gives others."""
        rows, self.spare = self.spare, None
        if rows is not None:
            return rows
        if self.block is not None:  # whose arrays are those of a batch later
            return copied_rows(self.block.read_rows(self.t))
        return PolicyRows(self.columns, self.part, len(self.lanes))

    def column(self, name: str) -> Tree | None:
        """Return one column; None if these rows do not have it."""
        block = self.block
        if block is None:
            return part_of(self.columns[name], self.part) if name in self.columns else None
        if name in block.fixed:
            return block.fixed[name]
        tables = block.rows.get(name)
        return None if tables is None else block.forms.rows[name].tree([table[:, self.t] for table in tables])

    def take(self, mask: BoolArray) -> Moment:
        """Some of the rows, which came together."""
        lanes = self.lanes[mask]
        if not len(lanes):
            return Moment.none()
        missing = None if self.missing is None else self.missing[mask]
        columns = dict(self.rows.take(mask).items())
        ticks = self.ticks if isinstance(self.ticks, int) else self.ticks[mask]
        return Moment(lanes, ticks, self.env_t[mask], self.final, missing, columns)

    def join(self, other: Moment) -> Moment:
        """These rows, which wait for their policy, and others that do; in no round, as they came in several."""
        if not len(self.lanes):
            return other
        lanes, env_t = (np.concatenate([getattr(one, name) for one in (self, other)]) for name in ("lanes", "env_t"))
        order = np.argsort(lanes, kind="stable")
        rows = Rows.concat(_with_masks([self.rows, other.rows])).take(order)
        return Moment(lanes[order], 0, env_t[order], False, None, dict(rows.items()))


def _with_masks(parts: list[Rows]) -> list[Rows]:
    """Rows of which some came before an env gave its first mask: until then all was allowed."""
    if ("action_mask" in parts[0]) == ("action_mask" in parts[1]):
        return parts
    shape = next(part["action_mask"].shape[1:] for part in parts if "action_mask" in part)
    return [
        part if "action_mask" in part else part.replace(action_mask=np.ones((len(part), *shape), np.bool_))
        for part in parts
    ]


@dataclass(slots=True)
class Answers:
    """A policy's answers to rows of ``lanes`` (n,); in order of time where a lane has several."""

    lanes: IntArray
    columns: dict[str, Leaves]  # leaves (n, …); of those that are in a block, the version alone
    block: Block | None = None  # where the others are, at step t
    t: int = 0

    def leaves(self, name: str) -> Leaves | None:
        """Leaves of one column; None where these answers do not have it."""
        block = self.block
        if block is None or name in self.columns:
            return self.columns.get(name)
        tables = block.answers.get(name)
        return None if tables is None else [table[:, self.t] for table in tables]
