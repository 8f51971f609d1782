"""The address a server listens at: this machine alone, unless more was asked for, and never more than that."""

from __future__ import annotations

import ipaddress
import socket

from marlvec.errors import ArgumentError, ResourceError

__all__ = ["bind"]

BACKLOG = 1024


def bind(host: str, port: int, *, allow_remote: bool, is_guarded: bool) -> socket.socket:
    """Listen.

    Args:
        host: A name or an address; each address it stands for must be this machine's own, unless ``allow_remote``.
        port: 0 for a free one.
        allow_remote: Whether others may come.
        is_guarded: Whether they need a token, or somebody has said that they need none.

    Raises:
        ArgumentError: The address is not this machine's own, and nobody asked for that, or there is no token.
        ResourceError: The name is not known, or the port is taken.
    """
    where = f"Server(host={host!r}, port={port!r})"
    if not isinstance(host, str) or not host:
        raise ArgumentError(f"{where}: expected a host's name or address; 127.0.0.1 is this machine alone")
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port < 2**16:
        raise ArgumentError(f"{where}: expected a port from 0 (a free one) to 65535")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ResourceError(f"{where}: there is no such address ({error})") from error
    remote = [info[4][0] for info in found if not ipaddress.ip_address(str(info[4][0]).partition("%")[0]).is_loopback]
    if remote and not allow_remote:
        raise ArgumentError(
            f"{where} is {remote[0]}, where others can come from outside: say allow_remote=True (--allow-remote) and "
            f"give a token, or use 127.0.0.1 and a tunnel, e.g. ssh -L"
        )
    if remote and not is_guarded:
        raise ArgumentError(
            f"{where} is {remote[0]}, where anybody can come: give a token, as make_token() makes them (marlvec serve "
            f"has it from MARLVEC_TOKEN or --token-file), or say allow_no_token=True (--no-token)"
        )
    family, kind, number, _, address = found[0]
    try:
        listener = socket.socket(family, kind, number)
    except OSError as error:
        raise ResourceError(f"{where}: {error.strerror or error}; has this machine no such addresses?") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # "::" is not 0.0.0.0, too
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ResourceError(
            f"{where}: cannot listen there ({error.strerror or error}); take another port, or 0 for a free one"
        ) from error
    listener.setblocking(False)
    return listener
