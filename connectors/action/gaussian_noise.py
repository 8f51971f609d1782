"""Normal noise on actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Space
from numpy.typing import NDArray

from marlvec.connectors.action.decay import Decay
from marlvec.connectors.action.float_boxes import FloatBoxes
from marlvec.connectors.connector import ActionConnector, State
from marlvec.connectors.row_random import RowRandom
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, UnsupportedSpaceError

__all__ = ["GaussianNoise"]


class GaussianNoise(ActionConnector):
    """Adds independent normal noise to every element of every Box of floats, while training.

    Other leaves pass unchanged. ``std`` is in the units of the actions: before `UnsquashActions` they go from -1 to 1,
    whatever the env's bounds, and that is where this belongs.

    With ``final`` and ``decay_steps`` the deviation goes linearly from ``std`` to ``final``. Each agent of each env
    counts its own decisions, so with 16 envs a decay over 16,000 steps of all of them is ``decay_steps=1000``. What is
    assigned to ``std`` holds from the next call on.

    Args:
        std: Standard deviation, at first: one number, or one for each element, of all Boxes in a row.
        final: Deviation after the decay; None to stay at ``std``.
        decay_steps: Decisions of an agent, while training, until then.
        clip: Whether to bring what comes out into the bounds of the Box.
        seed: Equal seeds give equal noise.

    Raises:
        ArgumentError: A deviation is not a number from 0 on, or only one of ``final`` and ``decay_steps`` is given.
        UnsupportedSpaceError: Where a space is first seen: it has no Box of floats, or not as many elements as ``std``.
    """

    def __init__(
        self,
        std: float | Sequence[float] = 0.1,
        *,
        final: float | None = None,
        decay_steps: int | None = None,
        clip: bool = True,
        seed: int = 0,
    ) -> None:
        for name, value in (("std", std), ("final", 0.0 if final is None else final)):
            number = np.asarray(value, np.float64)
            if number.ndim > 1 or not (np.isfinite(number) & (number >= 0)).all():
                raise ArgumentError(f"{name} must be a number from 0 on, got {value}")
        self.std = std
        self.final = final
        self.decay_steps = decay_steps
        self.clip = clip
        self.seed = seed
        self._decay = Decay(final, decay_steps)
        self._random = RowRandom(seed, "GaussianNoise")
        self._boxes: FloatBoxes | None = None

    def __call__(self, rows: Rows) -> Rows:
        if self._boxes is None:
            raise self._not_set_up()
        if not self.training:
            return rows
        std: NDArray[np.float64] = self._decay(np.asarray(self.std, np.float64), rows)
        self._decay.count(rows)
        noise = self._random.normal(rows, self._boxes.size) * std
        return rows.replace(actions_for_env=self._boxes.add(rows.actions_for_env, noise, clip=self.clip))

    def setup(self, space: Space[Any]) -> None:
        self._boxes = FloatBoxes(space)

    def policy_space(self, space: Space[Any]) -> Space[Any]:
        boxes, given = FloatBoxes(space), np.shape(self.std)
        boxes.need("GaussianNoise")
        if given not in ((), (boxes.size,)):
            raise UnsupportedSpaceError(
                f"std has {given[0]} numbers for the {boxes.size} elements of the float Boxes in {space}"
            )
        return space

    def state_dict(self) -> State:
        return self._decay.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._decay.load_state_dict(state)

    def merge_states(self, states: Sequence[Mapping[str, Any]]) -> State:
        return self._decay.merge_states(states)
