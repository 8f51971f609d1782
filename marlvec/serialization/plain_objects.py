"""Objects in observations and actions, such as texts and graphs, and arrays of them, as plain data."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import GraphInstance
from numpy.typing import NDArray

from marlvec.errors import SerialisationError
from marlvec.trees import to_array

__all__ = ["array_from", "object_from", "plain_array", "plain_object"]

_GRAPH = "GraphInstance"


def plain_object(value: Any) -> Any:
    """An object of an observation as plain data: a copy."""
    if isinstance(value, GraphInstance):
        return {_GRAPH: [plain_object(part) for part in value]}
    if isinstance(value, (tuple, list)):
        return type(value)(plain_object(item) for item in value)
    if isinstance(value, dict):
        return {key: plain_object(item) for key, item in value.items()}
    return value.copy() if isinstance(value, np.ndarray) else value


def object_from(value: Any) -> Any:
    """What `plain_object` was given: a copy."""
    if isinstance(value, dict):
        if value.keys() == {_GRAPH}:
            return GraphInstance(*(object_from(part) for part in value[_GRAPH]))
        return {key: object_from(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(object_from(item) for item in value)
    return value.copy() if isinstance(value, np.ndarray) else value


def plain_array(value: Any, where: str) -> Any:
    """A copy of an array; of one of objects, a list of those.

    Raises:
        SerialisationError: It holds objects along more axes than one.
    """
    array = to_array(value)
    if not array.dtype.hasobject:
        return array.copy()
    if array.dtype != object or array.ndim != 1:
        raise SerialisationError(f"{where} holds Python objects in {array.dtype} of {array.shape}")
    return [plain_object(item) for item in array.tolist()]


def array_from(value: Any) -> NDArray[Any]:
    """The array that `plain_array` was given, in new memory."""
    if not isinstance(value, list):
        return np.array(value)
    array = np.empty(len(value), object)
    for i, item in enumerate(value):
        array[i] = object_from(item)
    return array
