"""Parameter types that declare legal values, such as `PositiveInt`, and the check of their values."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from marlvec.arguments import whole_number
from marlvec.errors import ArgumentError

__all__ = [
    "NonNegativeFloat",
    "NonNegativeInt",
    "PositiveFloat",
    "PositiveInt",
    "Probability",
    "Range",
    "UnitFloat",
    "check_parameters",
]


class Range(NamedTuple):
    """The legal values of a parameter."""

    text: str  # description for messages
    read: Callable[[Any], Any]  # returns a legal value in its stored form, and None for an illegal one


def _whole(least: int) -> Range:
    def read(value: Any) -> int | None:
        number = whole_number(value)
        return number if number is not None and number >= least else None

    return Range(f"a whole number of at least {least}", read)


def _number(text: str, holds: Callable[[Any], Any]) -> Range:
    def read(value: Any) -> Any:
        try:
            return value if holds(value) else None
        except TypeError:  # not a number
            return None

    return Range(text, read)


PositiveInt = Annotated[int, _whole(1)]
NonNegativeInt = Annotated[int, _whole(0)]
PositiveFloat = Annotated[float, _number("above 0", lambda x: x > 0)]
NonNegativeFloat = Annotated[float, _number("at least 0", lambda x: x >= 0)]
UnitFloat = Annotated[float, _number("from 0 to 1", lambda x: 0 <= x <= 1)]
Probability = Annotated[float, _number("a probability in [0, 1]", lambda x: 0 <= x <= 1)]


def check_parameters(owner: Any) -> None:
    """Check an object's fields for which its classes in ``marlvec.connectors`` declare a range or a Literal."""
    for name, legal, optional in _ranges(type(owner)):  # type: ignore[arg-type]  # a class is hashable
        value = getattr(owner, name)
        if value is None and optional:
            continue
        kept = legal.read(value)
        if kept is None:
            raise ArgumentError(f"{name} must be {legal.text}{', or None' if optional else ''}, got {value!r}")
        setattr(owner, name, kept)


@cache
def _ranges(cls: type[Any]) -> tuple[tuple[str, Range, bool], ...]:
    """Return (name, range, whether None is legal) of each field with a range."""
    ours = [base for base in reversed(cls.__mro__) if base.__module__.startswith("marlvec.connectors.")]
    hints = [item for base in ours for item in inspect.get_annotations(base, eval_str=True).items()]
    found = ((name, _range_of(hint), type(None) in get_args(hint)) for name, hint in hints)
    return tuple((name, legal, optional) for name, legal, optional in found if legal is not None)


def _range_of(hint: Any) -> Range | None:
    if get_origin(hint) is Literal:
        *others, last = (f'"{choice}"' for choice in get_args(hint))
        return Range(f"{', '.join(others)} or {last}", lambda value: value if value in get_args(hint) else None)
    marks = (mark for part in (hint, *get_args(hint)) for mark in getattr(part, "__metadata__", ()))
    return next((mark for mark in marks if isinstance(mark, Range)), None)
