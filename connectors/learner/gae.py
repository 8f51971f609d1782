"""Advantages."""

from __future__ import annotations

import numpy as np

from marlvec.connectors.connector import LearnerConnector
from marlvec.connectors.learner.bootstrap import ValueFunction, next_values
from marlvec.connectors.learner.columns import check_share, numbers, unknown_outcome
from marlvec.connectors.learner.fragments import Fragments
from marlvec.connectors.rows import Rows

__all__ = ["GeneralAdvantageEstimation"]


class GeneralAdvantageEstimation(LearnerConnector):
    """Adds ``advantages`` and ``value_targets``, (n,) float32, computed in float64.

    Generalized advantage estimation (Schulman et al. 2016, equation 16) inside each fragment::

        delta[t]        = rewards[t] + gamma * V[t + 1] - V[t]
        advantages[t]   = delta[t] + gamma * gae_lambda * advantages[t + 1]
        value_targets   = advantages + V

    ``V`` is the column ``values``, and ``V[t + 1]`` that of the next row. After a fragment's last row it is 0 where
    that row is terminated. Where it is truncated, or the batch ended in the middle of the episode, it is the value of
    its ``next_obs``: from the phantom row that `AddLastObs` put there, else from column ``next_values``, else from the
    value function, which is called once for all fragments together. In phantom rows both columns are 0.

    Where an agent was truncated and the env gave no final observation (``next_obs_missing``), there is nothing to take
    that value from, and none is made up: that row has advantage 0 and its own ``V`` as target, so that it teaches
    nothing, and the rows before it end with its ``V``.

    Args:
        gamma: Discount per decision, from 0 to 1.
        gae_lambda: Between one-step (0) and whole-fragment (1) advantages.
        value_function: Rows to their (n,) values. It gets the last rows with ``obs`` = ``next_obs`` and, where there is
            a ``state_out``, ``state_in`` = ``state_out``.

    Raises:
        ArgumentError: ``gamma`` or ``gae_lambda`` is not from 0 to 1; or, when called, the value of a ``next_obs`` is
            needed and nothing gives it.
        ContractError: When called: a column is missing or no (n,) numbers, or the rows are out of order.
    """

    def __init__(
        self, gamma: float = 0.99, gae_lambda: float = 0.95, value_function: ValueFunction | None = None
    ) -> None:
        check_share("gamma", gamma)
        check_share("gae_lambda", gae_lambda)
        self.gamma = gamma
        self.gae_lambda = gae_lambda
        self.value_function = value_function

    def __call__(self, rows: Rows) -> Rows:
        fragments = Fragments(rows)
        fragments.check_ends(rows)
        values = numbers(rows, "values")
        after = next_values(rows, fragments, self.value_function)
        deltas = numbers(rows, "rewards") + self.gamma * after - values
        deltas[unknown_outcome(rows)] = 0.0
        advantages = fragments.scan(deltas, self.gamma * self.gae_lambda)
        targets = np.where(fragments.left_n >= 0, advantages + values, 0.0)
        return rows.replace(advantages=advantages.astype(np.float32), value_targets=targets.astype(np.float32))
