"""Plans of batches: a share of every collector (`Shares`), or fragments in order of arrival (`Fragments`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from marlvec.collect.batch.sample_target import SampleTarget
from marlvec.distributed.accounting.ledger import Ledger
from marlvec.errors import ArgumentError, StateError
from marlvec.serialization.state_fields import State, check_fields, number_field

__all__ = ["Pacing", "Fragments", "Plan", "Shares"]


@dataclass(frozen=True, slots=True)
class Pacing:
    """Limits outstanding fragments, and picks the fragments of each batch; every batch makes one weight version.

    A fragment's lag is the version at its delivery minus the version at its request. It is bounded without dropping
    fragments: the plan waits for fragments that would get too old. It must wait early enough: the remaining fragments
    must fit into the batches that come before they are too old.

    Attributes:
        fragments: Fragments per batch, F.
        max_lag: Greatest lag, L; None: no bound.
    """

    fragments: int
    max_lag: int | None

    @property
    def before(self) -> int | None:
        """Most outstanding fragments, held ones included, before a batch is returned; None: no limit."""
        return None if self.max_lag is None else self.fragments * (self.max_lag + 1)

    @property
    def after(self) -> int | None:
        """Most outstanding fragments after a batch is returned; None: no limit."""
        return None if self.max_lag is None else self.fragments * self.max_lag

    def may_publish(self, bases: Sequence[int], version: int) -> bool:
        """Return whether a new weight version keeps all outstanding fragments within the bound.

        Args:
            bases: Versions at the requests of all outstanding fragments.
            version: The current version.
        """
        return self.max_lag is None or all(base > version - self.max_lag for base in bases)

    def pick(self, ready: Sequence[int], bases: Sequence[int], version: int) -> list[int] | None:
        """Choose the fragments of the next batch: by arrival, as long as the rest stays within the bound.

        Args:
            ready: Positions in ``bases`` of held fragments, in order of arrival.
            bases: Versions at the requests of all outstanding fragments.
            version: The current version.

        Returns:
            Positions in ``bases``, or None if the batch must wait.
        """
        if len(ready) < self.fragments:
            return None
        chosen: list[int] = []
        for base, number in self._due(bases, version):
            have = sum(bases[k] <= base for k in chosen)
            for k in ready:
                if have >= number or len(chosen) == self.fragments:
                    break
                if k not in chosen and bases[k] <= base:
                    chosen.append(k)
                    have += 1
            if have < number and len(chosen) < self.fragments:
                return None
        chosen += [k for k in ready if k not in chosen][: self.fragments - len(chosen)]
        return [k for k in ready if k in chosen]

    def _due(self, bases: Sequence[int], version: int) -> list[tuple[int, int]]:
        """Return (youngest base of a class, fragments of the class that this batch must hold), oldest class first."""
        if self.max_lag is None:
            return []
        found = []
        for i in range(self.max_lag + 1):
            base = version + i - self.max_lag
            found.append((base, max(0, sum(b <= base for b in bases) - self.fragments * i)))
        return found


_WHERE = "the plan of batches"


class Plan(Protocol):
    """Decides how much to request of each collector, and which answers make the next batch."""

    @property
    def max_lag(self) -> int | None:
        """Greatest lag of outstanding fragments, in versions."""

    def begin(self, goal: SampleTarget, active: Sequence[int]) -> None:
        """Begin a batch.

        Raises:
            ArgumentError: The plan cannot make batches of this amount.
            StateError: Another batch is unfinished.
        """

    def asked(self, active: Sequence[int]) -> Sequence[int]:
        """Return the collectors that take part in the batch; small batches need fewer than all."""

    def lacking(self, ledger: Ledger, active: Sequence[int]) -> list[tuple[int, int]]:
        """Return what to request now: (collector index, amount), in order."""

    def ahead(self, ledger: Ledger, active: Sequence[int], chosen: Sequence[int]) -> list[tuple[int, int]]:
        """Return what to request while the learner uses the chosen batch: (collector index, amount)."""

    def issued(self, index: int, amount: int, request_id: int) -> None:
        """Record that the requests of `lacking` were sent."""

    def chosen(self, ledger: Ledger, version: int) -> list[int] | None:
        """Return the requests that make the next batch, in order; None if it must wait."""

    def end(self) -> None:
        """End the batch: it was returned."""

    @property
    def settings(self) -> State:
        """Arguments of the plan."""

    def get_state(self) -> State:
        """Return the state of the unfinished batch, or of coming batches."""

    def prepare(self, state: State) -> Callable[[], None]:
        """Validate a state from `get_state` of a plan with equal settings; return a function that installs it.

        Raises:
            ArgumentError: ``state`` is not from `get_state`.
        """


@dataclass(slots=True)
class _Share:
    index: int
    amount: int
    request_id: int | None = None


class Shares:
    """Each collector's share of every batch, joined in the order of collectors: the same numbers each time.

    If Ctrl-C or an error leaves a batch unfinished, the next call finishes it; it must request the same amount.
    """

    max_lag = 0

    def __init__(self) -> None:
        self._goal: SampleTarget | None = None
        self._shares: list[_Share] = []

    def begin(self, goal: SampleTarget, active: Sequence[int]) -> None:
        if self._goal is None:
            each, more = divmod(goal.amount, len(active))
            amounts = [each + (k < more) for k in range(len(active))]
            self._shares = [_Share(index, n) for index, n in zip(active, amounts, strict=True) if n]
            self._goal = goal
        elif goal != self._goal:
            raise StateError(
                f"a batch of {self._goal.amount} {self._goal.unit} is unfinished, and parts of it are there: ask for "
                f"as much, then for what you like"
            )

    def asked(self, active: Sequence[int]) -> Sequence[int]:
        return [share.index for share in self._shares if share.index in active]

    def lacking(self, ledger: Ledger, active: Sequence[int]) -> list[tuple[int, int]]:
        found = []
        for share in self._shares:
            if share.request_id is None or share.request_id not in ledger:
                share.request_id = None
                if share.index not in active:  # other collectors deliver its share
                    share.index = min(active, key=lambda index: (self._asked(index), index))
                found.append((share.index, share.amount))
        return found

    def _asked(self, index: int) -> int:
        return sum(share.amount for share in self._shares if share.index == index)

    def ahead(self, ledger: Ledger, active: Sequence[int], chosen: Sequence[int]) -> list[tuple[int, int]]:
        return []

    def issued(self, index: int, amount: int, request_id: int) -> None:
        for share in self._shares:
            if share.request_id is None and (share.index, share.amount) == (index, amount):
                share.request_id = request_id
                return

    def chosen(self, ledger: Ledger, version: int) -> list[int] | None:
        ids = [share.request_id for share in sorted(self._shares, key=lambda share: share.index)]
        found = [key for key in ids if key is not None and key in ledger and ledger[key].held is not None]
        return found if len(found) == len(self._shares) else None

    def end(self) -> None:
        self._goal = None  # one assignment, so that Ctrl-C cannot split it

    @property
    def settings(self) -> State:
        return {"sync": True}

    def get_state(self) -> State:
        if self._goal is None:
            return {"goal": None, "shares": []}
        shares = [[share.index, share.amount, share.request_id] for share in self._shares]
        return {"goal": [self._goal.unit, self._goal.amount], "shares": shares}

    def prepare(self, state: State) -> Callable[[], None]:
        check_fields(state, ("goal", "shares"), _WHERE)
        try:
            goal = None if state["goal"] is None else SampleTarget(*state["goal"])
            shares = [_Share(*share) for share in state["shares"]]
        except TypeError as error:
            raise ArgumentError(f"{_WHERE}: expected a state from get_state(): {error!r:.200}") from error
        return partial(vars(self).update, {"_goal": goal, "_shares": shares})


class Fragments:
    """Fragments of one size, in order of arrival, within the bound on lag.

    Args:
        fragment: Amount of a fragment; None: the first batch's amount divided by the number of collectors.
        max_in_flight: Most requests of one collector.
        max_lag: See `Pacing`.
    """

    def __init__(self, fragment: int | None, max_in_flight: int, max_lag: int | None) -> None:
        self._given = self._fragment = fragment
        self._most, self.max_lag = max_in_flight, max_lag
        self._unit = ""
        self._pacing = Pacing(1, max_lag)

    def begin(self, goal: SampleTarget, active: Sequence[int]) -> None:
        fragment = self._fragment
        if fragment is None:
            fragment, rest = divmod(goal.amount, len(active))
            if rest:
                raise ArgumentError(
                    f"{goal.amount} {goal.unit} cannot be shared by {len(active)} collectors: ask for "
                    f"{(fragment + 1) * len(active)}, or give a fragment=... that it is a multiple of"
                )
        if goal.amount % fragment:
            raise ArgumentError(
                f"{goal.amount} {goal.unit} are no multiple of fragment={fragment}: ask for "
                f"{(goal.amount // fragment + 1) * fragment}"
            )
        if self._unit not in ("", goal.unit):
            raise ArgumentError(
                f"collect(): outstanding fragments are of {self._unit}: expected an amount of these, got {goal.unit}"
            )
        self._fragment, self._unit = fragment, goal.unit
        self._pacing = Pacing(goal.amount // fragment, self.max_lag)

    def asked(self, active: Sequence[int]) -> Sequence[int]:
        return active

    def lacking(self, ledger: Ledger, active: Sequence[int]) -> list[tuple[int, int]]:
        return self._up_to(self._pacing.before, ledger, active)

    def ahead(self, ledger: Ledger, active: Sequence[int], chosen: Sequence[int]) -> list[tuple[int, int]]:
        after = self._pacing.after
        return self._up_to(None if after is None else after + len(chosen), ledger, active)

    def _up_to(self, most: int | None, ledger: Ledger, active: Sequence[int]) -> list[tuple[int, int]]:
        """Request up to a number of fragments, from the least busy collectors first."""
        waiting = {index: len(ledger.waiting_of(index)) for index in active}
        assert self._fragment is not None  # `begin` was called
        if most is None:  # bounds the number of held answers
            most = len(active) * self._most + self._pacing.fragments
        found: list[tuple[int, int]] = []
        outstanding = len(ledger.fragments)
        while outstanding + len(found) < most:
            index = min(active, key=lambda index: (waiting[index], index))
            if waiting[index] >= self._most:
                break
            waiting[index] += 1
            found.append((index, self._fragment))
        return found

    def issued(self, index: int, amount: int, request_id: int) -> None:
        pass

    def chosen(self, ledger: Ledger, version: int) -> list[int] | None:
        entries = ledger.fragments
        places = {entry.id: k for k, entry in enumerate(entries)}
        ready = [places[entry.id] for entry in ledger.held]
        found = self._pacing.pick(ready, [entry.base for entry in entries], version)
        return None if found is None else [entries[k].id for k in found]

    def end(self) -> None:
        pass

    @property
    def settings(self) -> State:
        return {"sync": False, "fragment": self._given, "max_in_flight": self._most, "max_policy_lag": self.max_lag}

    def get_state(self) -> State:
        return {"fragment": self._fragment, "unit": self._unit, "fragments": self._pacing.fragments}

    def prepare(self, state: State) -> Callable[[], None]:
        check_fields(state, ("fragment", "unit", "fragments"), _WHERE)
        fragment = None if state["fragment"] is None else number_field(state, "fragment", _WHERE, least=1)
        pacing = Pacing(number_field(state, "fragments", _WHERE, least=1), self.max_lag)
        new = {"_fragment": fragment, "_unit": str(state["unit"]), "_pacing": pacing}
        return partial(vars(self).update, new)
