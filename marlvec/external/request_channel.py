"""`RequestChannel`: numbered requests and their replies, across reconnections.

One of the threads that wait for a reply reads the connection and hands replies to all of them, without an extra thread
switch. A helper thread reads when no other does, so that pings are answered while the simulator works.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable
from typing import Any

from marlvec.errors import AnswerTimeout, ClosedError, ConnectionLost, ProtocolError, RefusedError
from marlvec.external.connections import ClientConnection
from marlvec.external.handshake import ClientHandshake, Welcome
from marlvec.external.messages import Message, MessageStream, Type, read_message, write_message

_HANDSHAKE_SECONDS = 5.0
_KEPT = 64 * 2**20
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0  # seconds between two attempts to reconnect
_FINAL = frozenset({"version", "token", "protocol", "request"})  # codes after which a retry cannot succeed
_HIGH = 2**20
_LEAST = {"max_message": 1, "window": 1, "heartbeat": 0.001}


class PendingRequest:
    """A request and its reply."""

    __slots__ = ("era", "number", "reply")

    def __init__(self, number: int, era: int) -> None:
        self.number, self.era = number, era
        self.reply: Message | Exception | None = None  # or the error in its place; None while it is pending


class RequestChannel:
    """A session with a server, across reconnections. A server that is gone is tried for `reconnect_timeout` seconds.

    Raises:
        ConnectionLost: The server cannot be reached.
        RefusedError: The server refuses this client.
        ProtocolError: The server does not speak marlvec's protocol.
    """

    def __init__(self, url: str, token: str | None, name: str, reconnect_timeout: float) -> None:
        self._url, self._token, self._name, self._reconnect_timeout = url, token, name, reconnect_timeout
        self._lock = threading.Condition()
        self._stream = MessageStream(_KEPT)
        self._pending_requests: dict[int, PendingRequest] = {}
        self._link: ClientConnection | None = None
        self._reading = self._closed = False
        self._server_closing = False  # the server announced that it closes, and no call has raised that yet
        self._lost: Exception | None = None
        self._gone_since = 0.0
        self._attempts = 0
        self._next_attempt = 0.0
        self.era = 0  # how many sessions were lost before this one
        self.welcome = self._dial(time.monotonic() + min(reconnect_timeout, _HANDSHAKE_SECONDS))
        self._helper = threading.Thread(target=self._help, name="marlvec-client", daemon=True)
        self._helper.start()

    # --- requests

    def request(self, kind: Type, fields: dict[str, Any], timeout: float | None = None) -> PendingRequest:
        """Send a request without waiting for its reply; waits only while too much is unsent or unanswered.

        Raises:
            ClosedError: `close` was called.
            ConnectionLost: The server is gone, and could not be reached again in time.
            AnswerTimeout: The request could not be sent in time.
            ProtocolError: It is larger than the server accepts; code ``"limit"``.
        """
        deadline = _deadline(timeout)
        window = int(self.welcome.limits["window"])
        self._turn_until(lambda: self._has_room(window), deadline, "capacity to send a request")
        with self._lock:
            if self._closed:
                raise ClosedError("the client was closed")
            data = self._stream.make(kind, fields, int(self.welcome.limits["max_message"]))
            pending = self._pending_requests[self._stream.sent] = PendingRequest(self._stream.sent, self.era)
            if (link := self._link) is not None:
                try:
                    link.send(data)
                except ConnectionLost as error:
                    self._hang_up(link, error)  # the stream keeps the message, and it is sent again
            return pending

    def wait(self, pending: PendingRequest, timeout: float | None) -> Message:
        """Wait for a reply.

        Raises:
            RefusedError: The server refuses the request.
            AnswerTimeout: No reply came in time; it may still come.
            ConnectionLost: The server is gone, and could not be reached again in time; or it has lost this session.
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
        """Read, or let another thread read, until `is_there` is True."""
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
        """Read once, or try to reconnect; called by the thread that has set ``_reading``."""
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

    # --- reconnecting

    def _come_back(self, timeout: float, deadline: float | None) -> None:
        """Try once to reconnect, if it is time."""
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
        """Start a new session, since the server has lost this one: fail its pending requests."""
        with self._lock:
            self.era += 1
            lost = ConnectionLost(f"{self._url} has lost this session ({error}): its episodes are lost")
            for pending in self._pending_requests.values():
                pending.reply = lost
            self._pending_requests.clear()
            self._stream = MessageStream(_KEPT)
            self.welcome = self.welcome._replace(session=b"")

    def _dial(self, deadline: float) -> Welcome:
        """Connect, do the handshake, and send again all messages that the server has not received."""
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
                        later.append(message)  # messages that follow the welcome at once
                        continue
                    answer = shake.receive(message)
                    if isinstance(answer, Welcome):
                        welcome = answer
                        _check_limits(welcome)
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

    # --- closing

    def close(self, timeout: float = 1.0) -> None:
        """Say goodbye to the server, and close the connection; may be called again."""
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


def _check_limits(welcome: Welcome) -> None:
    """Raise `ProtocolError` unless requests can be sent within the limits that the client keeps to."""
    for name, least in _LEAST.items():
        limit = welcome.limits.get(name)
        if limit is None or limit < least:
            raise ProtocolError(f"WELCOME: limits: {name}: expected a number from {least}, got {limit}")


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout
