"""`SlotBuffer`: one policy's transitions, a slot per decision, linked to the agent's next one.

Every row that came out of the agent connectors gets one *slot*, in order of time. A transition is a pair of slots: the
one an agent acted on, and the agent's next: its next turn, or its end. Observation, reward and flags of the outcome are
those of the second slot. So an observation is stored once, though it is the ``next_obs`` of one transition and the
``obs`` of another, and closing a transition is writing down one number.

A *lane* is one (env, agent): number ``env * A + agent``. Lanes advance each at its own pace; a lane's slots ascend.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.storage.columns import ColumnForm
from marlvec.env_ids import Where
from marlvec.errors import ContractError
from marlvec.trees import Tree

__all__ = ["BATCH_COLUMNS", "ROW_COLUMNS", "SlotBuffer"]

IntArray = NDArray[np.int64]

ROW_COLUMNS = (
    *("obs", "rewards", "terminated", "truncated", "first", "last"),
    *("env_id", "agent_index", "eps_id", "t", "action_mask", "state"),
)
"""Columns of rows that the collector itself gives; what else comes out of the connectors, they added."""

BATCH_COLUMNS = (
    *("actions", "actions_for_env", "next_obs", "next_state", "next_obs_missing"),
    *("env_t", "next_env_t", "unroll_id", "policy_version", "off_policy"),
)
"""Names that the collector gives to columns of its own."""

_MADE_HERE = ("rewards", "next_obs", "next_obs_missing", "env_t", "next_env_t", "unroll_id")

_LATER = {"off_policy"}  # may come at any time, and was False until then

_START = 256


class SlotBuffer:
    """Growing table of slots, and the links between them.

    Args:
        owner: For messages, e.g. ``"policy 'main'"``.
        num_lanes: N × A.
    """

    def __init__(self, owner: str, num_lanes: int) -> None:
        self._owner = owner
        self._rows: dict[str, ColumnForm] = {}  # written when a row came
        self._answers: dict[str, ColumnForm] = {}  # written when the policy had answered
        self._asked = False
        self._size, self._capacity = 0, _START
        self._lane = np.zeros(_START, np.int64)
        self._tick = np.zeros(_START, np.int64)
        self._env_t = np.zeros(_START, np.int64)
        self._next = np.full(_START, -1, np.int64)
        self._final = np.zeros(_START, np.bool_)
        self._missing = np.zeros(_START, np.bool_)
        # A stable sort of 16-bit keys is a radix sort.
        self._sort_dtype = np.uint16 if num_lanes <= np.iinfo(np.uint16).max else np.int64

    def __len__(self) -> int:
        return self._size

    def append(
        self,
        columns: Mapping[str, Tree],
        lanes: IntArray,
        tick: IntArray | int,
        env_t: IntArray,
        missing: NDArray[np.bool_] | None = None,
    ) -> IntArray:
        """Store rows.

        Args:
            columns: Columns of n rows behind the agent connectors.
            lanes: (n,) whose rows they are; ascending.
            tick: (n,) the rounds they came in, or that of all.
            env_t: (n,) env steps that their episodes had made by then.
            missing: None where somebody is to act on them. Else they are last rows, which may lack what connectors add;
                (n,) which of them have no observation of their own, so that the one there does not count.

        Returns:
            (n,) their slots, one after the other.

        Raises:
            ContractError: A column is missing, new, or has changed its form.
        """
        final = missing is not None
        if not final and columns.keys() != self._rows.keys():
            self._learn(columns)
        start, stop = self._size, self._size + len(lanes)
        if stop > self._capacity:
            self._grow(stop)
        where = slice(start, stop)
        for name, column in self._rows.items():
            if final and name not in columns:
                if name in ROW_COLUMNS:
                    raise ContractError(f"{self._owner}: its agent connectors dropped column {name!r} of last rows")
                continue
            column.write(where, columns[name])
        self._lane[where] = lanes
        self._tick[where] = tick
        self._env_t[where] = env_t
        self._next[where] = -1
        self._final[where] = final
        self._missing[where] = False if missing is None else missing
        self._size = stop
        return np.arange(start, stop)

    def _learn(self, columns: Mapping[str, Tree]) -> None:
        if self._rows and columns.keys() - self._rows.keys() == {"action_mask"} and self._rows.keys() < columns.keys():
            # An env has given its first mask, in its infos; until now everything was allowed.
            masks = ColumnForm(self._owner, "action_mask", columns["action_mask"], self._capacity)
            for leaf in masks.leaves:
                leaf[...] = True
            self._rows["action_mask"] = masks
            return
        if self._rows:
            raise ContractError(
                f"{self._owner}: its agent connectors gave the columns {sorted(columns)}, "
                f"until now {sorted(self._rows)}"
            )
        for name in columns:
            if name in BATCH_COLUMNS:
                raise ContractError(f"{self._owner}: its agent connectors may not add a column named {name!r}")
        self._rows = {name: ColumnForm(self._owner, name, value, self._capacity) for name, value in columns.items()}

    def rows(self, where: Where) -> dict[str, Tree]:
        """Copies of the columns of some slots, as they came out of the connectors."""
        return {name: column.get(where) for name, column in self._rows.items()}

    def env_t(self, where: Where) -> IntArray:
        """Env steps that the episodes of some slots had made when they came."""
        return self._env_t[where]

    def check_answer(self, columns: Mapping[str, Tree], *, asked: bool = True) -> list[list[NDArray[Any]]]:
        """Leaves of the columns to write with `answer`, per column; changes nothing that was stored.

        Args:
            columns: Columns of n rows.
            asked: Whether the policy was asked about any of them; what it adds is not known before that.

        Raises:
            ContractError: Columns are missing, new, or have changed their form; or one has a name that is taken.
        """
        if columns.keys() != self._answers.keys():
            new = {name: column for name, column in columns.items() if name not in self._answers}
            if self._answers and (len(new) + len(self._answers) > len(columns) or (self._asked and set(new) - _LATER)):
                raise ContractError(
                    f"{self._owner}: gave the columns {sorted(columns)}, until now {sorted(self._answers)}; "
                    f"they must stay the same"
                )
            taken = [name for name in new if name in self._rows or name in _MADE_HERE]
            if taken:
                raise ContractError(
                    f"{self._owner}: it or its action connectors add columns named {taken}; such there are already"
                )
            for name, value in new.items():
                self._answers[name] = ColumnForm(self._owner, name, value, self._capacity)
                if self._size and name not in _LATER:  # until now only actions that were not the policy's
                    for leaf in self._answers[name].leaves:
                        leaf[...] = np.nan if leaf.dtype.kind in "fc" else 0
        self._asked |= asked
        return [column.fit(columns[name]) for name, column in self._answers.items()]

    def answer(self, where: Where, parts: list[list[NDArray[Any]]]) -> None:
        """Write down what the policy answered in some slots: what `check_answer` returned."""
        for column, part in zip(self._answers.values(), parts, strict=True):
            column.put(where, part)

    def link(self, slots: IntArray, successors: IntArray) -> None:
        """Close transitions: each slot's outcome is its successor."""
        self._next[slots] = successors

    def closed(self, eps_ids: IntArray | None = None) -> IntArray:
        """Slots of transitions whose outcome is known, of all episodes or of some; ascending."""
        slots = np.flatnonzero(self._next[: self._size] >= 0)
        if eps_ids is not None:
            slots = slots[np.isin(self._rows["eps_id"].leaves[0][slots], eps_ids)] if self._rows else slots
        return slots

    def of_episodes(self, eps_ids: IntArray) -> IntArray:
        """All slots of some episodes, ends and rows that wait for an action included; ascending."""
        if not self._rows:
            return np.zeros(0, np.int64)
        return np.flatnonzero(np.isin(self._rows["eps_id"].leaves[0][: self._size], eps_ids))

    def without(self, slots: IntArray, eps_ids: Collection[int]) -> IntArray:
        """Those of some slots that are of none of these episodes."""
        if not len(slots) or not eps_ids:
            return slots
        return slots[~np.isin(self._rows["eps_id"].leaves[0][slots], list(eps_ids))]

    def closing_order(self, slots: IntArray) -> tuple[IntArray, IntArray]:
        """Tick at which each transition was closed, and its lane."""
        return self._tick[self._next[slots]], self._lane[slots]

    def read(self, slots: IntArray, unroll_id: int) -> tuple[dict[str, Tree], int]:
        """Columns of transitions, ordered by env, agent and time.

        Args:
            slots: Some of `closed`, ascending; at least one.
            unroll_id: Number of the first fragment, a stretch of one agent's episode.

        Returns:
            The columns, and the number after the last fragment's.
        """
        slots = slots[np.argsort(self._lane[slots].astype(self._sort_dtype), kind="stable")]
        after = self._next[slots]
        missing = self._missing[after]
        rows, answers = self._rows, self._answers
        own = {name: column.get(slots) for name, column in rows.items() if name not in ("rewards", "first", "last")}
        columns: dict[str, Tree] = {
            "obs": own.pop("obs"),
            "actions": answers["actions"].get(slots),
            "actions_for_env": answers["actions_for_env"].get(slots),
            "rewards": rows["rewards"].get(after),
            "next_obs": rows["obs"].get(np.where(missing, slots, after)),
            "terminated": rows["terminated"].get(after),
            "truncated": rows["truncated"].get(after),
            "next_obs_missing": missing,
        }
        if "state" in rows:
            columns["state"], columns["next_state"] = own.pop("state"), rows["state"].get(after)
        lane, eps = self._lane[slots], own["eps_id"]
        starts = np.zeros(len(slots), np.int64)
        starts[1:] = (lane[1:] != lane[:-1]) | (eps[1:] != eps[:-1])
        starts[1:] |= (columns["terminated"] | columns["truncated"])[:-1]  # an agent that came back has a new life
        unroll_ids = np.cumsum(starts) + unroll_id
        own["unroll_id"] = unroll_ids
        own["env_t"], own["next_env_t"] = self._env_t[slots], self._env_t[after]
        for name in ("action_mask", "t", "env_t", "next_env_t", "eps_id", "unroll_id", "env_id", "agent_index"):
            if name in own:
                columns[name] = own.pop(name)
        columns["policy_version"] = answers["policy_version"].get(slots)
        columns.update((name, value) for name, value in own.items() if name not in columns)  # what connectors added
        for name in sorted(answers, key=_LATER.__contains__):  # those are last, whenever they came
            if name not in columns:
                columns[name] = answers[name].get(slots)
        return columns, int(unroll_ids[-1]) + 1

    def forget(self, slots: IntArray, current: IntArray) -> IntArray:
        """Drop transitions that were handed over, and with them the ends that nothing leads to any more.

        Args:
            slots: What to drop.
            current: Slots of lanes whose transition is not closed.

        Returns:
            Where ``current`` are now.
        """
        size = self._size
        keep = ~self._final[:size]
        keep[slots] = False
        after = self._next[:size][keep]
        keep[after[after >= 0]] = True
        kept = np.flatnonzero(keep)
        moved = np.cumsum(keep) - 1
        for column in (*self._rows.values(), *self._answers.values()):
            column.keep(kept)
        n = len(kept)
        after = self._next[kept]
        self._next[:n] = np.where(after >= 0, moved[after], -1)
        for array in (self._lane, self._tick, self._env_t, self._final, self._missing):
            array[:n] = array[kept]
        self._size = n
        return moved[current]

    def clear(self) -> None:
        """Drop everything; the columns' forms stay known."""
        self._size = 0

    def _grow(self, wanted: int) -> None:
        capacity = max(2 * self._capacity, wanted)
        for column in (*self._rows.values(), *self._answers.values()):
            column.grow(capacity, self._size)
        for name in ("_lane", "_tick", "_env_t", "_next", "_final", "_missing"):
            old = getattr(self, name)
            more = np.zeros(capacity, old.dtype)
            more[: self._size] = old[: self._size]
            setattr(self, name, more)
        self._capacity = capacity
