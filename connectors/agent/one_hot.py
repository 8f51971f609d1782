"""Choices as one-hot vectors."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Discrete, MultiDiscrete
from numpy.typing import NDArray

from marlvec.errors import ContractError
from marlvec.spaces import Leaf

__all__ = ["OneHot"]


class OneHot:
    """Turns the values of a Discrete or MultiDiscrete leaf into one-hots; those of its entries stand side by side.

    Args:
        leaf: The leaf; a MultiDiscrete of any rank, which is raveled.

    Attributes:
        width: Length of one vector.
    """

    def __init__(self, leaf: Leaf) -> None:
        count, first = _categories(leaf)
        self.leaf = leaf
        self._low, self._high = first, first + count - 1
        # Column j of the one-hot is entry owner[j] of the leaf compared with level[j].
        self._owner = np.repeat(np.arange(len(count)), count)
        self._level = np.concatenate([np.arange(c) + f for c, f in zip(count, first, strict=True)])
        self.width = len(self._level)

    def __call__(self, value_n: Any) -> NDArray[np.bool_]:
        """Turn (n, *leaf.shape) into (n, width).

        Raises:
            ContractError: A value is outside of the leaf's space; names value and row.
        """
        values = np.asarray(value_n).reshape(len(value_n), len(self._low))
        wrong = (values < self._low) | (values > self._high)
        if wrong.any():
            row, entry = np.argwhere(wrong)[0]
            raise ContractError(f"{self.leaf} is {values[row, entry]} in row {row}, outside of {self.leaf.space}")
        hot: NDArray[np.bool_] = values[:, self._owner] == self._level
        return hot


def _categories(leaf: Leaf) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Number of categories and the first one, for each entry, raveled."""
    if isinstance(leaf.space, Discrete):
        return np.array([leaf.space.n], np.int64), np.array([leaf.space.start], np.int64)
    assert isinstance(leaf.space, MultiDiscrete)
    return leaf.space.nvec.ravel().astype(np.int64), leaf.space.start.ravel().astype(np.int64)
