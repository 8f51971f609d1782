"""Tokens, and the proof of knowing one without sending it: an HMAC, whose formula docs/protocol.md has.

It includes the role, so that no proof can be sent back to its author, and the Host header of the WebSocket request, in
lower case, so that a proof for one server is not valid at another one.
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

ENVIRONMENT_VARIABLE = "MARLVEC_TOKEN"
MIN_LENGTH = 32


def make_token() -> str:
    """Make a new token: 256 random bits, 43 characters.

    Returns:
        The token.
    """
    return secrets.token_urlsafe(32)


def check_token(token: str, where: str = "token") -> str:
    """Return a token that is long enough; the error of another one does not contain it."""
    if not isinstance(token, str) or len(token) < MIN_LENGTH or not token.isascii() or not token.isprintable():
        raise ArgumentError(
            f"{where}: expected {MIN_LENGTH} or more printable ASCII characters; see marlvec.external.make_token()"
        )
    return token


def find_token(file: str | os.PathLike[str] | None = None) -> str | None:
    """Read the token from a file or, without one, from the environment variable MARLVEC_TOKEN.

    Args:
        file: A file with the token, which only its owner may read.

    Returns:
        The token; None if no file is given and the variable is not set.

    Raises:
        ArgumentError: The file cannot be read, other users may read it, or it holds no valid token.
    """
    if file is None:
        found = os.environ.get(ENVIRONMENT_VARIABLE)
        return None if found is None else check_token(found.strip(), ENVIRONMENT_VARIABLE)
    try:
        with Path(file).open("rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            if mode & (stat.S_IRWXG | stat.S_IRWXO) and sys.platform != "win32":  # where modes have no meaning
                raise ArgumentError(f"token file {file}: other users may read or write it; run chmod 600 {file}")
            text = opened.read(4096).decode("ascii", "replace")
    except OSError as error:
        raise ArgumentError(f"token file {file} cannot be read: {error.strerror or error}") from error
    return check_token(text.strip(), f"token file {file}")


def proof(
    token: str, role: Literal["client", "server"], host: str, server: bytes, client_nonce: bytes, server_nonce: bytes
) -> bytes:
    """Compute a side's proof that it knows the token, 32 bytes."""
    message = f"marlvec/1 {role}\0{host.lower()}\0".encode()
    return hmac.digest(token.encode(), message + server + client_nonce + server_nonce, hashlib.sha256)


def is_equal(own: bytes, other: bytes) -> bool:
    """Compare two proofs in a time that does not depend on where they differ."""
    return hmac.compare_digest(own, other)
