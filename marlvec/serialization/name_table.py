"""`NameTable`: names of the classes and functions that a config may refer to."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from marlvec.errors import AlreadyRegisteredError, ArgumentError, RegistryError

__all__ = ["CLASSES", "FUNCTIONS", "NameTable"]

T = TypeVar("T", bound=Callable[..., Any])


class NameTable(Generic[T]):
    """A table from names to classes or functions, and back; `kind` and `decorator` are for messages."""

    def __init__(self, kind: str, decorator: str) -> None:
        self.kind = kind
        self.decorator = decorator
        self._things: dict[str, T] = {}

    def add(self, thing: T, name: str | None = None) -> None:
        """Register ``thing`` under ``name``; None: under its own name. Registering it again has no effect."""
        # A thing defined again at the same place, as when a notebook's cell runs twice, replaces the old one.
        name = getattr(thing, "__name__", None) if name is None else name
        if not isinstance(name, str) or not name or name == "<lambda>":
            raise ArgumentError(
                f"{thing!r} needs a name to be registered under, got {name!r}: give {self.kind} name=..."
            )
        if (known := self.name_of(thing)) not in (None, name):
            raise AlreadyRegisteredError(f"{thing!r} is registered as the {self.kind} {known!r} already")
        taken = self._things.get(name)
        if taken is not None and taken is not thing and not _same_place(taken, thing):
            raise AlreadyRegisteredError(
                f"the {self.kind} {name!r} is {_place(taken)} already; register {_place(thing)} with another name=..."
            )
        self._things[name] = thing

    def name_of(self, thing: T) -> str | None:
        """Return a thing's name; None if it is not registered."""
        return next((name for name, known in self._things.items() if known is thing), None)

    def find(self, name: str) -> T:
        """Return the thing with a name; `RegistryError` lists similar names."""
        if name in self._things:
            return self._things[name]
        close = difflib.get_close_matches(name, self._things) if isinstance(name, str) and len(name) < 200 else []
        hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
        raise RegistryError(
            f"no {self.kind} is registered as {name!r:.200}: first import the module that has {self.decorator} over it"
            f"{hint}"
        )


CLASSES: NameTable[type[Any]] = NameTable("connector", "@register_connector")
"""Connector classes: marlvec's own, and others by `register_connector`."""

FUNCTIONS: NameTable[Callable[..., Any]] = NameTable("function", "@register_function")
"""Functions that connectors take as arguments, by `register_function`."""


def _same_place(a: Any, b: Any) -> bool:
    """Return whether two things come from one definition in the source, run twice."""
    return _place(a) == _place(b) and "<" not in _place(a)  # "<locals>" and "<lambda>" are not unique


def _place(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '?')}.{getattr(thing, '__qualname__', '<no name>')}"
