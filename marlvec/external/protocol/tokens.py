r"""Tokens, and the proof that one knows one without sending it.

A token never goes over the wire. Each side sends 32 random bytes, and proves with them that it knows the token:

    HMAC-SHA256(token, "marlvec/1 " + role + "\0" + host + "\0" + server id + client's bytes + server's bytes)

``runner`` is ``client`` or ``server``, so that no proof can be sent back to where it came from. ``host`` is the Host
header of the WebSocket request, in lower case: who dials one server is not passed on to another one.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
import sys
from pathlib import Path
from typing import Literal

from marlvec.errors import ArgumentError

__all__ = ["ENVIRONMENT_VARIABLE", "check_token", "find_token", "is_equal", "make_token", "proof"]

ENVIRONMENT_VARIABLE = "MARLVEC_TOKEN"
MIN_LENGTH = 32


def make_token() -> str:
    """A new token: 256 random bits, 43 characters.

    Returns:
        The token.
    """
    return secrets.token_urlsafe(32)


def check_token(token: str, where: str = "token") -> str:
    """Refuse what cannot be a good token.

    Raises:
        ArgumentError: It is too short, or not of plain characters. It is not in the message.
    """
    if not isinstance(token, str) or len(token) < MIN_LENGTH or not token.isascii() or not token.isprintable():
        raise ArgumentError(
            f"{where}: expected {MIN_LENGTH} or more printable ASCII characters, as marlvec.external.make_token() makes"
        )
    return token


def find_token(file: str | os.PathLike[str] | None = None) -> str | None:
    """The token of a file, or else of the environment variable MARLVEC_TOKEN; None where there is neither.

    Args:
        file: A file that only its owner may read, with the token in it.

    Returns:
        The token, or None.

    Raises:
        ArgumentError: The file cannot be read, others may read it, or what is in it is no token.
    """
    if file is None:
        found = os.environ.get(ENVIRONMENT_VARIABLE)
        return None if found is None else check_token(found.strip(), ENVIRONMENT_VARIABLE)
    try:
        with Path(file).open("rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            if mode & (stat.S_IRWXG | stat.S_IRWXO) and sys.platform != "win32":  # whose modes say nothing
                raise ArgumentError(f"token file {file}: others may read or write it; say chmod 600 {file}")
            text = opened.read(4096).decode("ascii", "replace")
    except OSError as error:
        raise ArgumentError(f"token file {file} cannot be read: {error.strerror or error}") from error
    return check_token(text.strip(), f"token file {file}")


def proof(
    token: str, runner: Literal["client", "server"], host: str, server: bytes, client_nonce: bytes, server_nonce: bytes
) -> bytes:
    """What only who knows the token can say, 32 bytes."""
    said = f"marlvec/1 {runner}\0{host.lower()}\0".encode()
    return hmac.digest(token.encode(), said + server + client_nonce + server_nonce, hashlib.sha256)


def is_equal(own: bytes, other: bytes) -> bool:
    """Whether two proofs are equal, in a time that does not depend on where they differ."""
    return hmac.compare_digest(own, other)
