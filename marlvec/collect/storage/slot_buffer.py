"""`SlotBuffer`: one policy's transitions, a slot per decision, linked to the agent's next one.

Every row that came out of the agent connectors gets one *slot*, in order of time. A transition is a pair of slots: the
one an agent acted on, and the agent's next: its next turn, or its end. Observation, reward and flags of the outcome are
those of the second slot. So an observation is stored once, though it is the ``next_obs`` of one transition and the
``obs`` of another, and closing a transition is writing down one number.

A *lane* is one (env, agent): number ``env * A + agent``. Lanes advance each at its own pace; a lane's slots ascend.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.storage.batch_memory import BatchMemory
from marlvec.collect.storage.columns import ROW_COLUMNS, ColumnForms, Leaves, order_columns
from marlvec.collect.storage.dense_buffer import DenseBuffer
from marlvec.collect.storage.plain_columns import columns_from, plain_columns
from marlvec.connectors import Rows
from marlvec.env_ids import Where
from marlvec.errors import ArgumentError
from marlvec.serialization.state_fields import State, array_field, check_fields
from marlvec.trees import Tree

__all__ = ["SlotBuffer"]

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

_START = 256


class SlotBuffer:
    """Growing table of slots, and the links between them.

    Ctrl-C may come at any line. Rows are written behind those there are, and count when `append` ends; what drops some
    builds new arrays, and puts all of them in the place of the old ones by one call, in which Python does not look for
    signals.

    Args:
        forms: The columns' forms.
        num_lanes: N × A.
        memory: What makes the arrays of batches.

    Attributes:
        forms: As given.
        slot_L: (L,) each lane's row that waits for an action or for its outcome, or -1; for reading.
    """

    def __init__(self, forms: ColumnForms, num_lanes: int, memory: BatchMemory) -> None:
        self.forms, self._memory = forms, memory
        self._columns: dict[str, Leaves] = {}
        self._size, self._capacity = 0, _START
        self._lane = np.zeros(_START, np.int64)
        self._tick = np.zeros(_START, np.int64)
        self._env_t = np.zeros(_START, np.int64)
        self._next = np.full(_START, -1, np.int64)
        self._final = np.zeros(_START, np.bool_)
        self._missing = np.zeros(_START, np.bool_)
        self.slot_L = np.full(num_lanes, -1, np.int64)
        # A stable sort of 16-bit keys is a radix sort.
        self._sort_dtype = np.uint16 if num_lanes <= np.iinfo(np.uint16).max else np.int64

    def __len__(self) -> int:
        return self._size

    # --- in

    def append(
        self,
        rows: Rows,
        lanes: IntArray,
        places: Where,
        tick: IntArray | int,
        env_t: IntArray,
        missing: BoolArray | None = None,
    ) -> int:
        """Store rows, and close the transitions that led to them.

        Args:
            rows: n rows behind the agent connectors.
            lanes: (n,) whose rows they are; ascending.
            places: The same as an index.
            tick: (n,) the rounds they came in, or that of all.
            env_t: (n,) env steps that their episodes had made by then.
            missing: None where an agent is to act on them. Else they are last rows, which may lack what connectors add;
                (n,) which of them have no observation of their own, so that the one there does not count.

        Returns:
            How many transitions were closed.

        Raises:
            ContractError: A column is missing, new, or has changed its form.
        """
        final = missing is not None
        self.forms.check_rows(rows, final=final)
        start, stop = self._size, self._size + len(lanes)
        if stop > self._capacity:
            self._keep(slice(start), max(2 * self._capacity, stop))
        where = slice(start, stop)
        values, stored = dict(rows.items()), self._columns
        for name, form in self.forms.rows.items():
            if name not in values or name in _UNREAD:
                continue
            value, leaves = values[name], stored.get(name) or self._add_column(name)
            if value.__class__ is np.ndarray and value.dtype == form.dtype and value.shape[1:] == form.shape:
                leaves[0][where] = value
            else:
                for leaf, part in zip(leaves, form.fit(value), strict=True):
                    leaf[where] = part
        self._lane[where] = lanes
        self._tick[where] = tick
        self._next[where] = -1
        self._final[where] = final
        self._env_t[where] = env_t
        self._missing[where] = False if missing is None else missing
        before, slots = self.slot_L[places], np.arange(start, stop)
        closed = int(np.count_nonzero(before >= 0))
        if closed == len(before):
            self._next[before] = slots
        elif closed:
            acted = before >= 0
            self._next[before[acted]] = slots[acted]
        self.slot_L[places] = -1 if final else slots
        self._size = stop
        return closed

    def _add_column(self, name: str) -> Leaves:
        form = self.forms.rows.get(name) or self.forms.answers[name]
        leaves = form.room(self._capacity)
        form.blank([leaf[: self._size] for leaf in leaves])
        self._columns[name] = leaves
        return leaves

    def answer(self, places: Where, parts: list[Leaves]) -> None:
        """Write down what the policy answered to these lanes' last rows: what `ColumnForms.check_answer` returned."""
        slots = self.slot_L[places]
        where: Where = slots
        if len(slots) and np.count_nonzero(slots[1:] - slots[:-1] == 1) == len(slots) - 1:  # rows that came together
            where = slice(int(slots[0]), int(slots[-1]) + 1)
        for name, part in zip(self.forms.answers, parts, strict=True):
            for leaf, values in zip(self._columns.get(name) or self._add_column(name), part, strict=True):
                leaf[where] = values

    def adopt(self, dense: DenseBuffer) -> None:
        """Store what a dense buffer holds, as if it had come here tick by tick; that one stays as it is."""
        for moment in dense.moments():
            lanes, tick, env_t = dense.lanes, moment.tick, moment.env_t
            self.append(moment.rows, lanes, lanes, tick, env_t)
            if moment.answer is not None:
                self.answer(lanes, moment.answer)
            for end in moment.ends:
                self.append(
                    end.rows, lanes[end.places], lanes[end.places], tick + 1, env_t[end.places] + 1, end.missing
                )

    # --- saved

    def get_state(self, unanswered: IntArray) -> State:
        """All slots, as arrays that later calls do not change.

        Args:
            unanswered: Lanes whose last rows wait for an answer: what stands there is no answer, and saved as 0.
        """
        final = self._final[: self._size]
        no_answer = final.copy()
        slots = self.slot_L[unanswered]
        no_answer[slots[slots >= 0]] = True
        columns = {}
        for name, leaves in self._columns.items():
            form = self.forms.rows.get(name) or self.forms.answers[name]
            own = [leaf[: self._size].copy() for leaf in leaves]
            if name not in ROW_COLUMNS:  # which alone last rows have for certain
                for leaf in own:
                    leaf[no_answer if name in self.forms.answers else final] = 0
            columns[name] = form.tree(own)
        return {
            "columns": plain_columns(columns, "stored rows"),
            "links": {name: getattr(self, name)[: self._size].copy() for name in _ARRAYS},
            "slot_L": self.slot_L.copy(),
        }

    @classmethod
    def from_state(cls, state: State, forms: ColumnForms, num_lanes: int, memory: BatchMemory) -> SlotBuffer:
        """The buffer that `get_state` was asked of.

        Args:
            state: What it gave.
            forms: The columns' forms, as they were.
            num_lanes: N × A.
            memory: What makes the arrays of batches.

        Raises:
            ArgumentError: It is no such state.
        """
        where = "stored rows"
        check_fields(state, ("columns", "links", "slot_L"), where)
        buffer = cls(forms, num_lanes, memory)
        links = check_fields(state["links"], _ARRAYS, where)
        size = len(array_field(links, "_lane", np.int64, (None,), where))
        for name in _ARRAYS:
            setattr(buffer, name, array_field(links, name, getattr(buffer, name).dtype, (size,), where))
        buffer.slot_L = array_field(state, "slot_L", np.int64, (num_lanes,), where)
        odd = buffer._lane[(buffer._lane < 0) | (buffer._lane >= num_lanes)]
        if len(odd) or max(buffer.slot_L.max(initial=-1), buffer._next.max(initial=-1)) >= size:
            raise ArgumentError(f"{where}: there are {size} in {num_lanes} lanes, and some lead to others")
        buffer._columns = forms.fit_saved(columns_from(state["columns"], size, where), where)
        wanted = (forms.rows.keys() if size else set()) | (forms.answers.keys() if (buffer._next >= 0).any() else set())
        if missing := sorted(wanted - buffer._columns.keys() - _UNREAD - _LATE):
            raise ArgumentError(f"{where}: the columns {missing} are missing")
        buffer._size = buffer._capacity = size
        return buffer

    # --- looking

    def _get(self, name: str, where: IntArray) -> Tree:
        form = self.forms.rows.get(name) or self.forms.answers[name]
        found = self._columns.get(name) or self._add_column(name)
        empty, n = self._memory.empty, len(where)
        # With another mode numpy takes into an array of its own first.
        return form.tree(
            [leaf.take(where, axis=0, out=empty((n, *leaf.shape[1:]), leaf.dtype), mode="clip") for leaf in found]
        )

    def closed(self, eps_ids: IntArray | None = None) -> IntArray:
        """Slots of transitions whose outcome is known, of all episodes or of some; ascending."""
        slots = np.flatnonzero(self._next[: self._size] >= 0)
        return slots if eps_ids is None or not len(slots) else slots[np.isin(self._eps_id(slots), eps_ids)]

    def of_episodes(self, eps_ids: IntArray) -> IntArray:
        """All slots of some episodes, ends and rows that wait for an action included; ascending."""
        return np.flatnonzero(np.isin(self._eps_id(slice(self._size)), eps_ids))

    def without(self, slots: IntArray, eps_ids: Collection[int]) -> IntArray:
        """Those of some slots that are of none of these episodes."""
        if not len(slots) or not eps_ids:
            return slots
        return slots[~np.isin(self._eps_id(slots), list(eps_ids))]

    def _eps_id(self, where: Where) -> IntArray:
        found: IntArray = self._columns["eps_id"][0][where] if self._size else np.zeros(0, np.int64)
        return found

    def closing_order(self, slots: IntArray) -> tuple[IntArray, IntArray]:
        """Tick at which each transition was closed, and its lane."""
        return self._tick[self._next[slots]], self._lane[slots]

    # --- out

    def read(self, slots: IntArray, unroll_id: int) -> tuple[dict[str, Tree], int]:
        """Columns of transitions, ordered by env, agent and time.

        Args:
            slots: Some of `closed`, ascending; at least one.
            unroll_id: Number of the first fragment, a stretch of one agent's episode.

        Returns:
            The columns, and the number after the last fragment's.
        """
        self._memory.begin()
        slots = slots[np.argsort(self._lane[slots].astype(self._sort_dtype), kind="stable")]
        after = self._next[slots]
        missing, lane = self._missing[after], self._lane[slots]
        outcome = ("rewards", "terminated", "truncated", "first", "last")
        columns = {name: self._get(name, slots) for name in self.forms.rows if name not in outcome}
        columns["rewards"] = self._get("rewards", after)
        columns["terminated"], columns["truncated"] = self._get("terminated", after), self._get("truncated", after)
        columns["next_obs"] = self._get("obs", np.where(missing, slots, after))
        columns["next_obs_missing"] = missing
        if "state" in columns:
            columns["next_state"] = self._get("state", after)
        columns["env_t"], columns["next_env_t"] = self._env_t[slots], self._env_t[after]
        starts = np.zeros(len(slots), np.int64)
        starts[1:] = (lane[1:] != lane[:-1]) | (columns["eps_id"][1:] != columns["eps_id"][:-1])
        starts[1:] |= (columns["terminated"] | columns["truncated"])[:-1]  # an agent that came back has a new life
        columns["unroll_id"] = np.cumsum(starts) + unroll_id
        columns |= {name: self._get(name, slots) for name in self.forms.answers}
        return order_columns(columns), int(columns["unroll_id"][-1]) + 1

    def forget(self, slots: IntArray) -> None:
        """Drop transitions that were handed over or lost, and with them the ends that nothing leads to any more."""
        if not len(slots):
            return
        keep = ~self._final[: self._size]
        keep[slots] = False
        after = self._next[: self._size][keep]
        keep[after[after >= 0]] = True
        self._keep(np.flatnonzero(keep), self._capacity)

    def keep_ended(self, ended_N: IntArray) -> None:
        """Drop all slots but those of episodes whose ids are below that of their env, of which none waits any more."""
        self.slot_L[:] = -1
        if self._size:
            env_id, eps_id = (self._columns[name][0][: self._size] for name in ("env_id", "eps_id"))
            self.forget(np.flatnonzero(eps_id >= ended_N[env_id]))

    def _keep(self, where: slice | IntArray, capacity: int) -> None:
        """Keep some slots, in new arrays."""
        kept = np.arange(self._size)[where]
        n = len(kept)

        def chosen(old: NDArray[Any]) -> NDArray[Any]:
            new = np.empty((capacity, *old.shape[1:]), old.dtype)
            new[:n] = old[where] if isinstance(where, slice) else old.take(where, axis=0)
            return new

        moved = np.full(self._size + 1, -1)  # the last entry is that of -1
        moved[kept] = np.arange(n)
        columns = {name: [chosen(leaf) for leaf in leaves] for name, leaves in self._columns.items()}
        arrays = {name: chosen(getattr(self, name)) for name in _ARRAYS}
        arrays["_next"][:n] = moved[arrays["_next"][:n]]
        vars(self).update(arrays, slot_L=moved[self.slot_L], _columns=columns, _capacity=capacity, _size=n)

    def clear(self) -> None:
        """Drop everything; the columns' forms stay known."""
        self._size = 0
        self.slot_L[:] = -1


_UNREAD = {"first", "last"}
_LATE = {"action_mask", "off_policy"}  # columns that may come at any time
_ARRAYS = ("_lane", "_tick", "_env_t", "_next", "_final", "_missing")
