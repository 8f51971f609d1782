"""`StateLoader`: loads the states of a user's objects (policies, callbacks, …), all or none."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from marlvec.errors import ArgumentError, MarlvecError

__all__ = ["StateLoader", "has_state", "state_of"]

_OF_WRONG_DATA = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
_METHODS = ("get_state", "set_state"), ("state_dict", "load_state_dict")


def _methods(thing: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """Return the methods that get and set an object's state; None if it has none."""
    if isinstance(thing, Mapping):
        return None
    for pair in _METHODS:
        get, put = (getattr(thing, name, None) for name in pair)
        if callable(get) and callable(put):
            return get, put
    return None


def has_state(thing: Any) -> bool:
    """Whether an object has ``get_state()`` and ``set_state()``, or ``state_dict()`` and ``load_state_dict()``."""
    return _methods(thing) is not None


def state_of(thing: Any) -> Any:
    """Return a copy of an object's state; it must have one."""
    methods = _methods(thing)
    assert methods is not None  # has_state() is true
    return copy.deepcopy(methods[0]())


Put = Callable[[Any], Any]


class StateLoader:
    """Loads states one after the other; if an object rejects its state, restores the earlier ones."""

    def __init__(self) -> None:
        self._wanted: list[tuple[str, Callable[[], Any], Put, Any]] = []
        self._before: list[tuple[Put, Any]] = []

    def add(self, who: str, thing: Any, state: Any) -> None:
        """Register an object, ``who`` in messages, and the state that `load` will give it."""
        if (methods := _methods(thing)) is None:
            raise ArgumentError(f"{who}: the saved state has a state for it, but {thing!r:.200} cannot load one")
        self._wanted.append((who, *methods, state))

    def load(self) -> None:
        """Load all states; an error names the object that raised it. Call `undo` then."""
        for who, get, put, state in self._wanted:
            self._before.append((put, copy.deepcopy(get())))
            try:
                put(copy.deepcopy(state))
            except Exception as error:
                if isinstance(error, _OF_WRONG_DATA) and not isinstance(error, MarlvecError):
                    raise ArgumentError(f"set_state(): {who} cannot take its state: {error!r:.300}") from error
                error.add_note(f"in the state of {who}")
                raise

    def undo(self) -> None:
        """Restore the previous states of all objects."""
        while self._before:
            put, state = self._before.pop()
            put(state)
