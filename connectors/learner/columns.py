"""Columns of a batch as formulas want them: one number or flag a row."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, ContractError
from marlvec.trees import to_array

__all__ = ["Floats", "check_share", "column", "flags", "numbers", "one_array", "unknown_outcome"]

Floats = NDArray[np.float64]

_ORIGIN = {
    "values": "the policy returns it beside its actions, or a learner connector before this one adds it",
    "logp": "the policy returns it beside its actions",
    "target_logp": "a learner connector before this one adds it: log-probabilities under the policy that learns",
    "next_obs": "batches of a Collector have it",
    "rewards": "batches of a Collector have it",
    "terminated": "batches of a Collector have it",
    "truncated": "batches of a Collector have it",
    "unroll_id": "batches of a Collector have it",
}


def column(rows: Rows, name: str) -> Any:
    """A column that a connector cannot do without.

    Raises:
        ContractError: It is not there; says where it comes from.
    """
    if name in rows.columns:
        return rows.columns[name]
    hint = f"; {_ORIGIN[name]}" if name in _ORIGIN else ""
    raise ContractError(f"expected a column {name!r}{hint}; the columns are {list(rows.columns)}")


def one_array(rows: Rows, name: str) -> NDArray[Any]:
    """A column that is no tree.

    Raises:
        ContractError: It is missing, or a tree.
    """
    values = column(rows, name)
    if isinstance(values, (dict, tuple)):
        raise ContractError(f"expected column {name!r} to be one array, got a {type(values).__name__} of arrays")
    return to_array(values)


def numbers(rows: Rows, name: str) -> Floats:
    """A column of one number a row, as (n,) float64.

    Raises:
        ContractError: It is missing, or has another shape.
    """
    return np.asarray(_flat(rows, name), np.float64)


def flags(rows: Rows, name: str) -> NDArray[np.bool_]:
    """A column of one bool a row, (n,).

    Raises:
        ContractError: It is missing, or has another shape.
    """
    return np.asarray(_flat(rows, name), np.bool_)


def _flat(rows: Rows, name: str) -> NDArray[Any]:
    array = one_array(rows, name)
    if array.ndim != 1:
        # (n, 1) against (n,) would broadcast to (n, n) without a word.
        raise ContractError(f"expected column {name!r} of shape ({len(rows)},), one number a row, got {array.shape}")
    return array


def unknown_outcome(rows: Rows) -> NDArray[np.bool_]:
    """Where an agent was cut off and the env gave no final observation, so that nothing tells what came after.

    Where it was terminated nothing came after, with or without one.

    Returns:
        A bool for each row, (n,), or (B, T) of sequences.
    """
    if "next_obs_missing" not in rows.columns:
        return np.zeros(len(rows), np.bool_)
    missing, terminated = (one_array(rows, name).astype(np.bool_) for name in ("next_obs_missing", "terminated"))
    unknown: NDArray[np.bool_] = missing & ~terminated
    return unknown


def check_share(name: str, value: float) -> None:
    """Refuse a discount or the like that is not from 0 to 1.

    Raises:
        ArgumentError: It is not.
    """
    if not 0 <= value <= 1:
        raise ArgumentError(f"{name} must be from 0 to 1, got {value}")
