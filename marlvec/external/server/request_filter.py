"""`RequestFilter`: which WebSocket upgrade requests are accepted, by headers that web pages cannot forge.

A page of another site has another ``Origin``; a page whose name was made to point here (DNS rebinding) has another
``Host``, too.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping
from urllib.parse import SplitResult, urlsplit

__all__ = ["SUBPROTOCOL", "RequestFilter"]

SUBPROTOCOL = "marlvec.v1"
_LOCAL = ("localhost", "127.0.0.1", "::1")


class RequestFilter:
    """Accepts or refuses WebSocket upgrade requests, by the server's names and by sites whose pages may use it."""

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
