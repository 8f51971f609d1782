"""`Place`: the location of a fault; and the first difference of nested values, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from traceback import extract_tb
from typing import Any, NoReturn

from marlvec.errors import ContractError
from marlvec.spaces.equality import Difference, difference, short
from marlvec.testing.env_checks.findings import CHECKS, EpisodeLog, Fault, Finding

__all__ = ["Place", "short", "first_difference", "leaf"]


@dataclass(frozen=True)
class Place:
    """One call of one env."""

    env: str
    call: str  # e.g. "step()"
    episode: int | None = None  # from 1; None outside of one
    step: int | None = None  # from 1; None at a reset
    # for findings after which the check can continue; None: it stops
    log: EpisodeLog | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        counts = (("episode", self.episode), ("step", self.step))
        return f"{self.env}.{self.call}" + "".join(f", {what} {n}" for what, n in counts if n is not None)

    def broken(self, subject: str, expected: str, got: str) -> NoReturn:
        """Raise the `ContractError` of a fault here."""
        raise ContractError(f"{self}: {subject}: expected {expected}, got {got}")

    def fault(
        self,
        check: str,
        subject: str,
        expected: str,
        got: str,
        change: str = "",
        *,
        path: str = "",
        kind: str = "",
        minor: bool = False,
    ) -> NoReturn:
        """Raise the `Fault` of a finding here.

        `change`: advice, by default the check's. Faults with equal check, `path` (the leaf) and `kind` (by default the
        advice) are one finding. `minor`: marlvec corrects it silently.
        """
        advice = change or CHECKS[check]
        finding = Finding(check, "minor" if minor else "serious", str(self), subject, expected, got, advice)
        raise Fault(finding, (check, path, kind or advice))

    def report(self, *args: Any, **kwargs: Any) -> None:
        """Add the `Fault` that `fault` raises to the log; raise it if there is no log."""
        with self.logging():
            self.fault(*args, **kwargs)

    def raised(self, error: Exception) -> NoReturn:
        """Raise the `Fault` of an error that the env raised."""
        frame = extract_tb(error.__traceback__)[-1]
        change = f"see {frame.filename}, line {frame.lineno}, in {frame.name}()"
        got = f"{type(error).__name__}: {error}"
        kind = f"{self.call} {type(error).__name__}"
        try:
            self.fault("runs", "the call", "no exception", got, change, kind=kind)
        except Fault as fault:
            raise fault from error

    @contextmanager
    def logging(self) -> Iterator[None]:
        """Add faults raised inside to the log, and continue after the block; without a log, raise them."""
        try:
            yield
        except Fault as fault:
            if self.log is None:
                raise
            self.log.add(fault)


def first_difference(before: Any, after: Any) -> Difference | None:
    """Return where two values differ; the array index, if any, is in ``expected``."""
    found = difference(before, after)
    return found and found._replace(expected=found.expected + (f" at index {found.at}" if found.at else ""))


def leaf(subject: str, path: str) -> str:
    """Return the name of a leaf of a value."""
    return f"{subject}, leaf {path!r}" if path else subject
