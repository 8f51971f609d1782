"""The first 24 bytes of every message.

    offset  size
    0       2     "mv"
    2       1     version of the protocol, 1
    3       1     type, see `marlvec.external.wire.schema.Type`
    4       4     flags, 0
    8       8     number of this message, 0 for those without one
    16      8     number of the last numbered message that came the other way

Big-endian, as msgpack is. Numbers stay below 2**53, which JavaScript can count to. A message is one binary WebSocket
message: that says where it ends and how long it is, before anything is allocated, so there is no length here; and
there is no checksum, which TCP has, and which keeps nobody out.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from marlvec.errors import ProtocolError

__all__ = ["HEADER_SIZE", "MAX_NUMBER", "VERSION", "Frame", "pack_frame", "unpack_frame"]

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
