"""Where something went wrong, and where two nested values differ, to the bit."""

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
    """One call of one env.

    Attributes:
        env: The env's name.
        call: What was called, e.g. ``"step()"``.
        episode: Number of the episode, counted from 1; None outside of one.
        step: Number of the step, counted from 1; None at a reset.
        log: Where findings go from which the check can go on; None: it cannot.
    """

    env: str
    call: str
    episode: int | None = None
    step: int | None = None
    log: EpisodeLog | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        counts = (("episode", self.episode), ("step", self.step))
        return f"{self.env}.{self.call}" + "".join(f", {what} {n}" for what, n in counts if n is not None)

    def broken(self, subject: str, expected: str, got: str) -> NoReturn:
        """Raise the `ContractError` that says what is wrong here."""
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
        """Raise the `Fault` that says what is wrong here, and what to change.

        Args:
            check: The check, of `CHECKS`.
            subject: What is wrong.
            expected: What it should be.
            got: What it is.
            change: What to change; ``""``: what the check says.
            path: The leaf. Faults of one check that have one ``path`` and one ``kind`` are one finding.
            kind: What makes it another fault; default: the advice.
            minor: Whether marlvec puts it right in silence.
        """
        advice = change or CHECKS[check]
        finding = Finding(check, "minor" if minor else "serious", str(self), subject, expected, got, advice)
        raise Fault(finding, (check, path, kind or advice))

    def report(self, *args: Any, **kwargs: Any) -> None:
        """Write the `Fault` that `fault` raises into the log; raise it if there is no log."""
        with self.going_on():
            self.fault(*args, **kwargs)

    def raised(self, error: Exception) -> NoReturn:
        """Raise the `Fault` that says that the env raised this."""
        frame = extract_tb(error.__traceback__)[-1]
        change = f"see {frame.filename}, line {frame.lineno}, in {frame.name}()"
        got = f"{type(error).__name__}: {error}"
        kind = f"{self.call} {type(error).__name__}"
        try:
            self.fault("runs", "the call", "no exception", got, change, kind=kind)
        except Fault as fault:
            raise fault from error

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Write down what is found here, and go on behind it."""
        try:
            yield
        except Fault as fault:
            if self.log is None:
                raise
            self.log.add(fault)


def first_difference(before: Any, after: Any) -> Difference | None:
    """Find where two values differ; the index in an array, if there is one, stands in ``expected``."""
    found = difference(before, after)
    return found and found._replace(expected=found.expected + (f" at index {found.at}" if found.at else ""))


def leaf(subject: str, path: str) -> str:
    """Name a part of a value."""
    return f"{subject}, leaf {path!r}" if path else subject
