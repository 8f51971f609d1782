"""Names of the checks of `marlvec.testing.check_env`, their findings, and the places of faults."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from traceback import extract_tb
from typing import Any, NoReturn

from marlvec.errors import ArgumentError, ContractError
from marlvec.spaces.equality import Difference, difference, short

__all__ = [
    "CHECKS",
    "EpisodeLog",
    "Fault",
    "Finding",
    "Findings",
    "check_names",
    "Place",
    "Uncopied",
    "short",
    "first_difference",
    "leaf",
]

CHECKS: dict[str, str] = {
    "form": "return such an env from the factory",
    "runs": "mend what raises",
    "results": "return what the API asks for",
    "shared_state": "keep on self all that changes while it plays",
    "seed": "draw only from a generator that reset(seed=…) seeds; the clock, os.urandom(), ids of objects and the "
    "order of sets differ, too",
    "reset": "begin anew in reset(seed=…) all that earlier episodes have changed, random generators included",
    "life": "set the agent's termination or truncation in the step that takes it out of env.agents, and leave it out "
    "of every dict from then on",
    "agents": "name in env.agents and in every dict only possible agents",
    "keys": "give one entry for each live agent",
    "ends": "truncate it after so many steps, or call with a larger max_steps if it is meant to be so long",
    "rewards": "return float(reward) for each agent",
    "rewards_once": "call self._clear_rewards() at the beginning of each step, and self._accumulate_rewards() once at "
    "its end",
    "flags": "return bool(flag)",
    "masks": "give one 0 or 1 per choice",
    "observations": "widen the space, or keep the observation within it",
    "state": "widen state_space, or keep the state within it",
    "spaces": "build the spaces once in __init__, keep them on self, and return those",
    "infos": "return {} where there is nothing to say",
    "arguments": "work on a copy of it",
}
"""Name of each check, most serious first, and the default advice of its findings; `check_env` documents each check."""

_BREAKS = frozenset({"runs", "results", "life", "agents", "masks"})
"""After one of these, other faults of an episode's agents may be consequences."""
_FOLLOWS = frozenset({"runs", "results", "life", "agents", "keys", "ends", "rewards_once"})


@dataclass(frozen=True)
class Finding:
    """One fault of an env.

    Attributes:
        check: Name of the check, as for ``skip``.
        severity: ``"serious"``: numbers are wrong, or code stops. ``"minor"``: marlvec corrects it silently; other
            libraries may not.
        where: The call, episode and step where first seen.
        subject: What is wrong there.
        expected: What it should be.
        got: What it is.
        change: What to change.
        times: How often it was seen.
    """

    check: str
    severity: str
    where: str
    subject: str
    expected: str
    got: str
    change: str
    times: int = field(default=1, compare=False)

    @property
    def problem(self) -> str:
        """Place, expectation and result, in one line."""
        return f"{self.where}: {self.subject}: expected {self.expected}, got {self.got}"

    def __str__(self) -> str:
        return f"{self.problem}\n  To change: {self.change}"


class Fault(ContractError):
    """Carries a finding, with a key that equal faults share, to where the check can continue."""

    def __init__(self, finding: Finding, key: tuple[Any, ...]) -> None:
        super().__init__(finding.problem)
        self.finding, self.key = finding, key


class Findings:
    """All findings, each fault once. `is_aside`: they come from instances that may affect each other."""

    def __init__(self, skip: Iterable[str] = (), *, is_aside: bool = False) -> None:
        self._skip = frozenset(skip)
        self.is_aside = is_aside
        self._found: dict[tuple[Any, ...], Finding] = {}

    def __len__(self) -> int:
        return len(self._found)

    def new(self) -> Findings:
        """Return an empty collection for instances that may affect each other."""
        return Findings(self._skip, is_aside=True)

    def add(self, fault: Fault) -> None:
        """Add a finding, or count it if present; the first serious one represents all."""
        found = fault.finding
        if found.check in self._skip:
            return
        if (seen := self._found.get(fault.key)) is not None:
            worse = seen.severity == "minor" and found.severity == "serious"
            found = replace(found if worse else seen, times=seen.times + 1)
        self._found[fault.key] = found

    def note(self, place: Place, *fault: str) -> None:
        """Add the finding of a fault at a place; see `Place.fault`."""
        try:
            place.fault(*fault)
        except Fault as found:
            self.add(found)

    def update(self, others: Findings) -> None:
        """Add the findings of others that are missing here."""
        for key, finding in others._found.items():
            self._found.setdefault(key, finding)

    def in_order(self) -> list[Finding]:
        """Return the findings, serious ones first."""
        rank = {name: number for number, name in enumerate(CHECKS)}
        return sorted(self._found.values(), key=lambda one: (one.severity != "serious", rank[one.check]))


class EpisodeLog:
    """Log of one player's findings.

    Once the agents of an episode are wrong, further faults of agents in the same episode may be consequences and are
    dropped.
    """

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        self._is_aside = False
        self.begin()

    def divert(self, findings: Findings) -> None:
        self._is_aside = findings.is_aside
        self.findings = findings

    def begin(self) -> None:
        self.doubtful, self.found = False, self._is_aside

    def add(self, fault: Fault) -> None:
        check = fault.finding.check
        self.found = True
        if self.doubtful and check in _FOLLOWS:
            return
        self.doubtful = self.doubtful or (check in _BREAKS and fault.finding.severity == "serious")
        self.findings.add(fault)


def check_names(skip: Iterable[str] | str) -> frozenset[str]:
    """Return the names of checks to skip; the error of an unknown one lists all names."""
    names = (skip,) if isinstance(skip, str) else tuple(skip)
    for name in names:
        if name not in CHECKS:
            near = difflib.get_close_matches(str(name), CHECKS, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ArgumentError(f"skip: expected names of checks, {', '.join(CHECKS)}; got {name!r}{hint}")
    return frozenset(names)


@dataclass(frozen=True)
class Uncopied:
    """Stands for a value that cannot be copied; two of one class are equal."""

    kind: type


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

    def stopped(self, error: Exception) -> Fault:
        """Return the `Fault` of an error that ended the check here: the check could not go on, so it must say so."""
        frame = extract_tb(error.__traceback__)[-1]
        where = f"{frame.filename}, line {frame.lineno}, in {frame.name}()"
        got = f"{type(error).__name__}: {error} ({where})"
        change = "mend the other findings and check again: nothing was checked from there to the end of the episode"
        try:
            self.fault("runs", "check_env()", "to go on", got, change, kind=f"stopped {type(error).__name__}")
        except Fault as fault:
            return fault

    def copied(self, check: str, subject: str, value: Any, purpose: str) -> Any:
        """Return a deep copy of a value; report one that cannot be copied, and return an `Uncopied` in its place."""
        try:
            return deepcopy(value)
        except Exception as error:
            got = f"{type(value).__name__}: copy.deepcopy() raises {type(error).__name__}: {error}"
            change = f"use arrays, numbers and classes that copy.deepcopy() can copy: {purpose}"
            self.report(check, subject, "a value that can be copied", got, change)
            return Uncopied(type(value))

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
