"""Where in a value that cannot be pickled the part is that cannot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import cloudpickle

__all__ = ["find_culprit"]


def find_culprit(value: Any) -> str:
    """Follow what cannot be pickled to its innermost part.

    Args:
        value: Something that cannot be pickled.

    Returns:
        The way there as one would write it in Python, ``"[2].keywords['config'].lock"``; empty if it is the value
        itself.
    """
    way, seen = "", set[int]()
    while id(value) not in seen:
        seen.add(id(value))
        for step, part in _parts(value):
            if not _can_be_pickled(part):
                way, value = way + step, part
                break
    return way


def _can_be_pickled(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What a value is made of, and how to get there."""
    match value:
        case dict():
            yield from ((f"[{key!r}]", part) for key, part in value.items())
        case list() | tuple():
            yield from ((f"[{k}]", part) for k, part in enumerate(value))
        case partial():
            yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
        case MethodType():
            yield ".__self__", value.__self__
        case FunctionType():
            yield from _parts_of_function(value)
        case _:
            own = getattr(value, "__dict__", {})
            yield from ((f".{name}", part) for name, part in own.items() if not name.startswith("__"))


def _parts_of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Its defaults, and the variables of other scopes that it uses: those travel with it."""
    yield ".__defaults__", function.__defaults__
    yield ".__kwdefaults__", function.__kwdefaults__
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # nothing was assigned to it yet
            yield f".__closure__[{name!r}]", cell.cell_contents
    for name in sorted(_names_in(function.__code__) & function.__globals__.keys()):
        yield f".__globals__[{name!r}]", function.__globals__[name]


def _names_in(code: CodeType) -> set[str]:
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*map(_names_in, inner))
