"""`SessionManager`: all connections and sessions of a server, and their deadlines; only the server's thread uses it."""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from marlvec.errors import ConnectionLost, ProtocolError, RefusedError
from marlvec.external.exchange.gateway import EpisodeGateway
from marlvec.external.exchange.row import Account
from marlvec.external.protocol.handshake import ServerHandshake, Welcome
from marlvec.external.protocol.messages import Message, Type, read_message, write_message
from marlvec.external.server.connection import Connection, Stage
from marlvec.external.server.session import CLOSE_CODES, Session
from marlvec.external.server.slot_queue import SlotQueue
from marlvec.external.server.value_readers import ValueReaders
from marlvec.external.server.weight_store import WeightStore
from marlvec.external.settings import Limits

__all__ = ["ServerCounters", "SessionManager"]


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


_LOG = logging.getLogger("marlvec.external")
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
        if connection.stage is not Stage.OPEN or connection in self._penalties:
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
                and connection.stage is Stage.OPEN
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
        if connection.stage is Stage.CLOSING:
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
            if connection.stage is Stage.OPEN:
                self._refuse(connection, "closing", "the server closes")
            self.drop(connection, "the server closes")
        for session in list(self.sessions.values()):
            self._end_session(session, "the server closes")


def _name(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def plain(text: str) -> str:
    """Clean a client's text for the log: one line, no control characters, at most 500 characters."""
    return "".join(c if c.isprintable() else "?" for c in text[:500])
