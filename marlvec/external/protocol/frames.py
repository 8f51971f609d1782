"""Message bodies as msgpack, restricted to the types that the protocol uses.

None, bools, ints of 64 bits, floats of 64 bits, UTF-8 texts, bytes, lists, and dicts whose keys are texts. No extension
types (so no timestamps), no key twice, nothing after the end. How many items there may be is counted while they are
built, and how many a list or dict says it has before: a short message cannot make a large object.
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
"""Items of all lists and dicts of one body."""
MAX_WIDTH = 1024
"""Items of one list or dict."""


def pack(body: Any) -> bytes:
    """Write a body, or any other tree of what we use."""
    packed: bytes = msgpack.packb(body)
    return packed


def unpack(data: bytes | memoryview, max_width: int = MAX_WIDTH) -> dict[str, Any]:
    """Read a body.

    Args:
        data: The whole of it.
        max_width: Items that one list or dict may say it has; room for so many is made before they have come, at each
            of 512 levels.

    Raises:
        ProtocolError: It is not msgpack, uses more than we use, or is no dict.
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
        raise ProtocolError(f"a body is a dict, this one is {type(body).__name__}")
    return body


def unpack_tree(data: bytes) -> Any:
    """Read any tree, however many items it has: for data from a trusted source.

    Raises:
        ProtocolError: It is not msgpack, or uses more than we use.
    """
    return _unpack(data)


def _unpack(data: bytes | memoryview, **limits: Any) -> Any:
    try:
        return msgpack.unpackb(data, strict_map_key=True, ext_hook=_no_extension, max_ext_len=0, **limits)
    except (ValueError, msgpack.exceptions.UnpackException) as error:  # UnicodeDecodeError is a ValueError, too
        raise ProtocolError(f"the body is not what it should be: {type(error).__name__}: {str(error)[:200]}") from None


def _no_extension(code: int, data: bytes) -> Any:
    raise ProtocolError(f"extension types are not used, got type {code} of {len(data)} bytes")


MAGIC = b"mv"
VERSION = 1
MAX_NUMBER = 2**53 - 1
_HEADER = struct.Struct(">2sBBIQQ")
HEADER_SIZE = _HEADER.size


class Frame(NamedTuple):
    """One message, its body still packed.

    Attributes:
        type: What it is.
        number: Its number; 0 where it has none.
        received: Number of the last numbered message that its sender has got.
        body: The rest.
    """

    type: int
    number: int
    received: int
    body: bytes | memoryview


def pack_frame(frame: Frame) -> bytes:
    """Put the header before the body."""
    return b"".join((_HEADER.pack(MAGIC, VERSION, frame.type, 0, frame.number, frame.received), frame.body))


def unpack_frame(data: bytes | bytearray) -> Frame:
    """Take the header off.

    Raises:
        ProtocolError: It is none, or of another version: code ``"protocol"`` or ``"version"``.
    """
    if len(data) < HEADER_SIZE:
        raise ProtocolError(f"a message has {HEADER_SIZE} bytes at least, this one has {len(data)}")
    magic, version, kind, flags, number, received = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise ProtocolError("a message begins with 'mv', this one does not: it is not marlvec's")
    if version != VERSION:
        raise ProtocolError(f"this side speaks version {VERSION}, the message is of version {version}", "version")
    if flags or number > MAX_NUMBER or received > MAX_NUMBER:
        raise ProtocolError(f"flags must be 0 and numbers below 2**53, got {flags}, {number}, {received}")
    return Frame(kind, number, received, memoryview(data)[HEADER_SIZE:])
