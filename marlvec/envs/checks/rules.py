"""How the episodes of a check are played."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.envs.contract import AgentId

__all__ = ["Choose", "Rules"]

Choose = Callable[[AgentId, Any, NDArray[np.bool_] | None, np.random.Generator], Any]
"""``fn(agent, observation, mask, rng)`` → an action; mask (k,) bool, or None where there is none."""


@dataclass(frozen=True)
class Rules:
    """How long, and with which actions.

    Attributes:
        max_steps: Within how many steps an episode must end.
        endless: Whether an episode may go on for longer; then it is left there, and the next one begins.
        choose: What chooses the actions; None: random ones that the masks allow.
        ignore_infos: Keys of infos, at any depth, that may differ from play to play.
    """

    max_steps: int = 10_000
    endless: bool = False
    choose: Choose | None = None
    ignore_infos: frozenset[str] = frozenset()
