"""What a seeded defect is: a function that patches marlvec, and the tests that must find it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["DEFECTS", "FINDERS", "VARIABLE", "WRONG", "Defect", "Patch", "after", "during", "found_by"]

VARIABLE = "MARLVEC_TEST_DEFECT"
"""The variable of the environment that names the defect of a run."""
FINDERS = "MARLVEC_TEST_FINDERS"
"""The variable that names a file for the ids of the tests that found it, one a line."""
WRONG = 70
"""The exit code of a run in which something else failed."""


class Patch(Protocol):
    """What a defect patches with: a `pytest.MonkeyPatch`, or in a worker, which ends with it, plain `setattr`."""

    def setattr(self, target: Any, name: str, value: Any) -> None: ...


@dataclass(frozen=True)
class Defect:
    """One defect.

    Attributes:
        name: Its name.
        title: What is wrong, in one sentence.
        tests: What pytest is asked to run to find it.
        apply: Puts it into marlvec.
        in_workers: Whether it must be in the worker processes, too.
    """

    name: str
    title: str
    tests: tuple[str, ...]
    apply: Callable[[Patch], None]
    in_workers: bool


DEFECTS: dict[str, Defect] = {}


def found_by(*tests: str, in_workers: bool = False) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Keep a defect under its name; its docstring is the title."""

    def keep(apply: Callable[[Patch], None]) -> Callable[[Patch], None]:
        name = apply.__name__
        assert name not in DEFECTS
        DEFECTS[name] = Defect(name, (apply.__doc__ or "").strip(), tests, apply, in_workers)
        return apply

    return keep


def after(patch: Patch, owner: Any, name: str, what: Callable[..., None]) -> None:
    """Let ``what(result, self, *args)`` follow on a method."""
    original = getattr(owner, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        what(result, self, *args)
        return result

    patch.setattr(owner, name, method)


@contextmanager
def during(obj: Any, name: str, value: Any) -> Iterator[None]:
    """Give one object another method, or attribute, for a while."""
    own, had, before = vars(obj), name in vars(obj), getattr(obj, name)  # raises where there is no such name
    own[name] = value
    try:
        yield
    finally:
        if had:
            own[name] = before
        else:
            del own[name]
