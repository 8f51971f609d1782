"""`Client`: a simulator in another process asks a `Server` for actions."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from gymnasium.spaces import Space

from marlvec.errors import ArgumentError
from marlvec.external.exchange.external_episode import Flags
from marlvec.external.protocol.tokens import check_token

if TYPE_CHECKING:
    from marlvec.external.client.local_inference import LocalInference

__all__ = ["Client"]

_DEFAULT = -1.0  # of timeouts: as the constructor says


class Client:
    """Drives episodes from another process: as `ExternalEnv` does from a thread, with the same calls.

        with Client("ws://127.0.0.1:8000/") as client:
            episode = client.start_episode()
            obs = simulator.begin()
            while not simulator.over:
                actions = client.get_action(episode, obs)
                obs, rewards = simulator.go(actions)
                client.log_returns(episode, rewards)
            client.end_episode(episode, obs)

    Several episodes may run at a time, each in a thread of its own or all in one. Where the vectorizer has one agent,
    observations, actions, rewards and infos are that agent's own; else they are dicts of agent name to one.

    Where the connection breaks, it is made again, and nothing is lost or doubled; as long as the server keeps the
    session, episodes go on. A call that waits meanwhile goes on waiting, up to its timeout.

    Rewards and infos are sent with the next observation. `log_action`, `end_agents` and `log_returns` do not wait for
    the server; if it refuses one, the next call about that episode raises.

    Args:
        url: ``ws://host:port/``, as `Server.url` says.
        token: What the server asks for: `find_token` reads it from the environment or a file. A server that asks for
            none is refused then.
        timeout: Seconds that each call waits at most; None: for ever.
        reconnect_timeout: Seconds to go on trying to reach a server that is gone.
        name: What to be called in the server's log.
        dicts: Whether everything goes by agent name also where there is one agent.
        local: Decides here, with weights from the server; see `LocalInference`. None: the server's collector decides.

    Raises:
        ArgumentError: The url or the token is none.
        ConnectionLost: No server answers there.
        RefusedError: The server does not let this client in; its ``code`` says why.
        ProtocolError: It is no server of ours.
        MissingExtraError: ``marlvec[external]`` is not installed.

    Attributes:
        timeout: As given; may be changed.
        agents: Agent names, in order.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout: float | None = None,
        reconnect_timeout: float = 60.0,
        name: str = "",
        dicts: bool = False,
        local: LocalInference | None = None,
    ) -> None:
        if token is not None:
            check_token(token)
        if not reconnect_timeout > 0:
            raise ArgumentError(f"reconnect_timeout must be seconds above 0, got {reconnect_timeout!r}")
        # Here, and not above: all of them need libraries that are extras.
        from marlvec.external.client.client_episodes import ClientEpisodes
        from marlvec.external.client.env_form import EnvForm
        from marlvec.external.client.request_channel import RequestChannel

        self.timeout = timeout
        self._url = url
        caller = RequestChannel(url, token, name, reconnect_timeout)
        self._finalizer = weakref.finalize(self, caller.close)
        try:
            self._runs = ClientEpisodes(caller, EnvForm(caller.welcome), local)
        except BaseException:
            self._finalizer()
            raise
        self.agents: tuple[str, ...] = self._runs.form.agents
        self._alone = self.agents[0] if len(self.agents) == 1 and not dicts else None

    def observation_space(self, agent: str) -> Space[Any]:
        """One agent's observations, without the action mask."""
        space: Space[Any] = self._runs.form.obs[agent].space
        return space

    def action_space(self, agent: str) -> Space[Any]:
        """One agent's actions."""
        space: Space[Any] = self._runs.form.actions[agent].space
        return space

    @property
    def weights_version(self) -> int:
        """Number of the weights that decide here; 0: none were fetched."""
        return int(self._runs.weights_version)

    def update_weights(self, timeout: float | None = _DEFAULT) -> int:
        """Fetch the newest weights now, without waiting until it is time; returns their number.

        Returns:
            The number of the weights it decides with now.

        Raises:
            StateError: The server decides, not this client.
            MarlvecError: As `get_action`.
        """
        return int(self._runs.update(self._seconds(timeout)))

    def start_episode(
        self,
        episode_id: Hashable | None = None,
        *,
        training_enabled: bool = True,
        env_id: int | None = None,
        timeout: float | None = _DEFAULT,
    ) -> Hashable:
        """Begin an episode; wait for a free slot.

        Args:
            episode_id: How to call it here; None: a number that no other one of this client has.
            training_enabled: False: its rows are in no batch.
            env_id: The slot it gets; None: any.
            timeout: Seconds to wait; default: as the constructor says.

        Returns:
            Its id. It is forgotten when the episode is over.

        Raises:
            EpisodesFull: No slot was free in time.
            StateError: An episode of this id runs.
            AnswerTimeout, ConnectionLost, ClosedError: As `get_action`.
        """
        begun: Hashable = self._runs.begin(
            episode_id, training_enabled=training_enabled, env_id=env_id, timeout=self._seconds(timeout)
        )
        return begun

    def get_action(self, episode_id: Hashable, obs: Any, *, masks: Any = None, timeout: float | None = _DEFAULT) -> Any:
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
            EpisodeOver: There is no such episode: it has ended, or was lost.
            ContractError, ArgumentError: What was said is not what was declared. Nothing was asked.
            ConnectionLost: The server is gone; the episode, too, where it has lost this session.
            ClosedError: `close` was called.
        """
        tables = self._table(obs), None if masks is None else self._table(masks)
        answer = self._runs.ask(episode_id, *tables, self._seconds(timeout))
        return answer if self._alone is None else answer[self._alone]

    def wait_for_action(self, episode_id: Hashable, timeout: float | None = _DEFAULT) -> Any:
        """Wait for what a `get_action` that ran out of time has asked for.

        Returns:
            As `get_action`.

        Raises:
            StateError: Nothing was asked.
            MarlvecError: As `get_action`.
        """
        answer = self._runs.wait(episode_id, self._seconds(timeout))
        return answer if self._alone is None else answer[self._alone]

    def log_action(
        self, episode_id: Hashable, obs: Any, actions: Any, *, masks: Any = None, timeout: float | None = _DEFAULT
    ) -> None:
        """Say what was done at what observation; no policy is asked.

        Args:
            episode_id: The episode.
            obs: Observations of all who act now.
            actions: Their actions, as the env was given them.
            masks: As `get_action`.
            timeout: Seconds to wait for room; likewise.

        Raises:
            MarlvecError: As `get_action`.
        """
        tables = self._table(obs), self._table(actions), None if masks is None else self._table(masks)
        self._runs.log(episode_id, *tables, self._seconds(timeout))

    def log_returns(self, episode_id: Hashable, rewards: Any, infos: Any = None) -> None:
        """Note the rewards for the last actions. They add up until the next observation, or the end.

        Args:
            episode_id: Of the episode.
            rewards: By agent; of an env with one agent a number.
            infos: By agent.

        Raises:
            EpisodeOver: There is no such episode.
            ContractError, ArgumentError: A reward is no finite number; an info does not go over a socket.
        """
        self._runs.log_returns(episode_id, self._table(rewards), None if infos is None else self._table(infos))

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
        self._runs.leave(episode_id, self._table(final_obs), terminated, truncated, self._seconds(_DEFAULT))

    def end_episode(
        self,
        episode_id: Hashable,
        final_obs: Any = None,
        *,
        terminated: Flags | None = None,
        truncated: Flags = False,
        timeout: float | None = _DEFAULT,
    ) -> None:
        """The episode is over, for all who are left. Its id is forgotten.

        Args:
            episode_id: The episode.
            final_obs: Agent name to last observation; an agent that is not in it has none. None: no agent has one.
            terminated: As `end_agents`; where flags go by agent, others who are left end as ``terminated``.
            truncated: As `end_agents`: whether time was up.
            timeout: Seconds to wait until the server has it; likewise.

        Raises:
            MarlvecError: As `get_action`.
        """
        table = {} if final_obs is None else self._table(final_obs)
        self._runs.end(episode_id, table, terminated, truncated, self._seconds(timeout))

    def close(self) -> None:
        """Close the connection; episodes that run are lost. May be called again."""
        self._finalizer()

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return not self._finalizer.alive

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{len(self._runs)} episodes"
        return f"<Client of {self._url}: {state}>"

    def _table(self, value: Any) -> Mapping[str, Any]:
        return value if self._alone is None else {self._alone: value}  # checked there

    def _seconds(self, timeout: float | None) -> float | None:
        return self.timeout if timeout == _DEFAULT else timeout
