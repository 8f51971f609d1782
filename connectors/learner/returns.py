"""`ReturnsToGo` and `NStep`: discounted returns to the fragment's end, and over n decisions."""

from __future__ import annotations

import numpy as np

from marlvec.connectors.connector import LearnerConnector
from marlvec.connectors.learner.advantages import ValueFunction, end_values, state_columns
from marlvec.connectors.learner.fragments import Fragments, check_share, column, flags, numbers, unknown_outcome
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError
from marlvec.trees import map_tree

__all__ = ["ReturnsToGo", "NStep"]


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
        totals = numbers(rows, "rewards").copy()
        if self.bootstrap is not False:
            value_function = None if self.bootstrap is True else self.bootstrap
            totals[fragments.last_F] += self.gamma * end_values(rows, fragments, value_function)
            if (unknown := unknown_outcome(rows)).any():
                totals[unknown] = numbers(rows, "values")[unknown]
        return rows.replace(returns_to_go=fragments.scan(totals, self.gamma).astype(np.float32))


class NStep(LearnerConnector):
    """Makes each row a transition over up to n decisions, and adds ``discounts`` (n,) float32.

    Row t sums up ``k`` rewards, n of them or as many as its fragment still has, and takes the outcome of the last::

        rewards[t]   = sum of gamma ** i * rewards[t + i] for i in 0 … k - 1
        next_*[t]    = next_*[t + k - 1]          (next_obs, next_state, next_env_t, next_obs_missing, …)
        state_out[t] = state_out[t + k - 1]       (and every x_out beside a column x_in)
        terminated, truncated likewise
        discounts[t] = gamma ** k, or 0 where the outcome is terminated

    so that ``rewards + discounts * V(next_obs, state_out)`` is the target for every row, those near a fragment's end
    included. All other columns stay those of the row's own decision (obs, state_in, actions, logp, t, env_t, …).
    Phantom rows keep what they have, with discount 0. So does a row in which an agent was truncated without a final
    observation (``next_obs_missing``): no other row reaches across it, and ``loss_mask`` (n,) bool is False there.

    Args:
        n: Most decisions in one row, at least 1.
        gamma: Discount per decision, from 0 to 1.

    Raises:
        ArgumentError: ``n`` is not a whole number above 0, or ``gamma`` not from 0 to 1.
        ContractError: When called: a column is missing or no (n,) numbers, or the rows are out of order.
    """

    def __init__(self, n: int, gamma: float = 0.99) -> None:
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ArgumentError(f"n must be a whole number of at least 1, got {n!r}")
        check_share("gamma", gamma)
        self.n = n
        self.gamma = gamma

    def __call__(self, rows: Rows) -> Rows:
        fragments = Fragments(rows)
        fragments.check_ends(rows)
        unknown = unknown_outcome(rows)
        left = fragments.left_n - ((fragments.left_n > 0) & unknown[fragments.last_F][fragments.fragment_n])
        real = (left >= 0) & ~unknown
        steps = np.minimum(left + 1, self.n)
        outcome = np.arange(len(rows)) + np.maximum(steps - 1, 0)
        single = numbers(rows, "rewards")
        rewards = single.copy()
        for i in range(1, int(steps.max(initial=0))):
            rewards[:-i] += np.where(steps[:-i] > i, self.gamma**i * single[i:], 0.0)
        changed = [*(name for name, _ in rows.items() if name.startswith("next_")), *state_columns(rows)]
        discounts = self.gamma**steps * (real & ~flags(rows, "terminated")[outcome])
        if unknown.any():
            mask = flags(rows, "loss_mask") if "loss_mask" in rows else np.ones(len(rows), np.bool_)
            rows = rows.replace(loss_mask=mask & ~unknown)
        return rows.replace(
            rewards=rewards,
            **{
                name: map_tree(lambda leaf: leaf[outcome], column(rows, name))
                for name in (*changed, "terminated", "truncated")
            },
            discounts=discounts.astype(np.float32),
        )
