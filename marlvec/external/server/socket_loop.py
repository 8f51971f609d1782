"""`SocketLoop`: the server's thread, which waits for sockets, calls from other threads, and deadlines."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import math
import selectors
import socket
import threading
import time
from collections import deque

from marlvec.errors import ArgumentError, ResourceError
from marlvec.external.server.connection import Connection, RequestFilter, Stage
from marlvec.external.server.session_manager import SessionManager
from marlvec.external.settings import Limits

__all__ = ["bind", "SocketLoop"]

BACKLOG = 1024


def bind(host: str, port: int, *, allow_remote: bool, is_guarded: bool) -> socket.socket:
    """Open the listening socket, of port 0: a free one.

    `ArgumentError`: other machines reach the address, without `allow_remote`, or with neither a token nor the word that
    none is required (`is_guarded`). `ResourceError`: the name is unknown, or the port is taken.
    """
    where = f"Server(host={host!r}, port={port!r})"
    if not isinstance(host, str) or not host:
        raise ArgumentError(f"{where}: host: expected a name or address, e.g. 127.0.0.1 for this machine alone")
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port < 2**16:
        raise ArgumentError(f"{where}: port: expected 0 (a free one) to 65535")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ResourceError(f"{where}: no such address ({error})") from error
    remote = [info[4][0] for info in found if not ipaddress.ip_address(str(info[4][0]).partition("%")[0]).is_loopback]
    if remote and not allow_remote:
        raise ArgumentError(
            f"{where} is {remote[0]}, which other machines can reach: say allow_remote=True (--allow-remote) and "
            f"give a token, or use 127.0.0.1 and a tunnel, e.g. ssh -L"
        )
    if remote and not is_guarded:
        raise ArgumentError(
            f"{where} is {remote[0]}, which other machines can reach: give a token, as make_token() makes them "
            f"(marlvec serve: from MARLVEC_TOKEN or --token-file), or say allow_no_token=True (--no-token)"
        )
    family, kind, number, _, address = found[0]
    try:
        listener = socket.socket(family, kind, number)
    except OSError as error:
        raise ResourceError(f"{where}: {error.strerror or error}; does this machine support such addresses?") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # "::" does not include 0.0.0.0
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ResourceError(
            f"{where}: cannot listen there ({error.strerror or error}); take another port, or 0 for a free one"
        ) from error
    listener.setblocking(False)
    return listener


_LOG = logging.getLogger("marlvec.external")
_SWEEP = 0.1  # seconds between two checks of deadlines
_RETRY = 0.002  # seconds until held requests are tried again
_WARNING_PAUSE = 60.0  # seconds between two warnings of a shortage
_ACCEPTS = 64  # new connections in one round
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class SocketLoop:
    """The server's thread: sockets, calls from other threads, and deadlines. Set `session_manager` before `start`."""

    session_manager: SessionManager

    def __init__(self, listener: socket.socket, gate: RequestFilter, limits: Limits) -> None:
        self._listener, self._request_filter, self._limits = listener, gate, limits
        self._selector = selectors.DefaultSelector()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._wake_sent = False
        self._to_write: deque[Connection] = deque()
        self._slot_is_free = self._stopping = False
        self._masks: dict[Connection, int] = {}
        self._credit: dict[Connection, tuple[float, float]] = {}  # (messages that it may send, time of that count)
        self._slow: dict[Connection, float] = {}  # time until which it is not read
        self._sweep_at = 0.0
        self._is_short = False  # of file descriptors or memory for a client that waits
        self._warn_at = -math.inf
        self._thread = threading.Thread(target=self._run, name="marlvec-server", daemon=True)

    clock = staticmethod(time.monotonic)

    # --- from any thread

    def start(self) -> None:
        """Start the thread."""
        self._selector.register(self._listener, _READ)
        self._selector.register(self._wake_receiver, _READ)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, and wait until it has ended."""
        self._stopping = True
        self._wake()
        if self._thread.ident is not None:
            self._thread.join()
        else:
            self._close_all()

    def slot_is_free(self) -> None:
        """Make the thread begin waiting episodes."""
        self._slot_is_free = True
        self._wake()

    def want_write(self, connection: Connection) -> None:
        """Make the thread send a connection's waiting bytes."""
        self._to_write.append(connection)
        if threading.current_thread() is not self._thread:
            self._wake()

    def _wake(self) -> None:
        if not self._wake_sent:
            self._wake_sent = True
            with contextlib.suppress(OSError):  # full: the thread wakes anyway; closed: it has ended
                self._wake_sender.send(b"\0")

    # --- the thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                try:
                    self._turn()
                except Exception:
                    _LOG.exception("a defect in marlvec; the server continues")
                    time.sleep(_SWEEP)
        finally:
            self._close_all()

    def _turn(self) -> None:
        session_manager, now = self.session_manager, self.clock()
        pause = _RETRY if session_manager.is_busy else max(0.0, self._sweep_at - now)
        for key, mask in self._selector.select(pause):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._wake_receiver:
                self._wake_receiver.recv(4096)
                self._wake_sent = False  # reset after recv(): requests that come in between are served below
            else:
                self._serve(key.data, mask)
        while self._to_write:
            self._watch(self._to_write.popleft())
        if self._slot_is_free:
            self._slot_is_free = False
            session_manager.begin_waiting()
        if session_manager.is_busy:
            session_manager.retry()
        now = self.clock()
        for connection in [c for c, until in self._slow.items() if until <= now]:
            del self._slow[connection]
            self._watch(connection)
        if now >= self._sweep_at:
            self._sweep_at = now + _SWEEP
            session_manager.sweep()
            session_manager.begin_waiting()

    def _accept(self) -> None:
        for _ in range(_ACCEPTS):
            try:
                sock, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                self._is_short = False  # no client waits
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._warn_of_shortage(error)
                    time.sleep(_SWEEP / 10)  # accept() would fail again at once
                    return
                raise
            if not self.session_manager.has_room():
                sock.close()
                continue
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            now = self.clock()
            connection = Connection(
                sock, f"{address[0]}:{address[1]}", self._request_filter, self._limits, now, self.want_write
            )
            self.session_manager.accept(connection)
            self._masks[connection] = _READ
            self._selector.register(sock, _READ, connection)

    def _warn_of_shortage(self, error: OSError) -> None:
        """Warn once per shortage, and at most once a minute if clients come and go at the limit."""
        now = self.clock()
        if not self._is_short and now >= self._warn_at:
            self._warn_at = now + _WARNING_PAUSE
            _LOG.warning(
                "no more clients can connect now: %s; %d are connected, others wait until one leaves. Raise the "
                "server's limit of open files (`ulimit -n`) above Limits(clients=%d)",
                error.strerror,
                len(self.session_manager.connections),
                self._limits.clients,
            )
        self._is_short = True

    def _serve(self, connection: Connection, mask: int) -> None:
        now = self.clock()
        try:
            if mask & _WRITE:
                connection.write(now)
            if mask & _READ and connection.stage is not Stage.CLOSED:
                messages = connection.read(now)
                for message in messages:
                    self.session_manager.receive(connection, message)
                self.session_manager.weigh(connection)
                if messages:
                    self._charge(connection, len(messages), now)
        except (BlockingIOError, InterruptedError):
            pass
        except (OSError, EOFError) as error:
            self.session_manager.drop(connection, str(error) or type(error).__name__)
            return
        except Exception:  # a defect that one client triggers must not affect the others
            _LOG.exception("a defect in marlvec: %r is closed", connection)
            self.session_manager.drop(connection, "a defect in marlvec")
            return
        self._watch(connection)

    def _charge(self, connection: Connection, count: int, now: float) -> None:
        """Stop reading for a while from a client that sends more messages a second than it may."""
        rate = self._limits.messages_per_second
        credit, then = self._credit.get(connection, (rate, now))
        credit = min(rate, credit + (now - then) * rate) - count
        self._credit[connection] = credit, now
        if credit < 0:
            self._slow[connection] = now - credit / rate

    def _watch(self, connection: Connection) -> None:
        """Register the socket events that a connection needs."""
        if connection.stage is Stage.CLOSED or connection not in self._masks:
            return
        mask = 0 if connection.is_sent else _WRITE
        if not connection.is_full and connection not in self._slow:
            mask |= _READ
        if connection.stage is Stage.CLOSING and connection.is_sent:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_WR)
        if mask == self._masks[connection]:
            return
        if not mask:
            self._selector.unregister(connection.sock)
        elif not self._masks[connection]:
            self._selector.register(connection.sock, mask, connection)
        else:
            self._selector.modify(connection.sock, mask, connection)
        self._masks[connection] = mask

    def release(self, connection: Connection) -> None:
        """Forget a connection whose socket is closed."""
        if self._masks.pop(connection, 0):
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(connection.number)
        self._credit.pop(connection, None)
        self._slow.pop(connection, None)

    def _close_all(self) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self._listener)
        self._listener.close()
        self.session_manager.close()
        self._selector.close()
        self._wake_receiver.close()
        self._wake_sender.close()
