"""`Server`: answers simulators in other processes, over a socket."""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Self

from marlvec.collect import Collector
from marlvec.collect.policies import named
from marlvec.errors import ArgumentError
from marlvec.external.episode import EpisodeGateway
from marlvec.external.exchange import Limits
from marlvec.external.tokens import check_token
from marlvec.external.vector_env import ExternalVectorEnv
from marlvec.policies import Policy, PolicyLike
from marlvec.serialization.saved import ProcessBound

if TYPE_CHECKING:
    from marlvec.external.session_loop import ServerCounters


class Server(ProcessBound):
    """Lets clients in other processes fill the slots of an `ExternalVectorEnv`, over WebSocket.

    It listens and answers in its own thread until `close`; use it in a ``with`` block. Code that collects from ``envs``
    needs no change. Received data is never unpickled or evaluated; docs/protocol.md describes it.

    Args:
        envs: The vectorizer whose slots clients fill; belongs to the caller, and must outlive the server.
        host: An address that only this machine reaches, unless ``allow_remote``.
        port: 0: a free one, see `url`.
        token: Secret that clients must prove to know, from `make_token` or `find_token`; None: any client on this
            machine may connect.
        allow_remote: Whether ``host`` may be an address that other machines reach; a token is required then, unless
            ``allow_no_token``. Data is not encrypted: use a tunnel (ssh -L) or a proxy with TLS.
        allow_no_token: Whether any client may connect even if other machines reach ``host``. Has no effect for a local
            address.
        hosts: Further names of the server, e.g. that of a proxy.
        origins: Sites whose pages may use it, e.g. ``"https://example.com"``, besides pages of this machine.
        logs: Whether clients may send their own actions (`log_action`, `LocalInference`). If action connectors change
            the action space, the collector raises on the first of these: allow only clients that you trust, or pass
            False.
        limits: Limits on clients' memory, time and connections.

    Raises:
        ArgumentError: Other machines reach the address, without ``allow_remote`` or without a token; or another
            argument is wrong.
        ResourceError: The port is taken, or the address does not exist.
        UnsupportedSpaceError: The protocol has no form for the observations or actions.
        MissingExtraError: ``marlvec[external]`` is not installed.

    Attributes:
        host, port: Address and port that it listens at.
        limits: As given.
    """

    def __init__(
        self,
        envs: ExternalVectorEnv,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        token: str | None = None,
        allow_remote: bool = False,
        allow_no_token: bool = False,
        hosts: Collection[str] = (),
        origins: Collection[str] = (),
        logs: bool = True,
        limits: Limits | None = None,
    ) -> None:
        if not isinstance(envs, ExternalVectorEnv):
            raise ArgumentError(f"envs: expected an ExternalVectorEnv of marlvec.external.make(), got {envs!r}")
        if isinstance(hosts, str) or isinstance(origins, str):
            raise ArgumentError(f"hosts, origins: expected lists of texts, got hosts={hosts!r}, origins={origins!r}")
        if token is not None:
            check_token(token)
        # Imported here since they need libraries of the extra `external`.
        from marlvec.external.session_loop import SocketLoop, bind  # noqa: I001  # it raises first if the extra is missing
        from marlvec.external.connections import RequestFilter
        from marlvec.external.session_loop import SessionManager
        from marlvec.external.session import ValueReaders
        from marlvec.external.session import WeightStore

        self.limits = Limits() if limits is None else limits
        readers = ValueReaders(envs.spec, logs=logs)
        listener = bind(host, port, allow_remote=allow_remote, is_guarded=allow_no_token or token is not None)
        self.host, self.port = listener.getsockname()[:2]
        self._weights = WeightStore()
        loop = SocketLoop(listener, RequestFilter(host, hosts, origins), self.limits)
        loop.session_manager = SessionManager(
            envs.gateway, readers, self._weights, self.limits, token, loop.clock, loop.slot_is_free, loop.release
        )
        self._loop = loop
        envs.gateway.arrive()
        self._finalizer = weakref.finalize(self, _stop, loop, envs.gateway, os.getpid())
        loop.start()

    @property
    def url(self) -> str:
        """Address for clients, e.g. ``"ws://127.0.0.1:40001/"``."""
        return f"ws://[{self.host}]:{self.port}/" if ":" in self.host else f"ws://{self.host}:{self.port}/"

    @property
    def counters(self) -> ServerCounters:
        """A copy of the server's counters."""
        return copy.copy(self._loop.session_manager.counters)

    @property
    def clients(self) -> int:
        """How many clients are connected or may still resume their session."""
        return len(self._loop.session_manager.sessions)

    @property
    def weights_version(self) -> int:
        """Version of the newest published weights; 0: none."""
        return self._weights.version

    def publish(self, source: Collector | Mapping[str, PolicyLike] | PolicyLike, version: int | None = None) -> int:
        """Publish policies' weights to clients with local inference. Call it between two batches.

        Args:
            source: A collector: its policies, and the learned state of its connectors; or policy id to policy; or one
                policy, which becomes ``"main"``.
            version: Version of these weights, above all earlier ones; None: the last plus one.

        Returns:
            The version.

        Raises:
            ArgumentError: ``version`` is not above the last.
            SerialisationError: The protocol has no form for a value of a state.
        """
        self._check_process("publish()")
        content: dict[str, Any] = {"agent_connectors": {}, "action_connectors": {}}
        if isinstance(source, Collector):
            for side in content:
                content[side] = {name: _learned(chain) for name, chain in getattr(source, side).items()}
            policies: Mapping[str, Policy] = source.policies
        else:
            policies = named(source)
        content["policies"] = {name: dict(policy.state_dict()) for name, policy in policies.items()}
        return self._weights.add(content, version)

    def close(self) -> None:
        """Close all connections with a message to each client; running episodes are lost. May be called again."""
        self._finalizer()

    @property
    def closed(self) -> bool:
        """Whether the server was closed."""
        return not self._finalizer.alive

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.clients} clients"
        return f"<Server at {self.url}: {state}>"


def _stop(loop: Any, gateway: EpisodeGateway, pid: int) -> None:
    """End the server; a forked process leaves it to the process that made it."""
    if os.getpid() == pid:
        loop.stop()
        gateway.depart()


def _learned(chain: Any) -> Any:
    """Return the learned state of connectors, without memory of running episodes."""
    fresh = copy.deepcopy(chain)
    fresh.reset()
    return fresh.state_dict()
