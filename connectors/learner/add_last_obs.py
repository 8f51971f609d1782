"""The observation after the last decision, as a row of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.connectors.connector import LearnerConnector
from marlvec.connectors.learner.bootstrap import following
from marlvec.connectors.learner.columns import column
from marlvec.connectors.learner.fragments import Fragments
from marlvec.connectors.rows import Rows
from marlvec.errors import ContractError
from marlvec.trees import zip_trees

__all__ = ["AddLastObs"]


class AddLastObs(LearnerConnector):
    """Puts one phantom row after each fragment, so that one pass over all rows also values its last ``next_obs``.

    In a phantom row ``obs`` is the ``next_obs`` of the row before, as is every column with a ``next_`` one beside it;
    ``state_in`` is its ``state_out``, ``t`` one more, ``rewards`` 0. The other columns repeat the row before, flags
    and ids included: ``terminated`` and ``truncated`` say how the last true step ended. ``values``, unless there is a
    ``next_values``, is NaN until somebody computes it. All rows get

    * ``phantom`` (n,) bool, True for the new ones,
    * ``loss_mask`` (n,) bool, False for them; the one that was there, or True, for the others.

    `GeneralAdvantageEstimation`, `ReturnsToGo` and `VTrace` take the value after a fragment from its phantom row, and
    like `NStep` and `Standardize` leave phantom rows out of everything else.

    Raises:
        ContractError: When called: a column is missing, the rows have phantom ones already, or they have the envs'
            ``state`` and not ``next_state``, so that a critic would see the wrong one.
    """

    changes_length = True

    def __call__(self, rows: Rows) -> Rows:
        if "phantom" in rows.columns:
            raise ContractError("these rows have phantom rows already; use AddLastObs once")
        if "state" in rows.columns and "next_state" not in rows.columns:
            raise ContractError(
                "expected a column 'next_state' beside 'state', because a phantom row has the state of its own moment; "
                "add it, or drop 'state' before AddLastObs"
            )
        column(rows, "next_obs")
        fragments, n = Fragments(rows), len(rows)
        stops = fragments.stop_F
        after = following(rows, fragments.last_F)
        if "rewards" in rows.columns:
            after = after.replace(rewards=np.zeros_like(after["rewards"]))
        if "values" in rows.columns and "next_values" not in rows.columns:
            # As floats even where V was given as ints: those have no NaN.
            values = np.asarray(after["values"])
            after = after.replace(values=np.full(values.shape, np.nan, np.result_type(values.dtype, np.float32)))
        where = np.arange(n) + fragments.fragment_n
        where_new = stops + np.arange(len(fragments))

        def merged(parts: list[Any]) -> NDArray[Any]:
            old, new = (np.asarray(part) for part in parts)
            out = np.empty((n + len(fragments), *old.shape[1:]), np.result_type(old.dtype, new.dtype))
            out[where], out[where_new] = old, new
            return out

        mask = rows["loss_mask"] if "loss_mask" in rows.columns else np.ones(n, np.bool_)
        columns = {name: zip_trees(merged, [rows[name], after[name]]) for name in rows.columns}
        no, yes = np.zeros(n, np.bool_), np.ones(len(fragments), np.bool_)
        columns["loss_mask"] = merged([np.asarray(mask, np.bool_), ~yes])
        columns["phantom"] = merged([no, yes])
        return Rows(columns)
