"""Discounted sums of what is still to come."""

from __future__ import annotations

import numpy as np

from marlvec.connectors.connector import LearnerConnector
from marlvec.connectors.learner.bootstrap import ValueFunction, end_values
from marlvec.connectors.learner.columns import check_share, numbers, unknown_outcome
from marlvec.connectors.learner.fragments import Fragments
from marlvec.connectors.rows import Rows

__all__ = ["ReturnsToGo"]


class ReturnsToGo(LearnerConnector):
    """Adds ``returns_to_go`` (n,) float32, computed in float64: ``rewards[t] + gamma * returns_to_go[t + 1]``.

    Sums end with the fragment; in phantom rows they are 0. What a fragment leaves out, because it was cut or truncated,
    is left out of them unless ``bootstrap`` says otherwise: then the discounted value of the last ``next_obs`` is added
    where the last row is not terminated.

    Args:
        gamma: Discount per decision, from 0 to 1.
        bootstrap: False to add nothing. True to add the value found in the phantom row that `AddLastObs` put there, or
            in column ``next_values``. A value function, rows to their (n,) values, to ask it where neither has one.
            Where an agent was truncated without a final observation there is none: the return of that row is its own
            ``values``.

    Raises:
        ArgumentError: ``gamma`` is not from 0 to 1; or, when called, the value of a ``next_obs`` is needed and nothing
            gives it.
        ContractError: When called: a column is missing or no (n,) numbers, or the rows are out of order.
    """

    def __init__(self, gamma: float = 0.99, bootstrap: bool | ValueFunction = False) -> None:
        check_share("gamma", gamma)
        self.gamma = gamma
        self.bootstrap = bootstrap

    def __call__(self, rows: Rows) -> Rows:
        fragments = Fragments(rows)
        fragments.check_ends(rows)
        paid = numbers(rows, "rewards").copy()
        if self.bootstrap is not False:
            value_function = None if self.bootstrap is True else self.bootstrap
            paid[fragments.last_F] += self.gamma * end_values(rows, fragments, value_function)
            if (unknown := unknown_outcome(rows)).any():
                paid[unknown] = numbers(rows, "values")[unknown]
        return rows.replace(returns_to_go=fragments.scan(paid, self.gamma).astype(np.float32))
