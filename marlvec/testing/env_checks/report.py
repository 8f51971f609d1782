"""Where something went wrong, and where two nested values differ, to the bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from reprlib import Repr
from traceback import extract_tb
from typing import Any, NamedTuple, NoReturn

import numpy as np

from marlvec.errors import ContractError
from marlvec.testing.env_checks.findings import CHECKS, EpisodeLog, Fault, Finding

__all__ = ["Place", "short", "Difference", "first_difference", "leaf"]

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
        advice = change or CHECKS[check].change
        finding = Finding(check, "minor" if minor else "serious", str(self), subject, expected, got, advice)
        raise Fault(finding, (check, path, kind or advice))

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


def short(value: Any) -> str:
    """A value for a message, on one line."""
    return " ".join(_REPR.repr(value).split())


class Difference(NamedTuple):
    """The first place in which two values differ.

    Attributes:
        path: Where in the tree, e.g. ``"camera/left"``; ``""`` for the value itself.
        before, after: What is there, in words.
    """

    path: str
    before: str
    after: str


def first_difference(before: Any, after: Any, path: str = "") -> Difference | None:
    """Compare dicts, lists and tuples part by part, arrays by dtype, shape and every number; NaN equals NaN."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        if before.keys() != after.keys():
            return Difference(path, f"keys {_keys(before)}", f"keys {_keys(after)}")
        parts = [(str(key), before[key], after[key]) for key in before]
    elif isinstance(before, (list, tuple)) and type(before) is type(after):
        if len(before) != len(after):
            return Difference(path, short(before), short(after))
        parts = [(str(i), a, b) for i, (a, b) in enumerate(zip(before, after, strict=True))]
    else:
        return None if _same(before, after) else _differ(path, before, after)
    found = (first_difference(a, b, f"{path}/{key}" if path else key) for key, a, b in parts)
    return next((difference for difference in found if difference), None)


def leaf(subject: str, path: str) -> str:
    """Name a part of a value."""
    return f"{subject}, leaf {path!r}" if path else subject


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, (np.ndarray, np.generic)) or isinstance(b, (np.ndarray, np.generic)):
        if type(a) is not type(b) or a.dtype != b.dtype or a.shape != b.shape:
            return False
        return bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fc"))
    return type(a) is type(b) and bool(a == b or (a != a and b != b))


def _differ(path: str, before: Any, after: Any) -> Difference:
    arrays = isinstance(before, np.ndarray) and isinstance(after, np.ndarray)
    if arrays and before.shape == after.shape and before.dtype == after.dtype:
        # One number says more than the beginnings of two large arrays.
        for at in np.ndindex(before.shape):
            if not _same(before[at], after[at]):
                where = f" at index {at}" if at else ""
                return Difference(path, f"{short(before[at])}{where}", short(after[at]))
    return Difference(path, _described(before), _described(after))


def _described(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape} {short(value.tolist())}"
    return f"{type(value).__name__} {short(value)}"


def _keys(table: Mapping[Any, Any]) -> str:
    return short(sorted(map(str, table)))
