"""What states are made of: a copy of what an env said, once it is sure that it can be written to a file."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from marlvec.errors import ArgumentError, SerialisationError
from marlvec.serialization.values import encode

__all__ = ["one_each", "plain_copy"]


def plain_copy(state: Any, name: str) -> Any:
    """Copy a state, so that its env may go on changing what it handed out.

    Args:
        state: What ``get_state()`` returned.
        name: The env's, for messages.

    Raises:
        SerialisationError: It is no plain data; names the part.
    """
    try:
        encode(state, f"what {name}.get_state() returned")
    except SerialisationError as error:
        raise SerialisationError(f"{error}. A state is plain data, so that it can be written to a file") from None
    return deepcopy(state)


def one_each(values: Any, n: int, where: str) -> list[Any]:
    """A copy of a list of a state that has one value for each of n agents.

    Raises:
        ArgumentError: It is none.
    """
    if not isinstance(values, list) or len(values) != n:
        raise ArgumentError(f"{where}: expected {n} values, one for each agent, got {values!r:.200}")
    return list(values)
