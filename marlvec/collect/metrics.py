"""`Metrics`: returns, lengths and durations of episodes, counts of lost ones, and seconds per part of the loop.

`EndedEpisodes` stores the last finished episodes as arrays; `RolloutState` holds the counters, running episodes and
waiting rows of a rollout, published by one store.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from marlvec.arguments import whole_number
from marlvec.errors import ArgumentError
from marlvec.serialization.records import Count, read_fields, to_plain
from marlvec.serialization.saved import State, array_field

IntArray = NDArray[np.int64]
STREAM_BITS = 43
"""Ids of episodes and fragments are ``stream << STREAM_BITS | local``, so that many collectors have no id in common."""


def first_id(stream: int) -> int:
    """Return the first id of a stream, an integer from 0 to 2**20 - 1."""
    number = whole_number(stream)
    if number is None or not 0 <= number < 1 << 63 - STREAM_BITS:
        raise ArgumentError(f"stream must be an integer from 0 to 2**{63 - STREAM_BITS} - 1, got {stream!r}")
    return number << STREAM_BITS


@dataclass(slots=True)
class Counters:
    """Sums over a collector's life, and of what is in no batch yet. Those of a published state are never written to.

    Agent steps are decisions given to envs. Lost steps are in no batch and never will be.
    """

    env_steps: Count = 0  # that envs answered
    agent_steps: Count = 0
    env_steps_delivered: Count = 0  # that batches have counted
    agent_steps_delivered: Count = 0
    env_steps_lost: Count = 0
    agent_steps_lost: Count = 0
    episodes_total: Count = 0
    episodes_faulty: Count = 0  # lost to faults
    episodes_restarted: Count = 0  # lost because their env raised `RestartQuietly`
    episodes_interrupted: Count = 0  # lost because Ctrl-C, or an error, came in the middle of a tick
    noop_steps: Count = 0  # how often a declared no-op was sent
    closed_steps: Count = 0  # decisions whose outcome is known, and which are in no batch yet
    ended_episodes: Count = 0  # since the last batch; where only whole ones are delivered, all that wait
    ended_env_steps: Count = 0  # of episodes that ended, which no batch has counted yet
    ended_agent_steps: Count = 0  # decisions made in whole episodes that wait
    unroll_id: Count = 0  # number of the next fragment

    def copy(self) -> Counters:
        """Return a copy that may be written to."""
        return Counters(*_ALL(self))

    def get_state(self) -> State:
        """The numbers by name."""
        return dict(zip(Counters.__slots__, _ALL(self), strict=True))

    @property
    def waiting_env_steps(self) -> int:
        """Env steps that are in no batch yet, and not lost."""
        return self.env_steps - self.env_steps_delivered - self.env_steps_lost


_ALL = attrgetter(*Counters.__slots__)


class WholeEpisode(NamedTuple):
    """An episode that ended and is in no batch yet; handed over in the order of the rounds of their last steps."""

    round: int
    env_id: int
    eps_id: int
    env_steps: int
    agent_steps: int
    episodes: int = 1


class RolloutState(NamedTuple):
    """State of a rollout between two ticks. Nothing in it is ever written to."""

    tick: int  # 0: nothing runs yet
    counters: Counters
    eps_id_N: IntArray  # id of each env's running episode, or -1
    ended_N: IntArray  # episodes of an env with smaller ids than this have ended
    number_N: IntArray  # it is the env's n-th episode, from 0, that runs or ran last
    finished: tuple[WholeEpisode, ...] = ()  # in no batch yet; only where batches are made of whole episodes
    # Transitions closed up to this (round, lane), and episodes ended up to this (round, env), are in batches but still
    # stored; None: nothing of that is stored any more.
    delivered: tuple[int, int] | None = None

    @classmethod
    def new(cls, num_envs: int, first_id: int = 0) -> RolloutState:
        """Return the initial state; the first fragment gets the first id."""
        none = np.full(num_envs, -1, np.int64)
        return cls(0, Counters(unroll_id=first_id), none, np.zeros(num_envs, np.int64), none)

    def get_state(self) -> State:
        """Return all but the arrays, which `EpisodeTracker` saves; no delivered rows may be stored."""
        finished = [list(episode) for episode in self.finished]
        return {"tick": self.tick, "counters": self.counters.get_state(), "finished": finished}

    def with_state(self, state: State) -> RolloutState:
        """Return the state that `get_state()` saved, with this one's arrays."""
        found = read_fields(state, "rollout", tick=Count, counters=Counters, finished=tuple[WholeEpisode, ...])
        return self._replace(**found, delivered=None)


class CurrentState:
    """The one place where a state is published, by one store into `now`.

    Attributes:
        now: A state, then its tick, env steps, agent steps and closed steps; or a state and these four numbers of a
            later one that differs in nothing else: so most ticks make no other object.
    """

    __slots__ = ("_made", "now", "tick_counters")

    def __init__(self, num_envs: int, first_id: int = 0) -> None:
        self.now: tuple[RolloutState, int, int, int, int]
        self._made: tuple[tuple[RolloutState, int, int, int, int], RolloutState]  # and the state that it is
        self.state = RolloutState.new(num_envs, first_id)
        self.tick_counters: Counters | None = None  # of a tick for which callbacks are called before it is over

    @property
    def state(self) -> RolloutState:
        """The published state."""
        now, made = self.now, self._made
        if made[0] is now:
            return made[1]
        state, tick, env_steps, agent_steps, closed_steps = now
        counters = state.counters.copy()
        counters.env_steps, counters.agent_steps, counters.closed_steps = env_steps, agent_steps, closed_steps
        state = state._replace(tick=tick, counters=counters)
        self._made = now, state
        return state

    @state.setter
    def state(self, state: RolloutState) -> None:
        counters = state.counters
        now = state, state.tick, counters.env_steps, counters.agent_steps, counters.closed_steps
        self._made = now, state
        self.now = now

    @property
    def counters(self) -> Counters:
        """The counters that metrics show."""
        return self.state.counters if self.tick_counters is None else self.tick_counters


AnyArray = NDArray[Any]
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
_TABLE_FIELDS = {
    **dict.fromkeys((*_SAVED, "policy"), Any),  # arrays
    "policies": list[str],
    "custom": list[tuple[Count, dict[str, float]]],  # an episode's row, and its numbers
    "size": Count,
    "kept": Count | None,
}
_PER_AGENT = {"returns", "lengths", "present", "truncated", "policy"}


class EndedEpisodes:
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
        saved = read_fields(state, where, **_TABLE_FIELDS)
        size, ids, customs = saved["size"], saved["policies"], dict(saved["custom"])
        rows = len(array_field(state, "eps_id", np.int64, (None,), where))
        if not min(size, self.window) <= rows <= size:
            raise ArgumentError(f"{where}: eps_id: {rows} of {size} were saved, metrics are over {self.window}")
        shapes = {name: (rows, self._num_agents) if name in _PER_AGENT else (rows,) for name in _COLUMNS}
        arrays: dict[str, Any] = {name: array_field(state, name, _DTYPES[name], shapes[name], where) for name in _SAVED}
        places = array_field(state, "policy", np.int64, shapes["policy"], where)
        if (places < 0).any() or (places >= len(ids)).any() or max(customs, default=-1) >= rows:
            raise ArgumentError(f"{where}: expected policies of all that played, and numbers of {rows} episodes")
        own = np.array([numbers.get(name, -1 - k) for k, name in enumerate(ids)], np.int64)
        arrays["policy"], arrays["made"] = own[places], np.full(rows, None, np.object_)
        found = FinishedEpisodes(**arrays, policy_ids=dict(zip(own.tolist(), ids, strict=True)))
        for i, custom in customs.items():
            found.record(i, custom)
        return partial(vars(self).update, size=size, kept=saved["kept"], _arrays=found, _first=size - rows, _known={})

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


@dataclass(frozen=True, slots=True)
class Stats:
    """Minimum, mean, maximum and standard deviation (of the population) of some numbers; NaN if there are none."""

    count: int = 0
    min: float = math.nan
    mean: float = math.nan
    max: float = math.nan
    std: float = field(default=math.nan, compare=False)

    @classmethod
    def of(cls, values: Iterable[float]) -> Stats:
        """Statistics of these numbers."""
        numbers = list(values)
        if not numbers:
            return cls()
        mean = math.fsum(numbers) / len(numbers)
        std = math.sqrt(math.fsum((number - mean) ** 2 for number in numbers) / len(numbers))
        return cls(len(numbers), float(min(numbers)), mean, float(max(numbers)), std)

    def as_dict(self) -> dict[str, float]:
        """``count``, ``min``, ``mean`` and ``max``, by name; not ``std``."""
        return {"count": self.count, "min": self.min, "mean": self.mean, "max": self.max}


def stats_of_episodes(records: Iterable[EpisodeRecord]) -> dict[str, Stats]:
    """Return statistics of ``return`` (sum over agents), ``length`` (env steps) and ``duration`` of episodes."""
    records = list(records)
    return _named((e.episode_return for e in records), (e.length for e in records), (e.duration for e in records))


def stats_of_agents(pairs: Sequence[tuple[EpisodeRecord, int]]) -> dict[str, Stats]:
    """Return statistics of ``return``, ``length`` (decisions) and ``duration`` of (episode, agent index) pairs."""
    returns, lengths = (float(e.returns_A[a]) for e, a in pairs), (int(e.lengths_A[a]) for e, a in pairs)
    return _named(returns, lengths, (e.duration for e, _ in pairs))


def stats_of_policy(records: Iterable[EpisodeRecord], policy_id: str) -> dict[str, Stats]:
    """Return `stats_of_agents` of all agents that one policy played in these episodes."""
    return stats_of_agents(
        [(e, a) for e in records for a, name in enumerate(e.policies) if name == policy_id and e.present_A[a]]
    )


def _of_rows(found: FinishedEpisodes, rows: slice | NDArray[np.bool_]) -> dict[str, Stats]:
    """Return `stats_of_episodes` of some rows."""
    returns = found.returns[rows].sum(axis=1).tolist()
    return _named(returns, found.length[rows].tolist(), found.duration[rows].tolist())


def _of_agents(found: FinishedEpisodes, chosen: NDArray[np.bool_]) -> dict[str, Stats]:
    """Return `stats_of_agents` of the agents chosen by a (k, A) mask."""
    durations = found.duration[np.nonzero(chosen)[0]].tolist()
    return _named(found.returns[chosen].tolist(), found.lengths[chosen].tolist(), durations)


def _named(returns: Iterable[float], lengths: Iterable[float], durations: Iterable[float]) -> dict[str, Stats]:
    return {"return": Stats.of(returns), "length": Stats.of(lengths), "duration": Stats.of(durations)}


TIMERS = ("inference", "action_connectors", "env_wait", "agent_connectors", "ingest", "batch", "callbacks")
"""Policies; both sides' connectors; waiting for envs; book-keeping; batches, with their connectors; callbacks."""


@dataclass(slots=True)
class Timer:
    """Seconds spent in one part of the loop, over the life of a collector, and number of calls."""

    seconds: float = 0.0
    calls: int = 0

    def add(self, seconds: float) -> None:
        """Count one call."""
        self.seconds += seconds
        self.calls += 1

    @property
    def mean(self) -> float:
        """Mean seconds a call; 0 before the first call."""
        return self.seconds / self.calls if self.calls else 0.0


class MetricsState(NamedTuple):
    """The state of a `Metrics` without its table of episodes. Never written to when deltas are added."""

    rollout: RolloutState
    policies: tuple[str, ...]
    timers: dict[str, Timer]
    values: dict[str, deque[float]]


class Metrics:
    """Totals over a collector's life, and statistics over its last episodes.

    All steps are accounted for: between two calls of `Collector.collect`, ``env_steps`` is the sum of the env steps in
    all batches, ``env_steps_lost``, and the steps stored for a later batch (none after a ``collect(env_steps=...)``
    that cuts through episodes). The same holds for ``agent_steps``; a decision is stored until its outcome is known.
    Lost steps never come into a batch, because a fault, `RestartQuietly`, Ctrl-C or `Collector.reset` ended their
    episode.

    Attributes:
        timers: Timer by name, see `TIMERS`.
        agents, policies: Agent names, in order, and policy ids.
        collectors: Counts of each of many collectors, in order; empty for a single collector.
    """

    def __init__(
        self,
        agents: tuple[str, ...],
        policies: tuple[str, ...],
        *,
        window: int = 100,
        current: CurrentState | None = None,
    ) -> None:
        self._current = CurrentState(0) if current is None else current
        self._table = EndedEpisodes(len(agents), window)
        self.agents, self.policies = agents, policies
        self.collectors: tuple[CollectorStats, ...] = ()
        self._values: dict[str, deque[float]] = {}
        self.timers = {name: Timer() for name in TIMERS}
        self._numbers: dict[str, int] = {}  # policies named by deltas
        self._taken: Counters | None = None  # counters at the last delta
        self._taken_timers: dict[str, tuple[float, int]] = {}
        self._new_values: list[tuple[str, float]] = []

    def add(self, episodes: FinishedEpisodes) -> None:
        """Count finished episodes."""
        self._table.add(episodes)

    def forget_unpublished(self) -> None:
        """Drop the episodes of an unfinished tick."""
        self._table.size = self._current.state.counters.episodes_total

    @property
    def env_steps(self) -> int:
        """Env steps that envs answered, including lost and failed ones; autoreset steps don't count."""
        return self._current.counters.env_steps

    @property
    def agent_steps(self) -> int:
        """Decisions sent to envs, including those of lost episodes."""
        return self._current.counters.agent_steps

    @property
    def episodes_total(self) -> int:
        """Finished episodes; lost ones don't count."""
        return self._current.counters.episodes_total

    @property
    def episodes_faulty(self) -> int:
        """Episodes lost to a fault: of their env, or of another env in the same worker."""
        return self._current.counters.episodes_faulty

    @property
    def episodes_restarted(self) -> int:
        """Episodes lost because their env raised `RestartQuietly`."""
        return self._current.counters.episodes_restarted

    @property
    def episodes_interrupted(self) -> int:
        """Episodes lost to Ctrl-C, or to an error of an env or a connector, in the middle of a tick."""
        return self._current.counters.episodes_interrupted

    @property
    def noop_steps(self) -> int:
        """Declared no-ops sent for agents whose rows a connector had removed."""
        return self._current.counters.noop_steps

    @property
    def env_steps_lost(self) -> int:
        """Number of `env_steps` that were lost."""
        return self._current.counters.env_steps_lost

    @property
    def agent_steps_lost(self) -> int:
        """Number of `agent_steps` that were lost."""
        return self._current.counters.agent_steps_lost

    def add_value(self, name: str, value: float) -> None:
        """Add a custom number: `last_values` has the last one, `custom` the statistics of the last ones, without NaN.

        Put numbers of an episode into `RunningEpisode.custom` instead.
        """
        number = as_number(value, f"metrics.add_value({name!r})")
        values = self._values.setdefault(name, deque(maxlen=self._table.window))
        if not math.isnan(number):
            values.append(number)
            if self._taken is not None:
                self._new_values.append((name, number))

    def take_delta(self) -> MetricsDelta:
        """Return all changes since the last call, between two calls of `Collector.collect`, for `add_delta` elsewhere.

        The first call returns an empty delta; from then on episodes are kept until taken, even beyond the window.
        """
        counters = self._current.state.counters
        before = counters if self._taken is None else self._taken
        seconds = {name: (timer.seconds, timer.calls) for name, timer in self.timers.items()}
        taken = seconds if self._taken is None else self._taken_timers
        delta = MetricsDelta(
            agents=self.agents,
            policies=self.policies,
            episodes=standalone(self._table.between(before.episodes_total, counters.episodes_total)),
            counters=difference(counters, before),
            timers={name: (s - taken[name][0], n - taken[name][1]) for name, (s, n) in seconds.items()},
            values=tuple(self._new_values),
        )
        self._new_values.clear()
        self._taken, self._taken_timers, self._table.kept = counters, seconds, counters.episodes_total
        return delta

    def add_delta(self, *deltas: MetricsDelta) -> None:
        """Add deltas of other metrics, each once, in this order; statistics are then over the last episodes of all."""
        self.show(self.after(deltas))

    def after(self, deltas: Iterable[MetricsDelta]) -> MetricsState:
        """Return the state with these deltas added; the metrics themselves do not change."""
        self.forget_unpublished()
        rollout, policies, timers, values = self.state
        counters = rollout.counters
        self._table.kept = max(0, self._table.size - self._table.window)  # show() may return to this state
        timers = {name: Timer(timer.seconds, timer.calls) for name, timer in timers.items()}
        values = {name: numbers.copy() for name, numbers in values.items()}
        for delta in deltas:
            if delta.agents != self.agents:
                raise ArgumentError(f"metrics of the agents {list(self.agents)} got some of {list(delta.agents)}")
            counters = counted(counters, delta.counters)
            if len(delta.episodes):
                self._table.add(renumbered(delta.episodes, self._numbers))
            policies = tuple(dict.fromkeys(policies + delta.policies))
            for name, (seconds, calls) in delta.timers.items():
                timer = timers.setdefault(name, Timer())
                timer.seconds, timer.calls = timer.seconds + seconds, timer.calls + calls
            for name, value in delta.values:
                values.setdefault(name, deque(maxlen=self._table.window)).append(value)
        return MetricsState(rollout._replace(counters=counters), policies, timers, values)

    @property
    def state(self) -> MetricsState:
        """The current state, for `show`."""
        return MetricsState(self._current.state, self.policies, self.timers, self._values)

    def show(self, state: MetricsState) -> None:
        """Show this state from now on: the last result of `after`, or the value of `state` before it."""
        self._current.state, self.policies, self.timers, self._values = state  # not interrupted: stores alone

    def get_state(self) -> State:
        """Return the state: the content of the next delta, and all but the counters."""
        return {
            "table": self._table.get_state(),
            "policies": list(self.policies),
            "timers": to_plain(self.timers),
            "values": to_plain(self._values),
            "numbers": dict(self._numbers),
            "taken": None if self._taken is None else self._taken.get_state(),
            "taken_timers": {name: list(taken) for name, taken in self._taken_timers.items()},
            "new_values": [list(new) for new in self._new_values],
        }

    def prepare(self, state: State, numbers: Mapping[str, int]) -> Callable[[], None]:
        """Validate a state from `get_state()`; return a function that installs it. ``numbers``: policies' by id."""
        found = read_fields(
            state,
            "metrics",
            table=Any,
            policies=tuple[str, ...],
            timers=dict[str, Timer],
            values=dict[str, list[float]],
            numbers=dict[str, int],
            taken=Counters | None,
            taken_timers=dict[str, tuple[float, int]],
            new_values=list[tuple[str, float]],
        )
        policies, timers = found.pop("policies"), found.pop("timers")
        put_table = self._table.prepare(found.pop("table"), numbers)
        if missing := [name for name in TIMERS if name not in timers]:
            raise ArgumentError(f"metrics: the timers {missing} are missing")
        found["values"] = {name: deque(values, self._table.window) for name, values in found["values"].items()}
        own = {f"_{name}": value for name, value in found.items()}

        def put() -> None:
            put_table()
            vars(self).update(own, policies=policies, timers=timers)

        return put

    def _last(self, k: int | None = None) -> FinishedEpisodes:
        return self._table.last(k, total=self._current.counters.episodes_total)

    @property
    def episodes(self) -> list[EpisodeRecord]:
        """The last finished episodes, oldest first; at most the window's."""
        return self.latest(self._table.window)

    def latest(self, k: int) -> list[EpisodeRecord]:
        """Return the last k of `episodes`, or all if they are fewer, oldest first."""
        found = self._last(k)
        return [found.record(i) for i in range(len(found))]

    @property
    def policies_seen(self) -> list[str]:
        """Ids of the policies that played in `episodes`, in order of first appearance."""
        return self._last().policies_seen

    @property
    def returns(self) -> Stats:
        """Statistics of team returns: sums over all agents."""
        return Stats.of(self._last().returns.sum(axis=1).tolist())

    @property
    def lengths(self) -> Stats:
        """Statistics of env steps an episode."""
        return Stats.of(self._last().length.tolist())

    @property
    def durations(self) -> Stats:
        """Statistics of seconds an episode."""
        return Stats.of(self._last().duration.tolist())

    def env(self, env_id: int) -> dict[str, Stats]:
        """Return statistics of ``return``, ``length`` and ``duration`` of one env's episodes."""
        found = self._last()
        return _of_rows(found, found.env_id == env_id)

    def agent(self, name: str) -> dict[str, Stats]:
        """Return statistics of one agent's ``return``, ``length`` (decisions) and ``duration``."""
        if name not in self.agents:
            raise KeyError(f"no agent {name!r}; there are {list(self.agents)}")
        a = self.agents.index(name)
        found = self._last()
        return _of_agents(found, found.present & (np.arange(len(self.agents)) == a))

    def policy(self, policy_id: str) -> dict[str, Stats]:
        """Return statistics of ``return``, ``length`` (decisions) and ``duration`` of a policy's agents, one by one."""
        if policy_id not in self.policies:
            raise KeyError(f"no policy {policy_id!r}; there are {list(self.policies)}")
        found = self._last()
        numbers = [number for number, name in found.policy_ids.items() if name == policy_id]
        return _of_agents(found, found.present & np.isin(found.policy, numbers))

    @property
    def last_values(self) -> dict[str, float]:
        """The last value of each name given to `add_value`, NaN left out; loggers and tables show it."""
        return {name: values[-1] for name, values in self._values.items() if values}

    @property
    def episode_values(self) -> dict[str, Stats]:
        """Statistics of `RunningEpisode.custom` by name, over the window's episodes, NaN left out."""
        return {name: Stats.of(numbers) for name, numbers in self._of_episodes().items()}

    @property
    def custom(self) -> dict[str, Stats]:
        """Statistics of custom values by name, NaN left out.

        Values from callbacks are over the window's episodes; values from `add_value` over as many last values.
        """
        found = {name: list(values) for name, values in self._values.items()}
        for name, numbers in self._of_episodes().items():
            found.setdefault(name, []).extend(numbers)
        return {name: Stats.of(numbers) for name, numbers in found.items()}

    def _of_episodes(self) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for record in self._last().made.tolist():
            for name, value in record.custom.items() if record is not None else ():
                numbers = found.setdefault(name, [])
                if not math.isnan(value):
                    numbers.append(value)
        return found

    def summary(self) -> dict[str, Any]:
        """Return everything as plain dicts and numbers."""
        found = self._last()
        return {
            **{name: getattr(self, name) for name in _COUNTED},
            **_plain(_of_rows(found, slice(None))),
            "envs": {i: _plain(self.env(i)) for i in np.unique(found.env_id).tolist()},
            "agents": {name: _plain(self.agent(name)) for name in self.agents},
            "policies": {name: _plain(self.policy(name)) for name in self.policies},
            "custom": _plain(self.custom),
            "last_values": self.last_values,
            "timers": {name: {"seconds": t.seconds, "calls": t.calls} for name, t in self.timers.items()},
        }

    def __repr__(self) -> str:
        r = self.returns
        gone = self.episodes_faulty + self.episodes_restarted + self.episodes_interrupted
        lost = f" and {gone} lost" if gone else ""
        return (
            f"Metrics({self.env_steps} env steps, {self.agent_steps} agent steps, {self.episodes_total} episodes"
            f"{lost}; team returns (sums over agents) of the last {r.count}: mean {r.mean:.4g}, min {r.min:.4g}, "
            f"max {r.max:.4g})"
        )


def as_number(value: Any, what: str) -> float:
    """Convert a single number to a float; refuse anything else."""
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError("text")
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(f"{what}: expected one number, got {value!r}") from error


def _plain(stats: Mapping[str, Stats]) -> dict[str, dict[str, float]]:
    return {name: s.as_dict() for name, s in stats.items()}


@dataclass(frozen=True, slots=True)
class CollectorStats:
    """Counts of one of many collectors, up to the last delivered batch.

    Attributes:
        index: Its number.
        restarts: How often it was restarted.
        lag: Versions of the weights that its oldest fragment in its last batch was behind.
        env_steps: Env steps in batches, over all restarts.
        seconds_waiting: Seconds it waited for a request.
        seconds_working: Seconds it worked on requests.
    """

    index: int
    restarts: int = 0
    lag: int = 0
    env_steps: int = 0
    seconds_waiting: float = 0.0
    seconds_working: float = 0.0

    @property
    def waiting(self) -> float:
        """Share of its time that it waited for requests, between 0 and 1."""
        total = self.seconds_waiting + self.seconds_working
        return self.seconds_waiting / total if total else 0.0


_COUNTED = (
    *("env_steps", "agent_steps", "episodes_total", "episodes_faulty", "episodes_restarted", "episodes_interrupted"),
    *("noop_steps", "env_steps_lost", "agent_steps_lost"),
)
"""The sums of `Counters` that metrics show."""


@dataclass(frozen=True, slots=True)
class MetricsDelta:
    """The records, counts and seconds that a `Metrics` gained since its last delta.

    Means cannot be added, so it contains every finished episode once.
    """

    agents: tuple[str, ...]
    policies: tuple[str, ...]
    episodes: FinishedEpisodes
    counters: Mapping[str, int]  # increase of each counter
    timers: Mapping[str, tuple[float, int]]  # seconds and calls by name
    values: tuple[tuple[str, float], ...]  # given to `Metrics.add_value`, in order, NaN left out


def difference(now: Counters, before: Counters) -> dict[str, int]:
    """Return the increase of each counter."""
    return {name: getattr(now, name) - getattr(before, name) for name in _COUNTED}


def counted(counters: Counters, more: Mapping[str, int]) -> Counters:
    """Return the counters with these increases added."""
    new = counters.copy()
    for name in _COUNTED:
        setattr(new, name, getattr(new, name) + more[name])
    return new


def standalone(found: FinishedEpisodes) -> FinishedEpisodes:
    """Return a copy of a table's rows, without fields that their records can be rebuilt from."""
    arrays = {name: getattr(found, name).copy() for name in FinishedEpisodes.__slots__ if name != "policy_ids"}
    for i, record in enumerate(found.made.tolist()):
        if record is not None and not record.custom:
            arrays["made"][i] = None
    used = np.unique(found.policy).tolist()
    return FinishedEpisodes(**arrays, policy_ids={number: found.policy_ids[number] for number in used})


def renumbered(found: FinishedEpisodes, numbers: dict[str, int]) -> FinishedEpisodes:
    """Return these episodes with another table's policy numbers, to which new ids are added."""
    policy = np.empty_like(found.policy)
    for number, name in found.policy_ids.items():
        policy[found.policy == number] = numbers.setdefault(name, len(numbers))
    arrays = {name: getattr(found, name) for name in FinishedEpisodes.__slots__ if name not in ("policy", "policy_ids")}
    return FinishedEpisodes(**arrays, policy=policy, policy_ids={number: name for name, number in numbers.items()})
