"""`View`: earlier values of any column as a column of their own."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import numpy as np
from gymnasium.spaces import Space
from numpy.typing import NDArray

from marlvec.connectors._support.agent_table import AgentTable
from marlvec.connectors._support.shifts import Shift, parse_shifts
from marlvec.connectors.agent._support.history import (
    History,
    TreeForm,
    action_tree,
    blank_action,
    blank_obs,
    cast_row_leaf,
    check_column_is_new,
    fixed_size_tree,
)
from marlvec.connectors.connector import AgentConnector, EnvIds, State
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, ContractError
from marlvec.spaces import SpaceTree
from marlvec.trees import Tree, map_tree, to_array

__all__ = ["View"]

AnyArray = NDArray[Any]

_KEPT = (
    *("env_id", "agent_index", "eps_id", "t", "obs", "rewards"),
    *("terminated", "truncated", "first", "last", "actions"),
)


class View(AgentConnector):
    """Adds a column with the values that another one had in the agent's earlier rows: RLlib's view requirement.

    For one shift it is ``(n, …)``, for a list or range of k shifts ``(n, k, …)``, oldest first; tree for tree.

    A column of the rows (``obs``, ``rewards``, ``t``, ``action_mask``, one that a connector before this one added) is
    seen at shift 0 and before. Of the policy's answer (``actions`` and the columns it returned) the last one that is
    known when a row comes is that to the row before, at shift -1. ``rewards`` at shift 0 is the reward for the action
    at shift -1.

    Args:
        column: Name of the column to add.
        source: Name of the column to look at.
        shift: ``0``, ``-1``, ``[-4, -2]``, ``"-3:-1"``, ``"-6:0:2"``; see `parse_shifts`. To look ahead, use `AddView`
            on the learner side.
        fill: What stands for rows before the episode. None for zeros, or a valid action that stands for none;
            ``"repeat"`` for the episode's first value, of columns of the rows; or one row's value, a number standing
            for an array full of it. Of a policy's column other than ``actions`` it must be given, with its shapes and
            dtypes.

    Raises:
        ArgumentError: ``shift`` is no such thing or looks ahead, ``column`` is taken, or ``fill`` does not fit; or,
            where a space is first seen, actions are asked for and their space is not known.
        UnsupportedSpaceError: Where a space is first seen: part of an observation asked for has no fixed size.
    """

    def __init__(self, column: str, source: str, shift: Shift, fill: Tree = None) -> None:
        shifts = parse_shifts(shift)
        if shifts[-1] > 0:
            raise ArgumentError(
                f"shift {shift!r} looks ahead, to rows that are still to come; use AddView on the learner side"
            )
        if column in _KEPT:
            raise ArgumentError(f"column {column!r} belongs to the row itself; choose another name")
        if source == "actions" and shifts[-1] == 0:
            raise ArgumentError(f"shift {shift!r} asks for the action that is still to be chosen; the last is at -1")
        if isinstance(fill, str) and (fill != "repeat" or source == "actions"):
            raise ArgumentError(
                f'fill must be None, one row\'s value, or "repeat" for columns of the rows; got {fill!r}'
            )
        self.column = column
        self.source = source
        self.shift = shift
        self.fill = fill
        self._single = not isinstance(shift, str) and np.ndim(shift) == 0
        self._shifts = np.array(shifts, np.int64)
        # Whether the source is a column of the policy's answer; None until rows come that have it, or do not.
        self._from_policy: bool | None = {"actions": True, "obs": False, "rewards": False}.get(source)
        self._form: SpaceTree | TreeForm | None = None
        self._history: History | None = None
        self._loaded: State = {}  # a state that waits until its column's form is known
        if source == "rewards":
            self._learn(TreeForm(np.zeros(())), [np.zeros(())])

    def __call__(self, rows: Rows) -> Rows:
        check_column_is_new(rows, self.column, self.name)
        form, history = self._known(rows)
        history.begin(rows)
        shifts = self._shifts
        if self._from_policy:
            shifts = shifts + 1  # the last answer there is, is that to the row before
        else:
            history.push(rows, form.flatten(rows[self.source]), repr(self.source))
        leaves = history.look(rows, shifts)
        return rows.replace(
            **{self.column: form.unflatten([leaf[:, 0] for leaf in leaves] if self._single else leaves)}
        )

    @property
    def policy_columns(self) -> tuple[str, ...]:
        return (self.source,) if self._from_policy and self.source != "actions" else ()

    def on_policy_output(self, rows: Rows) -> None:
        if not self._from_policy or self._history is None or self._form is None:
            return
        if self.source not in rows:
            raise ContractError(
                f"{self.name} needs the column {self.source!r}, which neither the rows have nor the policy's output, "
                f"{list(rows.keys())}"
            )
        self._history.push(rows, self._form.flatten(rows[self.source]), repr(self.source))

    def reset(self, env_ids: EnvIds | None = None) -> None:
        if self._loaded:
            waiting = AgentTable((), np.int64)
            waiting.load_state_dict(self._loaded["history"]["count"])
            waiting.reset(env_ids)
            self._loaded["history"]["count"] = waiting.state_dict()
        if self._history is not None:
            self._history.reset(env_ids)

    def setup(self, space: Space[Any]) -> None:
        if self.source == "obs":
            tree = fixed_size_tree(space, self.name)
            self._learn(tree, [blank_obs(leaf) for leaf in tree.leaves])
        elif self.source == "actions":
            tree = action_tree(self.action_space, self.name)
            self._learn(tree, [blank_action(leaf) for leaf in tree.leaves])

    def output_space(self, space: Space[Any]) -> Space[Any]:
        if self.source == "obs":
            fixed_size_tree(space, self.name)
        elif self.source == "actions":
            action_tree(self.action_space, self.name)
        return space

    def state_dict(self) -> State:
        if self._loaded:
            return deepcopy(self._loaded)
        if self._history is None:
            return {}
        return {"from_policy": bool(self._from_policy), "history": self._history.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not state and self.source not in ("obs", "actions", "rewards"):  # of one that has seen no row
            self._from_policy, self._form, self._history, self._loaded = None, None, None, {}
            return
        if state.keys() != {"from_policy", "history"} or self._from_policy not in (None, bool(state["from_policy"])):
            raise ArgumentError(f"expected the history of column {self.source!r}, got {list(state)}")
        if self._history is not None:
            self._history.load_state_dict(state["history"])
        elif self.source in ("obs", "actions"):
            raise self._not_set_up()
        else:
            self._loaded = deepcopy(dict(state))
            if state["from_policy"] and self.fill is not None and not isinstance(self.fill, str):
                self._from_policy = True
                self._learn(form := TreeForm(self.fill), form.blanks)

    def _known(self, rows: Rows) -> tuple[SpaceTree | TreeForm, History]:
        """The column's form and history; learnt here, if neither a space nor rows have set them yet."""
        if self._form is None or self._history is None:
            if self.source in ("obs", "actions"):
                raise self._not_set_up()
            self._from_policy = self.source not in rows
            if self._from_policy:
                self._check_policy_column(rows)
                form = TreeForm(self.fill)
            else:
                form = TreeForm(map_tree(_blank_of, rows[self.source]))
            self._learn(form, form.blanks)
            assert self._form is not None
            assert self._history is not None
        return self._form, self._history

    def _learn(self, form: SpaceTree | TreeForm, blanks: list[AnyArray]) -> None:
        repeat = isinstance(self.fill, str)
        if not repeat and self.fill is not None:
            blanks = self._filled(form, blanks)
        oldest = int(-self._shifts[0])
        history = History(oldest if self._from_policy else oldest + 1, blanks, repeat=repeat)
        if self._loaded:
            history.load_state_dict(self._loaded["history"])
            self._loaded = {}
        before = self._form.space if isinstance(self._form, SpaceTree) else None
        other = isinstance(form, SpaceTree) and before is not None and form.space != before
        if self._history is None or other or not history.same_form(self._history):
            self._history = history
        else:
            self._history.blanks = history.blanks
        self._form = form

    def _filled(self, form: SpaceTree | TreeForm, blanks: list[AnyArray]) -> list[AnyArray]:
        """One row's value made of ``fill``, per leaf."""
        if not isinstance(self.fill, (dict, tuple)) and np.ndim(self.fill) == 0:
            values = [self.fill] * len(blanks)
        else:
            try:
                values = form.flatten(self.fill)
            except ContractError as error:
                raise ArgumentError(f"fill is not one row's {self.source!r}: {error}") from None
        return [cast_row_leaf(value, blank, "fill") for value, blank in zip(values, blanks, strict=True)]

    def _check_policy_column(self, rows: Rows) -> None:
        if self._shifts[-1] == 0:
            raise ContractError(
                f"{self.name} looks at column {self.source!r} at shift 0, but the rows have only {list(rows.keys())}; "
                f"of a column of the policy's the last that is known is at shift -1"
            )
        if self.fill is None or isinstance(self.fill, str):
            raise ContractError(
                f"{self.name} looks at column {self.source!r}, but the rows have only {list(rows.keys())}; if it is "
                f"one of the policy's, give fill: what stands for one row of it before the policy has answered"
            )


def _blank_of(column: Any) -> AnyArray:
    array = to_array(column)
    return np.zeros(array.shape[1:], array.dtype)
