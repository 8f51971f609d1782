"""Advantages of actions that an older policy chose."""

from __future__ import annotations

import numpy as np

from marlvec.connectors.connector import LearnerConnector
from marlvec.connectors.learner.bootstrap import ValueFunction, next_values
from marlvec.connectors.learner.columns import check_share, numbers, unknown_outcome
from marlvec.connectors.learner.fragments import Fragments
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError

__all__ = ["VTrace"]


class VTrace(LearnerConnector):
    """Adds ``vs`` and ``pg_advantages``, (n,) float32, computed in float64.

    V-trace (Espeholt et al. 2018, "IMPALA", section 4.1, in the recursive form of its remark 1) inside each fragment::

        ratio = exp(target_logp - logp);  rho = min(rho_bar, ratio);  c = min(c_bar, ratio)
        delta[t]         = rho[t] * (rewards[t] + gamma * V[t + 1] - V[t])
        vs[t]            = V[t] + delta[t] + gamma * c[t] * (vs[t + 1] - V[t + 1])
        pg_advantages[t] = rho[t] * (rewards[t] + gamma * vs[t + 1] - V[t])

    ``V`` is the column ``values``: of the policy that learns, as is ``target_logp``. After a fragment's last row both
    V and vs are the value that `GeneralAdvantageEstimation` would take there. In phantom rows both columns are 0. Where
    an agent was truncated without a final observation, ``vs`` is the row's own V, and ``pg_advantages`` 0.

    Args:
        gamma: Discount per decision, from 0 to 1.
        rho_bar: Limit of the weights of the deltas; ``math.inf`` for none.
        c_bar: Limit of the weights of the trace; not above ``rho_bar``.
        value_function: As for `GeneralAdvantageEstimation`.
        logp: Column of log-probabilities of the actions under the policy that chose them, (n,).
        target_logp: Column of those under the policy that learns, (n,).

    Raises:
        ArgumentError: ``gamma`` is not from 0 to 1, or the limits are not ``0 < c_bar <= rho_bar``; or, when called,
            the value of a ``next_obs`` is needed and nothing gives it.
        ContractError: When called: a column is missing or no (n,) numbers, or the rows are out of order.
    """

    def __init__(
        self,
        gamma: float = 0.99,
        rho_bar: float = 1.0,
        c_bar: float = 1.0,
        value_function: ValueFunction | None = None,
        *,
        logp: str = "logp",
        target_logp: str = "target_logp",
    ) -> None:
        check_share("gamma", gamma)
        if not 0 < c_bar <= rho_bar:
            raise ArgumentError(f"the limits must be 0 < c_bar <= rho_bar, got c_bar={c_bar}, rho_bar={rho_bar}")
        self.gamma = gamma
        self.rho_bar = rho_bar
        self.c_bar = c_bar
        self.value_function = value_function
        self.logp = logp
        self.target_logp = target_logp

    def __call__(self, rows: Rows) -> Rows:
        fragments = Fragments(rows)
        fragments.check_ends(rows)
        real, unknown = fragments.left_n >= 0, unknown_outcome(rows)
        values, rewards = numbers(rows, "values"), numbers(rows, "rewards")
        after = next_values(rows, fragments, self.value_function)
        with np.errstate(over="ignore"):  # a ratio beyond all numbers is clipped like any other
            ratio = np.exp(numbers(rows, self.target_logp) - numbers(rows, self.logp))
        rho, c = np.minimum(ratio, self.rho_bar), np.minimum(ratio, self.c_bar)
        deltas = rho * (rewards + self.gamma * after - values)
        deltas[unknown] = 0.0
        gain = fragments.scan(deltas, self.gamma * c)  # vs - V
        vs_after = after.copy()
        inner = np.flatnonzero(fragments.left_n > 0)
        vs_after[inner] += gain[inner + 1]
        advantages = rho * (rewards + self.gamma * vs_after - values)
        return rows.replace(
            vs=np.where(real, gain + values, 0.0).astype(np.float32),
            pg_advantages=np.where(real & ~unknown, advantages, 0.0).astype(np.float32),
        )
