"""What came after the rows of a batch, and what it is worth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.connectors.learner.columns import Floats, flags, numbers, unknown_outcome
from marlvec.connectors.learner.fragments import Fragments
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, ContractError
from marlvec.trees import to_array

__all__ = ["ValueFunction", "end_values", "following", "next_values"]

ValueFunction = Callable[[Rows], Any]
"""Rows in, (n,) values of them out; an array or a tensor."""


def following(rows: Rows, at: NDArray[np.int64]) -> Rows:
    """The moments after some rows, as rows to look at.

    Every column takes its next one's place where there is one: ``obs`` is ``next_obs``, ``state`` is ``next_state`` and
    so on; ``state_in`` is ``state_out``, and ``t`` one more. The other columns stay those of the row before.

    Args:
        rows: All rows.
        at: (k,) positions of the rows before.
    """
    before = rows.take(at)
    names = [name for name in rows.columns if f"next_{name}" in rows.columns]
    after = {name: before[f"next_{name}"] for name in names}
    if "state_out" in rows.columns:
        after["state_in"] = before["state_out"]
    if "t" in rows.columns:
        after["t"] = before["t"] + 1
    return before.replace(**after)


def end_values(rows: Rows, fragments: Fragments, value_function: ValueFunction | None) -> Floats:
    """Value of what came after each fragment.

    It is 0 where the last row is terminated, or where nobody can know it: see `unknown_outcome`. Elsewhere the episode
    went on or could have (truncated), and it is the value of the last row's ``next_obs``: ``values`` of the fragment's
    phantom row, else ``next_values`` of its last row, else what the value function says, asked once for all fragments
    that need it. A NaN in those columns stands for "not known".

    Returns:
        (F,) float64.

    Raises:
        ArgumentError: A value is needed and there is none of the three.
        ContractError: The value function gave no (k,) numbers for k rows.
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
    """(F,) end values that are in the rows already, NaN where they are not; the first known one counts."""
    found = []
    if "phantom" in rows.columns and "values" in rows.columns:
        end = fragments.stop_F - 1
        found.append(np.where(end > fragments.last_F, numbers(rows, "values")[end], np.nan))
    if "next_values" in rows.columns:
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
    if "state" in rows.columns and "next_state" not in rows.columns:
        after = after.drop("state")  # the one at hand is of the moment before: no answer is better than that one's
    values = to_array(value_function(after))
    if values.shape != (len(at),) or values.dtype.kind not in "fiub":
        raise ContractError(
            f"expected the value function to give one number for each of {len(at)} rows, shape ({len(at)},), "
            f"got {values.dtype} of shape {values.shape}"
        )
    return values.astype(np.float64)


def next_values(rows: Rows, fragments: Fragments, value_function: ValueFunction | None) -> Floats:
    """Value of what came after each row: ``values`` of the next row of its fragment, or `end_values`.

    Returns:
        (n,) float64; 0 in phantom rows.
    """
    values, after = numbers(rows, "values"), np.zeros(len(rows))
    after[:-1] = values[1:]
    after[fragments.left_n <= 0] = 0.0
    after[fragments.last_F] = end_values(rows, fragments, value_function)
    return after
