"""`Connection`: one client's socket on the server's side; `ClientConnection`: the client's end."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from urllib.parse import SplitResult, urlsplit

from marlvec.errors import ArgumentError, ConnectionLost, RefusedError
from marlvec.external.exchange import Limits
from marlvec.external.messages import MAX_HANDSHAKE, MAX_MESSAGE
from marlvec.extras import needs_extra

with needs_extra("websockets", "an external env over a socket", "pip install 'marlvec[external]'"):
    from websockets.client import ClientProtocol
    from websockets.exceptions import InvalidHandshake, InvalidStatus, InvalidURI
    from websockets.frames import Frame, Opcode
    from websockets.http11 import Request
    from websockets.server import ServerProtocol
    from websockets.typing import Subprotocol
    from websockets.uri import parse_uri


SUBPROTOCOL = "marlvec.v1"
_LOCAL = ("localhost", "127.0.0.1", "::1")


class RequestFilter:
    """Accepts or refuses WebSocket upgrade requests, by the server's names and by sites whose pages may use it.

    Web pages cannot forge the headers: a page of another site has another ``Origin``; a page whose name was made to
    point here (DNS rebinding) has another ``Host``, too.
    """

    def __init__(self, host: str, hosts: Collection[str], origins: Collection[str]) -> None:
        self._hosts = {*_LOCAL, host.lower(), *(name.lower() for name in hosts)}
        self._origins = {origin.lower().rstrip("/") for origin in origins}

    def refusal(self, path: str, headers: Mapping[str, list[str]]) -> tuple[int, str] | None:
        """Return why a request is refused: an HTTP status and a sentence. None: it is accepted.

        `headers`: the values of ``Host``, ``Origin`` and ``Sec-WebSocket-Protocol``, by these names.
        """
        if path != "/":
            return 404, "only / exists here"
        hosts, origins = headers["Host"], headers["Origin"]
        if len(hosts) != 1 or _name(f"//{hosts[0]}") not in self._hosts:
            return 403, "this server does not have that name; add it with hosts="
        if len(origins) > 1 or not all(self._is_ours(origin) for origin in origins):
            return 403, "pages of that site may not use this server; add it with origins="
        offered = [part.strip() for value in headers["Sec-WebSocket-Protocol"] for part in value.split(",")]
        if SUBPROTOCOL not in offered:
            return 400, f"request subprotocol {SUBPROTOCOL}"
        return None

    def _is_ours(self, origin: str) -> bool:
        if origin.lower() in self._origins:
            return True
        parts = _split(origin)
        return parts is not None and parts.scheme in ("http", "https") and _is_local(parts.hostname)


def _split(url: str) -> SplitResult | None:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return None
    is_bare = not (parts.path or parts.query or parts.fragment or parts.username is not None)
    return parts if is_bare and url.isascii() else None


def _name(url: str) -> str | None:
    parts = _split(url)
    return None if parts is None else parts.hostname


def _is_local(name: str | None) -> bool:
    if name is None or name in _LOCAL:
        return name is not None
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


_CHUNK = 65_536
_MAX_REQUEST = 8192  # bytes of the HTTP request; browsers add cookies and languages
_MAX_FRAGMENTS = 4096
_HIGH = 2**20  # unsent bytes above which nothing more is read
_EACH = 128  # overhead in bytes of one bytes object
_QUIET = logging.getLogger("marlvec.external.websockets")
_QUIET.setLevel(logging.CRITICAL)  # marlvec logs invalid requests itself, once


class ConnectionStage(Enum):
    """How far a connection has come."""

    REQUEST = "no WebSocket request has come"
    OPEN = "messages come and go"
    CLOSING = "what is left is sent"
    CLOSED = "the socket is closed"


class Connection:
    """One client's non-blocking socket. `want_write` is called, from any thread, if bytes wait to be sent."""

    def __init__(
        self,
        sock: socket.socket,
        address: str,
        gate: RequestFilter,
        limits: Limits,
        now: float,
        want_write: Callable[[Connection], None],
    ) -> None:
        self.sock, self.address, self.number = sock, address, sock.fileno()
        self._request_filter, self._limits, self._want_write = gate, limits, want_write
        self._protocol = ServerProtocol(
            subprotocols=[Subprotocol(SUBPROTOCOL)], max_size=MAX_HANDSHAKE, logger=_QUIET, extensions=None
        )
        self._lock = threading.Lock()
        self._out: deque[bytes | memoryview] = deque()
        self._parts: list[bytes | bytearray] = []
        self._parts_bytes = 0
        self._read_bytes = 0
        self.unsent_bytes = 0  # with the overhead of their lists
        self.stage = ConnectionStage.REQUEST
        self.host = ""  # header of the request
        self.began = self.heard = self.pinged = now
        self.unfinished: float | None = None  # when the message that is still incomplete began
        self.stuck: float | None = None  # since when the client has read none of the waiting bytes
        self.closing: float | None = None  # when closing began
        self.error = ""  # why it was cut off

    def __repr__(self) -> str:
        return f"<Connection from {self.address}: {self.stage.value}>"

    # --- in

    @property
    def is_full(self) -> bool:
        """Whether nothing more should be read, since too many bytes wait to be sent."""
        return self.unsent_bytes > _HIGH

    @property
    def read_bytes(self) -> int:
        """Bytes of incomplete messages, with the overhead of their lists."""
        return len(self._protocol.reader.buffer) + self._parts_bytes

    def admit(self) -> None:
        """Raise the message limit after the handshake."""
        self._protocol.max_message_size = self._limits.message_bytes

    def read(self, now: float) -> list[bytes]:
        """Read one chunk; return the messages it completes.

        `OSError`: the connection is broken; `EOFError`: the client has closed it.
        """
        data = self.sock.recv(_CHUNK)
        if not data:
            raise EOFError("the client closed the connection")
        self.heard = now
        if self.stage is not ConnectionStage.OPEN:
            self._read_bytes += len(data)
            if self.stage is ConnectionStage.CLOSING:
                return []
            if self._read_bytes > _MAX_REQUEST and self.stage is ConnectionStage.REQUEST:
                raise EOFError(f"more than {_MAX_REQUEST} bytes came before a WebSocket request")
        with self._lock:
            protocol = self._protocol
            protocol.receive_data(data)
            events = protocol.events_received()
            messages: list[bytes] = []
            begun = now if self.unfinished is None else self.unfinished
            for event in events:
                if isinstance(event, Request):
                    self._answer(event)
                    continue
                assert isinstance(event, Frame)
                if event.opcode in (Opcode.BINARY, Opcode.CONT):
                    if (message := self._assemble(bytes(event.data), fin=event.fin)) is not None:
                        messages.append(message)
                elif event.opcode is Opcode.TEXT:
                    protocol.fail(1003, "binary messages only")
                    break
                if not self._parts:  # no message is incomplete
                    begun = now
            if self._check_ended():
                messages = messages if not protocol.parser_exc else []
            self._flush(now)
        has_rest = bool(protocol.reader.buffer) or bool(self._parts)
        self.unfinished = begun if has_rest or not events else None
        return messages

    def _answer(self, request: Request) -> None:
        if self._protocol.eof_sent:  # the bytes after it were invalid: the protocol has closed already
            return
        headers = {name: request.headers.get_all(name) for name in ("Host", "Origin", "Sec-WebSocket-Protocol")}
        refusal = self._request_filter.refusal(request.path, headers)
        if refusal is None:
            response = self._protocol.accept(request)
            self.host = headers["Host"][0]
        else:
            response = self._protocol.reject(refusal[0], refusal[1] + "\n")
        self._protocol.send_response(response)
        if response.status_code == 101:
            self.stage = ConnectionStage.OPEN
        else:
            self.error = f"request refused with status {response.status_code}"
            self.stage = ConnectionStage.CLOSING

    def _assemble(self, data: bytes, *, fin: bool) -> bytes | None:
        """Join fragments; None: more fragments follow."""
        if fin and not self._parts:
            return data
        self._parts.append(data)
        self._parts_bytes += len(data) + _EACH
        if not fin:
            if len(self._parts) > _MAX_FRAGMENTS:
                self._protocol.fail(1009, "too many fragments")
            return None
        whole = b"".join(self._parts)
        self._parts, self._parts_bytes = [], 0
        return whole

    def _check_ended(self) -> bool:
        """Return whether the WebSocket protocol has ended."""
        protocol = self._protocol
        if protocol.parser_exc is not None or protocol.handshake_exc is not None or protocol.close_expected():
            exception = protocol.parser_exc or protocol.handshake_exc
            if not self.error and exception is not None:
                self.error = f"{type(exception).__name__}: {exception}"
            if self.stage is not ConnectionStage.CLOSED:
                self.stage = ConnectionStage.CLOSING
            return True
        return False

    # --- out

    def send(self, data: bytes, now: float) -> None:
        """Send one message, or queue it until the client reads. Does nothing while closing."""
        self.send_all((data,), now)

    def send_all(self, messages: Iterable[bytes], now: float) -> None:
        """Send several messages in one piece."""
        with self._lock:
            if self.stage is ConnectionStage.OPEN:
                for data in messages:
                    self._protocol.send_binary(data)
                self._flush(now)

    def ping(self, now: float) -> None:
        """Send a WebSocket ping."""
        self.pinged = now
        with self._lock:
            if self.stage is ConnectionStage.OPEN:
                self._protocol.send_ping(b"")
                self._flush(now)

    def end(self, code: int, reason: str, now: float) -> None:
        """Begin to close, after the waiting bytes."""
        with self._lock:
            if self.stage is ConnectionStage.OPEN:
                self._protocol.fail(code, reason)
                self.error = self.error or reason
                self.stage = ConnectionStage.CLOSING
                self._flush(now)

    def write(self, now: float) -> None:
        """Send as many of the waiting bytes as the socket takes; `OSError` if the connection is broken."""
        with self._lock:
            self._push(now)

    @property
    def is_sent(self) -> bool:
        """Whether nothing waits to be sent."""
        return not self._out

    def close(self) -> None:
        """Close the socket at once; may be called again."""
        with self._lock:
            self.stage = ConnectionStage.CLOSED
            self._out.clear()
            self._parts.clear()
            self.unsent_bytes = self._parts_bytes = 0
            self.sock.close()

    def _flush(self, now: float) -> None:
        had = bool(self._out)
        pieces = [data for data in self._protocol.data_to_send() if data]  # b"" marks the end
        if pieces:
            self._out.append(pieces[0] if len(pieces) == 1 else b"".join(pieces))
            self.unsent_bytes += len(self._out[-1]) + _EACH
        if had or not self._out:
            return  # another thread is sending, and continues
        try:
            self._push(now)
        except OSError:
            return  # reading will raise it
        if self._out:
            self._want_write(self)

    def _push(self, now: float) -> None:
        while self._out and self.stage is not ConnectionStage.CLOSED:
            data = self._out[0]
            try:
                sent = self.sock.send(data)
            except (BlockingIOError, InterruptedError):
                self.stuck = now if self.stuck is None else self.stuck
                return
            self.unsent_bytes -= sent
            self.stuck = None
            if sent == len(data):
                self._out.popleft()
                self.unsent_bytes -= _EACH
            else:
                self._out[0] = memoryview(data)[sent:]


_Selector = getattr(selectors, "PollSelector", selectors.SelectSelector)  # neither has a file descriptor of its own
_SLICE = 0.1  # seconds between two checks for bytes that another thread wants to send
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
