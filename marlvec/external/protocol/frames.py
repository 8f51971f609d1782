"""A message's 24-byte header, and its body: msgpack, restricted to the types that the protocol uses.

None, bools, 64-bit ints and floats, UTF-8 texts, bytes, lists, and dicts whose keys are texts. No extension types, no
duplicate key, no bytes after the end. Items are limited while they are built, and the declared length of a list or dict
before: a short message cannot make a large object.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

from marlvec.errors import ProtocolError
from marlvec.extras import needs_extra

with needs_extra("msgpack", "an external env over a socket", "pip install 'marlvec[external]'"):
    import msgpack

__all__ = [
    "MAX_ITEMS",
    "MAX_WIDTH",
    "pack",
    "unpack",
    "unpack_tree",
    "HEADER_SIZE",
    "MAX_NUMBER",
    "VERSION",
    "Frame",
    "pack_frame",
    "unpack_frame",
]

MAX_ITEMS = 65_536
"""Limit of items in all lists and dicts of one body."""
MAX_WIDTH = 1024
"""Limit of items in one list or dict."""


def pack(body: Any) -> bytes:
    """Pack a body."""
    packed: bytes = msgpack.packb(body)
    return packed


def unpack(data: bytes | memoryview, max_width: int = MAX_WIDTH) -> dict[str, Any]:
    """Unpack a body; `ProtocolError` unless it is a dict of the protocol's types.

    A list or dict may declare `max_width` items: memory for that many is allocated before they are read, at each of
    512 levels.
    """
    left = MAX_ITEMS

    def count(items: list[Any]) -> list[Any]:
        nonlocal left
        left -= len(items) + 1
        if left < 0:
            raise ProtocolError(f"a body may have {MAX_ITEMS} items at most")
        return items

    def mapping(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
        found = dict(count(pairs))
        if len(found) < len(pairs):
            raise ProtocolError("a key comes twice")
        if not all(type(key) is str for key in found):
            raise ProtocolError("keys must be texts")
        return found

    body = _unpack(data, object_pairs_hook=mapping, list_hook=count, max_array_len=max_width, max_map_len=max_width)
    if type(body) is not dict:
        raise ProtocolError(f"body: expected a dict, got {type(body).__name__}")
    return body


def unpack_tree(data: bytes) -> Any:
    """Unpack any tree, without a limit of items: for data from a trusted source."""
    return _unpack(data)


def _unpack(data: bytes | memoryview, **limits: Any) -> Any:
    try:
        return msgpack.unpackb(data, strict_map_key=True, ext_hook=_no_extension, max_ext_len=0, **limits)
    except (ValueError, msgpack.exceptions.UnpackException) as error:  # includes UnicodeDecodeError
        raise ProtocolError(f"cannot decode the message body: {type(error).__name__}: {str(error)[:200]}") from None


def _no_extension(code: int, data: bytes) -> Any:
    raise ProtocolError(f"expected no extension types, got type {code} of {len(data)} bytes")


MAGIC = b"mv"
VERSION = 1
MAX_NUMBER = 2**53 - 1
_HEADER = struct.Struct(">2sBBIQQ")
HEADER_SIZE = _HEADER.size


class Frame(NamedTuple):
    """One message with a packed body."""

    type: int  # number of the message type
    number: int  # 0: not numbered
    received: int  # number of the last numbered message that the sender has received
    body: bytes | memoryview


def pack_frame(frame: Frame) -> bytes:
    """Prepend the header to the body."""
    return b"".join((_HEADER.pack(MAGIC, VERSION, frame.type, 0, frame.number, frame.received), frame.body))


def unpack_frame(data: bytes | bytearray) -> Frame:
    """Split a message into header fields and body; `ProtocolError` has the code ``"protocol"`` or ``"version"``."""
    if len(data) < HEADER_SIZE:
        raise ProtocolError(f"a message: expected at least {HEADER_SIZE} bytes, got {len(data)}")
    magic, version, kind, flags, number, received = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise ProtocolError("a message: expected it to begin with 'mv'; this is not marlvec's protocol")
    if version != VERSION:
        raise ProtocolError(f"this side speaks version {VERSION}, the message is of version {version}", "version")
    if flags or number > MAX_NUMBER or received > MAX_NUMBER:
        raise ProtocolError(f"flags must be 0 and numbers below 2**53, got {flags}, {number}, {received}")
    return Frame(kind, number, received, memoryview(data)[HEADER_SIZE:])
