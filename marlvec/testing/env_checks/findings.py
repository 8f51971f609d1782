"""What `marlvec.testing.check_env` looks for, and what it found."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from marlvec.errors import ArgumentError, ContractError

__all__ = ["CHECKS", "EpisodeLog", "Fault", "Finding", "Findings", "check_names"]


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
"""Name of each check, the most serious first, to what to change where a finding says nothing closer; `check_env` says
what each checks."""

_BREAKS = frozenset({"runs", "results", "life", "agents", "masks"})
"""After one of these, what an episode shows of its agents may follow from it."""
_FOLLOWS = frozenset({"runs", "results", "life", "agents", "keys", "ends", "rewards_once"})


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with an env.

    Attributes:
        check: The name of the check that found it, as ``skip`` takes it.
        severity: ``"serious"``: numbers are wrong, or code stops. ``"minor"``: marlvec puts it right in silence; other
            libraries may not.
        where: The call, episode and step in which it was seen first.
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
        """Where it is, what was expected, and what came instead, on one line."""
        return f"{self.where}: {self.subject}: expected {self.expected}, got {self.got}"

    def __str__(self) -> str:
        return f"{self.problem}\n  To change: {self.change}"


class Fault(ContractError):
    """Carries a finding from where it was seen to where the check can go on.

    Args:
        finding: The finding.
        key: What it has in common with those that are the same fault.
    """

    def __init__(self, finding: Finding, key: tuple[Any, ...]) -> None:
        super().__init__(finding.problem)
        self.finding, self.key = finding, key


class Findings:
    """All that was found, each fault once.

    Args:
        skip: Names of checks whose findings are left out.
        is_aside: Whether what is found comes from instances that may disturb each other.
    """

    def __init__(self, skip: Iterable[str] = (), *, is_aside: bool = False) -> None:
        self._skip = frozenset(skip)
        self.is_aside = is_aside
        self._found: dict[tuple[Any, ...], Finding] = {}

    def __len__(self) -> int:
        return len(self._found)

    def new(self) -> Findings:
        """Others, of instances that may disturb each other."""
        return Findings(self._skip, is_aside=True)

    def add(self, fault: Fault) -> None:
        """Add one, or count it, if it is there; the first serious one stands for all."""
        found = fault.finding
        if found.check in self._skip:
            return
        if (seen := self._found.get(fault.key)) is not None:
            worse = seen.severity == "minor" and found.severity == "serious"
            found = replace(found if worse else seen, times=seen.times + 1)
        self._found[fault.key] = found

    def update(self, others: Findings) -> None:
        """Add those that others have and this one has not."""
        for key, finding in others._found.items():
            self._found.setdefault(key, finding)

    def in_order(self) -> list[Finding]:
        """The findings, serious ones first."""
        rank = {name: number for number, name in enumerate(CHECKS)}
        return sorted(self._found.values(), key=lambda one: (one.severity != "serious", rank[one.check]))


class EpisodeLog:
    """Where one player writes what it finds.

    After an episode's agents have once been something else than they may be, what else is wrong with them in this
    episode may only follow from it, and is left out.

    Attributes:
        findings: Where they go.
        doubtful: Whether something is wrong with the agents of this episode.
        found: Whether anything is wrong in this episode.
    """

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        self._is_aside = False
        self.begin()

    def divert(self, findings: Findings) -> None:
        """Write to these from now on."""
        self._is_aside = findings.is_aside
        self.findings = findings

    def begin(self) -> None:
        """An episode begins."""
        self.doubtful, self.found = False, self._is_aside

    def add(self, fault: Fault) -> None:
        """Write down one fault."""
        check = fault.finding.check
        self.found = True
        if self.doubtful and check in _FOLLOWS:
            return
        self.doubtful = self.doubtful or (check in _BREAKS and fault.finding.severity == "serious")
        self.findings.add(fault)


def check_names(skip: Iterable[str] | str) -> frozenset[str]:
    """Names of checks to leave out.

    Raises:
        ArgumentError: One is not known; lists them all.
    """
    names = (skip,) if isinstance(skip, str) else tuple(skip)
    for name in names:
        if name not in CHECKS:
            near = difflib.get_close_matches(str(name), CHECKS, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ArgumentError(f"skip: expected names of checks, {', '.join(CHECKS)}; got {name!r}{hint}")
    return frozenset(names)
