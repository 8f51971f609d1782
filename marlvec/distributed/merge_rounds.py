"""`MergeRounds`: what connectors of all collectors have learnt, gathered, merged and given back, round by round."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from marlvec.connectors import Pipeline
from marlvec.distributed.server.messages import HandedOver
from marlvec.errors import ArgumentError
from marlvec.serialization.state_fields import State, check_fields, number_field

__all__ = ["MergeRounds"]


class MergeRounds:
    """One round at a time: each collector is asked once to hand over, and all that came is merged.

    A collector that dies before it has handed over brought nothing: what it had learnt alone is gone. One that is built
    meanwhile has what was merged before from birth. A collector takes over the merged state with the next request that
    it gets, so it has, before it is asked to hand over again.

    Args:
        every: Begin a round with every so many batches; None: never.

    Attributes:
        every: As given.
        merged: Policy id to the states of its agent and action connectors; None: nothing was merged yet.
        number: How many rounds were merged.
    """

    def __init__(self, every: int | None) -> None:
        self.every = every
        self._batches = 0
        self._asked: set[int] = set()
        self._unasked: set[int] = set()
        self._came: dict[int, HandedOver] = {}
        self._chains: dict[str, tuple[Pipeline[Any], ...]] = {}
        self._lacks_chains = True
        self.merged: Mapping[str, tuple[Any, ...]] | None = None
        self.number = 0

    def note_batch(self, indices: Collection[int]) -> None:
        """A batch is begun, for which these collectors are asked."""
        if self.every is None:
            return
        if self._batches % self.every == 0 and not self._asked and not self._unasked:
            self._unasked = set(indices)
        self._batches += 1

    def ask(self, index: int) -> tuple[bool, bool]:
        """Whether the next request to a collector is to hand over, and to give its pipelines, too."""
        if index not in self._unasked:
            return False, False
        self._unasked.discard(index)
        self._asked.add(index)
        return True, self._lacks_chains

    def take(self, index: int, handed: HandedOver | None) -> None:
        """A collector has answered a request that asked for it, or was lost: None."""
        if handed is None:
            self._unasked.discard(index)
        elif index in self._asked:
            self._came[index] = handed
        self._asked.discard(index)
        if not self._asked and not self._unasked and self._came:
            self._merge()

    def forget(self, policy_id: str) -> None:
        """A policy was removed."""
        self._chains.pop(policy_id, None)
        if self.merged is not None:
            self.merged = {name: states for name, states in self.merged.items() if name != policy_id}

    def get_state(self) -> State:
        """All but the pipelines, which collectors give once more."""
        return {
            "batches": self._batches,
            "asked": sorted(self._asked),
            "unasked": sorted(self._unasked),
            "came": {str(index): dict(handed.states) for index, handed in self._came.items()},
            "merged": None if self.merged is None else dict(self.merged),
            "number": self.number,
        }

    def prepare(self, state: State) -> Callable[[], None]:
        """Look at what `get_state` gave; returns what puts it in place.

        Raises:
            ArgumentError: It is none.
        """
        where = "the merging of states"
        check_fields(state, ("batches", "asked", "unasked", "came", "merged", "number"), where)
        try:
            new = {
                "_batches": number_field(state, "batches", where),
                "_asked": set(map(int, state["asked"])),
                "_unasked": set(map(int, state["unasked"])),
                "_came": {int(index): HandedOver(dict(states), None) for index, states in state["came"].items()},
                "_chains": {},
                "_lacks_chains": True,
                "merged": None if state["merged"] is None else dict(state["merged"]),
                "number": number_field(state, "number", where),
            }
        except (TypeError, ValueError, AttributeError) as error:
            raise ArgumentError(f"{where}: expected what get_state() returned: {error!r:.200}") from error
        return partial(vars(self).update, new)

    def _merge(self) -> None:
        came = [self._came[index] for index in sorted(self._came)]
        for handed in came:
            if handed.pipelines is not None:
                self._chains = pickle.loads(handed.pipelines) | self._chains
        merged = dict(self.merged or {})
        self._lacks_chains = False
        for name in dict.fromkeys(name for handed in came for name in handed.states):
            if name not in self._chains:  # it hands over the same once more
                self._lacks_chains = True
                continue
            sides = zip(*(handed.states[name] for handed in came if name in handed.states), strict=True)
            merged[name] = tuple(
                chain.merge_states(states) for chain, states in zip(self._chains[name], sides, strict=True)
            )
        self._came, self.merged, self.number = {}, merged, self.number + 1  # not interrupted: stores alone
