"""The handshake, on both sides: HELLO, CHALLENGE, AUTH, WELCOME; docs/protocol.md lists their fields.

The order is fixed, each message comes once, and every other message is refused. A client proves that it has a token
without sending it: an HMAC, whose formula docs/protocol.md has.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from marlvec.errors import ProtocolError, RefusedError
from marlvec.external.messages import VERSION, Message, Type
from marlvec.external.tokens import ENVIRONMENT_VARIABLE, is_equal, proof

FEATURES = ("resume", "weights")
"""Optional features of a server of this version."""

_NONCE = 32


class Welcome(NamedTuple):
    """A server's declaration of its session, agents, spaces and limits."""

    session: bytes  # secret with which this session can be resumed
    resumed: bool
    received: int  # number of the last of the client's messages that the server has received
    agents: tuple[str, ...]
    groups: Sequence[Any]  # spaces, as plain data
    limits: Mapping[str, float]
    weights: int  # version of the newest weights; 0: none


class ServerHandshake:
    """The server's side of the handshake. `server`: 16 bytes that identify it; `host`: Host header of the request."""

    def __init__(self, token: str | None, server: bytes, host: str) -> None:
        self._token, self._server, self._host = token, server, host
        self._nonce = secrets.token_bytes(_NONCE)
        self._client_nonce = b""
        self._next: Type | None = Type.HELLO
        self.session = b""  # to resume, once known; b"": a new one

    @property
    def is_done(self) -> bool:
        """Whether the client has passed the handshake."""
        return self._next is None

    def receive(self, message: Message) -> Message | None:
        """Process one message; return the answer. None: the client has passed, and `welcome` makes the answer.

        `ProtocolError`: another message was due. `RefusedError`: wrong proof, or versions or features do not fit.
        """
        _check_turn(message, self._next)
        if message.type is Type.HELLO:
            return self._hello(message.fields)
        self._auth(message.fields)
        return None

    def _hello(self, fields: Mapping[str, Any]) -> Message:
        if VERSION not in fields["versions"]:
            raise RefusedError(
                f"this server speaks version {VERSION} of the protocol, the client speaks {fields['versions']}",
                "version",
            )
        if unknown := [name for name in fields["features"] if name not in FEATURES]:
            raise RefusedError(f"this server has the features {list(FEATURES)}, the client needs {unknown}", "version")
        self._client_nonce = fields["nonce"]
        self._next = Type.AUTH
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
                raise RefusedError("this server has no token, but the client has one", "token")
        elif not is_equal(self._proof("client"), given):
            raise RefusedError("the token is missing or wrong", "token")
        self.session = fields["session"]
        self._next = None

    def _proof(self, role: Any) -> bytes:
        assert self._token is not None  # proofs are only made with a token
        return proof(self._token, role, self._host, self._server, self._client_nonce, self._nonce)

    def welcome(self, welcome: Welcome) -> Message:
        """Make the last message of a handshake that `is_done`."""
        fields = {"proof": b"" if self._token is None else self._proof("server"), **welcome._asdict()}
        return Message(Type.WELCOME, fields, received=fields.pop("received"))


class ClientHandshake:
    """The client's side of the handshake. `session`: to resume, or ``b""``; `features`: the server must have them."""

    def __init__(
        self, token: str | None, host: str, name: str = "", session: bytes = b"", features: Sequence[str] = ()
    ) -> None:
        self._token, self._host, self._name = token, host, name
        self._session, self._features = session, list(features)
        self._nonce = secrets.token_bytes(_NONCE)
        self._server = self._server_nonce = b""
        self._next: Type | None = Type.CHALLENGE

    def hello(self) -> Message:
        """Make the first message."""
        return Message(
            Type.HELLO,
            {"versions": [VERSION], "features": self._features, "name": self._name, "nonce": self._nonce},
        )

    def receive(self, message: Message) -> Message | Welcome:
        """Process one message; return the answer or, at the end, the server's welcome.

        `ProtocolError`: another message was due. `RefusedError`: the server refused, its proof is wrong, or only one
        side has a token.
        """
        fields = message.fields
        if message.type is Type.ERROR:
            raise RefusedError(fields["text"], fields["code"])
        _check_turn(message, self._next)
        if message.type is Type.CHALLENGE:
            return self._challenge(fields)
        if self._token is not None and not is_equal(self._proof("server"), fields["proof"]):
            raise RefusedError("the server does not know the token", "token")
        self._next = None
        told = {name: value for name, value in fields.items() if name != "proof"}
        return Welcome(**{**told, "agents": tuple(told["agents"])}, received=message.received)

    def _challenge(self, fields: Mapping[str, Any]) -> Message:
        if fields["version"] != VERSION:
            raise RefusedError(f"the server chose version {fields['version']}, this client speaks {VERSION}", "version")
        if fields["wants_token"] and self._token is None:
            raise RefusedError(
                f"the server requires a token, and this client has none; token=marlvec.external.find_token() reads "
                f"the environment variable {ENVIRONMENT_VARIABLE}, find_token(file) reads a file",
                "token",
            )
        if self._token is not None and not fields["wants_token"]:
            raise RefusedError("this client has a token, but the server requires none: it may be another one", "token")
        self._server, self._server_nonce = fields["server"], fields["nonce"]
        self._next = Type.WELCOME
        own_proof = b"" if self._token is None else self._proof("client")
        return Message(Type.AUTH, {"proof": own_proof, "session": self._session})

    def _proof(self, role: Any) -> bytes:
        assert self._token is not None  # proofs are only made with a token
        return proof(self._token, role, self._host, self._server, self._nonce, self._server_nonce)


def _check_turn(message: Message, due: Type | None) -> None:
    if message.type is not due:
        expected = "nothing more" if due is None else due.name.lower()
        raise ProtocolError(f"expected {expected!r}, got {message.type.name.lower()!r}")
