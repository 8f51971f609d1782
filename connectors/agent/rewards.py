"""Rewards clipped, scaled, or mapped by a function."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.connectors.connector import AgentConnector, PositiveFloat
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, ContractError


@dataclass(eq=False, repr=False)
class ClipReward(AgentConnector):
    """Clips the ``rewards`` column: to its sign, or to ``[-limit, limit]``.

    It clips the agent's reward since its last row, in turn-based games maybe a sum over several steps. An episode's
    first rows, which have no reward yet, pass unchanged.

    Args:
        sign: Clip to -1, 0 or 1.
        limit: Clip to ``[-limit, limit]``.

    Raises:
        ArgumentError: Both or neither are given, or ``limit`` is not above 0.
    """

    _: KW_ONLY
    sign: bool = False
    limit: PositiveFloat | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sign == (self.limit is not None):
            raise ArgumentError(f"give sign=True or a limit, and not both; got sign={self.sign}, limit={self.limit}")

    def __call__(self, rows: Rows) -> Rows:
        rewards = rows.rewards
        clipped: Any = np.sign(rewards) if self.limit is None else np.clip(rewards, -self.limit, self.limit)
        if "first" in rows:
            clipped = np.where(rows.first, rewards, clipped)
        return rows.replace(rewards=clipped)


@dataclass(eq=False, repr=False)
class ScaleReward(AgentConnector):
    """Replaces the ``rewards`` column by ``rewards * scale + shift``.

    It scales the agent's reward since its last row, in turn-based games maybe a sum over several steps; ``shift`` is
    added once. An episode's first rows, which have no reward yet, pass unchanged.

    Args:
        scale: The factor.
        shift: Number added after scaling.

    Raises:
        ArgumentError: Either is NaN or infinite.
    """

    scale: float
    shift: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.scale) and math.isfinite(self.shift)):
            raise ArgumentError(f"scale and shift must be finite, got scale={self.scale}, shift={self.shift}")

    def __call__(self, rows: Rows) -> Rows:
        with np.errstate(over="ignore", invalid="ignore"):  # first rows may hold anything
            scaled = rows.rewards * self.scale + self.shift
        if "first" in rows:
            scaled = np.where(rows.first, rows.rewards, scaled)
        return rows.replace(rewards=scaled)


@dataclass(eq=False, repr=False)
class MapReward(AgentConnector):
    """Replaces the ``rewards`` column by ``function(rewards)``, all rows in one call.

    The function sees each agent's reward since its last row. Episodes' first rows, which have
    no reward yet, pass unchanged.

    Args:
        function: Maps (m,) float64 to (m,) numbers, element by element.

    Raises:
        ArgumentError: ``function`` is not a function.
    """

    function: Callable[[NDArray[np.float64]], Any]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ArgumentError(f"MapReward wants a function of rewards, got {type(self.function).__name__}")

    def __call__(self, rows: Rows) -> Rows:
        rewards = np.array(rows.rewards, np.float64)
        rewarded = ~rows.first if "first" in rows else np.ones(len(rows), np.bool_)
        given = rewards[rewarded]
        mapped = np.asarray(self.function(given))
        if mapped.shape != given.shape or mapped.dtype.kind not in "biuf":
            raise ContractError(
                f"{self.name}: the function must return one number for each of {given.shape} rewards, got "
                f"{mapped.dtype} of shape {mapped.shape}"
            )
        rewards[rewarded] = mapped
        return rows.replace(rewards=rewards)
