"""`Metrics`: returns, lengths and durations of episodes, counts of lost ones, and seconds per part of the loop."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.metrics.episode_table import EpisodeRecord, EpisodeTable, FinishedEpisodes
from marlvec.collect.rollout_state import Counters, CurrentState, RolloutState
from marlvec.errors import ArgumentError
from marlvec.serialization.state_fields import State, check_fields

__all__ = [
    "Stats",
    "stats_of_agents",
    "stats_of_episodes",
    "stats_of_policy",
    "TIMERS",
    "Timer",
    "Metrics",
    "MetricsDelta",
    "MetricsState",
    "CollectorStats",
    "as_number",
    "EpisodeRecord",
]


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
        self._table = EpisodeTable(len(agents), window)
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
            "timers": {name: [timer.seconds, timer.calls] for name, timer in self.timers.items()},
            "values": {name: list(values) for name, values in self._values.items()},
            "numbers": dict(self._numbers),
            "taken": None if self._taken is None else self._taken.get_state(),
            "taken_timers": {name: list(taken) for name, taken in self._taken_timers.items()},
            "new_values": [list(new) for new in self._new_values],
        }

    def prepare(self, state: State, numbers: Mapping[str, int]) -> Callable[[], None]:
        """Validate a state from `get_state()`; return a function that installs it. ``numbers``: policies' by id."""
        where = "metrics"
        names = ("table", "policies", "timers", "values", "numbers", "taken", "taken_timers", "new_values")
        check_fields(state, names, where)
        put_table = self._table.prepare(state["table"], numbers)
        try:
            new = {
                "policies": tuple(map(str, state["policies"])),
                "timers": {name: Timer(float(s), int(calls)) for name, (s, calls) in state["timers"].items()},
                "_values": {name: deque(values, self._table.window) for name, values in state["values"].items()},
                "_numbers": dict(state["numbers"]),
                "_taken": None if state["taken"] is None else Counters.from_state(state["taken"]),
                "_taken_timers": {name: (float(s), int(n)) for name, (s, n) in state["taken_timers"].items()},
                "_new_values": [(str(name), float(value)) for name, value in state["new_values"]],
            }
        except (TypeError, ValueError, AttributeError) as error:
            raise ArgumentError(f"{where}: expected a state from get_state(): {error!r:.200}") from error
        if not isinstance(state["policies"], list) or not all(isinstance(name, str) for name in state["policies"]):
            raise ArgumentError(f"{where}: policies: expected a list of ids, got {state['policies']!r:.200}")
        if missing := [name for name in TIMERS if name not in state["timers"]]:
            raise ArgumentError(f"{where}: the timers {missing} are missing")

        def put() -> None:
            put_table()
            vars(self).update(new)

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
