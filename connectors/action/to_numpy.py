"""Whatever a policy returns, as numpy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Space
from numpy.typing import NDArray

from marlvec.connectors.connector import ActionConnector
from marlvec.connectors.rows import Rows
from marlvec.connectors.trees import map_tree
from marlvec.errors import ContractError
from marlvec.spaces import SpaceTree

__all__ = ["ToNumpy"]


class ToNumpy(ActionConnector):
    """Turns every column that is not numpy yet into arrays, leaf by leaf.

    Takes torch tensors on any device, also those that need a gradient, all that has ``__array__``, and lists. The
    numbers stay as they are. A list has no dtype of its own: in ``actions_for_env`` it takes that of the action space.
    No library of tensors is imported.
    """

    def __init__(self) -> None:
        self._tree: SpaceTree | None = None

    def __call__(self, rows: Rows) -> Rows:
        if self._tree is None:
            raise self._not_set_up()
        done: dict[str, Any] = {}
        for name, column in rows.columns.items():
            if type(column) is np.ndarray:
                continue
            if name == "actions_for_env":
                pairs = zip(self._tree.flatten(column), self._tree.leaves, strict=True)
                done[name] = self._tree.unflatten([_typed(to_array(value), value, leaf.dtype) for value, leaf in pairs])
            else:
                done[name] = map_tree(to_array, column)
        return rows.replace(**done) if done else rows

    def setup(self, space: Space[Any]) -> None:
        self._tree = SpaceTree(space)


def to_array(value: Any) -> NDArray[Any]:
    """Turn one leaf into an array; an array is returned as it is.

    Raises:
        ContractError: It is no rectangle of numbers.
    """
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "detach"):  # torch: __array__ refuses a tensor on another device or with a gradient
        return np.asarray(value.detach().cpu().numpy())
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ContractError(f"expected numbers in a regular shape, got {type(value).__name__}: {error}") from error
    if array.dtype == object:
        raise ContractError(f"expected numbers, got {type(value).__name__} of {type(array.flat[0]).__name__}")
    return array


def _typed(array: NDArray[Any], value: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    # Never from float to int: that would cut 0.7 down to action 0.
    if isinstance(value, (list, tuple)) and np.can_cast(array.dtype, dtype, "same_kind"):
        return array.astype(dtype)
    return array
