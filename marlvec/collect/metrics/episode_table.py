"""`EpisodeTable`: stores the last finished episodes as arrays, and makes objects of them on request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.rollout_state import STREAM_BITS
from marlvec.errors import ArgumentError
from marlvec.serialization.state_fields import State, array_field, check_fields, number_field

__all__ = ["EpisodeRecord", "EpisodeTable", "FinishedEpisodes"]

AnyArray = NDArray[Any]
IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True)
class EpisodeRecord:
    """One finished episode. Rewards are the env's raw rewards of acting and idle agents.

    Attributes:
        eps_id: Its id, as in batches.
        env_id: Its env.
        number: Number of the episode in its env, from 0.
        length: Env steps.
        returns_A: (A,) float64, sum of each agent's rewards.
        lengths_A: (A,) int64, each agent's decisions.
        present_A: (A,) bool, whether the agent was in this episode.
        truncated_A: (A,) bool, whether the agent was truncated, not terminated.
        policies: Each agent's policy id.
        duration: Wall-clock seconds from its first observation to its end.
        custom: Numbers from `RunningEpisode.custom`, by name.
    """

    eps_id: int
    env_id: int
    number: int
    length: int
    returns_A: FloatArray
    lengths_A: IntArray
    present_A: BoolArray
    truncated_A: BoolArray
    policies: tuple[str, ...]
    duration: float
    custom: Mapping[str, float] = field(default_factory=dict)

    @property
    def episode_return(self) -> float:
        """Sum of all agents' returns."""
        return float(self.returns_A.sum())

    @property
    def stream(self) -> int:
        """Stream number of its collector, which distinguishes episodes of many collectors; 0 by default."""
        return self.eps_id >> STREAM_BITS


@dataclass(slots=True)
class FinishedEpisodes:
    """Finished episodes, a row each, in the order of their ends: k arrays' rows; see `EpisodeRecord`."""

    eps_id: IntArray
    env_id: IntArray
    number: IntArray
    length: IntArray
    returns: FloatArray  # (k, A), as the next four
    lengths: IntArray
    present: BoolArray
    truncated: BoolArray
    policy: IntArray  # number of each agent's policy
    duration: FloatArray
    made: NDArray[np.object_]  # each episode's `EpisodeRecord`; None until requested
    policy_ids: Mapping[int, str]  # by number; at least those in `policy`

    def __len__(self) -> int:
        return len(self.eps_id)

    @property
    def policies_seen(self) -> list[str]:
        """Ids of the policies that played, in order of first appearance."""
        numbers, first = np.unique(self.policy, return_index=True)
        return list(dict.fromkeys(self.policy_ids[number] for number in numbers[np.argsort(first)].tolist()))

    def record(self, i: int, custom: Mapping[str, float] | None = None) -> EpisodeRecord:
        """Return row i as an object, the same at each call; only the first may pass ``custom`` numbers of callbacks."""
        record: EpisodeRecord | None = self.made[i]
        if record is None:
            record = self.made[i] = EpisodeRecord(
                eps_id=int(self.eps_id[i]),
                env_id=int(self.env_id[i]),
                number=int(self.number[i]),
                length=int(self.length[i]),
                returns_A=self.returns[i].copy(),
                lengths_A=self.lengths[i].copy(),
                present_A=self.present[i].copy(),
                truncated_A=self.truncated[i].copy(),
                policies=tuple([self.policy_ids[k] for k in self.policy[i].tolist()]),
                duration=float(self.duration[i]),
                custom={} if custom is None else custom,
            )
        return record


_COLUMNS = tuple(name for name in FinishedEpisodes.__slots__ if name != "policy_ids")
_DTYPES: Mapping[str, type[Any]] = {
    **dict.fromkeys(_COLUMNS, np.int64),
    **dict.fromkeys(("returns", "duration"), np.float64),
    **dict.fromkeys(("present", "truncated"), np.bool_),
    "made": np.object_,
}
_SAVED = tuple(name for name in _COLUMNS if name not in ("policy", "made"))
_PER_AGENT = {"returns", "lengths", "present", "truncated", "policy"}


class EpisodeTable:
    """The last finished episodes; statistics are over ``window`` of them.

    Rows are appended. When the arrays are full, the last rows are copied into new arrays: no row is ever overwritten.
    """

    def __init__(self, num_agents: int, window: int) -> None:
        if window < 1:
            raise ArgumentError(f"the metrics' window must be at least 1 episode, got {window}")
        self.window, self._num_agents = window, num_agents
        self.size = 0  # number of episodes ever added
        self.kept: int | None = None  # keep episodes from this number on, even beyond the window
        self._arrays = self._room(0)
        self._first = 0  # number of the episode in the arrays' first row
        self._known: Mapping[int, str] = {}  # policy ids of the rows added last

    def _room(self, rows: int) -> FinishedEpisodes:
        a = self._num_agents
        shapes = {name: (rows, a) if name in _PER_AGENT else (rows,) for name in _COLUMNS}
        arrays: dict[str, Any] = {name: np.empty(shape, _DTYPES[name]) for name, shape in shapes.items()}
        return FinishedEpisodes(**arrays, policy_ids={})

    def __len__(self) -> int:
        return min(self.size, self.window)

    def add(self, episodes: FinishedEpisodes) -> None:
        """Add rows."""
        start, stop = self.size - self._first, self.size - self._first + len(episodes)
        if stop > len(self._arrays):
            start, stop = self._move(len(episodes))
        arrays = self._arrays
        for name in _COLUMNS:
            getattr(arrays, name)[start:stop] = getattr(episodes, name)
        if episodes.policy_ids is not self._known:  # policies were added or removed
            arrays.policy_ids = {**arrays.policy_ids, **episodes.policy_ids}
            self._known = episodes.policy_ids
        self.size += len(episodes)

    def _move(self, more: int) -> tuple[int, int]:
        """Make room for more rows, and drop the ids of policies that are in no kept row."""
        kept = self._all_kept()
        first, start = self.size - len(kept), len(kept)
        room = self._room(2 * (start + more))
        for name in _COLUMNS:
            getattr(room, name)[:start] = getattr(kept, name)
        room.policy_ids = {number: kept.policy_ids[number] for number in np.unique(kept.policy).tolist()}
        self._arrays, self._first, self._known = room, first, {}
        return start, start + more

    def _all_kept(self) -> FinishedEpisodes:
        first = self.size - len(self)
        return self.between(first if self.kept is None else min(first, self.kept), self.size)

    def get_state(self) -> State:
        """Return the kept episodes; policies are indices into ``policies``."""
        found = self._all_kept()
        ids, policy = found.policies_seen, np.zeros_like(found.policy)
        for number in np.unique(found.policy).tolist():
            policy[found.policy == number] = ids.index(found.policy_ids[number])
        customs = [[i, dict(one.custom)] for i, one in enumerate(found.made.tolist()) if one is not None and one.custom]
        return {
            **{name: getattr(found, name).copy() for name in _SAVED},
            "policy": policy,
            "policies": ids,
            "custom": customs,
            "size": self.size,
            "kept": self.kept,
        }

    def prepare(self, state: State, numbers: Mapping[str, int]) -> Callable[[], None]:
        """Validate a state from `get_state()`; return a function that installs it.

        ``numbers`` are those of the present policies by id; others get numbers below 0.
        """
        where = "finished episodes"
        check_fields(state, (*_SAVED, "policy", "policies", "custom", "size", "kept"), where)
        size = number_field(state, "size", where)
        kept = None if state["kept"] is None else number_field(state, "kept", where)
        rows = len(array_field(state, "eps_id", np.int64, (None,), where))
        if not min(size, self.window) <= rows <= size:
            raise ArgumentError(f"{where}: eps_id: {rows} of {size} were saved, metrics are over {self.window}")
        shapes = {name: (rows, self._num_agents) if name in _PER_AGENT else (rows,) for name in _COLUMNS}
        arrays: dict[str, Any] = {name: array_field(state, name, _DTYPES[name], shapes[name], where) for name in _SAVED}
        places = array_field(state, "policy", np.int64, shapes["policy"], where)
        ids = state["policies"]
        if not isinstance(ids, list) or (places < 0).any() or (places >= len(ids)).any():
            raise ArgumentError(f"{where}: policies: expected all that played, got {ids!r:.200}")
        own = np.array([numbers.get(name, -1 - k) for k, name in enumerate(ids)], np.int64)
        arrays["policy"], arrays["made"] = own[places], np.full(rows, None, np.object_)
        found = FinishedEpisodes(**arrays, policy_ids=dict(zip(own.tolist(), ids, strict=True)))
        for i, custom in state["custom"]:
            found.record(i, dict(custom))
        return partial(vars(self).update, size=size, kept=kept, _arrays=found, _first=size - rows, _known={})

    def last(self, k: int | None = None, *, total: int | None = None) -> FinishedEpisodes:
        """Return the last k episodes, by default and at most the window's, oldest first, as read-only views.

        ``total``: count only the first ``total`` episodes ever added; None: all.
        """
        total = self.size if total is None else total
        most = min(total, self.window)
        return self.between(total - (most if k is None else min(k, most)), total)

    def between(self, start: int, stop: int) -> FinishedEpisodes:
        """Return episodes number ``start`` to ``stop - 1``, which must still be kept, as read-only views."""
        rows = slice(start - self._first, stop - self._first)
        arrays: dict[str, Any] = {name: getattr(self._arrays, name)[rows] for name in _COLUMNS}
        return FinishedEpisodes(**arrays, policy_ids=self._arrays.policy_ids)
