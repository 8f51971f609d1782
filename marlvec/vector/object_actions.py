"""Actions that are Python objects, on their way into the buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.errors import ActionError, ContractError
from marlvec.spaces import Leaf, check_member, check_size, snapshot

__all__ = ["arrange", "check_members", "take_copies"]

AnyArray = NDArray[Any]
BoolArray = NDArray[np.bool_]
Where = Callable[[int, int], str]
"""Names the cell of row i, agent j of the group, in messages."""


def arrange(value: Any, rows: int, agents: int) -> AnyArray:
    """Put objects into cells.

    Args:
        value: An array (rows, agents) of dtype object, or sequences within a sequence.
        rows: n.
        agents: A_g.

    Returns:
        (n, A_g) of dtype object; the given array where it is one.

    Raises:
        ActionError: The lengths differ, or there are none.
    """
    if value.__class__ is np.ndarray and value.dtype == np.object_ and value.shape == (rows, agents):
        array: AnyArray = value
        return array
    cells = np.full((rows, agents), None, np.object_)
    for i, row in enumerate(_parts(value, rows, f"{rows} rows, one per env")):
        for j, cell in enumerate(_parts(row, agents, f"rows of {agents} values, one per agent")):
            cells[i, j] = cell
    return cells


def _parts(value: Any, length: int, what: str) -> Any:
    is_row = isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim > 0)
    if not is_row or len(value) != length:
        got = f"{len(value)}" if is_row else type(value).__name__
        raise ActionError(f"expected an array of objects, or a list of lists, with {what}; got {got}")
    return value


def check_members(leaf: Leaf, array: AnyArray, wanted: BoolArray, where: Where) -> None:
    """Ask a leaf's space itself whether it contains values.

    Args:
        leaf: The leaf.
        array: (n, A_g, *leaf.shape).
        wanted: (n, A_g) bool, of which values.
        where: For messages.

    Raises:
        ActionError: One is no member.
    """
    for i, j in np.argwhere(wanted).tolist():
        value = array[i, j] if not leaf.shape else array[i, j].astype(leaf.dtype)
        try:
            check_member(leaf, value)
        except ContractError as error:
            raise ActionError(f"{where(i, j)}: {error}") from None


def take_copies(leaf: Leaf, array: AnyArray, wanted: BoolArray, sizes: NDArray[np.int64], where: Where) -> AnyArray:
    """Copy objects, so that the caller may change them at once.

    Args:
        leaf: The leaf.
        array: (n, A_g) of dtype object.
        wanted: (n, A_g) bool, which of them; the others mean nothing, and None takes their place.
        sizes: (n,) bytes of each env's objects so far; those of these are added.
        where: For messages.

    Raises:
        ActionError: One cannot be pickled, or an env's objects become too large.
    """
    copies = np.full(array.shape, None, np.object_)
    for i, j in np.argwhere(wanted).tolist():
        try:
            copies[i, j], size = snapshot(leaf, array[i, j], by_value=True)
            check_size(leaf, size, int(sizes[i]))
        except ContractError as error:
            raise ActionError(f"{where(i, j)}: {error}") from None
        sizes[i] += size
    return copies
