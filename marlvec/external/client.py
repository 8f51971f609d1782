"""`Client`: a simulator in another process requests actions from a `Server`."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any, Self

from gymnasium.spaces import Space

from marlvec.errors import ArgumentError
from marlvec.external.episode import DEFAULT, EpisodeDriver
from marlvec.external.tokens import check_token

if TYPE_CHECKING:
    from marlvec.external.exchange import LocalInference


class Client(EpisodeDriver):
    """Drives episodes from another process, with the calls with which `ExternalEnv` drives them from a thread.

        with Client("ws://127.0.0.1:8000/") as client:
            episode = client.start_episode()
            obs = simulator.begin()
            while not simulator.over:
                actions = client.get_action(episode, obs)
                obs, rewards = simulator.go(actions)
                client.log_returns(episode, rewards)
            client.end_episode(episode, obs)

    Several episodes may run at a time, each in its own thread or all in one. If the vectorizer has one agent,
    observations, actions, rewards and infos are that agent's values; otherwise they are dicts by agent name.

    If the connection breaks, the client reconnects, and nothing is lost or doubled: episodes continue as long as the
    server keeps the session. A call that waits during that time continues to wait, up to its timeout.

    Rewards and infos are sent with the next observation. `log_action`, `end_agents` and `log_returns` do not wait for
    the server; if it refuses one, the next call about that episode raises.

    Args:
        url: ``ws://host:port/``, see `Server.url`.
        token: The server's token; `find_token` reads it from the environment or a file. With a token, a server that
            requires none is refused.
        timeout: Seconds that each call waits at most; None: for ever.
        reconnect_timeout: Seconds to keep trying to reach a server that is gone.
        name: The client's name in the server's log.
        dicts: Whether values are dicts by agent name even if there is one agent.
        local: Chooses actions in this process, with weights from the server; see `LocalInference`. None: the server's
            collector chooses them.

    Raises:
        ArgumentError: The url or the token is malformed.
        ConnectionLost: No server answers at ``url``.
        RefusedError: The server refuses this client; ``code`` gives the reason.
        ProtocolError: The server does not speak marlvec's protocol.
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
            raise ArgumentError(f"reconnect_timeout: expected seconds above 0, got {reconnect_timeout!r}")
        # Imported here since they need libraries of the extra `external`.
        from marlvec.external.client_episodes import ClientEpisodes, EnvForm
        from marlvec.external.request_channel import RequestChannel

        self._url = url
        caller = RequestChannel(url, token, name, reconnect_timeout)
        self._finalizer = weakref.finalize(self, _close, caller, os.getpid())
        try:
            self._runs = ClientEpisodes(caller, EnvForm(caller.welcome), local)
        except BaseException:
            self._finalizer()
            raise
        super().__init__(self._runs, self._runs.form.agents, timeout, dicts=dicts)

    def observation_space(self, agent: str) -> Space[Any]:
        """Observation space of one agent, without the action mask."""
        return self._runs.form.obs[agent].space

    def action_space(self, agent: str) -> Space[Any]:
        """Action space of one agent."""
        return self._runs.form.actions[agent].space

    @property
    def weights_version(self) -> int:
        """Version of the weights used in this process; 0: none were fetched."""
        return self._runs.weights_version

    def update_weights(self, timeout: float | None = DEFAULT) -> int:
        """Fetch the newest weights now.

        Returns:
            The version of the weights now in use.

        Raises:
            StateError: The client has no local inference.
            MarlvecError: As `get_action`.
        """
        self._check_process("update_weights()")
        return self._runs.update(self._seconds(timeout))

    def close(self) -> None:
        """Close the connection; running episodes are lost. May be called again."""
        self._finalizer()

    @property
    def closed(self) -> bool:
        """Whether the client was closed."""
        return not self._finalizer.alive

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{len(self._runs)} episodes"
        return f"<Client of {self._url}: {state}>"


def _close(caller: Any, pid: int) -> None:
    """Close the connection; a forked process leaves it to the process that made it."""
    if os.getpid() == pid:
        caller.close()
