"""`Server`: answers simulators in other processes, over a socket."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Collection, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from marlvec.collect import Collector
from marlvec.collect.acting.policy_set import named
from marlvec.errors import ArgumentError
from marlvec.external.exchange.gateway import EpisodeGateway
from marlvec.external.limits import Limits
from marlvec.external.protocol.tokens import check_token
from marlvec.external.vector_env import ExternalVectorEnv
from marlvec.policies import Policy, PolicyLike

if TYPE_CHECKING:
    from marlvec.external.server.session_manager import ServerCounters

__all__ = ["Server"]


class Server:
    """Lets clients in other processes fill the slots of an `ExternalVectorEnv`, over WebSocket.

    It listens, and answers, in a thread of its own from the moment it is made until `close`; use it in a ``with``
    block. Who collects from ``envs`` need not know of it. Nothing that comes is ever unpickled or evaluated;
    docs/protocol.md says what may come.

    Args:
        envs: Whose slots; belongs to the caller, and must outlive the server.
        host: An address of this machine alone, unless ``allow_remote``.
        port: 0 for a free one, see `url`.
        token: What clients must know, from `make_token` or `find_token`; None: on this machine any client may connect.
        allow_remote: Whether ``host`` may be one that other machines can reach; a token is needed then, unless
            ``allow_no_token``. What goes over the net can be read there: use a tunnel (ssh -L) or a proxy that speaks
            TLS.
        allow_no_token: Whether any client may connect where ``host`` is one that other machines can reach. On this
            machine alone it makes no difference.
        hosts: Names that it goes by, beside its address: that of a proxy, say.
        origins: Web pages that may use it, e.g. ``"https://example.com"``, beside those of this machine.
        logs: Whether clients may say themselves what was done, and decide for themselves (`Local`). Where action
            connectors change the action space, the collector raises on the first of those, so let only such clients in
            that you trust, or say False.
        limits: How much memory, time and how many connections it grants.

    Raises:
        ArgumentError: The address is not this machine's own, and that was not asked for, nor doing without a token;
            or another argument is wrong.
        ResourceError: The port is taken, or there is no such address.
        UnsupportedSpaceError: Observations or actions do not go over a socket.
        MissingExtraError: ``marlvec[external]`` is not installed.

    Attributes:
        host, port: Where it listens.
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
            raise ArgumentError(f"expected an ExternalVectorEnv of marlvec.external.make(), got {envs!r}")
        if isinstance(hosts, str) or isinstance(origins, str):
            raise ArgumentError(f"expected lists of texts, got hosts={hosts!r}, origins={origins!r}")
        if token is not None:
            check_token(token)
        # Here, and not above: all of them need libraries that are extras.
        from marlvec.external.server.socket_loop import SocketLoop, bind  # noqa: I001  # it says first what is missing
        from marlvec.external.server.request_filter import RequestFilter
        from marlvec.external.server.session_manager import SessionManager
        from marlvec.external.server.value_readers import ValueReaders
        from marlvec.external.server.weight_store import WeightStore

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
        self._finalizer = weakref.finalize(self, _stop, loop, envs.gateway)
        loop.start()

    @property
    def url(self) -> str:
        """Where clients go, e.g. ``"ws://127.0.0.1:40001/"``."""
        return f"ws://[{self.host}]:{self.port}/" if ":" in self.host else f"ws://{self.host}:{self.port}/"

    @property
    def counters(self) -> ServerCounters:
        """A copy of the counts of what has happened."""
        counters: ServerCounters = copy.copy(self._loop.session_manager.counters)
        return counters

    @property
    def clients(self) -> int:
        """How many there are, with those that may come back."""
        return len(self._loop.session_manager.sessions)

    @property
    def weights_version(self) -> int:
        """Number of the newest weights that were published; 0 for none."""
        return int(self._weights.version)

    def publish(self, source: Collector | Mapping[str, PolicyLike] | PolicyLike, version: int | None = None) -> int:
        """Give clients that decide for themselves what policies have learned until now. Call it between two batches.

        Args:
            source: A collector: its policies, and what their connectors have learned; or policy id to policy; or one
                policy, which is ``"main"``.
            version: Number of these weights, above all before; None: one more than the last.

        Returns:
            Their number.

        Raises:
            ArgumentError: The number is not above the last.
            SerialisationError: A state does not go over a socket.
        """
        content: dict[str, Any] = {"agent_connectors": {}, "action_connectors": {}}
        if isinstance(source, Collector):
            for side in content:
                content[side] = {name: _learned(chain) for name, chain in getattr(source, side).items()}
            policies: Mapping[str, Policy] = source.policies
        else:
            policies = named(source)
        content["policies"] = {name: dict(policy.state_dict()) for name, policy in policies.items()}
        return int(self._weights.add(content, version))

    def close(self) -> None:
        """Close all connections, with a message to each client; episodes that run are lost. May be called again."""
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
        state = "closed" if self.closed else f"{self.clients} clients"
        return f"<Server at {self.url}: {state}>"


def _stop(loop: Any, gateway: EpisodeGateway) -> None:
    loop.stop()
    gateway.depart()


def _learned(chain: Any) -> Any:
    """What connectors have learned, without what they remember of running episodes."""
    fresh = copy.deepcopy(chain)
    fresh.reset()
    return fresh.state_dict()
