"""`RolloutState`: counters, running episodes and waiting rows of a rollout, published by one store.

Ctrl-C, or an error, may come at any line. So a tick writes where nothing reads yet, makes the next state, and publishes
it as its last act: whatever ends the tick before, the last state is true. See `RolloutLoop.recover`.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from marlvec.arguments import whole_number
from marlvec.errors import ArgumentError
from marlvec.serialization.state_fields import State, check_fields, number_field

__all__ = ["Counters", "CurrentState", "RolloutState", "STREAM_BITS", "WholeEpisode", "first_id"]

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

    env_steps: int = 0  # that envs answered
    agent_steps: int = 0
    env_steps_delivered: int = 0  # that batches have counted
    agent_steps_delivered: int = 0
    env_steps_lost: int = 0
    agent_steps_lost: int = 0
    episodes_total: int = 0
    episodes_faulty: int = 0  # lost to faults
    episodes_restarted: int = 0  # lost because their env raised `RestartQuietly`
    episodes_interrupted: int = 0  # lost because Ctrl-C, or an error, came in the middle of a tick
    noop_steps: int = 0  # how often a declared no-op was sent
    closed_steps: int = 0  # decisions whose outcome is known, and which are in no batch yet
    ended_episodes: int = 0  # since the last batch; where only whole ones are delivered, all that wait
    ended_env_steps: int = 0  # of episodes that ended, which no batch has counted yet
    ended_agent_steps: int = 0  # decisions made in whole episodes that wait
    unroll_id: int = 0  # number of the next fragment

    def copy(self) -> Counters:
        """Return a copy that may be written to."""
        return Counters(*_ALL(self))

    def get_state(self) -> State:
        """The numbers by name."""
        return dict(zip(Counters.__slots__, _ALL(self), strict=True))

    @classmethod
    def from_state(cls, state: State) -> Counters:
        """Return the numbers that `get_state` gave."""
        check_fields(state, Counters.__slots__, "counters")
        return cls(**{name: number_field(state, name, "counters") for name in Counters.__slots__})

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
        where = "rollout"
        check_fields(state, ("tick", "counters", "finished"), where)
        counters, tick = Counters.from_state(state["counters"]), number_field(state, "tick", where)
        try:
            finished = tuple(WholeEpisode(*map(int, one)) for one in state["finished"])
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"{where}: finished: expected episodes, got {state['finished']!r:.200}") from error
        return self._replace(tick=tick, counters=counters, finished=finished, delivered=None)


class CurrentState:
    """The one place where a state is published."""

    __slots__ = ("state", "tick_counters")

    def __init__(self, num_envs: int, first_id: int = 0) -> None:
        self.state = RolloutState.new(num_envs, first_id)
        self.tick_counters: Counters | None = None  # of a tick for which callbacks are called before it is over

    @property
    def counters(self) -> Counters:
        """The counters that metrics show."""
        return self.state.counters if self.tick_counters is None else self.tick_counters
