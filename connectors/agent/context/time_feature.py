"""`TimeFeature`: the episode's time step, appended to the observation."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Box, Space

from marlvec.connectors.agent._support.leafwise_obs import append_to_obs, appended_space
from marlvec.connectors.connector import AgentConnector
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, ContractError

__all__ = ["TimeFeature"]


class TimeFeature(AgentConnector):
    """Appends ``min(t / horizon, 1)`` to an observation vector: ``(d,)`` becomes ``(d + 1,)``.

    ``t`` is the number of decisions the agent has taken in its episode. An agent that knows it can distinguish an end
    by time from one by its own doing, without which a time limit makes values ambiguous (Pardo et al., 2018,
    arXiv:1712.00378). Vectors of ints become floats.

    Args:
        horizon: Where 1 is reached, in decisions; above 0.

    Raises:
        ArgumentError: ``horizon`` is not above 0.
        UnsupportedSpaceError: Where a space is first seen: it is no vector.
        ContractError: In a call: the rows have no column ``t``.
    """

    _extra = Box(0, 1, (1,), np.float32)

    def __init__(self, horizon: float) -> None:
        if not horizon > 0:
            raise ArgumentError(f"horizon must be above 0, got {horizon}")
        self.horizon = horizon
        self._dtype: np.dtype[Any] | None = None

    def __call__(self, rows: Rows) -> Rows:
        if self._dtype is None:
            raise self._not_set_up()
        if "t" not in rows:
            raise ContractError(f"{self.name} needs column 't', the number of the decision; got {list(rows.keys())}")
        return append_to_obs(rows, np.minimum(rows.t / self.horizon, 1.0)[:, None], self._dtype)

    def setup(self, space: Space[Any]) -> None:
        self._dtype = np.dtype(self.output_space(space).dtype)

    def output_space(self, space: Space[Any]) -> Space[Any]:
        return appended_space(space, self._extra, 1, self.name)
