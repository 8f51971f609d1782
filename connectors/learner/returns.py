"""Returns, advantages and value targets: bootstrapped values, generalised advantage estimation, V-trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.connectors.connector import LearnerConnector
from marlvec.connectors.learner.fragments import Floats, Fragments, column, flags, numbers, unknown_outcome
from marlvec.connectors.parameters import PositiveInt, UnitFloat
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, ContractError
from marlvec.trees import map_tree, to_array

__all__ = [
    "ValueFunction",
    "end_values",
    "following",
    "next_values",
    "state_columns",
    "GeneralAdvantageEstimation",
    "VTrace",
    "ReturnsToGo",
    "NStep",
]

ValueFunction = Callable[[Rows], Any]
"""Rows in, (n,) values of them out; an array or a tensor."""


def state_columns(rows: Rows) -> dict[str, str]:
    """Return the columns of recurrent states after a decision, each with the column of the state before it.

    ``state_out`` belongs to ``state_in``, and any other ``x_out`` to the ``x_in`` that the rows have.
    """
    pairs = {name: f"{name.removesuffix('_out')}_in" for name, _ in rows.items() if name.endswith("_out")}
    return {after: before for after, before in pairs.items() if before in rows or after == "state_out"}


def following(rows: Rows, at: NDArray[np.int64]) -> Rows:
    """Return the moments after the rows ``at``, (k,), as rows.

    Columns with a ``next_…`` column take its values: ``obs`` is ``next_obs``, ``state`` is ``next_state``; also masks
    and columns of agent connectors. ``state_in`` is ``state_out`` (see `state_columns`), and ``t`` increases by 1.
    """
    before = rows.take(at)
    names = [name for name, _ in rows.items() if f"next_{name}" in rows]
    after = {name: before[f"next_{name}"] for name in names}
    after |= {state_in: before[state_out] for state_out, state_in in state_columns(rows).items()}
    if "t" in rows:
        after["t"] = before["t"] + 1
    return before.replace(**after)


def end_values(rows: Rows, fragments: Fragments, value_function: ValueFunction | None) -> Floats:
    """Return the value of the moment after each fragment, (F,): 0 if it is terminated or the value is unknown.

    Else ``values`` of its phantom row, else ``next_values`` of its last row, else from the value function, called once
    for all fragments that need it. NaN in these columns means "unknown".
    """
    last = fragments.last_F
    wanted = ~(flags(rows, "terminated") | unknown_outcome(rows))[last]
    values = np.zeros(len(fragments))
    for found in _columns(rows, fragments):
        use = wanted & ~np.isnan(found)
        values[use] = found[use]
        wanted &= ~use
    if wanted.any():
        values[wanted] = _ask(value_function, rows, last[wanted])
    return values


def _columns(rows: Rows, fragments: Fragments) -> list[Floats]:
    """Return (F,) end values from the rows' columns, the first known one of each; NaN if none is known."""
    found = []
    if "phantom" in rows and "values" in rows:
        end = fragments.stop_F - 1
        found.append(np.where(end > fragments.last_F, numbers(rows, "values")[end], np.nan))
    if "next_values" in rows:
        found.append(numbers(rows, "next_values")[fragments.last_F])
    return found


def _ask(value_function: ValueFunction | None, rows: Rows, at: NDArray[np.int64]) -> Floats:
    if value_function is None:
        raise ArgumentError(
            f"{len(at)} fragments end in rows that are not terminated, so the value of their next_obs is needed: give "
            f"value_function=, or a column 'next_values', or put AddLastObs and a connector that computes 'values' "
            f"before this one"
        )
    after = following(rows, at)
    if "state" in rows and "next_state" not in rows:
        after = after.drop("state")  # without next_state, the column would be of the moment before
    values = to_array(value_function(after))
    if values.shape != (len(at),) or values.dtype.kind not in "fiub":
        raise ContractError(
            f"expected the value function to give one number for each of {len(at)} rows, shape ({len(at)},), "
            f"got {values.dtype} of shape {values.shape}"
        )
    return values.astype(np.float64)


def next_values(rows: Rows, fragments: Fragments, value_function: ValueFunction | None) -> Floats:
    """Return the value after each row: ``values`` of its fragment's next row, or `end_values`; 0 in phantom rows."""
    values, after = numbers(rows, "values"), np.zeros(len(rows))
    after[:-1] = values[1:]
    after[fragments.left_n <= 0] = 0.0
    after[fragments.last_F] = end_values(rows, fragments, value_function)
    return after


@dataclass(eq=False, repr=False)
class GeneralAdvantageEstimation(LearnerConnector):
    """Adds ``advantages`` and ``value_targets``, (n,) float32, computed in float64.

    Generalized advantage estimation (Schulman et al. 2016, equation 16) inside each fragment::

        delta[t]        = rewards[t] + gamma * V[t + 1] - V[t]
        advantages[t]   = delta[t] + gamma * gae_lambda * advantages[t + 1]
        value_targets   = advantages + V

    ``V`` is the column ``values``. After a fragment's last row, ``V[t + 1]`` is 0 if that row is terminated. If it is
    truncated, or the batch ended in the middle of the episode, it is the value of ``next_obs``: from the phantom row of
    `AddLastObs`, else from column ``next_values``, else from the value function, called once for all fragments. In
    phantom rows both columns are 0.

    If an agent was truncated and the env gave no final observation (``next_obs_missing``), the value is unknown: that
    row has advantage 0 and its own ``V`` as target, so that it teaches nothing, and the rows before it bootstrap from
    its ``V``.

    Args:
        gamma: Discount per decision, from 0 to 1.
        gae_lambda: Between one-step (0) and whole-fragment (1) advantages.
        value_function: Rows to their (n,) values. It gets the last rows with ``obs`` = ``next_obs`` and, for recurrent
            policies, ``state_in`` = ``state_out``.

    Raises:
        ArgumentError: ``gamma`` or ``gae_lambda`` is not from 0 to 1; or, when called, the value of a ``next_obs`` is
            needed and nothing gives it.
        ContractError: When called: a column is missing or no (n,) numbers, or the rows are out of order.
    """

    gamma: UnitFloat = 0.99
    gae_lambda: UnitFloat = 0.95
    value_function: ValueFunction | None = None

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


@dataclass(eq=False, repr=False)
class VTrace(LearnerConnector):
    """Adds ``vs`` and ``pg_advantages``, (n,) float32, computed in float64.

    V-trace (Espeholt et al. 2018, "IMPALA", section 4.1, in the recursive form of its remark 1) inside each fragment::

        ratio = exp(target_logp - logp);  rho = min(rho_bar, ratio);  c = min(c_bar, ratio)
        delta[t]         = rho[t] * (rewards[t] + gamma * V[t + 1] - V[t])
        vs[t]            = V[t] + delta[t] + gamma * c[t] * (vs[t + 1] - V[t + 1])
        pg_advantages[t] = rho[t] * (rewards[t] + gamma * vs[t + 1] - V[t])

    ``V`` is the column ``values``; it and ``target_logp`` are of the policy that learns. After a fragment's last row,
    V and vs are the value that `GeneralAdvantageEstimation` uses. In phantom rows both columns are 0. If an agent was
    truncated without a final observation, ``vs`` is the row's own V, and ``pg_advantages`` is 0.

    Args:
        gamma: Discount per decision, from 0 to 1.
        rho_bar: Limit of the weights of the deltas; ``math.inf`` for none.
        c_bar: Limit of the weights of the trace; not above ``rho_bar``.
        value_function: Rows to their (n,) values; see `GeneralAdvantageEstimation`.
        logp: Column of log-probabilities of the actions under the policy that chose them, (n,).
        target_logp: Column of log-probabilities of the actions under the policy that learns, (n,).

    Raises:
        ArgumentError: ``gamma`` is not from 0 to 1, or the limits are not ``0 < c_bar <= rho_bar``; or, when called,
            the value of a ``next_obs`` is needed and nothing gives it.
        ContractError: When called: a column is missing or no (n,) numbers, or the rows are out of order.
    """

    gamma: UnitFloat = 0.99
    rho_bar: float = 1.0
    c_bar: float = 1.0
    value_function: ValueFunction | None = None
    _: KW_ONLY
    logp: str = "logp"
    target_logp: str = "target_logp"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.c_bar <= self.rho_bar:
            raise ArgumentError(
                f"VTrace(): expected 0 < c_bar <= rho_bar, got c_bar={self.c_bar}, rho_bar={self.rho_bar}"
            )

    def __call__(self, rows: Rows) -> Rows:
        fragments = Fragments(rows)
        fragments.check_ends(rows)
        real, unknown = fragments.left_n >= 0, unknown_outcome(rows)
        values, rewards = numbers(rows, "values"), numbers(rows, "rewards")
        after = next_values(rows, fragments, self.value_function)
        with np.errstate(over="ignore"):  # an infinite ratio is clipped, too
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


@dataclass(eq=False, repr=False)
class ReturnsToGo(LearnerConnector):
    """Adds ``returns_to_go`` (n,) float32, computed in float64: ``rewards[t] + gamma * returns_to_go[t + 1]``.

    Sums end with the fragment; in phantom rows they are 0. With ``bootstrap``, the discounted value of the last
    ``next_obs`` is added if the fragment's last row is not terminated.

    Args:
        gamma: Discount per decision, from 0 to 1.
        bootstrap: False: add nothing. True: add the value from the phantom row of `AddLastObs`, or from column
            ``next_values``. A value function, rows to their (n,) values: call it for rows that have neither. If an
            agent was truncated without a final observation, the return of that row is its own ``values``.

    Raises:
        ArgumentError: ``gamma`` is not from 0 to 1; or, when called, the value of a ``next_obs`` is needed and nothing
            gives it.
        ContractError: When called: a column is missing or no (n,) numbers, or the rows are out of order.
    """

    gamma: UnitFloat = 0.99
    bootstrap: bool | ValueFunction = False

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


@dataclass(eq=False, repr=False)
class NStep(LearnerConnector):
    """Makes each row a transition over up to n decisions, and adds ``discounts`` (n,) float32.

    Row t sums ``k`` rewards (n, or as many as its fragment still has), and takes the outcome of the last of them::

        rewards[t]   = sum of gamma ** i * rewards[t + i] for i in 0 … k - 1
        next_*[t]    = next_*[t + k - 1]          (next_obs, next_state, next_env_t, next_obs_missing, …)
        state_out[t] = state_out[t + k - 1]       (and every x_out beside a column x_in)
        terminated[t] = terminated[t + k - 1];  truncated[t] = truncated[t + k - 1]
        discounts[t] = gamma ** k, or 0 where the outcome is terminated

    so that ``rewards + discounts * V(next_obs, state_out)`` is the target for every row, also near a fragment's end.
    Other columns (obs, state_in, actions, logp, t, env_t, …) are unchanged. Phantom rows, and rows in which an agent
    was truncated without a final observation (``next_obs_missing``), are unchanged and have discount 0; no other row
    reaches across such a row, and ``loss_mask`` (n,) bool is False there.

    Args:
        n: Most decisions in one row, at least 1.
        gamma: Discount per decision, from 0 to 1.

    Raises:
        ArgumentError: ``n`` is not a whole number above 0, or ``gamma`` not from 0 to 1.
        ContractError: When called: a column is missing or no (n,) numbers, or the rows are out of order.
    """

    n: PositiveInt
    gamma: UnitFloat = 0.99

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
