"""`SocketLoop`: the server's thread, which waits for sockets, calls from other threads, and deadlines.

`SessionManager` keeps all connections and sessions of a server; only the server's thread uses it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import ipaddress
import logging
import math
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from marlvec.errors import ArgumentError, ConnectionLost, ProtocolError, RefusedError, ResourceError
from marlvec.external.connections import Connection, ConnectionStage, RequestFilter
from marlvec.external.episode import EpisodeGateway
from marlvec.external.exchange import Account, Limits
from marlvec.external.handshake import ServerHandshake, Welcome
from marlvec.external.messages import Message, Type, read_message, write_message
from marlvec.external.session import CLOSE_CODES, Session, SlotQueue, ValueReaders, WeightStore

_LOG = logging.getLogger("marlvec.external")


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
            if mask & _READ and connection.stage is not ConnectionStage.CLOSED:
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
        if connection.stage is ConnectionStage.CLOSED or connection not in self._masks:
            return
        mask = 0 if connection.is_sent else _WRITE
        if not connection.is_full and connection not in self._slow:
            mask |= _READ
        if connection.stage is ConnectionStage.CLOSING and connection.is_sent:
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


@dataclass(slots=True)
class ServerCounters:
    """Counts since the server's start."""

    accepted: int = 0  # connections
    unadmitted: int = 0  # connections that closed before they had a session
    turned_away: int = 0  # connections closed at once, since too many were open
    refused: int = 0  # clients that were sent a reason and cut off
    wrong_tokens: int = 0  # clients refused for a wrong token
    sessions: int = 0
    resumed: int = 0
    messages: int = 0  # valid ones
    duplicates: int = 0  # valid messages that came twice and were dropped


_FREE_TRIES = 3  # wrong tokens of one address after which replies are delayed
_PENALTY = 1.0  # seconds of that delay
_ADDRESSES = 4096  # addresses with wrong tokens that are remembered
_FORGET = 60.0  # seconds after which wrong tokens are forgotten
_LINGER = 1.0  # seconds for a refused client to read the reason and close
_SPARE = 64  # connections beyond the limit, which receive a refusal


class SessionManager:
    """All connections and sessions of one server.

    `on_free` is called from any thread when a slot is free that a client waits for, `release` with each connection
    whose socket is about to close.
    """

    def __init__(
        self,
        gateway: EpisodeGateway,
        readers: ValueReaders,
        weights: WeightStore,
        limits: Limits,
        token: str | None,
        clock: Callable[[], float],
        on_free: Callable[[], None],
        release: Callable[[Connection], None],
    ) -> None:
        self._gateway, self._readers, self._weights, self._limits = gateway, readers, weights, limits
        self._token, self._clock, self._on_free, self._release = token, clock, on_free, release
        self._id = secrets.token_bytes(16)
        self.connections: dict[Connection, ServerHandshake | Session | None] = {}
        self.sessions: dict[bytes, Session] = {}  # by the hash of their secret: timing a lookup reveals no secret
        self.counters = ServerCounters()
        self._queue = SlotQueue[Session]()
        self._failures: dict[str, list[float]] = {}
        self._penalties: dict[Connection, tuple[float, RefusedError]] = {}
        self._held: set[Session] = set()
        self._all_accounts = Account(limits.total_bytes // 2)
        self._left_behind: list[Account] = []  # of ended sessions whose rows still wait
        self._total = 0  # bytes of all sessions and of `_left_behind`, when last counted

    # --- connecting

    def has_room(self) -> bool:
        """Whether another socket is accepted; at the limit, drop a connection that sends no handshake."""
        if len(self.connections) < self._limits.clients + _SPARE:
            return True
        for connection, who in self.connections.items():
            if not isinstance(who, Session) and self._clock() - connection.began > 1:
                self.drop(connection, "silent while others want to connect")
                return True
        self.counters.turned_away += 1
        return False

    def accept(self, connection: Connection) -> None:
        """Register a new connection."""
        self.counters.accepted += 1
        self.connections[connection] = None

    def receive(self, connection: Connection, data: bytes | bytearray) -> None:
        """Process one whole message."""
        if connection.stage is not ConnectionStage.OPEN or connection in self._penalties:
            return
        who = self.connections[connection]
        try:
            message = read_message(data, "client")
            self.counters.messages += 1
            if isinstance(who, Session):
                before = who.duplicates
                who.receive(message, data)
                self.counters.duplicates += who.duplicates - before
                if who.is_held:
                    self._held.add(who)
                if message.type is Type.BEGIN:
                    self.begin_waiting()
            else:
                self._greet(connection, message)
        except (ProtocolError, RefusedError) as error:
            if isinstance(error, RefusedError) and error.code == "token":
                self._punish(connection, error)
            else:
                self._refuse(connection, error.code, str(error))

    def _greet(self, connection: Connection, message: Message) -> None:
        who = self.connections[connection]
        if who is None:
            who = self.connections[connection] = ServerHandshake(self._token, self._id, connection.host)
        assert isinstance(who, ServerHandshake)
        answer = who.receive(message)
        if answer is not None:
            connection.send(write_message(answer), self._clock())
            return
        session = self._session(connection, who.session)
        welcome = Welcome(
            session.key,
            bool(who.session),
            session.received,
            self._readers.agents,
            self._readers.groups,
            {
                "max_message": self._limits.message_bytes,
                "episodes": self._limits.episodes,
                "window": self._limits.window,
                "heartbeat": self._limits.heartbeat_seconds,
                "idle": self._limits.idle_seconds,
                "resume": self._limits.resume_seconds,
            },
            self._weights.version,
        )
        connection.admit()
        session.attach(connection, write_message(who.welcome(welcome)), message.received)
        self.connections[connection] = session

    def _session(self, connection: Connection, key: bytes) -> Session:
        if not key:
            return self._new_session(connection)
        session = self.sessions.get(_name(key))
        if session is None or session.over or session.is_leaving:
            raise RefusedError("no such session exists any more", "session")
        if (old := session.connection) is None:
            self._check_room()
        else:
            self.connections[old] = None
            self._refuse(old, "session", "another connection resumed this session")
        self.counters.resumed += 1
        return session

    def _check_room(self) -> None:
        """Refuse a client beyond the limit, also one that resumes its session."""
        there = sum(isinstance(who, Session) for who in self.connections.values())
        if there >= self._limits.clients:
            raise RefusedError(f"{there} clients are connected, as many as may be; come back later", "full")

    def _new_session(self, connection: Connection) -> Session:
        self._check_room()
        if len(self.sessions) >= 2 * self._limits.clients:  # drop the one that was left first
            oldest = min((s for s in self.sessions.values() if s.left is not None), key=lambda s: s.left or 0.0)
            self._end_session(oldest, "dropped for newer sessions")
        key = secrets.token_bytes(32)
        session = Session(
            key,
            f"client {connection.address}",
            self._gateway,
            self._readers,
            self._weights,
            self._limits,
            self._clock,
            self._queue,
            Account(self._limits.held_bytes, self._all_accounts),
        )
        self.sessions[_name(key)] = session
        self.counters.sessions += 1
        return session

    def _punish(self, connection: Connection, error: RefusedError) -> None:
        """Refuse a wrong token; after several from one address, with a delay."""
        now = self._clock()
        address = connection.address.rpartition(":")[0]
        times = [t for t in self._failures.pop(address, []) if now - t < _FORGET]
        self._failures[address] = [*times, now][-_FREE_TRIES:]
        if len(self._failures) > _ADDRESSES:
            del self._failures[next(iter(self._failures))]
        self.counters.wrong_tokens += 1
        if len(times) < _FREE_TRIES:
            self._refuse(connection, error.code, str(error))
        else:
            self._penalties[connection] = now + _PENALTY, error

    def _refuse(self, connection: Connection, code: str, text: str) -> None:
        """Send the reason, and close the connection."""
        self.counters.refused += 1
        now = self._clock()
        _LOG.info("refused %s: %s: %s", connection.address, code, plain(text))
        who = self.connections.get(connection)
        if isinstance(who, Session) and who.connection is connection:
            who.fail(code, text)
        else:
            connection.send(write_message(Message(Type.ERROR, {"code": code, "text": text[:2000]})), now)
            connection.end(CLOSE_CODES.get(code, 1008), code, now)

    # --- waiting

    def begin_waiting(self) -> None:
        """Begin waiting episodes in free slots, each client in turn."""
        while self._queue:
            turn = self._queue.first(self._gateway.free_slots(self._on_free))
            if turn is None:
                return
            session, number = turn
            if not session.begin(number):
                return

    @property
    def is_busy(self) -> bool:
        """Whether requests are held, so that `retry` should be called soon."""
        return bool(self._held)

    def retry(self) -> None:
        """Retry held requests."""
        for session in list(self._held):
            try:
                session.retry()
            except ProtocolError as error:
                session.fail(error.code, str(error))
            if not session.is_held:
                self._held.discard(session)

    # --- disconnecting

    def drop(self, connection: Connection, reason: str) -> None:
        """Close a connection at once."""
        who = self.connections.pop(connection, None)
        reason = connection.error or reason
        self._release(connection)
        connection.close()
        self._penalties.pop(connection, None)
        if not isinstance(who, Session):
            _LOG.info("%s disconnected before its handshake ended: %s", connection.address, plain(reason))
            self.counters.unadmitted += 1  # counted last: whoever sees the count finds the line in the log
        elif who.connection is connection:
            who.detach()
            if who.is_leaving or self._limits.resume_seconds == 0:
                self._end_session(who, reason)

    def _end_session(self, session: Session, reason: str) -> None:
        del self.sessions[_name(session.key)]
        self._held.discard(session)
        text = "it said goodbye" if session.is_leaving and not reason else reason
        _LOG.info("%s is gone: %s", session.name, plain(text))
        session.end(ConnectionLost(f"{session.name} is gone: {plain(text)}"))
        self._total += session.account.rows - session.counted
        if session.account.rows:
            self._left_behind.append(session.account)

    def sweep(self) -> None:
        """Close connections and sessions past their deadlines."""
        now, limits = self._clock(), self._limits
        for connection, (due, error) in list(self._penalties.items()):
            if due <= now:
                del self._penalties[connection]
                self._refuse(connection, error.code, str(error))
        for connection, who in list(self.connections.items()):
            if (reason := self._overdue(connection, who, now)) is not None:
                self.drop(connection, reason)
            elif (
                isinstance(who, Session)
                and now - max(connection.heard, connection.pinged) > limits.heartbeat_seconds
                and connection.stage is ConnectionStage.OPEN
            ):
                connection.ping(now)
        for session in list(self.sessions.values()):
            session.sweep()
            if session.left is not None and (session.is_leaving or now - session.left > limits.resume_seconds):
                self._end_session(session, f"it did not reconnect within {limits.resume_seconds} s")
        for address in [a for a, times in self._failures.items() if now - times[-1] > _FORGET]:
            del self._failures[address]
        self._spare_memory()

    def _overdue(self, connection: Connection, who: object, now: float) -> str | None:
        limits = self._limits
        if connection.stage is ConnectionStage.CLOSING:
            if connection.closing is None:
                connection.closing = now
            return "closed" if now - connection.closing > _LINGER else None
        if not isinstance(who, Session):
            return "no handshake in time" if now - connection.began > limits.handshake_seconds else None
        if connection.unfinished is not None and now - connection.unfinished > limits.message_seconds:
            return f"a message took more than {limits.message_seconds} s"
        if connection.unsent_bytes > limits.unsent_bytes:
            return f"more than {limits.unsent_bytes} bytes wait for it to read"
        if connection.stuck is not None and now - connection.stuck > limits.message_seconds:
            return f"it has read nothing for {limits.message_seconds} s"
        if now - connection.heard > 2 * limits.heartbeat_seconds:
            return f"silent for {2 * limits.heartbeat_seconds} s"
        return None

    def weigh(self, connection: Connection) -> None:
        """Count the bytes of a client that sent something; if all hold too many, cut off the client with the most."""
        who = self.connections.get(connection)
        if isinstance(who, Session) and not who.over:
            cost = who.cost
            self._total += cost - who.counted
            who.counted = cost
            if self._total > self._limits.total_bytes:
                self._spare_memory()

    def _spare_memory(self) -> None:
        self._left_behind = [account for account in self._left_behind if account.rows]
        sizes: dict[Session | Account, int] = {account: account.rows for account in self._left_behind}
        for session in self.sessions.values():
            sizes[session] = session.counted = session.cost
        self._total = sum(sizes.values())
        most = self._limits.total_bytes
        while self._total > most and sizes:
            largest = max(sizes, key=lambda one: sizes[one])
            text = f"all clients together hold more than {most} bytes"
            account = largest
            if isinstance(largest, Session):
                largest.fail("limit", text)
                self._end_session(largest, text)
                account = largest.account
            else:
                _LOG.info("rows of a disconnected client are dropped: %s", text)
            assert isinstance(account, Account)
            left = account.rows
            self._gateway.drop(account, ConnectionLost(text))
            self._total -= left
            del sizes[largest]

    def close(self) -> None:
        """Send all clients that the server closes, and disconnect them without waiting."""
        for connection in list(self.connections):
            if connection.stage is ConnectionStage.OPEN:
                self._refuse(connection, "closing", "the server closes")
            self.drop(connection, "the server closes")
        for session in list(self.sessions.values()):
            self._end_session(session, "the server closes")


def _name(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def plain(text: str) -> str:
    """Clean a client's text for the log: one line, no control characters, at most 500 characters."""
    return "".join(c if c.isprintable() else "?" for c in text[:500])
