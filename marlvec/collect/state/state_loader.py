"""`StateLoader`: loads the states of objects that are not the collector's own, all or none."""

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
    """The state of an object that has one, as a copy."""
    methods = _methods(thing)
    assert methods is not None  # has_state() says so
    return copy.deepcopy(methods[0]())


class StateLoader:
    """Loads states one after the other; where one is refused, those before it are taken back."""

    def __init__(self) -> None:
        self._wanted: list[tuple[str, Any, Any]] = []
        self._before: list[tuple[Any, Any]] = []

    def add(self, who: str, thing: Any, state: Any) -> None:
        """An object is to get a state, when `load` is called.

        Args:
            who: The object, for messages.
            thing: It.
            state: Its state.

        Raises:
            ArgumentError: It has no methods for that.
        """
        if not has_state(thing):
            raise ArgumentError(f"{who}: the saved state has a state for it, but {thing!r:.200} cannot load one")
        self._wanted.append((who, thing, state))

    def load(self) -> None:
        """Load all.

        Raises:
            ArgumentError: One found its state to be none; names it. `undo` is to be called.
            Exception: As the object raised it, with a note that names the object.
        """
        for who, thing, state in self._wanted:
            methods = _methods(thing)
            assert methods is not None  # looked at in add()
            self._before.append((thing, state_of(thing)))
            try:
                methods[1](copy.deepcopy(state))
            except Exception as error:
                if isinstance(error, _OF_WRONG_DATA) and not isinstance(error, MarlvecError):
                    raise ArgumentError(f"set_state(): {who} cannot take its state: {error!r:.300}") from error
                error.add_note(f"in the state of {who}")
                raise

    def undo(self) -> None:
        """Give all their states of before."""
        while self._before:
            thing, state = self._before.pop()
            methods = _methods(thing)
            assert methods is not None  # likewise
            methods[1](state)
