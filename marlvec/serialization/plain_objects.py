"""Objects in observations and actions, such as texts and graphs, as plain data."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import GraphInstance

__all__ = ["object_from", "plain_object"]

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
