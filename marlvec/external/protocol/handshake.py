"""The handshake: versions, tokens and the declaration of spaces, on both sides.

    client                      server
    hello      ───────────────▶            which versions it speaks, 32 random bytes
               ◀───────────────  challenge  which version it is to be, 32 random bytes, whether a token is asked for
    auth       ───────────────▶            proof, and the session to be resumed, if any
               ◀───────────────  welcome    proof, session, agents, spaces, limits

The order is fixed, each message comes once, and whatever else comes is refused.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from marlvec.errors import ProtocolError, RefusedError
from marlvec.external.protocol.frames import VERSION
from marlvec.external.protocol.messages import Message, Type
from marlvec.external.protocol.tokens import ENVIRONMENT_VARIABLE, is_equal, proof

__all__ = ["FEATURES", "ClientHandshake", "ServerHandshake", "Welcome"]

FEATURES = ("resume", "weights")
"""What a server of this version can do beside answering."""

_NONCE = 32


class _Step(Enum):
    """What comes next."""

    HELLO = "hello"
    AUTH = "auth"
    CHALLENGE = "challenge"
    WELCOME = "welcome"
    NOTHING = "nothing more"


class Welcome(NamedTuple):
    """What a server says of itself.

    Attributes:
        session: The secret by which this session can be resumed.
        resumed: Whether it was.
        received: Number of the last message of this client's that the server has got.
        agents: Their names.
        groups: Spaces, as plain data.
        limits: How much memory, time and how many connections the server grants.
        weights: Number of the newest weights, 0 where there are none.
    """

    session: bytes
    resumed: bool
    received: int
    agents: tuple[str, ...]
    groups: Sequence[Any]
    limits: Mapping[str, float]
    weights: int


class ServerHandshake:
    """The server's side.

    Args:
        token: The token that clients must know; None where they need none.
        server: 16 bytes that name this server.
        host: Host header of the request.

    Attributes:
        session: Which session the client wants to resume, once it was heard; ``b""`` for a new one.
    """

    def __init__(self, token: str | None, server: bytes, host: str) -> None:
        self._token, self._server, self._host = token, server, host
        self._nonce = secrets.token_bytes(_NONCE)
        self._client_nonce = b""
        self._next = _Step.HELLO
        self.session = b""

    @property
    def is_done(self) -> bool:
        """Whether the client has proved what it must."""
        return self._next is _Step.NOTHING

    def receive(self, message: Message) -> Message | None:
        """Take one message; returns the answer. None: the client has passed, and `welcome` makes the answer.

        Raises:
            ProtocolError: It is not this message's turn.
            RefusedError: Versions or features do not fit, or the proof is wrong.
        """
        if message.type is Type.HELLO and self._next is _Step.HELLO:
            return self._hello(message.fields)
        if message.type is Type.AUTH and self._next is _Step.AUTH:
            self._auth(message.fields)
            return None
        raise ProtocolError(f"expected {self._next.value!r}, got {message.type.name.lower()!r}")

    def _hello(self, fields: Mapping[str, Any]) -> Message:
        if VERSION not in fields["versions"]:
            raise RefusedError(
                f"this server speaks version {VERSION} of the protocol, the client {fields['versions']}", "version"
            )
        if unknown := [name for name in fields["features"] if name not in FEATURES]:
            raise RefusedError(f"this server has the features {list(FEATURES)}, the client needs {unknown}", "version")
        self._client_nonce = fields["nonce"]
        self._next = _Step.AUTH
        return Message(
            Type.CHALLENGE,
            {
                "version": VERSION,
                "features": list(FEATURES),
                "server": self._server,
                "nonce": self._nonce,
                "wants_token": self._token is not None,
            },
        )

    def _auth(self, fields: Mapping[str, Any]) -> None:
        given = fields["proof"]
        if self._token is None:
            if given:
                raise RefusedError("this server has no token, and the client has one", "token")
        elif not is_equal(self._proof("client"), given):
            raise RefusedError("the token is missing or wrong", "token")
        self.session = fields["session"]
        self._next = _Step.NOTHING

    def _proof(self, runner: Any) -> bytes:
        assert self._token is not None  # who has none proves nothing
        return proof(self._token, runner, self._host, self._server, self._client_nonce, self._nonce)

    def welcome(self, welcome: Welcome) -> Message:
        """The last message of a handshake that `is_done`."""
        return Message(
            Type.WELCOME,
            {
                "proof": b"" if self._token is None else self._proof("server"),
                "session": welcome.session,
                "resumed": welcome.resumed,
                "agents": list(welcome.agents),
                "groups": list(welcome.groups),
                "limits": dict(welcome.limits),
                "weights": welcome.weights,
            },
            received=welcome.received,
        )


class ClientHandshake:
    """The client's side.

    Args:
        token: The token, or None.
        host: Host header of the request.
        name: What the client calls itself, for the server's log.
        session: A session to resume, or ``b""``.
        features: What the server must be able to do.
    """

    def __init__(
        self, token: str | None, host: str, name: str = "", session: bytes = b"", features: Sequence[str] = ()
    ) -> None:
        self._token, self._host, self._name = token, host, name
        self._session, self._features = session, list(features)
        self._nonce = secrets.token_bytes(_NONCE)
        self._server = self._server_nonce = b""
        self._next = _Step.CHALLENGE

    def hello(self) -> Message:
        """The first message."""
        return Message(
            Type.HELLO,
            {"versions": [VERSION], "features": self._features, "name": self._name, "nonce": self._nonce},
        )

    def receive(self, message: Message) -> Message | Welcome:
        """Take one message; returns the answer, or what the server says of itself.

        Raises:
            ProtocolError: It is not this message's turn, or the server's proof is wrong.
            RefusedError: The server refused, or does not ask for the token, or asks for one there is none of.
        """
        fields = message.fields
        if message.type is Type.ERROR:
            raise RefusedError(fields["text"], fields["code"])
        if message.type is Type.CHALLENGE and self._next is _Step.CHALLENGE:
            return self._challenge(fields)
        if message.type is Type.WELCOME and self._next is _Step.WELCOME:
            if self._token is not None and not is_equal(self._proof("server"), fields["proof"]):
                raise RefusedError("the server does not know the token", "token")
            self._next = _Step.NOTHING
            return Welcome(
                fields["session"],
                fields["resumed"],
                message.received,
                tuple(fields["agents"]),
                fields["groups"],
                fields["limits"],
                fields["weights"],
            )
        raise ProtocolError(f"expected {self._next.value!r}, got {message.type.name.lower()!r}")

    def _challenge(self, fields: Mapping[str, Any]) -> Message:
        if fields["version"] != VERSION:
            raise RefusedError(f"the server chose version {fields['version']}, this client speaks {VERSION}", "version")
        if fields["wants_token"] and self._token is None:
            raise RefusedError(
                f"the server asks for a token, and this client has none; token=marlvec.external.find_token() takes "
                f"that of the environment variable {ENVIRONMENT_VARIABLE}, find_token(file) that of a file",
                "token",
            )
        if self._token is not None and not fields["wants_token"]:
            raise RefusedError("this client has a token, and the server asks for none: it may be another one", "token")
        self._server, self._server_nonce = fields["server"], fields["nonce"]
        self._next = _Step.WELCOME
        own = b"" if self._token is None else self._proof("client")
        return Message(Type.AUTH, {"proof": own, "session": self._session})

    def _proof(self, runner: Any) -> bytes:
        assert self._token is not None  # who has none proves nothing
        return proof(self._token, runner, self._host, self._server, self._nonce, self._server_nonce)
