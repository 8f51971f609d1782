"""`Finding`: a broken rule of an env and its place; checks of single values and spaces; the progress bar of checks."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import pairwise
from time import perf_counter
from traceback import extract_tb
from typing import Any, ClassVar, NamedTuple, NoReturn

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Space, Tuple
from numpy.typing import NDArray

from marlvec.envs.adapters.base import Sink, as_reward
from marlvec.errors import ArgumentError, ContractError
from marlvec.spaces import describe_difference
from marlvec.spaces.action_masks import choice_sizes, count_choices, read_mask, why_no_mask
from marlvec.spaces.equality import Difference, difference, short
from marlvec.spaces.members import fit
from marlvec.spaces.tree import has_arrays

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


class RuleBroken(ContractError):
    """Carries a finding, with a key that equal faults share, to where the check can continue.

    `breaks`: other faults of the episode's agents may be consequences.
    """

    def __init__(self, finding: Finding, key: tuple[Any, ...], *, breaks: bool = False) -> None:
        super().__init__(finding.problem)
        self.finding, self.key, self.breaks = finding, key, breaks


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

    def add(self, fault: RuleBroken) -> None:
        """Add a finding, or count it if present; the first serious one represents all."""
        found = fault.finding
        if found.check in self._skip:
            return
        if (seen := self._found.get(fault.key)) is not None:
            worse = seen.severity == "minor" and found.severity == "serious"
            found = replace(found if worse else seen, times=seen.times + 1)
        self._found[fault.key] = found

    def add_fault(self, place: PlayedCall, *fault: str) -> None:
        """Add the finding of a fault at a place; see `PlayedCall.fault`."""
        try:
            place.fault(*fault)
        except RuleBroken as found:
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

    def add(self, fault: RuleBroken) -> None:
        check = fault.finding.check
        self.found = True
        if self.doubtful and check in _FOLLOWS:
            return
        self.doubtful = self.doubtful or fault.breaks
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
class PlayedCall(Sink):
    """One call of one env, where broken rules become findings."""

    episode: int | None = None  # from 1; None outside of one
    step: int | None = None  # from 1; None at a reset
    # for findings after which the check can continue; None: it stops
    log: EpisodeLog | None = field(default=None, compare=False, repr=False)

    collects: ClassVar[bool] = True

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
        breaks: bool = False,
    ) -> NoReturn:
        """Raise the `RuleBroken` of a finding here; `change` is by default the check's advice, `path` a leaf."""
        advice = change or CHECKS[check]
        finding = Finding(check, "minor" if minor else "serious", str(self), subject, expected, got, advice)
        raise RuleBroken(finding, (check, path, kind or advice), breaks=breaks or (check in _BREAKS and not minor))

    def report(self, *broken: Any, **more: Any) -> None:
        """Add the `RuleBroken` that `fault` raises to the log; raise it if there is no log."""
        with self.logging():
            self.fault(*broken, **more)

    remark = report

    def raised(self, error: Exception) -> NoReturn:
        """Raise the `RuleBroken` of an error that the env raised."""
        frame = extract_tb(error.__traceback__)[-1]
        change = f"see {frame.filename}, line {frame.lineno}, in {frame.name}()"
        got = f"{type(error).__name__}: {error}"
        kind = f"{self.call} {type(error).__name__}"
        try:
            self.fault("runs", "the call", "no exception", got, change, kind=kind)
        except RuleBroken as fault:
            raise fault from error

    def stopped(self, error: Exception) -> RuleBroken:
        """Return the `RuleBroken` of an error that ended the check here: it could not go on, so it must say so."""
        frame = extract_tb(error.__traceback__)[-1]
        where = f"{frame.filename}, line {frame.lineno}, in {frame.name}()"
        got = f"{type(error).__name__}: {error} ({where})"
        change = "mend the other findings and check again: nothing was checked from there to the end of the episode"
        try:
            self.fault("runs", "check_env()", "to go on", got, change, kind=f"stopped {type(error).__name__}")
        except RuleBroken as fault:
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
        except RuleBroken as fault:
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


def check_member(
    space: Space[Any], value: Any, place: PlayedCall, subject: str, check: str = "observations", *, path: str = ""
) -> None:
    """Check a value leaf by leaf: it must be in its space, with exactly the space's dtype and shape.

    `path`: the value's own place in a larger one.

    `RuleBroken`: a leaf is wrong; if the place has a log, all wrong leaves go there instead.
    """
    _check_part(_Value(place, subject, check), space, value, path)


class _Value(NamedTuple):
    place: PlayedCall
    subject: str
    check: str

    def fault(
        self, path: str, expected: str, got: str, change: str = "", *, kind: str = "", minor: bool = False
    ) -> NoReturn:
        where = leaf(self.subject, path)
        self.place.fault(self.check, where, expected, got, change, path=path, kind=kind, minor=minor)


def _check_part(one: _Value, space: Space[Any], value: Any, path: str) -> None:
    if isinstance(space, Dict):
        if not isinstance(value, Mapping):
            one.fault(
                path,
                f"a dict with keys {sorted(map(str, space.spaces))}",
                type(value).__name__,
                "return a dict with the space's keys",
            )
        if set(value) != set(space.spaces):
            one.fault(
                path,
                f"keys {sorted(map(str, space.spaces))}",
                f"{sorted(map(str, value))}",
                "return exactly the keys of the space, or change the space",
            )
        parts = [(str(key), sub, value[key]) for key, sub in space.spaces.items()]
    elif isinstance(space, Tuple):
        if not isinstance(value, tuple) or len(value) != len(space.spaces):
            got = f"a tuple of {len(value)}" if isinstance(value, tuple) else type(value).__name__
            change = "return a tuple with a part for each space"
            one.fault(path, f"a tuple of {len(space.spaces)}", got, change)
        parts = [(str(i), sub, part) for i, (sub, part) in enumerate(zip(space.spaces, value, strict=True))]
    else:
        _check_leaf(one, space, value, path)
        return
    for name, sub, part in parts:
        with one.place.logging():
            _check_part(one, sub, part, f"{path}/{name}" if path else name)


def _check_leaf(one: _Value, space: Space[Any], value: Any, path: str) -> None:
    is_array = has_arrays(space)  # else only contains() can tell
    if is_array and isinstance(space, Discrete):
        _check_choice(one, space, value, path)
    elif is_array and _check_array(one, space, value, path):
        return  # contains() would report the dtype again
    doubt = ""
    try:
        # Gymnasium warns of a numpy scalar that it could convert to an array of shape ().
        if space.contains(np.asarray(value) if is_array and isinstance(space, Box) else value):
            return
    except Exception as error:  # gymnasium's own raise on some values of other types
        doubt = f" (contains() raised {type(error).__name__}: {error})"
    one.fault(path, f"a member of {space}", f"{short(value)}{doubt}")


def _check_array(one: _Value, space: Space[Any], value: Any, path: str) -> bool:
    """Check an array; return whether only its type or dtype is wrong."""
    is_odd = False
    if not isinstance(value, np.ndarray) and not (isinstance(value, np.generic) and space.shape == ()):
        got = f"{type(value).__name__} {short(value)}"
        change = _cast_or_change(value, space, f"return np.asarray(…, dtype=np.{space.dtype})")
        try:
            array = fit(np.empty(space.shape or (), space.dtype), value, path)
        except ContractError:
            one.fault(path, f"a numpy array of dtype {space.dtype}", got, change)
        with one.place.logging():
            one.fault(path, f"a numpy array of dtype {space.dtype}", got, change, minor=True)
        value, is_odd = array.astype(space.dtype), True  # fit() has refused lossy casts
    if value.shape != space.shape:
        change = "return it in the space's shape, or give the space this one"
        one.fault(path, f"shape {space.shape}", f"{value.shape}", change)
    if value.dtype.kind == "f" and np.isnan(value).any():
        at = tuple(np.argwhere(np.isnan(value))[0].tolist())
        change = "look for 0/0, inf - inf, or the root of a negative number where it is computed"
        one.fault(path, "numbers", f"NaN at index {at}", change)
    if value.dtype != space.dtype:
        cast = f"return it with .astype(np.{space.dtype}), or give the space dtype={value.dtype}"
        change, is_minor = _cast_or_change(value, space, cast), _is_corrected(space, value, path)
        with one.place.logging():
            one.fault(path, f"dtype {space.dtype}", f"{value.dtype}", change, kind="dtype", minor=is_minor)
        is_odd = True
    if isinstance(space, Box):
        outside = np.argwhere(~((value >= space.low) & (value <= space.high)))
        if len(outside):
            at = tuple(outside[0].tolist())
            bounds = f"a number from {space.low[at]} to {space.high[at]} at index {at}"
            one.fault(path, bounds, str(np.asarray(value)[at]))
    return is_odd


def _check_choice(one: _Value, space: Discrete, value: Any, path: str) -> None:
    plain = isinstance(value, (np.ndarray, np.generic)) and value.shape == ()
    minor = _is_corrected(space, value, path)
    if not plain and (not isinstance(value, int) or isinstance(value, bool)):
        change = _cast_or_change(value, space, "return int(value)")
        one.fault(path, "an int", f"{type(value).__name__} {short(value)}", change, minor=minor)
    if plain and value.dtype != space.dtype:
        change = _cast_or_change(value, space, "return int(value)")
        one.fault(path, f"dtype {space.dtype}", f"{value.dtype}", change, minor=minor)


def _is_corrected(space: Space[Any], value: Any, path: str) -> bool:
    """Return whether marlvec's buffers accept a value of another type or dtype without loss."""
    try:
        fit(np.empty(space.shape or (), space.dtype), value, path)
    except ContractError:
        return False
    return _lost_in_cast(value, space) is None


def _cast_or_change(value: Any, space: Space[Any], cast: str) -> str:
    """Advise a cast if it keeps every value; else name a value that it would change."""
    if (lost := _lost_in_cast(value, space)) is None:
        return cast
    return f"{lost} is no {space.dtype}: change the space (dtype, low, high), or what the env computes"


def _lost_in_cast(value: Any, space: Space[Any]) -> Any:
    """Return the first number that the space's dtype cannot hold, None if there is none.

    Rounding to a shorter float is no loss; a fraction in an int, or 1e300 in a float32, is.
    """
    try:
        array = np.asarray(value)
    except ValueError:  # a ragged list
        return None
    if array.dtype.kind not in "biuf":
        return None
    with np.errstate(all="ignore"):
        cast = array.astype(space.dtype)
        lost = np.isfinite(array) & ~np.isfinite(cast) if cast.dtype.kind == "f" else cast != array
    return array[lost].flat[0] if lost.any() else None


def check_reward(value: Any, place: PlayedCall, agent: Any) -> float:
    """Report a reward that is not one finite real number; return it as a float."""
    reward = as_reward(value, place, agent)
    if not math.isfinite(reward):
        change = "look for a division by zero, a logarithm of zero, or an overflow where it is computed"
        place.report("rewards", f"reward of agent {agent!r}", "a finite number", str(value), change)
    return reward


def check_mask(action_space: Space[Any], value: Any, place: PlayedCall, agent: Any) -> NDArray[np.bool_] | None:
    """Report a value that is not a mask, does not fit the action space, or allows no action.

    Return (n,) bool, one entry per choice; None if the action space has no choices.
    """
    size, subject = count_choices(action_space), f"action mask of agent {agent!r}"
    if size is None:
        if value is not None and why_no_mask(action_space):
            change = (
                "give Discrete or MultiDiscrete actions, or put a mask that only the policy reads under another key"
            )
            expected = f"none: marlvec takes no masks of {type(action_space).__name__} actions"
            place.fault("masks", subject, expected, short(value), change)
        return None
    try:
        mask = read_mask(value)
    except ContractError as error:
        expected, _, got = str(error).removeprefix("expected ").partition(", got ")
        place.fault("masks", subject, expected, got, kind="values")
    if mask.shape != (size,):
        place.fault("masks", subject, f"shape ({size},), one entry per choice of {action_space}", str(mask.shape))
    assert isinstance(action_space, (Discrete, MultiDiscrete))  # it has choices
    ends = [0, *np.cumsum(choice_sizes(action_space)).tolist()]
    if not all(mask[low:high].any() for low, high in pairwise(ends)):
        change = "allow at least one action, or end the agent; an action that does nothing is one, too"
        place.fault(
            "masks", subject, "at least one allowed action of an agent that must act", short(mask.tolist()), change
        )
    return mask


class ConstantSpaces:
    """All spaces of one env, as first returned.

    `read` returns them keyed by call, e.g. ``"observation_space('agent_0')"``; `RuleBroken`: a value is not a space.
    """

    def __init__(self, env: str, read: Callable[[], dict[str, Any]], log: EpisodeLog) -> None:
        self._env, self._read = env, read
        self._first: dict[str, Space[Any]] = read()
        for call, space in self._first.items():
            if not isinstance(space, Space):
                PlayedCall(env, call).fault(
                    "spaces",
                    "the space",
                    "a gymnasium space",
                    type(space).__name__,
                    "return a space of gymnasium.spaces",
                )
        purpose = "without a copy, later changes of the space are not found, and worker processes cannot receive it"
        self._copies = {
            call: PlayedCall(env, call, log=log).copied("spaces", "the space", space, purpose)
            for call, space in self._first.items()
        }
        self.check(PlayedCall(env, "", log=log))

    def check(self, place: PlayedCall) -> None:
        """Read the spaces again; report changes to the place's log."""
        now = self._read()
        for call, space in self._first.items():
            asked = replace(place, call=call, step=None)
            with asked.logging():
                self._compare(asked, call, space, now)

    def _compare(self, place: PlayedCall, call: str, space: Space[Any], now: dict[str, Any]) -> None:
        kind = re.split(r"\(|\[| of ", call)[0]
        if call not in now:
            place.fault("spaces", "the space", "the same as before", "none", kind=kind)
        if now[call] is not space:
            # marlvec keeps the first; it refuses only a different one.
            equal = isinstance(now[call], Space) and describe_difference(space, now[call]) is None
            got = f"another one, {now[call]}"
            place.fault("spaces", "the space", "the same object on each call", got, kind=kind, minor=equal)
        if isinstance(copy := self._copies[call], Uncopied):
            return
        if changed := describe_difference(copy, space):
            change = "make a new env for another space; nothing in the env may write to a space it has handed out"
            place.fault(
                "spaces", "the space", "no change while the env lives", f"a change {changed}", change, kind=kind
            )


@contextmanager
def episodes_bar(total: int, unit: str, *, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that takes the numbers of finished episodes and of units so far, and draws a bar on stderr."""
    if not shown:
        yield lambda episodes, units: None
        return
    from marlvec.collect.progress_bar import ProgressBar  # here: rich is slow to import

    began = perf_counter()
    with ProgressBar("check", "episodes", total, speed_unit=unit) as bar:
        yield lambda episodes, units: bar.show(min(episodes, total), speed=units / max(perf_counter() - began, 1e-9))
