"""What a rollout has come to, published by one store: the counters, which episodes run, what waits for a batch.

Ctrl-C, or an error, may come at any line. So a tick writes where nobody reads yet, makes the next state, and publishes
it as its last act: whatever ends the tick before, the last state tells the truth. See `RolloutLoop.recover`.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Counters", "CurrentState", "RolloutState", "WholeEpisode"]

IntArray = NDArray[np.int64]


@dataclass(slots=True)
class Counters:
    """Sums over a collector's life, and of what is in no batch yet. Those of a published state are never written to.

    Attributes:
        env_steps: Env steps that envs answered.
        agent_steps: Decisions given to envs.
        env_steps_delivered: Env steps that batches have counted.
        agent_steps_delivered: Decisions that batches have counted.
        env_steps_lost: Env steps that are in no batch and never will be.
        agent_steps_lost: Likewise, decisions.
        episodes_total: Episodes finished.
        episodes_faulty: Episodes lost to faults.
        episodes_restarted: Episodes lost because their env raised `RestartQuietly`.
        episodes_interrupted: Episodes lost because Ctrl-C, or an error, came in the middle of a tick.
        noop_steps: How often a declared no-op was sent.
        closed_steps: Decisions whose outcome is known, and which are in no batch yet.
        ended_episodes: Episodes that ended since the last batch; where only whole ones are delivered, all that wait.
        ended_env_steps: Env steps of episodes that ended, which no batch has counted yet.
        ended_agent_steps: Decisions made in whole episodes that wait.
        unroll_id: Number of the next fragment.
    """

    env_steps: int = 0
    agent_steps: int = 0
    env_steps_delivered: int = 0
    agent_steps_delivered: int = 0
    env_steps_lost: int = 0
    agent_steps_lost: int = 0
    episodes_total: int = 0
    episodes_faulty: int = 0
    episodes_restarted: int = 0
    episodes_interrupted: int = 0
    noop_steps: int = 0
    closed_steps: int = 0
    ended_episodes: int = 0
    ended_env_steps: int = 0
    ended_agent_steps: int = 0
    unroll_id: int = 0

    def copy(self) -> Counters:
        """The same numbers, to be written to."""
        return Counters(*_ALL(self))

    @property
    def waiting_env_steps(self) -> int:
        """Env steps that are in no batch yet, and not lost."""
        return self.env_steps - self.env_steps_delivered - self.env_steps_lost


_ALL = attrgetter(*Counters.__slots__)


class WholeEpisode(NamedTuple):
    """An episode that ended and is in no batch yet; these are handed over in their order.

    Attributes:
        round: The round of its last step.
        env_id: Its env.
        eps_id: Its id.
        env_steps: Its env steps.
        agent_steps: Decisions that were made in it.
        episodes: One.
    """

    round: int
    env_id: int
    eps_id: int
    env_steps: int
    agent_steps: int
    episodes: int = 1


class RolloutState(NamedTuple):
    """Where a rollout stands between two ticks. Nothing in it is ever written to.

    Attributes:
        tick: Its number; 0: nothing runs yet.
        counters: The sums.
        eps_id_N: (N,) int64, id of each env's running episode, or -1.
        ended_N: (N,) int64, episodes of an env with smaller ids than this have ended.
        number_N: (N,) int64, it is the env's n-th episode, from 0, that runs or ran last.
        finished: Whole episodes that are in no batch yet, in order; only where batches are made of those.
        delivered: Transitions that were closed up to this (round, lane) are in batches, and episodes that ended up to
            this (round, env), and they are still stored; None: nothing of that is stored any more.
    """

    tick: int
    counters: Counters
    eps_id_N: IntArray
    ended_N: IntArray
    number_N: IntArray
    finished: tuple[WholeEpisode, ...] = ()
    delivered: tuple[int, int] | None = None

    @classmethod
    def new(cls, num_envs: int) -> RolloutState:
        """Where it begins."""
        none = np.full(num_envs, -1, np.int64)
        return cls(0, Counters(), none, np.zeros(num_envs, np.int64), none)


class CurrentState:
    """The one place where a state is published.

    Attributes:
        state: The state that counts.
        told: Counters of a tick that callbacks are told of before it is over; else None.
    """

    __slots__ = ("state", "told")

    def __init__(self, num_envs: int) -> None:
        self.state = RolloutState.new(num_envs)
        self.told: Counters | None = None

    @property
    def counters(self) -> Counters:
        """What metrics show."""
        return self.state.counters if self.told is None else self.told
