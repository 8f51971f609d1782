"""`ClientConnection`: one WebSocket connection to a server; any thread may send, one thread at a time reads."""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections import deque

from marlvec.errors import ArgumentError, ConnectionLost, RefusedError
from marlvec.external.protocol.messages import MAX_MESSAGE
from marlvec.extras import needs_extra

with needs_extra("websockets", "an external env over a socket", "pip install 'marlvec[external]'"):
    from websockets.client import ClientProtocol
    from websockets.exceptions import InvalidHandshake, InvalidStatus, InvalidURI
    from websockets.frames import Frame, Opcode
    from websockets.typing import Subprotocol
    from websockets.uri import parse_uri

__all__ = ["ClientConnection"]

_CHUNK = 65_536
_Selector = getattr(selectors, "PollSelector", selectors.SelectSelector)  # neither has a file descriptor of its own
_SLICE = 0.1  # seconds between two checks for bytes that another thread wants to send
_QUIET = logging.getLogger("marlvec.external.websockets")
_QUIET.setLevel(logging.CRITICAL)


class ClientConnection:
    """One WebSocket connection, open at `deadline` or not at all.

    Raises:
        ArgumentError: The url is malformed.
        ConnectionLost: No marlvec server answers there in time.
        RefusedError: The server accepts no client from here; the text gives its reason.
    """

    def __init__(self, url: str, deadline: float) -> None:
        try:
            uri = parse_uri(url)
        except InvalidURI as error:
            raise ArgumentError(f"url: expected one such as ws://127.0.0.1:8000/, got {url!r}") from error
        if uri.secure:
            raise ArgumentError(f"url={url!r}: expected ws://, since this client has no TLS; use a tunnel, e.g. ssh -L")
        self._lock = threading.Lock()
        self._protocol = ClientProtocol(
            uri, subprotocols=[Subprotocol("marlvec.v1")], max_size=MAX_MESSAGE + 2**20, logger=_QUIET
        )
        self._out: deque[bytes | memoryview] = deque()
        self._out_bytes = 0
        self._parts: list[bytes] = []
        self.heard = time.monotonic()  # when bytes last came
        try:
            self._sock = socket.create_connection((uri.host, uri.port), max(0.01, deadline - time.monotonic()))
        except OSError as error:
            raise ConnectionLost(f"no server answers at {url}: {error}") from error
        try:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sock.setblocking(False)
            self._selector = _Selector()
            self._selector.register(self._sock, selectors.EVENT_READ)
            request = self._protocol.connect()
            self.host = request.headers["Host"]  # Host header of the request
            self._protocol.send_request(request)
            self._shake_hands(url, deadline)
        except BaseException:
            self._sock.close()
            raise

    def _shake_hands(self, url: str, deadline: float) -> None:
        while self._protocol.state.name == "CONNECTING":
            left = deadline - time.monotonic()
            if left <= 0:
                raise ConnectionLost(f"{url} did not answer the WebSocket handshake in time")
            self._read(min(left, _SLICE))
            error = self._protocol.handshake_exc
            if isinstance(error, InvalidStatus):
                body = bytes(error.response.body or b"")[:300].decode("ascii", "replace").strip()
                status = error.response.status_code
                raise RefusedError(f"{url} refuses the connection: {status} {body}", "request")
            if error is not None or self._protocol.parser_exc is not None:
                raise ConnectionLost(f"{url} is not a WebSocket server: {error or self._protocol.parser_exc}")
        if self._protocol.subprotocol != "marlvec.v1":
            raise ConnectionLost(f"{url} is a WebSocket server, but not a marlvec server")

    @property
    def unsent_bytes(self) -> int:
        """Bytes that wait to be sent."""
        return self._out_bytes

    def send(self, data: bytes) -> None:
        """Send one message, or let `receive` send it once the socket takes it."""
        with self._lock:
            if self._protocol.state.name != "OPEN":
                raise self._gone("it is closed")
            self._protocol.send_binary(data)
            self._flush()

    def receive(self, timeout: float) -> list[bytes]:
        """Wait for messages, 0.1 s at most; may return none."""
        return self._read(min(timeout, _SLICE))

    def _read(self, timeout: float) -> list[bytes]:
        with self._lock:
            self._flush()
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0)
        self._selector.modify(self._sock, wanted)
        if not self._selector.select(max(0.0, timeout)):
            return []
        try:
            data = self._sock.recv(_CHUNK)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError as error:
            raise self._gone(str(error)) from error
        if not data:
            raise self._gone("the server has closed it")
        self.heard = time.monotonic()
        messages = []
        with self._lock:
            self._protocol.receive_data(data)
            for event in self._protocol.events_received():
                if isinstance(event, Frame) and event.opcode in (Opcode.BINARY, Opcode.CONT):
                    self._parts.append(bytes(event.data))
                    if event.fin:
                        messages.append(b"".join(self._parts))
                        self._parts = []
            self._flush()
        return messages

    def _flush(self) -> None:
        for written in self._protocol.data_to_send():
            if written:
                self._out.append(written)
                self._out_bytes += len(written)
        while self._out:
            data = self._out[0]
            try:
                sent = self._sock.send(data)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                raise self._gone(str(error)) from error
            self._out_bytes -= sent
            if sent == len(data):
                self._out.popleft()
            else:
                self._out[0] = memoryview(data)[sent:]

    def _gone(self, reason: str) -> ConnectionLost:
        close = self._protocol.close_rcvd
        close_frame = f"; its close frame: {close.code} {close.reason}".rstrip() if close is not None else ""
        return ConnectionLost(f"the connection is gone: {reason}{close_frame}")

    def close(self) -> None:
        """Close the connection; may be called again."""
        with self._lock:
            with contextlib.suppress(ConnectionLost, InvalidHandshake, OSError):
                if self._protocol.state.name == "OPEN":
                    self._protocol.send_close(1000)
                    self._flush()
            self._sock.close()
