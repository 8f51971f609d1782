"""`MergeRounds`: gathers, merges and sends back the statistics of all collectors' connectors, in rounds."""

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
    """Runs one round at a time: each collector hands its statistics over once, and all of them are merged.

    If a collector dies before it hands over, its own statistics are lost. A collector built during a round starts with
    the last merged state. Each collector gets the merged state with its next request, so always before it hands
    over again. `every` batches a round begins; None: never.
    """

    def __init__(self, every: int | None) -> None:
        self.every = every
        self._batches = 0
        self._asked: set[int] = set()
        self._unasked: set[int] = set()
        self._came: dict[int, HandedOver] = {}
        self._chains: dict[str, tuple[Pipeline[Any], ...]] = {}
        self._lacks_chains = True
        # policy id → states of its agent and action connectors
        self.merged: Mapping[str, tuple[Any, ...]] | None = None
        self.number = 0  # of merged rounds

    def note_batch(self, indices: Collection[int]) -> None:
        """Record that a batch begins, with requests to these collectors."""
        if self.every is None:
            return
        if self._batches % self.every == 0 and not self._asked and not self._unasked:
            self._unasked = set(indices)
        self._batches += 1

    def ask(self, index: int) -> tuple[bool, bool]:
        """Return whether a collector's next request must hand over statistics, and whether to send its pipelines."""
        if index not in self._unasked:
            return False, False
        self._unasked.discard(index)
        self._asked.add(index)
        return True, self._lacks_chains

    def take(self, index: int, handed: HandedOver | None) -> None:
        """Take a collector's statistics; None if the collector was lost."""
        if handed is None:
            self._unasked.discard(index)
        elif index in self._asked:
            self._came[index] = handed
        self._asked.discard(index)
        if not self._asked and not self._unasked and self._came:
            self._merge()

    def forget(self, policy_id: str) -> None:
        """Forget a removed policy."""
        self._chains.pop(policy_id, None)
        if self.merged is not None:
            self.merged = {name: states for name, states in self.merged.items() if name != policy_id}

    def get_state(self) -> State:
        """Return the state without pipelines, which collectors send again."""
        return {
            "batches": self._batches,
            "asked": sorted(self._asked),
            "unasked": sorted(self._unasked),
            "came": {str(index): dict(handed.states) for index, handed in self._came.items()},
            "merged": None if self.merged is None else dict(self.merged),
            "number": self.number,
        }

    def prepare(self, state: State) -> Callable[[], None]:
        """Validate a state from `get_state`; return a function that installs it."""
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
            raise ArgumentError(f"{where}: expected a state from get_state(): {error!r:.200}") from error
        return partial(vars(self).update, new)

    def _merge(self) -> None:
        came = [self._came[index] for index in sorted(self._came)]
        for handed in came:
            if handed.pipelines is not None:
                self._chains = pickle.loads(handed.pipelines) | self._chains
        merged = dict(self.merged or {})
        self._lacks_chains = False
        for name in dict.fromkeys(name for handed in came for name in handed.states):
            if name not in self._chains:  # it hands over the same statistics again
                self._lacks_chains = True
                continue
            sides = zip(*(handed.states[name] for handed in came if name in handed.states), strict=True)
            merged[name] = tuple(
                chain.merge_states(states) for chain, states in zip(self._chains[name], sides, strict=True)
            )
        self._came, self.merged, self.number = {}, merged, self.number + 1  # assignments only: Ctrl-C cannot split them
