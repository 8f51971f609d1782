"""`RnnState`: carries a recurrent policy's state from one row of an agent to its next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from marlvec.connectors.agent._support.history import History, TreeForm, check_column_is_new
from marlvec.connectors.connector import AgentConnector, EnvIds, State
from marlvec.connectors.rows import Rows
from marlvec.errors import ContractError
from marlvec.trees import Tree, map_tree

__all__ = ["RnnState"]

_LAST = np.zeros(1, np.int64)


class RnnState(AgentConnector):
    """Gives the policy back the state that it returned for the agent's row before; per (env, agent).

    A column ``state_in``: a tree of ``(n, …)`` arrays. At an episode's start it is ``initial``, then what the policy
    returned as its column ``state_out`` for that agent's last row. In rows whose action is given (``random_steps``,
    logged actions) the policy is asked for its state, and the given action replaces its action.

    Args:
        initial: State of one row, without a row axis: an array, or a dict or tuple of those. It gives the shapes and
            dtypes, too.
        column: Name of the column it adds.
        source: Name of the policy's column.

    Raises:
        ContractError: ``initial`` is not made of numbers; or, where the policy answers, its column is missing, or of
            another structure or shape than ``initial``.
    """

    def __init__(self, initial: Tree, column: str = "state_in", source: str = "state_out") -> None:
        self.initial = initial
        self.column = column
        self.source = source
        self._form = TreeForm(initial)
        self._history = History(1, self._form.blanks)

    def __call__(self, rows: Rows) -> Rows:
        check_column_is_new(rows, self.column, self.name)
        self._history.begin(rows)
        state = self._form.unflatten(self._history.look(rows, _LAST))
        return rows.replace(**{self.column: map_tree(lambda leaf: leaf[:, 0], state)})

    @property
    def policy_columns(self) -> tuple[str, ...]:
        return (self.source,)

    def on_policy_output(self, rows: Rows) -> None:
        if self.source not in rows:
            raise ContractError(
                f"{self.name} needs the column {self.source!r} of the policy's output, which has only "
                f"{list(rows.keys())}; the policy returns it as (actions, {{{self.source!r}: state}})"
            )
        self._history.push(rows, self._form.flatten(rows[self.source]), repr(self.source))

    def reset(self, env_ids: EnvIds | None = None) -> None:
        self._history.reset(env_ids)

    def state_dict(self) -> State:
        return self._history.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._history.load_state_dict(state)
