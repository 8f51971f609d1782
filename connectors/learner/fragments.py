"""Columns of a batch as arrays, and its fragments (stretches of one agent's episode)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.connectors.rows import Rows
from marlvec.errors import ContractError
from marlvec.trees import to_array

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
    """Return a required column, or raise ContractError that names its source."""
    if name in rows:
        return rows[name]
    hint = f"; {_ORIGIN[name]}" if name in _ORIGIN else ""
    raise ContractError(f"expected a column {name!r}{hint}; the columns are {list(rows.keys())}")


def one_array(rows: Rows, name: str) -> NDArray[Any]:
    """Return a required column that is one array."""
    values = column(rows, name)
    if isinstance(values, (dict, tuple)):
        raise ContractError(f"expected column {name!r} to be one array, got a {type(values).__name__} of arrays")
    return to_array(values)


def numbers(rows: Rows, name: str) -> Floats:
    """Return a required column of one number per row, as (n,) float64."""
    return np.asarray(_flat(rows, name), np.float64)


def flags(rows: Rows, name: str) -> NDArray[np.bool_]:
    """Return a required column of one bool per row, (n,)."""
    return np.asarray(_flat(rows, name), np.bool_)


def _flat(rows: Rows, name: str) -> NDArray[Any]:
    array = one_array(rows, name)
    if array.ndim != 1:
        # (n, 1) and (n,) would silently broadcast to (n, n).
        raise ContractError(f"expected column {name!r} of shape ({len(rows)},), one number a row, got {array.shape}")
    return array


def unknown_outcome(rows: Rows) -> NDArray[np.bool_]:
    """Return where an agent was truncated without a final observation, so that the value after it is unknown.

    (n,) bool, or (B, T) of sequences; False in terminated rows, which nothing follows.
    """
    if "next_obs_missing" not in rows:
        return np.zeros(len(rows), np.bool_)
    missing, terminated = (one_array(rows, name).astype(np.bool_) for name in ("next_obs_missing", "terminated"))
    unknown: NDArray[np.bool_] = missing & ~terminated
    return unknown


def given_actions(rows: Rows) -> NDArray[np.bool_]:
    """Return where the policy did not choose the action (``off_policy``), (n,) bool, or (B, T) of sequences."""
    if "off_policy" not in rows:
        return np.zeros(len(rows), np.bool_)
    return one_array(rows, "off_policy").astype(np.bool_)


def mask_out(rows: Rows, out: NDArray[np.bool_]) -> Rows:
    """Return the rows with ``loss_mask`` False where ``out`` (n,) is True; elsewhere it is as before, or True."""
    mask = flags(rows, "loss_mask") if "loss_mask" in rows else np.ones(len(rows), np.bool_)
    return rows.replace(loss_mask=mask & ~out)


IntArray = NDArray[np.int64]


class Fragments:
    """The F fragments of n rows: stretches of one agent's episode, which differ in ``unroll_id``.

    A fragment may end with a phantom row of `AddLastObs` (column ``phantom``). It holds the moment after the fragment;
    it is not a transition, and formulas skip it.

    Args:
        rows: Rows of equal ``unroll_id`` together, ascending in time.

    Raises:
        ContractError: The rows are in another order, or are sequences already; or a phantom row is not its fragment's
            last.

    Attributes:
        fragment_n: (n,) number of each row's fragment.
        first_F: (F,) first row of each fragment.
        last_F: (F,) last transition of each.
        stop_F: (F,) the row after each fragment, its phantom row included.
        left_n: (n,) transitions that follow in the same fragment: 0 for its last one, -1 for a phantom row.
    """

    __slots__ = ("first_F", "fragment_n", "last_F", "left_n", "stop_F")

    def __init__(self, rows: Rows) -> None:
        if "seq_lens" in rows:
            raise ContractError(
                "expected rows (n, …), got sequences (B, T, …): put this connector before PadSequences or after "
                "UnpadSequences"
            )
        n, unroll = len(rows), np.asarray(column(rows, "unroll_id"))
        begins = np.ones(n, np.bool_)
        np.not_equal(unroll[1:], unroll[:-1], out=begins[1:])
        self.first_F: IntArray = np.flatnonzero(begins)
        self.stop_F: IntArray = np.append(self.first_F, n)[1:]
        self.fragment_n: IntArray = np.cumsum(begins) - 1
        self.last_F: IntArray = self.stop_F - 1
        if "phantom" in rows:
            self.last_F = self.last_F - flags(rows, "phantom")[self.last_F]
        self.left_n: IntArray = self.last_F[self.fragment_n] - np.arange(n)
        self._check(rows, begins, unroll)

    def __len__(self) -> int:
        return len(self.first_F)

    def _check(self, rows: Rows, begins: NDArray[np.bool_], unroll: IntArray) -> None:
        if len(np.unique(unroll[begins])) != len(self):
            raise ContractError("rows of equal unroll_id must be adjacent; shuffle rows after this connector")
        if "t" in rows:
            t = np.asarray(rows["t"])
            if ((t[1:] <= t[:-1]) & ~begins[1:]).any():
                raise ContractError("rows of equal unroll_id must ascend in t; shuffle rows after this connector")
        if "phantom" in rows:
            phantom = flags(rows, "phantom")
            if (self.last_F < self.first_F).any() or not np.array_equal(phantom, self.left_n < 0):
                raise ContractError("a phantom row must be its fragment's last, and not its only one")

    def check_ends(self, rows: Rows) -> None:
        """Check that episodes end only in a fragment's last transition, as formulas assume.

        Raises:
            ContractError: An episode ends in the middle of a fragment.
        """
        for name in ("terminated", "truncated"):
            if name in rows and (flags(rows, name) & (self.left_n > 0)).any():
                raise ContractError(
                    f"a row with {name}=True must be the last of its unroll_id; give each episode its own, and "
                    f"put NStep, which passes these flags on to earlier rows, after this connector"
                )

    def scan(self, x_n: Floats, decay_n: Floats | float) -> Floats:
        """Solve ``y[t] = x[t] + decay[t] * y[t + 1]`` in every fragment, where y after its last transition is 0.

        Each pass doubles a row's reach (Hillis and Steele 1986), so the number of passes is the number of binary digits
        of the longest fragment's length. Results do not depend on other fragments, whatever these hold.

        Args:
            x_n: (n,) float64.
            decay_n: (n,) float64, or one number for all.

        Returns:
            (n,) y; 0 in phantom rows.
        """
        y = np.where(self.left_n >= 0, x_n, 0.0)
        weight = np.where(self.left_n > 0, decay_n, 0.0)  # of the row `reach` ahead
        reach = 1
        # Only rows that have this row in their fragment: a weight of 0 would not keep a NaN out.
        while (at := np.flatnonzero(self.left_n >= reach)).size:
            y[at] += weight[at] * y[at + reach]
            weight[at] *= weight[at + reach]
            reach *= 2
        return y
