"""What there is to choose from in a Discrete or MultiDiscrete, and what a mask leaves of it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from gymnasium.spaces import Discrete, MultiDiscrete, Space
from numpy.typing import NDArray

from marlvec.connectors.action.row_name import row_name
from marlvec.connectors.rows import Rows
from marlvec.errors import ContractError

__all__ = ["Choices"]

AnyArray = NDArray[Any]
BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]


class Choices:
    """The D dimensions of a Discrete (D = 1) or MultiDiscrete, each with so many choices, counted from 0.

    A mask is (n, k) bool, the choices of all dimensions one after the other, as in `marlvec.sampling.SpaceSampler`.

    Args:
        space: The space.

    Attributes:
        sizes: (D,) number of choices of each dimension.
    """

    def __init__(self, space: Discrete | MultiDiscrete) -> None:
        self._space = space
        self._shape = tuple(int(n) for n in space.shape or ())
        self._dtype = np.dtype(space.dtype)
        self._start = np.asarray(space.start, np.int64)
        self.sizes: IntArray = np.asarray(space.n if isinstance(space, Discrete) else space.nvec, np.int64).ravel()
        self._bounds = np.concatenate([[0], np.cumsum(self.sizes)])

    @classmethod
    def of(cls, space: Space[Any]) -> Choices | None:
        """The space's choices; None where it is of another kind."""
        return cls(space) if isinstance(space, (Discrete, MultiDiscrete)) else None

    def read(self, action_n: Any, rows: Rows) -> IntArray:
        """Turn (n, …) actions into (n, D) choices.

        Raises:
            ContractError: An action is no int, or outside the space; names the row.
        """
        action = np.asarray(action_n)
        if action.dtype.kind not in "iu" or action.shape[1:] != self._shape:
            raise ContractError(
                f"expected actions of {self._space}, ints of shape {(len(rows), *self._shape)}, got {action.dtype} of "
                f"shape {action.shape}"
            )
        chosen: IntArray = (action.astype(np.int64) - self._start).reshape(len(action), len(self.sizes))
        outside = (chosen < 0) | (chosen >= self.sizes)
        if outside.any():
            i = int(np.flatnonzero(outside.any(axis=1))[0])
            raise ContractError(f"expected an action of {self._space}, got {action[i]} for {row_name(rows, i)}")
        return chosen

    def write(self, chosen_nD: IntArray) -> AnyArray:
        """Turn (n, D) choices into (n, …) actions of the space's dtype."""
        actions: AnyArray = (chosen_nD.reshape(len(chosen_nD), *self._shape) + self._start).astype(self._dtype)
        return actions

    def check(self, mask: Any) -> BoolArray:
        """Give the mask as (n, k) bools.

        Raises:
            ContractError: It is not as long as there are choices.
        """
        checked: BoolArray = np.asarray(mask, np.bool_)
        if checked.ndim != 2 or checked.shape[1] != self._bounds[-1]:
            raise ContractError(
                f"expected action masks of {self._bounds[-1]} entries, one for each choice of {self._space}, got "
                f"{checked.shape[1:]}; masks are the env's, so put this connector where actions are those of the env"
            )
        return checked

    def allowed(self, mask: BoolArray, chosen_nD: IntArray) -> BoolArray:
        """Whether the mask allows each of (n, D) choices."""
        found: BoolArray = np.take_along_axis(mask, chosen_nD + self._bounds[:-1], axis=1)
        return found

    def pick(self, uniform_nD: NDArray[np.float64], mask: BoolArray | None, name: Callable[[int], str]) -> IntArray:
        """Choose by numbers in [0, 1), evenly among all choices, or among those that the mask allows; 0 is the first.

        Args:
            uniform_nD: The numbers.
            mask: (n, k) bool, or None.
            name: Names row i in messages.

        Raises:
            ContractError: The mask allows nothing in a dimension; names the row.
        """
        if mask is None:
            return (uniform_nD * self.sizes).astype(np.int64)
        out = np.empty(uniform_nD.shape, np.int64)
        for d, (low, high) in enumerate(pairwise(self._bounds.tolist())):
            running = np.cumsum(mask[:, low:high], axis=1)
            count = running[:, -1]
            if not count.all():
                i = int(np.flatnonzero(count == 0)[0])
                raise ContractError(
                    f"the action mask of {name(i)} allows nothing; an agent that must act needs one action at least"
                )
            # The k-th allowed choice is the first whose running count exceeds k.
            k = (uniform_nD[:, d] * count).astype(np.int64)
            out[:, d] = np.argmax(running > k[:, None], axis=1)
        return out
