"""A function of the reward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.connectors.connector import AgentConnector
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, ContractError

__all__ = ["MapReward"]


class MapReward(AgentConnector):
    """Puts ``function(reward)`` in the place of the ``reward`` column, all rows in one call.

    The function sees what each agent was paid since its last row. It is not asked about an episode's first rows, which
    have no reward yet and pass unchanged.

    Args:
        function: Takes (m,) float64 and returns as many numbers, each made of its own one alone.

    Raises:
        ArgumentError: ``function`` is none.
    """

    def __init__(self, function: Callable[[NDArray[np.float64]], Any]) -> None:
        if not callable(function):
            raise ArgumentError(f"MapReward wants a function of rewards, got {type(function).__name__}")
        self.function = function

    def __call__(self, rows: Rows) -> Rows:
        reward = np.array(rows.reward, np.float64)
        paid = ~rows.first if "first" in rows.columns else np.ones(len(rows), np.bool_)
        given = reward[paid]
        mapped = np.asarray(self.function(given))
        if mapped.shape != given.shape or mapped.dtype.kind not in "biuf":
            raise ContractError(
                f"{self.name}: the function must return one number for each of {given.shape} rewards, got "
                f"{mapped.dtype} of shape {mapped.shape}"
            )
        reward[paid] = mapped
        return rows.replace(reward=reward)
