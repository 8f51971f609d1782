"""Where in a check something was found, and the one form of its messages."""

from __future__ import annotations

from dataclasses import dataclass
from reprlib import Repr
from typing import Any, NoReturn

from marlvec.errors import ContractError

__all__ = ["Place", "short"]

_REPR = Repr()
_REPR.maxother = _REPR.maxstring = 120


@dataclass(frozen=True)
class Place:
    """One call of one env.

    Attributes:
        env: The env's name.
        call: What was called, e.g. ``"step()"``.
        episode: Number of the episode, counted from 1; None outside of one.
        step: Number of the step, counted from 1; None at a reset.
    """

    env: str
    call: str
    episode: int | None = None
    step: int | None = None

    def __str__(self) -> str:
        counts = (("episode", self.episode), ("step", self.step))
        return f"{self.env}.{self.call}" + "".join(f", {what} {n}" for what, n in counts if n is not None)

    def broken(self, subject: str, expected: str, got: str) -> NoReturn:
        """Raise the `ContractError` that says what is wrong here."""
        raise ContractError(f"{self}: {subject}: expected {expected}, got {got}")


def short(value: Any) -> str:
    """A value for a message, on one line."""
    return " ".join(_REPR.repr(value).split())
