"""Returns, advantages and value targets: bootstrapped values, generalised advantage estimation, V-trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.connectors.connector import LearnerConnector, PositiveInt, UnitFloat
from marlvec.connectors.learner.fragments import (
    Floats,
    Fragments,
    column,
    flags,
    given_actions,
    mask_out,
    numbers,
    one_array,
    unknown_outcome,
)
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, ContractError
from marlvec.trees import map_tree, to_array

Bools = NDArray[np.bool_]
ValueFunction = Callable[[Rows], Any]
"""Rows in, (n,) values of them out; an array or a tensor."""


def state_columns(rows: Rows) -> dict[str, str]:
    """Return the columns of recurrent states after a decision, each with the column of the state before it.

    ``state_out`` belongs to ``state_in``, and any other ``x_out`` to the ``x_in`` that the rows have.
    """
    pairs = {name: f"{name.removesuffix('_out')}_in" for name in tuple(rows.keys()) if name.endswith("_out")}
    return {after: before for after, before in pairs.items() if before in rows or after == "state_out"}


def following(rows: Rows, at: NDArray[np.int64]) -> Rows:
    """Return the moments after the rows ``at``, (k,), as rows.

    Columns with a ``next_…`` column take its values: ``obs`` is ``next_obs``, ``state`` is ``next_state``; also masks
    and columns of agent connectors. ``state_in`` is ``state_out`` (see `state_columns`), and ``t`` increases by 1.
    """
    before = rows.take(at)
    names = [name for name in tuple(rows.keys()) if f"next_{name}" in rows]
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
    return _call(value_function, after)


def _call(value_function: ValueFunction, rows: Rows) -> Floats:
    values = to_array(value_function(rows))
    if values.shape != (len(rows),) or values.dtype.kind not in "fiub":
        raise ContractError(
            f"expected the value function to give one number for each of {len(rows)} rows, shape ({len(rows)},), "
            f"got {values.dtype} of shape {values.shape}"
        )
    return values.astype(np.float64)


def own_values(rows: Rows, fragments: Fragments, value_function: ValueFunction | None) -> tuple[Floats, Bools]:
    """Return the value of each row, and where it is unknown: NaN there, both (n,).

    The policy was not asked about a row whose action was given (``off_policy``): its ``values`` is NaN, or, in a column
    of ints, means nothing. The value function is called once for all these rows; without one they stay unknown. Without
    a column ``off_policy`` each NaN counts as unknown; with it, a NaN of the policy's own is a value like others.
    """
    values = numbers(rows, "values").copy()
    given = given_actions(rows)
    if one_array(rows, "values").dtype.kind != "f":
        values[given] = np.nan
    unknown = np.isnan(values) & (fragments.left_n >= 0) & (given | ("off_policy" not in rows))
    if value_function is not None and unknown.any():
        values[unknown] = _call(value_function, rows.take(unknown))
        unknown[:] = False
    return values, unknown


def next_values(rows: Rows, fragments: Fragments, values: Floats, value_function: ValueFunction | None) -> Floats:
    """Return the value after each row: of its fragment's next row, or `end_values`; 0 in phantom rows."""
    after = _next(values, fragments, 0.0)
    after[fragments.last_F] = end_values(rows, fragments, value_function)
    return after


def _next(x_n: NDArray[Any], fragments: Fragments, end: Any) -> NDArray[Any]:
    """Return each row's entry of its fragment's next transition, ``end`` after the last one."""
    after = np.full_like(x_n, end)
    inner = np.flatnonzero(fragments.left_n > 0)
    after[inner] = x_n[inner + 1]
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

    A row whose action was given (``off_policy``: ``random_steps``, logged actions) has no ``V`` of the policy: NaN. The
    value function is called once more, for all such rows. Without one, both columns are NaN in these rows and
    ``loss_mask`` is False; the row before uses the row's return, as with ``gae_lambda=1``, in place of its ``V``. If
    the return is unknown, too, as its agent was truncated without a final observation, the row before teaches nothing,
    and its ``loss_mask`` is False. Rows with a column ``off_policy`` always get ``loss_mask``.

    Args:
        gamma: Discount per decision, from 0 to 1.
        gae_lambda: Between one-step (0) and whole-fragment (1) advantages.
        value_function: Rows to their (n,) values. It gets the last rows with ``obs`` = ``next_obs`` and, for recurrent
            policies, ``state_in`` = ``state_out``; and rows of given actions as they are.

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
        values, lacking = own_values(rows, fragments, self.value_function)
        rewards, unknown = numbers(rows, "rewards"), unknown_outcome(rows)
        after = next_values(rows, fragments, values, self.value_function)
        untaught = np.zeros(len(rows), np.bool_)
        if lacking.any():
            lost = _lost(fragments, lacking, unknown)
            untaught = _next(lost, fragments, False) & ~lacking
            unknown = unknown | untaught | lost
            values[lacking] = self._returns(fragments, rewards, values, after, lacking, unknown)[lacking]
            inner = fragments.left_n > 0
            after[inner] = _next(values, fragments, 0.0)[inner]
        deltas = rewards + self.gamma * after - values
        deltas[unknown] = 0.0
        advantages = fragments.scan(deltas, self.gamma * self.gae_lambda)
        targets = np.where(fragments.left_n >= 0, advantages + values, 0.0)
        advantages[lacking] = targets[lacking] = np.nan
        rows = _marked(rows, lacking, untaught)
        return rows.replace(advantages=advantages.astype(np.float32), value_targets=targets.astype(np.float32))

    def _returns(
        self, fragments: Fragments, rewards: Floats, values: Floats, after: Floats, lacking: Bools, unknown: Bools
    ) -> Floats:
        """Return each row's lambda-return, (n,), which passes through rows of unknown value as if lambda were 1."""
        inner, through = fragments.left_n > 0, _next(lacking, fragments, False)
        share = np.where(inner, 1 - self.gae_lambda, 1.0)
        found = rewards + self.gamma * np.where(through, 0.0, share * after)
        found[unknown] = np.where(lacking, 0.0, values)[unknown]
        decay = np.where(through, self.gamma, self.gamma * self.gae_lambda)
        decay[unknown] = 0.0
        return fragments.scan(found, decay)


def _lost(fragments: Fragments, lacking: Bools, unknown: Bools) -> Bools:
    """Return the rows of unknown value whose return is unknown, too: none is known up to an unknown outcome."""
    index = np.arange(len(lacking))
    next_known = np.minimum.accumulate(np.where(lacking, len(lacking), index)[::-1])[::-1]
    run_end = np.minimum(next_known - 1, fragments.last_F[fragments.fragment_n])
    lost: Bools = lacking & unknown[run_end]
    return lost


def _marked(rows: Rows, lacking: Bools, untaught: Bools) -> Rows:
    """Set ``loss_mask`` to False in ``untaught`` rows, and where a given action left something unknown.

    A NaN without ``off_policy`` is a fault of the policy, and stays visible.
    """
    if "off_policy" not in rows and not untaught.any():
        return rows
    return mask_out(rows, (lacking & given_actions(rows)) | untaught)


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

    In rows whose action was given (``off_policy``), ``logp`` or V is unknown (NaN). V comes from the value function, if
    any. If one of the two stays unknown, both columns are NaN in these rows and ``loss_mask`` is False; rows before
    bootstrap from its V, as if its ratio were 0. If V is unknown, the row before teaches nothing: ``vs`` is its V,
    ``pg_advantages`` is 0, ``loss_mask`` is False. Rows with a column ``off_policy`` always get ``loss_mask``.

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
        rewards = numbers(rows, "rewards")
        values, lacking = own_values(rows, fragments, self.value_function)
        after = next_values(rows, fragments, values, self.value_function)
        untaught = _next(lacking, fragments, False) & ~lacking
        unknown = unknown | untaught
        with np.errstate(over="ignore"):  # an infinite ratio is clipped, too
            ratio = np.exp(numbers(rows, self.target_logp) - numbers(rows, self.logp))
        given = given_actions(rows) | ("off_policy" not in rows)
        lacking |= real & np.isnan(ratio) & given
        rho, c = np.minimum(ratio, self.rho_bar), np.minimum(ratio, self.c_bar)
        deltas = rho * (rewards + self.gamma * after - values)
        deltas[unknown | lacking] = 0.0
        gain = fragments.scan(deltas, np.where(unknown | lacking, 0.0, self.gamma * c))  # vs - V
        advantages = rho * (rewards + self.gamma * (after + _next(gain, fragments, 0.0)) - values)
        vs = np.where(real, gain + values, 0.0)
        advantages = np.where(real & ~unknown, advantages, 0.0)
        vs[lacking] = advantages[lacking] = np.nan
        rows = _marked(rows, lacking, untaught)
        return rows.replace(vs=vs.astype(np.float32), pg_advantages=advantages.astype(np.float32))


@dataclass(eq=False, repr=False)
class ReturnsToGo(LearnerConnector):
    """Adds ``returns_to_go`` (n,) float32, computed in float64: ``rewards[t] + gamma * returns_to_go[t + 1]``.

    Sums end with the fragment; in phantom rows they are 0. With ``bootstrap``, the discounted value of the last
    ``next_obs`` is added if the fragment's last row is not terminated.

    Args:
        gamma: Discount per decision, from 0 to 1.
        bootstrap: False: add nothing. True: add the value from the phantom row of `AddLastObs`, or from column
            ``next_values``. A value function, rows to their (n,) values: call it for rows that have neither. If an
            agent was truncated without a final observation, the return of that row is its own ``values``; if its action
            was given (``off_policy``) and no value function values it, all returns of the fragment are NaN, and their
            ``loss_mask`` is False.

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
                values, lacking = own_values(rows, fragments, value_function)
                totals[unknown] = values[unknown]
                # Every return of the fragment depends on this value.
                lost = (lacking & unknown & given_actions(rows))[fragments.last_F][fragments.fragment_n]
                if lost.any():
                    rows = mask_out(rows, lost)
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
        changed = [*(name for name in tuple(rows.keys()) if name.startswith("next_")), *state_columns(rows)]
        discounts = self.gamma**steps * (real & ~flags(rows, "terminated")[outcome])
        if unknown.any():
            rows = mask_out(rows, unknown)
        return rows.replace(
            rewards=rewards,
            **{
                name: map_tree(lambda leaf: leaf[outcome], column(rows, name))
                for name in (*changed, "terminated", "truncated")
            },
            discounts=discounts.astype(np.float32),
        )
