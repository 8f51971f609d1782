"""`EpisodeDriver`: the calls by which a simulator drives its episodes, wherever the collector is."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

from marlvec.external.exchange.external_episode import Flags

__all__ = ["EpisodeDriver", "RunningEpisodes"]

DEFAULT = -1.0
"""Of timeouts: as the constructor says."""


class RunningEpisodes(Protocol):
    """The episodes of one driver, by id. Tables go by agent name; seconds are None for ever."""

    def __len__(self) -> int: ...

    def begin(
        self, key: Hashable | None, *, training_enabled: bool, env_id: int | None, timeout: float | None
    ) -> Hashable:
        """See `EpisodeDriver.start_episode`."""
        ...

    def ask(self, key: Hashable, obs: Any, masks: Any, timeout: float | None) -> Mapping[str, Any]:
        """See `EpisodeDriver.get_action`."""
        ...

    def wait(self, key: Hashable, timeout: float | None) -> Mapping[str, Any]:
        """See `EpisodeDriver.wait_for_action`."""
        ...

    def log(self, key: Hashable, obs: Any, actions: Any, masks: Any, timeout: float | None) -> None:
        """See `EpisodeDriver.log_action`."""
        ...

    def log_returns(self, key: Hashable, rewards: Any, infos: Any) -> None:
        """See `EpisodeDriver.log_returns`."""
        ...

    def leave(
        self, key: Hashable, final_obs: Any, terminated: Flags | None, truncated: Flags, timeout: float | None
    ) -> None:
        """See `EpisodeDriver.end_agents`."""
        ...

    def end(
        self, key: Hashable, final_obs: Any, terminated: Flags | None, truncated: Flags, timeout: float | None
    ) -> None:
        """See `EpisodeDriver.end_episode`."""
        ...


class EpisodeDriver:
    """Begins episodes, asks for actions, says what came of them.

    Args:
        episodes: Where they run.
        agents: Agent names, in order.
        timeout: Seconds that each call waits at most; None: for ever.
        dicts: Whether everything goes by agent name also where there is one agent.

    Attributes:
        agents, timeout: As given; the latter may be changed.
    """

    def __init__(self, episodes: RunningEpisodes, agents: Sequence[str], timeout: float | None, *, dicts: bool) -> None:
        self.agents, self.timeout = tuple(agents), timeout
        self._episodes = episodes
        self._alone = self.agents[0] if len(self.agents) == 1 and not dicts else None

    def start_episode(
        self,
        episode_id: Hashable | None = None,
        *,
        training_enabled: bool = True,
        env_id: int | None = None,
        timeout: float | None = DEFAULT,
    ) -> Hashable:
        """Begin an episode; wait for a free slot.

        Args:
            episode_id: How to call it; None: a name that no other one of this driver has.
            training_enabled: False: its rows are in no batch.
            env_id: The slot it gets; None: any.
            timeout: Seconds to wait; default: as the constructor says.

        Returns:
            Its id. It is forgotten when the episode is over.

        Raises:
            EpisodesFull: No slot was free in time, or as many episodes run as this driver may have.
            StateError: An episode of this id runs.
            ClosedError: The driver, or the vectorizer, was closed.
            MarlvecError: As `get_action`.
        """
        return self._episodes.begin(
            episode_id, training_enabled=training_enabled, env_id=env_id, timeout=self._seconds(timeout)
        )

    def get_action(self, episode_id: Hashable, obs: Any, *, masks: Any = None, timeout: float | None = DEFAULT) -> Any:
        """Ask for actions, and wait for them.

        Args:
            episode_id: The episode.
            obs: Observations of all who act now.
            masks: Action masks, where they are not in the observations.
            timeout: Seconds to wait; default: as the constructor says.

        Returns:
            Actions for the env.

        Raises:
            AnswerTimeout: None came in time. They may still come: `wait_for_action`, or end the episode.
            EpisodeOver: There is no such episode, or no more: `EpisodeCut` if time was up, and this was its end.
            BusyError, StateError: What was asked before is still to be taken; or an agent acts that has ended.
            ContractError, ArgumentError: What was said is not what was declared. Nothing was asked.
            ConnectionLost: The server is gone; the episode, too, where it has lost this session.
            ClosedError: The driver, or the vectorizer, was closed.
        """
        tables = self._table(obs), None if masks is None else self._table(masks)
        return self._own(self._episodes.ask(episode_id, *tables, self._seconds(timeout)))

    def wait_for_action(self, episode_id: Hashable, timeout: float | None = DEFAULT) -> Any:
        """Wait for what a `get_action` that ran out of time has asked for.

        Returns:
            As `get_action`.

        Raises:
            StateError: Nothing was asked.
            MarlvecError: As `get_action`.
        """
        return self._own(self._episodes.wait(episode_id, self._seconds(timeout)))

    def log_action(
        self, episode_id: Hashable, obs: Any, actions: Any, *, masks: Any = None, timeout: float | None = DEFAULT
    ) -> None:
        """Say what was done at what observation; no policy is asked for an action.

        Waits only where too many rows wait already.

        Args:
            episode_id: The episode.
            obs: Observations of all who act now.
            actions: Their actions, as the env was given them.
            masks: As `get_action`.
            timeout: Seconds to wait for room; likewise.

        Raises:
            AnswerTimeout: There was no room in time. Nothing was logged.
            MarlvecError: As `get_action`.
        """
        tables = self._table(obs), self._table(actions), None if masks is None else self._table(masks)
        self._episodes.log(episode_id, *tables, self._seconds(timeout))

    def log_returns(self, episode_id: Hashable, rewards: Any, infos: Any = None) -> None:
        """Note the rewards for the last actions. They add up until the next observation, or the end.

        Args:
            episode_id: The episode.
            rewards: By agent; of an env with one agent a number.
            infos: By agent; ``"__common__"`` for what is common to all.

        Raises:
            EpisodeOver: There is no such episode.
            ContractError, ArgumentError: A reward is no finite number; an info cannot be sent.
        """
        self._episodes.log_returns(episode_id, self._table(rewards), None if infos is None else self._table(infos))

    def end_agents(
        self, episode_id: Hashable, final_obs: Any, *, terminated: Flags | None = None, truncated: Flags = False
    ) -> None:
        """Some agents end, and the episode goes on.

        Args:
            episode_id: The episode.
            final_obs: Agent name to last observation, or to None where there is none.
            terminated: Whether they have come to an end of their own; None: those that are not truncated.
            truncated: Whether they were cut short.

        Raises:
            MarlvecError: As `get_action`.
        """
        self._episodes.leave(episode_id, self._table(final_obs), terminated, truncated, self.timeout)

    def end_episode(
        self,
        episode_id: Hashable,
        final_obs: Any = None,
        *,
        terminated: Flags | None = None,
        truncated: Flags = False,
        timeout: float | None = DEFAULT,
    ) -> None:
        """The episode is over, for all who are left. Its id is forgotten.

        Args:
            episode_id: The episode.
            final_obs: Agent name to last observation; an agent that is not in it has none. None: no agent has one.
            terminated: As `end_agents`; where flags go by agent, others who are left end as ``terminated``.
            truncated: As `end_agents`: whether time was up.
            timeout: Seconds to wait until a server has it; default: as the constructor says.

        Raises:
            MarlvecError: As `get_action`.
        """
        table = {} if final_obs is None else self._table(final_obs)
        self._episodes.end(episode_id, table, terminated, truncated, self._seconds(timeout))

    def _table(self, value: Any) -> Mapping[str, Any]:
        return value if self._alone is None else {self._alone: value}  # checked there

    def _own(self, actions: Mapping[str, Any]) -> Any:
        return actions if self._alone is None else actions[self._alone]

    def _seconds(self, timeout: float | None) -> float | None:
        return self.timeout if timeout == DEFAULT else timeout
