"""Conversion of objects in observations and actions (texts, graphs), and arrays of them, to plain data and back."""

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
    """Return a copy of an object as plain data."""
    if isinstance(value, GraphInstance):
        return {_GRAPH: [plain_object(part) for part in value]}
    if isinstance(value, (tuple, list)):
        return type(value)(plain_object(item) for item in value)
    if isinstance(value, dict):
        return {key: plain_object(item) for key, item in value.items()}
    return value.copy() if isinstance(value, np.ndarray) else value


def object_from(value: Any) -> Any:
    """Return a copy of the object that `plain_object` was called with."""
    if isinstance(value, dict):
        if value.keys() == {_GRAPH}:
            return GraphInstance(*(object_from(part) for part in value[_GRAPH]))
        return {key: object_from(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(object_from(item) for item in value)
    return value.copy() if isinstance(value, np.ndarray) else value


def plain_array(value: Any, where: str) -> Any:
    """Return a copy of an array; for objects on one axis, a list of them as plain data."""
    array = to_array(value)
    if not array.dtype.hasobject:
        return array.copy()
    if array.dtype != object or array.ndim != 1:
        raise SerialisationError(f"{where} holds Python objects in {array.dtype} of {array.shape}")
    return [plain_object(item) for item in array.tolist()]


def array_from(value: Any) -> NDArray[Any]:
    """Return the array that `plain_array` was called with, in new memory."""
    if not isinstance(value, list):
        return np.array(value)
    array = np.empty(len(value), object)
    for i, item in enumerate(value):
        array[i] = object_from(item)
    return array
