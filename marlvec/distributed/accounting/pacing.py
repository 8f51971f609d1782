"""`Pacing`: how many fragments may be on their way, and which of those that came make the next batch.

The lag of a fragment is the version when it is handed out minus that when it was asked for. It is bounded, and nothing
is dropped for it: what would get too old is waited for. To wait only for what is at the bound already is not enough;
the fragments that are left over must fit into the batches that are still to come before they are too old.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Pacing"]


@dataclass(frozen=True, slots=True)
class Pacing:
    """The rule for batches of so many fragments, at least one batch a version.

    Attributes:
        fragments: F, of which a batch is made.
        max_lag: L; None: there is no bound.
    """

    fragments: int
    max_lag: int | None

    @property
    def before(self) -> int | None:
        """How many fragments may be outstanding, held ones included, before a batch is handed out; None: any number."""
        return None if self.max_lag is None else self.fragments * (self.max_lag + 1)

    @property
    def after(self) -> int | None:
        """How many may be once it is."""
        return None if self.max_lag is None else self.fragments * self.max_lag

    def may_publish(self, bases: Sequence[int], version: int) -> bool:
        """Whether the weights may get a new version: nothing outstanding would be older than the bound then.

        Args:
            bases: The versions that all outstanding fragments were asked for with.
            version: The present one.
        """
        return self.max_lag is None or all(base > version - self.max_lag for base in bases)

    def pick(self, ready: Sequence[int], bases: Sequence[int], version: int) -> list[int] | None:
        """Choose the fragments of the next batch: first come, as long as the rest still fits.

        Args:
            ready: Places in ``bases`` of those that are held, first come first.
            bases: As `may_publish`.
            version: The present one.

        Returns:
            Places in ``bases``, or None where one has to wait.
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
        """(the youngest base of a class, how many of the class this batch must hold), the oldest class first."""
        if self.max_lag is None:
            return []
        found = []
        for i in range(self.max_lag + 1):
            base = version + i - self.max_lag
            found.append((base, max(0, sum(b <= base for b in bases) - self.fragments * i)))
        return found
