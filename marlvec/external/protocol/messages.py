"""The message types: who may send each, and its fields. All other messages are refused.

Of observations and actions only the agents' names are checked here; `protocol.values` reads them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping
from enum import IntEnum
from functools import partial
from typing import Any, Literal, NamedTuple

from marlvec.errors import ProtocolError
from marlvec.external.protocol.frames import MAX_NUMBER, MAX_WIDTH, Frame, pack, pack_frame, unpack, unpack_frame
from marlvec.external.protocol.values import read_array, short

__all__ = ["FORMS", "MAX_HANDSHAKE", "MAX_MESSAGE", "Message", "Type", "read_message", "write_message"]

MAX_HANDSHAKE = 4096
"""Byte limit of messages before the welcome, and of messages without observations."""

MAX_MESSAGE = 16 * 2**20
"""Byte limit of other messages; a server may set a lower one."""

MAX_TEXT = 4096
MAX_NAME = 256
_HANDSHAKE_WIDTH = 32

Side = Literal["client", "server"]
Kind = Callable[[Any, str], None]
"""Validates a field's value; raises `ProtocolError`."""


class Type(IntEnum):
    """Message type."""

    HELLO = 1
    CHALLENGE = 2
    AUTH = 3
    WELCOME = 4
    ERROR = 5
    PING = 6
    PONG = 7

    BEGIN = 16
    STEP = 17
    LOG = 18
    RETURNS = 19
    LEAVE = 20
    END = 21
    ABANDON = 22
    WEIGHTS = 23
    PART = 24
    BYE = 25

    OK = 32
    ACTIONS = 33
    OFFER = 34
    CHUNK = 35
    REFUSED = 36


def _bad(where: str, expected: str, got: Any) -> ProtocolError:
    return ProtocolError(f"{where}: expected {expected}, got {short(got)}")


def _flag(value: Any, where: str) -> None:
    if type(value) is not bool:
        raise _bad(where, "a bool", value)


def _count(value: Any, where: str) -> None:
    if type(value) is not int or not 0 <= value <= MAX_NUMBER:
        raise _bad(where, "a whole number below 2**53", value)


def _sized(kind: type[str | bytes], sizes: Container[int], expected: str) -> Kind:
    def check(value: Any, where: str) -> None:
        if type(value) is not kind or len(value) not in sizes:
            raise _bad(where, expected, value)

    return check


_text = _sized(str, range(MAX_TEXT + 1), f"a text of at most {MAX_TEXT} characters")
_name = _sized(str, range(1, MAX_NAME + 1), f"a name of 1 to {MAX_NAME} characters")
_data = _sized(bytes, range(2**31), "bytes")


def _bytes(*sizes: int) -> Kind:
    return _sized(bytes, sizes, f"{' or '.join(map(str, sizes))} bytes")


def _list(item: Kind, most: int = MAX_WIDTH) -> Kind:
    def check(value: Any, where: str) -> None:
        if type(value) is not list or len(value) > most:
            raise _bad(where, f"a list of at most {most}", value)
        for entry in value:
            item(entry, where)

    return check


def _dict(item: Kind, most: int = MAX_WIDTH) -> Kind:
    def check(value: Any, where: str) -> None:
        if type(value) is not dict or len(value) > most:
            raise _bad(where, f"a dict of at most {most}", value)
        for key, entry in value.items():
            _name(key, where)
            item(entry, where)

    return check


def _number(value: Any, where: str) -> None:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise _bad(where, "a finite number", value)


def _scalar(value: Any, where: str) -> None:
    if type(value) is str:
        _text(value, where)
    elif type(value) is list:
        read_array(value, where)
    elif value is not None and type(value) not in (bool, int, float):
        raise _bad(where, "None, a bool, a number, a text or an array", value)


def _anything(value: Any, where: str) -> None:
    """Accept any value: it is read later, against a space."""


_values = _dict(_anything)
_numbers = _dict(_number)
_names = _list(_name)
_infos = _dict(_dict(_scalar, most=64))
_outcome: dict[str, Kind] = {"rewards": _numbers, "infos": _infos}


class MessageForm(NamedTuple):
    """Fields and properties of one message type."""

    sender: Side | None  # None: both sides
    is_numbered: bool  # then also sent again after a reconnection, and processed once
    fields: Mapping[str, Kind]
    optional: Mapping[str, Kind]
    is_large: bool  # may be larger than `MAX_HANDSHAKE`


def _form(
    sender: Side | None,
    *,
    numbered: bool = False,
    optional: Mapping[str, Kind] = {},
    large: bool = False,
    **fields: Kind,
) -> MessageForm:
    return MessageForm(sender, numbered, fields, optional, large)


_request = partial(_form, "client", numbered=True)
_about = partial(_request, episode=_count)
_reply = partial(_form, "server", numbered=True, re=_count)
_names_16 = _list(_name, 16)

FORMS: dict[Type, MessageForm] = {
    Type.HELLO: _form("client", versions=_list(_count, 16), features=_names_16, name=_text, nonce=_bytes(32)),
    Type.CHALLENGE: _form(
        "server", version=_count, features=_names_16, server=_bytes(16), nonce=_bytes(32), wants_token=_flag
    ),
    Type.AUTH: _form("client", proof=_bytes(0, 32), session=_bytes(0, 32)),
    Type.WELCOME: _form(
        "server",
        proof=_bytes(0, 32),
        session=_bytes(32),
        resumed=_flag,
        agents=_list(_name),
        groups=_list(_anything),
        limits=_dict(_number),
        weights=_count,
        large=True,
    ),
    Type.ERROR: _form("server", code=_name, text=_text),
    Type.PING: _form(None),
    Type.PONG: _form(None),
    Type.BEGIN: _about(training=_flag, optional={"slot": _count}),
    Type.STEP: _about(obs=_values, optional={**_outcome, "masks": _values}, large=True),
    Type.LOG: _about(
        obs=_values, actions=_values, optional={**_outcome, "masks": _values, "version": _count}, large=True
    ),
    Type.RETURNS: _about(rewards=_numbers, optional={"infos": _infos}, large=True),
    Type.LEAVE: _about(obs=_values, terminated=_names, truncated=_names, optional=_outcome, large=True),
    Type.END: _about(obs=_values, truncated=_flag, optional=_outcome, large=True),
    Type.ABANDON: _about(reason=_text),
    Type.WEIGHTS: _request(have=_count),
    Type.PART: _request(version=_count, part=_count),
    Type.BYE: _request(),
    Type.OK: _reply(),
    Type.ACTIONS: _reply(actions=_values, large=True),
    Type.OFFER: _reply(version=_count, size=_count, parts=_count, sha256=_bytes(0, 32)),
    Type.CHUNK: _reply(data=_data, large=True),
    Type.REFUSED: _reply(code=_name, text=_text, large=True),
}
"""Fields of each message type."""


class Message(NamedTuple):
    """A validated message; values of spaces are not decoded yet."""

    type: Type
    fields: dict[str, Any]
    number: int = 0  # 0: not numbered
    received: int = 0  # number of the last numbered message that the sender has received


def write_message(message: Message) -> bytes:
    """Pack a message; its fields are not validated again."""
    return pack_frame(Frame(message.type, message.number, message.received, pack(message.fields)))


def read_message(data: bytes | bytearray, sender: Side) -> Message:
    """Unpack and validate a whole WebSocket message, whose size was checked before it was read."""
    frame = unpack_frame(data)
    try:
        kind = Type(frame.type)
    except ValueError:
        raise ProtocolError(f"no message of type {frame.type} exists") from None
    form = FORMS[kind]
    name = kind.name.lower()
    if form.sender not in (None, sender):
        raise ProtocolError(f"a {sender} does not send {name!r}")
    if form.is_numbered != (frame.number > 0):
        raise ProtocolError(f"{name!r} {'is' if form.is_numbered else 'is not'} numbered, got {frame.number}")
    if not form.is_large and len(data) > MAX_HANDSHAKE:
        raise ProtocolError(f"{name!r} may have {MAX_HANDSHAKE} bytes, this one has {len(data)}", "limit")
    fields = unpack(frame.body, MAX_WIDTH if form.is_large else _HANDSHAKE_WIDTH)
    missing = [key for key in form.fields if key not in fields]
    unknown = [key for key in fields if key not in form.fields and key not in form.optional]
    if missing or unknown:
        raise ProtocolError(f"{name!r}: missing fields: {missing}; unknown fields: {[key[:60] for key in unknown[:8]]}")
    for key, value in fields.items():
        kind_of = form.fields.get(key) or form.optional[key]
        kind_of(value, f"{name} {key}")
    return Message(kind, fields, frame.number, frame.received)
