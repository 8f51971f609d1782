"""`RequestChannel`: numbered requests and their replies, over connections that may break and be made again.

A thread that waits for a reply reads the connection, one at a time, and hands replies to all that wait: an answer
reaches its thread without passing through another one. A helper thread reads when no other does, so that the server's
pings are answered while the simulator is at work.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable
from typing import Any

from marlvec.errors import AnswerTimeout, ClosedError, ConnectionLost, ProtocolError, RefusedError
from marlvec.external.client.connection import ClientConnection
from marlvec.external.protocol.handshake import ClientHandshake, Welcome
from marlvec.external.protocol.messages import Message, Type, read_message, write_message
from marlvec.external.protocol.stream import MessageStream

__all__ = ["RequestChannel", "PendingRequest"]

_HANDSHAKE_SECONDS = 5.0
_KEPT = 64 * 2**20
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0  # seconds between two attempts to come back
_FINAL = frozenset({"version", "token", "protocol", "request"})  # of no use to try again
_HIGH = 2**20


class PendingRequest:
    """A request and, once it is there, its reply.

    Attributes:
        number: The request's.
        era: The session's; see `RequestChannel.era`.
        reply: The reply, or why there will be none; None as long as it is open.
    """

    __slots__ = ("era", "number", "reply")

    def __init__(self, number: int, era: int) -> None:
        self.number, self.era = number, era
        self.reply: Message | Exception | None = None


class RequestChannel:
    """A session with a server.

    Args:
        url: Where it is.
        token: What it asks for, or None.
        name: What to be called there.
        reconnect_timeout: Seconds to go on trying to reach it, each time that it is gone.

    Raises:
        ConnectionLost: It cannot be reached.
        RefusedError: It says no.
        ProtocolError: It is not one of ours.

    Attributes:
        welcome: What it has said of itself.
        era: How many sessions there have been before: one more after each that was lost.
    """

    def __init__(self, url: str, token: str | None, name: str, reconnect_timeout: float) -> None:
        self._url, self._token, self._name, self._reconnect_timeout = url, token, name, reconnect_timeout
        self._lock = threading.Condition()
        self._stream = MessageStream(_KEPT)
        self._pending_requests: dict[int, PendingRequest] = {}
        self._link: ClientConnection | None = None
        self._reading = self._closed = False
        self._server_closing = False  # whether the server has said that it closes, and no call has raised that yet
        self._lost: Exception | None = None
        self._gone_since = 0.0
        self._attempts = 0
        self._next_attempt = 0.0
        self.era = 0
        self.welcome = self._dial(time.monotonic() + min(reconnect_timeout, _HANDSHAKE_SECONDS))
        self._helper = threading.Thread(target=self._help, name="marlvec-client", daemon=True)
        self._helper.start()

    # --- requests

    def request(self, kind: Type, fields: dict[str, Any], timeout: float | None = None) -> PendingRequest:
        """Send a request, and do not wait for its reply; only for room, where the server is slow.

        Args:
            kind: What.
            fields: What it holds.
            timeout: Seconds to wait for room; None: for ever.

        Raises:
            ClosedError: `close` was called.
            ConnectionLost: The server is gone, and did not come back in time.
            AnswerTimeout: There was no room in time.
            ProtocolError: It is larger than the server takes; code ``"limit"``.
        """
        deadline = _deadline(timeout)
        window = int(self.welcome.limits["window"])
        self._turn_until(lambda: self._has_room(window), deadline, "room for a request")
        with self._lock:
            if self._closed:
                raise ClosedError("the client was closed")
            data = self._stream.make(kind, fields, int(self.welcome.limits["max_message"]))
            pending = self._pending_requests[self._stream.sent] = PendingRequest(self._stream.sent, self.era)
            if (link := self._link) is not None:
                try:
                    link.send(data)
                except ConnectionLost as error:
                    self._hang_up(link, error)  # it is kept, and sent again
            return pending

    def wait(self, pending: PendingRequest, timeout: float | None) -> Message:
        """Wait for a reply.

        Args:
            pending: Whose.
            timeout: Seconds; None: for ever.

        Raises:
            RefusedError: The server refuses it.
            AnswerTimeout: None came in time; it may still come.
            ConnectionLost: The server is gone, and did not come back in time; or it has lost this session.
            ClosedError: `close` was called.
        """
        self._turn_until(lambda: pending.reply is not None, _deadline(timeout), "the reply")
        reply = pending.reply
        assert reply is not None
        if isinstance(reply, Exception):
            raise type(reply)(*reply.args)
        if reply.type is Type.REFUSED:
            raise RefusedError(reply.fields["text"], reply.fields["code"])
        return reply

    def call(self, kind: Type, fields: dict[str, Any], timeout: float | None) -> Message:
        """Send a request and wait for its reply; raises as `wait`."""
        return self.wait(self.request(kind, fields, timeout), timeout)

    def _has_room(self, window: int) -> bool:
        if len(self._pending_requests) >= window or self._stream.kept_bytes > _KEPT // 2:
            return False
        link = self._link
        return link is None or link.unsent_bytes < _HIGH

    # --- reading

    def _turn_until(self, is_there: Callable[[], bool], deadline: float | None, what: str) -> None:
        """Read, or let another thread read, until something is there."""
        while not is_there():
            now = time.monotonic()
            left = None if deadline is None else deadline - now
            if left is not None and left <= 0:
                raise AnswerTimeout(f"{self._url}: {what} did not come in time; is a collector collecting?")
            with self._lock:
                if self._closed:
                    raise ClosedError("the client was closed")
                if self._reading:
                    self._lock.wait(0.5 if left is None else min(left, 0.5))
                    continue
                self._reading = True
            try:
                self._turn(1.0 if left is None else left, deadline)
            finally:
                with self._lock:
                    self._reading = False
                    self._lock.notify_all()

    def _turn(self, timeout: float, deadline: float | None) -> None:
        """Read once, or try to get the connection back; by the thread that has set ``_reading``."""
        link = self._link
        if link is None:
            self._come_back(timeout, deadline)
            return
        try:
            messages = link.receive(timeout)
            for data in messages:
                self._take(read_message(data, "server"))
        except (ConnectionLost, ProtocolError) as error:
            self._hang_up(link, error)
            return
        silence = time.monotonic() - link.heard
        if silence > 2.5 * self.welcome.limits["heartbeat"]:
            self._hang_up(link, ConnectionLost(f"the server was silent for {silence:.1f} s"))

    def _take(self, message: Message) -> None:
        with self._lock:
            if not self._stream.take(message):
                return
            if message.type is Type.PING:
                if self._link is not None:
                    self._link.send(self._stream.make(Type.PONG, {}))
            elif message.type is Type.ERROR:
                self._lost = RefusedError(message.fields["text"], message.fields["code"])
            elif "re" in message.fields:
                pending = self._pending_requests.pop(message.fields["re"], None)
                if pending is not None:
                    pending.reply = message

    def _hang_up(self, link: ClientConnection, error: Exception) -> None:
        with self._lock:
            if self._link is link:
                self._link = None
                self._lost = self._lost or error
                self._gone_since = time.monotonic()
                self._attempts, self._next_attempt = 0, self._gone_since
                self._server_closing = isinstance(self._lost, RefusedError) and self._lost.code == "closing"
        link.close()

    # --- coming back

    def _come_back(self, timeout: float, deadline: float | None) -> None:
        """One attempt, when it is due."""
        now = time.monotonic()
        until = self._gone_since + self._reconnect_timeout
        if self._server_closing or (now >= until and self._attempts):
            self._gone_since, self._attempts, self._server_closing = now, 0, False  # the next call may try again
            raise ConnectionLost(f"{self._url} is gone: {self._lost}")
        if now < self._next_attempt:
            pause = min(self._next_attempt - now, timeout)
            if deadline is not None and deadline - now <= pause:
                time.sleep(max(0.0, deadline - now))
                raise ConnectionLost(f"{self._url} is gone: {self._lost}")
            time.sleep(pause)
            return
        limit = min(now + _HANDSHAKE_SECONDS, *(() if deadline is None else (deadline,)), max(until, now + 0.1))
        try:
            self.welcome = self._dial(limit)
        except RefusedError as error:
            self._lost = error
            if error.code == "session":
                self._begin_anew(error)
            elif error.code in _FINAL:
                raise
            self._pause()
        except (ConnectionLost, ProtocolError) as error:
            self._lost = error
            self._pause()

    def _pause(self) -> None:
        longest = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**self._attempts)
        self._attempts += 1
        self._next_attempt = time.monotonic() + longest * random.uniform(0.5, 1.0)

    def _begin_anew(self, error: RefusedError) -> None:
        """The server does not know this session any more."""
        with self._lock:
            self.era += 1
            lost = ConnectionLost(f"{self._url} has lost this session ({error}): its episodes are lost")
            for pending in self._pending_requests.values():
                pending.reply = lost
            self._pending_requests.clear()
            self._stream = MessageStream(_KEPT)
            self.welcome = self.welcome._replace(session=b"")

    def _dial(self, deadline: float) -> Welcome:
        """Connect, and go through the handshake; sends again what the server has not got."""
        session = getattr(self, "welcome", None)
        link = ClientConnection(self._url, deadline)
        try:
            shake = ClientHandshake(self._token, link.host, self._name, session.session if session else b"")
            link.send(write_message(shake.hello()))
            welcome: Welcome | None = None
            later: list[Message] = []
            while welcome is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise ConnectionLost(f"{self._url} does not finish the handshake in time")
                for data in link.receive(left):
                    message = read_message(data, "server")
                    if welcome is not None:
                        later.append(message)  # what comes on its heels
                        continue
                    answer = shake.receive(message)
                    if isinstance(answer, Welcome):
                        welcome = answer
                    else:
                        link.send(write_message(answer._replace(received=self._stream.received)))
            with self._lock:
                for data in self._stream.missing(welcome.received):
                    link.send(data)
                self._link, self._lost, self._attempts = link, None, 0
            for message in later:
                self._take(message)
            return welcome
        except BaseException:
            link.close()
            raise

    # --- the helper

    def _help(self) -> None:
        while True:
            with self._lock:
                if self._closed:
                    return
                pause = self.welcome.limits["heartbeat"] / 4
                if self._link is None:
                    pause = min(pause, max(0.01, self._next_attempt - time.monotonic()))
                self._lock.wait_for(lambda: self._closed, pause)
                if self._closed:
                    return
                if self._reading or self._server_closing:
                    continue
                self._reading = True
            try:
                with contextlib.suppress(ConnectionLost, RefusedError):  # the next call raises it
                    self._turn(0.0, None)
            finally:
                with self._lock:
                    self._reading = False
                    self._lock.notify_all()

    # --- the end

    def close(self, timeout: float = 1.0) -> None:
        """Send that this client leaves, and close the connection; may be called again."""
        with self._lock:
            if self._closed:
                return
            is_there = self._link is not None
        if is_there:
            with contextlib.suppress(AnswerTimeout, ConnectionLost, RefusedError, ClosedError):
                self.call(Type.BYE, {}, timeout)
        with self._lock:
            self._closed = True
            link, self._link = self._link, None
            for pending in self._pending_requests.values():
                pending.reply = ClosedError("the client was closed")
            self._pending_requests.clear()
            self._lock.notify_all()
        if link is not None:
            link.close()
        self._helper.join()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout
