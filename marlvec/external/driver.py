"""`EpisodeDriver`: the calls by which a simulator drives its episodes, in the collector's process or another one."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

from marlvec.external.exchange.external_episode import Flags
from marlvec.serialization.saved import ProcessBound

__all__ = ["EpisodeDriver"]

DEFAULT = -1.0
"""Timeout argument: use the constructor's timeout."""


class RunningEpisodes(Protocol):
    """Running episodes of one driver, by id; its calls are those of `EpisodeDriver`.

    Dicts are keyed by agent name; a timeout of None waits for ever.
    """

    def __len__(self) -> int: ...

    def begin(
        self, key: Hashable | None, *, training_enabled: bool, env_id: int | None, timeout: float | None
    ) -> Hashable: ...

    def ask(self, key: Hashable, obs: Any, masks: Any, timeout: float | None) -> Mapping[str, Any]: ...

    def wait(self, key: Hashable, timeout: float | None) -> Mapping[str, Any]: ...

    def log(self, key: Hashable, obs: Any, actions: Any, masks: Any, timeout: float | None) -> None: ...

    def log_returns(self, key: Hashable, rewards: Any, infos: Any) -> None: ...

    def leave(
        self, key: Hashable, final_obs: Any, terminated: Flags | None, truncated: Flags, timeout: float | None
    ) -> None: ...

    def end(
        self, key: Hashable, final_obs: Any, terminated: Flags | None, truncated: Flags, timeout: float | None
    ) -> None: ...


class EpisodeDriver(ProcessBound):
    """Begins episodes, requests actions, and logs rewards and ends.

    Args:
        episodes: The driver's running episodes.
        agents: Agent names, in order.
        timeout: Seconds that each call waits at most; None: for ever. May be changed later.
        dicts: Whether values are dicts by agent name even if there is one agent.
    """

    def __init__(self, episodes: RunningEpisodes, agents: Sequence[str], timeout: float | None, *, dicts: bool) -> None:
        self.agents, self.timeout = tuple(agents), timeout
        self._running_episodes = episodes
        self._alone = self.agents[0] if len(self.agents) == 1 and not dicts else None

    @property
    def _episodes(self) -> RunningEpisodes:
        self._check_process("an episode")
        return self._running_episodes

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
            episode_id: Name of the episode; None: a new name, unique for this driver.
            training_enabled: False: its rows are in no batch.
            env_id: The slot it gets; None: any.
            timeout: Seconds to wait; default: the constructor's.

        Returns:
            The episode's id, valid until the episode is over.

        Raises:
            EpisodesFull: No slot was free in time, or this driver already runs ``max_episodes``.
            StateError: An episode with this id is running.
            ClosedError: The driver or the vectorizer was closed.
            MarlvecError: As `get_action`.
        """
        return self._episodes.begin(
            episode_id, training_enabled=training_enabled, env_id=env_id, timeout=self._seconds(timeout)
        )

    def get_action(self, episode_id: Hashable, obs: Any, *, masks: Any = None, timeout: float | None = DEFAULT) -> Any:
        """Request actions, and wait for them.

        Args:
            episode_id: The episode.
            obs: Observations of all agents that act now.
            masks: Action masks, if the observations don't contain them.
            timeout: Seconds to wait; default: the constructor's.

        Returns:
            Actions for the env.

        Raises:
            AnswerTimeout: No action came in time. Call `wait_for_action`, or end the episode.
            EpisodeOver: No such episode is running. `EpisodeCut`: the time limit was reached, and the episode ended
                here.
            BusyError, StateError: An earlier request's actions were not fetched; or an agent acts that has ended.
            ContractError, ArgumentError: A value does not match the declared spaces. Nothing was requested.
            ConnectionLost: The server is gone; so is the episode if the server has lost this session.
            ClosedError: The driver or the vectorizer was closed.
        """
        tables = self._table(obs), None if masks is None else self._table(masks)
        return self._unwrap(self._episodes.ask(episode_id, *tables, self._seconds(timeout)))

    def wait_for_action(self, episode_id: Hashable, timeout: float | None = DEFAULT) -> Any:
        """Wait for the actions of a `get_action` that timed out.

        Returns:
            As `get_action`.

        Raises:
            StateError: No request is pending.
            MarlvecError: As `get_action`.
        """
        return self._unwrap(self._episodes.wait(episode_id, self._seconds(timeout)))

    def log_action(
        self, episode_id: Hashable, obs: Any, actions: Any, *, masks: Any = None, timeout: float | None = DEFAULT
    ) -> None:
        """Log actions that were taken at observations; no policy is asked for an action.

        Waits only while too many rows wait for the collector.

        Args:
            episode_id: The episode.
            obs: Observations of all agents that act now.
            actions: Their actions, as the env received them.
            masks: As `get_action`.
            timeout: Seconds to wait until a row is accepted; default: the constructor's.

        Raises:
            AnswerTimeout: The row was not accepted in time. Nothing was logged.
            MarlvecError: As `get_action`.
        """
        tables = self._table(obs), self._table(actions), None if masks is None else self._table(masks)
        self._episodes.log(episode_id, *tables, self._seconds(timeout))

    def log_returns(self, episode_id: Hashable, rewards: Any, infos: Any = None) -> None:
        """Log rewards for the last actions. They add up until the next observation or the end.

        Args:
            episode_id: The episode.
            rewards: By agent; a number if there is one agent.
            infos: By agent; ``"__common__"`` for infos of no single agent.

        Raises:
            EpisodeOver: No such episode is running.
            ContractError, ArgumentError: A reward is not a finite number; an info cannot be sent.
        """
        self._episodes.log_returns(episode_id, self._table(rewards), None if infos is None else self._table(infos))

    def end_agents(
        self, episode_id: Hashable, final_obs: Any, *, terminated: Flags | None = None, truncated: Flags = False
    ) -> None:
        """End some agents; the episode continues.

        Args:
            episode_id: The episode.
            final_obs: Agent name to last observation, or to None if it has none.
            terminated: Whether they reached a terminal state; None: those that are not truncated.
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
        """End the episode for all agents that are left. Its id is forgotten.

        Args:
            episode_id: The episode.
            final_obs: Agent name to last observation; agents not in it have none. None: no agent has one.
            terminated: As `end_agents`; None: also agents that a dict ``truncated`` leaves out are terminated.
            truncated: As `end_agents`: True if the time limit was reached.
            timeout: Seconds to wait until a server confirms; default: the constructor's.

        Raises:
            MarlvecError: As `get_action`.
        """
        table = {} if final_obs is None else self._table(final_obs)
        self._episodes.end(episode_id, table, terminated, truncated, self._seconds(timeout))

    def _table(self, value: Any) -> Mapping[str, Any]:
        return value if self._alone is None else {self._alone: value}  # the episode checks its type

    def _unwrap(self, actions: Mapping[str, Any]) -> Any:
        return actions if self._alone is None else actions[self._alone]

    def _seconds(self, timeout: float | None) -> float | None:
        return self.timeout if timeout == DEFAULT else timeout
