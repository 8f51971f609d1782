"""Observations and actions, as the declared spaces say.

A Dict is a dict, a Tuple is a list, in the space's order; a leaf of shape ``()`` (Discrete, say) is a plain number or
bool, every other leaf a raw array of exactly its shape and dtype.

Two kinds of wrong: what is not even an array is a `ProtocolError`, which ends the connection; a sound array of another
shape or dtype than declared is a `ContractError`, which is told and changes nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from marlvec.errors import ContractError, ProtocolError, UnsupportedSpaceError
from marlvec.external.wire.arrays import DTYPES, MAX_NDIM, read_array, write_array
from marlvec.spaces import Leaf, SpaceTree

__all__ = ["ValueReader", "read_mask", "write_mask"]


class ValueReader:
    """Reads and writes values of one space.

    Args:
        space: Any space whose leaves are arrays.

    Raises:
        UnsupportedSpaceError: Values of it do not go over a wire; names the leaf.
    """

    def __init__(self, space: spaces.Space[Any]) -> None:
        self.space = space
        self._tree = SpaceTree(space)
        for leaf in self._tree.leaves:
            if leaf.is_object or leaf.dtype.name not in DTYPES or len(leaf.shape) > MAX_NDIM:
                raise UnsupportedSpaceError(
                    f"{leaf} of {leaf.space} does not go over a socket: expected Box, Discrete, MultiDiscrete or "
                    f"MultiBinary of {', '.join(DTYPES)}, in Dicts and Tuples"
                )
        self._wire = _skeleton(space)

    def read(self, data: Any, where: str) -> Any:
        """The value that was written.

        Raises:
            ProtocolError: An array is none.
            ContractError: It is not a value of this space's structure, shapes and dtypes; bounds are not looked at.
        """
        try:
            leaves = self._tree.flatten(data)
        except ContractError as error:
            raise ContractError(f"{where}: {error}") from None
        read = [_read_leaf(leaf, value, where) for leaf, value in zip(self._tree.leaves, leaves, strict=True)]
        return self._tree.unflatten(read)

    def write(self, value: Any) -> Any:
        """A value as it goes over the wire.

        Raises:
            ContractError: It is not a value of this space's structure, shapes and dtypes.
        """
        leaves = [
            _write_leaf(leaf, part) for leaf, part in zip(self._tree.leaves, self._tree.flatten(value), strict=True)
        ]
        return self._wire_tree(self._wire, iter(leaves))

    def _wire_tree(self, skeleton: Any, leaves: Any) -> Any:
        if isinstance(skeleton, dict):
            return {key: self._wire_tree(sub, leaves) for key, sub in skeleton.items()}
        if isinstance(skeleton, list):
            return [self._wire_tree(sub, leaves) for sub in skeleton]
        return next(leaves)


def _skeleton(space: spaces.Space[Any]) -> Any:
    if isinstance(space, spaces.Dict):
        for key in space.spaces:
            if type(key) is not str:
                raise UnsupportedSpaceError(f"keys of a Dict that goes over a socket must be texts, got {key!r}")
        return {key: _skeleton(sub) for key, sub in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return [_skeleton(sub) for sub in space.spaces]
    return None


def _read_leaf(leaf: Leaf, data: Any, where: str) -> Any:
    at = f"{where}/{leaf.path}" if leaf.path else where
    if leaf.shape == ():
        return _read_number(leaf, data, at)
    if type(data) is not list:
        raise ContractError(f"{at}: expected an array, {leaf.dtype.name} of {leaf.shape}, got {type(data).__name__}")
    array = read_array(data, at)
    if array.shape != leaf.shape or array.dtype != leaf.dtype:
        raise ContractError(
            f"{at}: expected {leaf.dtype.name} of {leaf.shape}, got {array.dtype.name} of {array.shape}"
        )
    return array


def _read_number(leaf: Leaf, data: Any, at: str) -> Any:
    kinds = {"b": (bool,), "f": (int, float)}.get(leaf.dtype.kind, (int,))
    if type(data) not in kinds:
        raise ContractError(f"{at}: expected a number of {leaf.dtype.name}, got {type(data).__name__}")
    if leaf.dtype.kind in "iu":
        bounds = np.iinfo(leaf.dtype)
        if not bounds.min <= data <= bounds.max:
            raise ContractError(f"{at}: expected a number of {leaf.dtype.name}, got {data}")
    with np.errstate(over="ignore", invalid="ignore"):  # what is too large is infinite, as bounds will tell
        number = np.array(data, leaf.dtype)
    return number if isinstance(leaf.space, spaces.Box) else number[()]  # as the spaces' own samples are


def _write_leaf(leaf: Leaf, value: Any) -> Any:
    array = np.asarray(value)
    if array.shape != leaf.shape or not np.can_cast(array.dtype, leaf.dtype, "same_kind"):
        raise ContractError(f"{leaf}: expected {leaf.dtype.name} of {leaf.shape}, got {array.dtype} of {array.shape}")
    if leaf.shape == ():
        return array.astype(leaf.dtype).item()
    return write_array(array.astype(leaf.dtype, copy=False))


def write_mask(mask: Any) -> list[Any]:
    """An action mask, (k,), as it goes over the wire."""
    return write_array(np.asarray(mask, np.bool_))


def read_mask(data: Any, where: str) -> NDArray[np.bool_]:
    """The action mask that was written, (k,) bool.

    Raises:
        ProtocolError: It is none.
    """
    mask = read_array(data, where)
    if mask.dtype != np.bool_ or mask.ndim != 1:
        raise ProtocolError(f"{where}: expected bools in one row, got {mask.dtype.name} of {mask.shape}")
    return mask
