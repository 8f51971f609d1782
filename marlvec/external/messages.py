"""The protocol's messages: frames, values, spaces and weights as bytes, and back; docs/protocol.md has their form.

Bodies are msgpack, restricted to the types that the protocol uses. `MessageStream` numbers messages after the
handshake; each is replied to once, also after reconnections.
"""

from __future__ import annotations

import math
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Container, Mapping
from enum import Enum, IntEnum
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from marlvec.errors import ContractError, ProtocolError, RefusedError, SerialisationError, UnsupportedSpaceError
from marlvec.extras import needs_extra
from marlvec.spaces import Leaf, SpaceTree

with needs_extra("msgpack", "an external env over a socket", "pip install 'marlvec[external]'"):
    import msgpack


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


MAX_NDIM = 8
MAX_SIDE = 2**31 - 1
DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(name).newbyteorder("<")
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64"),
    )
}
"""Supported array dtypes by name."""


def write_array(array: NDArray[Any]) -> list[Any]:
    """Pack an array; its dtype must be one of `DTYPES`."""
    name = array.dtype.name
    return [name, list(array.shape), np.ascontiguousarray(array, DTYPES[name]).tobytes()]


def read_array(data: Any, where: str) -> NDArray[Any]:
    """Unpack an array: a read-only view of the received bytes. `ProtocolError`, with `where`, if malformed."""
    if type(data) is not list or len(data) != 3:
        raise ProtocolError(f"{where}: expected [dtype, shape, bytes], got {short(data)}")
    name, lengths, raw = data
    if type(name) is not str or name not in DTYPES:
        raise ProtocolError(f"{where}: expected a dtype of {', '.join(DTYPES)}, got {short(name)}")
    shape, dtype = read_shape(lengths, where), DTYPES[name]
    size = math.prod(shape) * dtype.itemsize  # Python ints do not overflow
    if type(raw) is not bytes or len(raw) != size:
        got = f"{len(raw)} bytes" if type(raw) is bytes else short(raw)
        raise ProtocolError(f"{where}: expected {size} bytes for {name} of {shape}, got {got}")
    if name == "bool" and raw.translate(None, b"\0\1"):
        raise ProtocolError(f"{where}: expected bools of bytes 0 or 1")
    array: NDArray[Any] = np.frombuffer(raw, dtype)
    if len(shape) != 1:
        array = array.reshape(shape)
    return array if sys.byteorder == "little" else array.astype(dtype.newbyteorder("="))


def read_shape(data: Any, where: str) -> tuple[int, ...]:
    """Unpack the shape of an array or space. `ProtocolError`, with `where`, unless it is a list of a few lengths."""
    if type(data) is not list or len(data) > MAX_NDIM:
        raise ProtocolError(f"{where}: expected a shape, a list of at most {MAX_NDIM} lengths, got {short(data)}")
    for length in data:
        if type(length) is not int or not 0 <= length <= MAX_SIDE:
            raise ProtocolError(f"{where}: expected a shape of lengths 0 to {MAX_SIDE}, got the length {short(length)}")
    return tuple(data)


def short(value: Any) -> str:
    """Shorten a value's repr for an error message."""
    if isinstance(value, str):
        return repr(value[:60])[:60]  # the repr of a long text would be slow
    return repr(value)[:60] if isinstance(value, (int, float)) else type(value).__name__


class ValueReader:
    """Reads and writes values of one space whose leaves are arrays; `UnsupportedSpaceError` names another leaf."""

    def __init__(self, space: spaces.Space[Any]) -> None:
        self.space = space
        self._tree = SpaceTree(space)
        for leaf in self._tree.leaves:
            if leaf.is_object or leaf.dtype.name not in DTYPES or len(leaf.shape) > MAX_NDIM:
                raise UnsupportedSpaceError(
                    f"{leaf} of {leaf.space} does not go over a socket: expected Box, Discrete, MultiDiscrete or "
                    f"MultiBinary of {', '.join(DTYPES)}, in Dicts and Tuples"
                )
        _check_keys(space)
        self._leaves = [_LeafReader(leaf) for leaf in self._tree.leaves]
        self._bare = self._leaves[0] if self._tree.is_leaf else None

    def read(self, data: Any, where: str) -> Any:
        """Unpack a value; bounds are not checked.

        `ProtocolError`: an array is malformed. `ContractError`: not the space's structure, shapes and dtypes.
        """
        if self._bare is not None:
            return self._bare.read(data, where)
        try:
            parts = self._tree.flatten(data)
        except ContractError as error:
            raise ContractError(f"{where}: {error}") from None
        return self._tree.unflatten([leaf.read(part, where) for leaf, part in zip(self._leaves, parts, strict=True)])

    def write(self, value: Any) -> Any:
        """Pack a value; `ContractError` unless it has the space's structure, shapes and dtypes."""
        if self._bare is not None:
            return self._bare.write(value)
        parts = zip(self._leaves, self._tree.flatten(value), strict=True)
        return self._tree.unflatten([leaf.write(part) for leaf, part in parts])


def _check_keys(space: spaces.Space[Any]) -> None:
    if isinstance(space, spaces.Dict):
        for key, sub in space.spaces.items():
            if type(key) is not str:
                raise UnsupportedSpaceError(f"a Dict over a socket: expected keys that are texts, got {key!r}")
            _check_keys(sub)
    elif isinstance(space, spaces.Tuple):
        for sub in space.spaces:
            _check_keys(sub)


class _LeafReader:
    __slots__ = ("_bounds", "_dtype", "_is_box", "_kinds", "_leaf", "_name", "_plain", "_shape", "_shape_list")

    def __init__(self, leaf: Leaf) -> None:
        self._leaf, self._dtype, self._shape = leaf, leaf.dtype, leaf.shape
        self._name, self._shape_list = leaf.dtype.name, list(leaf.shape)
        self._plain = leaf.dtype if sys.byteorder == "little" and leaf.dtype.isnative else None
        self._is_box = isinstance(leaf.space, spaces.Box)
        self._kinds = {"b": (bool,), "f": (int, float)}.get(leaf.dtype.kind, (int,))
        bounds = np.iinfo(leaf.dtype) if leaf.dtype.kind in "iu" else None
        self._bounds = None if bounds is None else (int(bounds.min), int(bounds.max))

    def read(self, data: Any, where: str) -> Any:
        if self._shape == ():
            return self._read_number(data, where)
        if type(data) is not list:
            raise ContractError(
                f"{self._at(where)}: expected an array, {self._name} of {self._shape}, got {type(data).__name__}"
            )
        array = read_array(data, self._at(where) if self._leaf.path else where)
        if array.shape != self._shape or array.dtype != self._dtype:
            raise ContractError(
                f"{self._at(where)}: expected {self._name} of {self._shape}, got {array.dtype.name} of {array.shape}"
            )
        return array

    def _read_number(self, data: Any, where: str) -> Any:
        if type(data) not in self._kinds:
            raise ContractError(f"{self._at(where)}: expected a number of {self._name}, got {type(data).__name__}")
        if self._bounds is not None:
            if not self._bounds[0] <= data <= self._bounds[1]:
                raise ContractError(f"{self._at(where)}: expected a number of {self._name}, got {data}")
            number = self._dtype.type(data)
            return np.array(number) if self._is_box else number  # like the space's samples
        with np.errstate(over="ignore", invalid="ignore"):  # out of range becomes infinite; bounds are checked later
            return np.array(data, self._dtype)

    def write(self, value: Any) -> Any:
        if self._shape and value.__class__ is np.ndarray and value.shape == self._shape and value.dtype is self._plain:
            return [self._name, self._shape_list, value.tobytes()]
        array = np.asarray(value)
        if array.shape != self._shape or not np.can_cast(array.dtype, self._dtype, "same_kind"):
            raise ContractError(
                f"{self._leaf}: expected {self._name} of {self._shape}, got {array.dtype} of {array.shape}"
            )
        if self._shape == ():
            return array.astype(self._dtype).item()
        return write_array(array.astype(self._dtype, copy=False))

    def _at(self, where: str) -> str:
        return f"{where}/{self._leaf.path}" if self._leaf.path else where


def write_mask(mask: Any) -> list[Any]:
    """Pack an action mask, (k,)."""
    return write_array(np.asarray(mask, np.bool_))


def read_mask(data: Any, where: str) -> NDArray[np.bool_]:
    """Unpack an action mask, (k,) bool."""
    mask = read_array(data, where)
    if mask.dtype != np.bool_ or mask.ndim != 1:
        raise ProtocolError(f"{where}: expected bools in one row, got {mask.dtype.name} of {mask.shape}")
    return mask


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


class MessageStream:
    """One side's message numbers in one session, and messages that may have to be sent again. Outlives connections.

    At most `max_kept` bytes of unconfirmed messages are kept, counted with `each` more for each message.
    """

    def __init__(self, max_kept: int, each: int = 0) -> None:
        self._max_kept, self._each = max_kept, each
        self._kept: OrderedDict[int, bytes] = OrderedDict()
        self._kept_bytes = 0
        self._sent = 0
        self.received = 0  # number of the last received message
        self.duplicates = 0  # messages that came again and were dropped

    @property
    def sent(self) -> int:
        """Number of the last message that was made."""
        return self._sent

    @property
    def kept_bytes(self) -> int:
        """Bytes of kept messages, with the addition for each."""
        return self._kept_bytes

    def take(self, message: Message) -> bool:
        """Register a received message; return False for a duplicate, which must be ignored.

        `ProtocolError`: an earlier message is missing, or it confirms messages that were never sent.
        """
        self.acknowledge(message.received)
        if not message.number:
            return True
        if message.number <= self.received:
            self.duplicates += 1
            return False
        if message.number > self.received + 1:
            raise ProtocolError(f"message {message.number} came after {self.received}; some are missing")
        self.received = message.number
        return True

    def acknowledge(self, number: int) -> None:
        """Discard kept messages up to this number: the other side has received them."""
        if number > self._sent:
            raise ProtocolError(f"message {number} cannot have been received: the last one sent was {self._sent}")
        while self._kept and next(iter(self._kept)) <= number:
            _, data = self._kept.popitem(last=False)
            self._kept_bytes -= len(data) + self._each

    def make(self, kind: Type, fields: dict[str, Any], max_bytes: float = math.inf) -> bytes:
        """Make the bytes of the next message, and keep them if it is numbered.

        `ProtocolError`, code ``"limit"``, and no message: larger than `max_bytes`, or too many bytes are unconfirmed.
        """
        if not FORMS[kind].is_numbered:
            return write_message(Message(kind, fields, 0, self.received))
        data = write_message(Message(kind, fields, self._sent + 1, self.received))
        if len(data) > max_bytes:
            raise ProtocolError(f"a message of {len(data)} bytes; the other side takes {max_bytes} at most", "limit")
        if self._kept and self._kept_bytes + len(data) + self._each > self._max_kept:
            raise ProtocolError(
                f"more than {self._max_kept} bytes were sent, and the other side confirms none of them", "limit"
            )
        self._sent += 1
        self._kept[self._sent] = data
        self._kept_bytes += len(data) + self._each
        return data

    def missing(self, received: int) -> list[bytes]:
        """Return the messages to send again, in order, given the last number that the other side has received."""
        self.acknowledge(received)
        return list(self._kept.values())


class EpisodeState(Enum):
    """State of an episode, as seen from the protocol."""

    BEGINNING = "waits for a free slot"
    RUNNING = "runs"
    ASKED = "waits for actions"


_OF_EPISODES = frozenset({Type.STEP, Type.LOG, Type.RETURNS, Type.LEAVE, Type.END, Type.ABANDON})
_ALLOWED = {
    EpisodeState.BEGINNING: frozenset({Type.ABANDON}),
    EpisodeState.RUNNING: _OF_EPISODES,
    EpisodeState.ASKED: frozenset({Type.RETURNS, Type.END, Type.ABANDON}),
}


def check_order(message: Message, state: EpisodeState | None) -> None:
    """Check that a message about an episode may come while the episode is in this state; None: it is not running.

    `RefusedError`: code ``"order"``: not in this state; ``"episode"``: no such episode is running.
    """
    if message.type in _OF_EPISODES:
        episode = message.fields["episode"]
        if state is None:
            raise RefusedError(f"there is no episode {episode}, or it is over", "episode")
        if message.type not in _ALLOWED[state]:
            name = message.type.name.lower()
            raise RefusedError(f"episode {episode} {state.value}: {name!r} cannot come now", "order")


MAX_SPACE_DEPTH = 32


def write_space(space: spaces.Space[Any]) -> dict[str, Any]:
    """Convert a space to plain data; `UnsupportedSpaceError` unless it is one of the six kinds."""
    match space:
        case spaces.Box():
            low, high = _write_bound(space.low), _write_bound(space.high)
            return {"space": "box", "dtype": space.dtype.name, "shape": list(space.shape), "low": low, "high": high}
        case spaces.Discrete():
            assert space.dtype is not None  # set in every Discrete
            name = np.dtype(space.dtype).name
            return {"space": "discrete", "dtype": name, "n": int(space.n), "start": int(space.start)}
        case spaces.MultiDiscrete():
            return {"space": "multi_discrete", "nvec": write_array(space.nvec), "start": write_array(space.start)}
        case spaces.MultiBinary():
            return {
                "space": "multi_binary",
                "n": space.n if isinstance(space.n, int) else [int(n) for n in space.shape],
            }
        case spaces.Dict():
            return {"space": "dict", "items": [[key, write_space(sub)] for key, sub in space.spaces.items()]}
        case spaces.Tuple():
            return {"space": "tuple", "items": [write_space(sub) for sub in space.spaces]}
    raise UnsupportedSpaceError(
        f"{space} does not go over a socket: expected Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple"
    )


def read_space(data: Any, depth: int = 0) -> spaces.Space[Any]:
    """Rebuild a space; `ProtocolError`: not a space, nested too deep, or larger than a message may be."""
    if type(data) is not dict or depth > MAX_SPACE_DEPTH:
        raise ProtocolError(f"expected a space, at most {MAX_SPACE_DEPTH} deep, got {type(data).__name__} at {depth}")
    try:
        kind, parts = data["space"], {key: part for key, part in data.items() if key != "space"}
        if kind == "dict":
            (items,) = parts.values()
            pairs = [(_key(key), read_space(sub, depth + 1)) for key, sub in items]
            return spaces.Dict(OrderedDict(pairs))
        if kind == "tuple":
            (items,) = parts.values()
            return spaces.Tuple([read_space(sub, depth + 1) for sub in items])
        return _KINDS[kind](**parts)
    except (LookupError, TypeError, ValueError, AssertionError, ArithmeticError) as error:
        raise ProtocolError(f"expected a space: {type(error).__name__}: {str(error)[:200]}") from None


def _key(key: Any) -> str:
    if type(key) is not str:
        raise TypeError(f"expected a Dict key that is a text, got {type(key).__name__}")
    return key


def _write_bound(bound: NDArray[Any]) -> Any:
    if bound.size and (bound == bound.flat[0]).all():
        return bound.flat[0].item()
    return write_array(bound)


def _bound(data: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    if type(data) in {"b": (bool,), "f": (int, float)}.get(dtype.kind, (int,)):
        with np.errstate(over="ignore", invalid="ignore"):  # values out of range become infinite
            return np.full(shape, data, dtype)
    array = read_array(data, "a bound")
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(f"expected a bound of {dtype} and {shape}, got {array.dtype} and {array.shape}")
    return array


def _shape(data: Any) -> tuple[int, ...]:
    shape = read_shape(data, "a space")
    if math.prod(shape) > MAX_MESSAGE:
        raise ValueError(f"{math.prod(shape)} numbers do not fit into a message")
    return shape


def _box(dtype: str, shape: Any, low: Any, high: Any) -> spaces.Space[Any]:
    sides, kind = _shape(shape), DTYPES[dtype].newbyteorder("=")
    return spaces.Box(_bound(low, sides, kind), _bound(high, sides, kind), sides, kind.type)


def _discrete(dtype: str, n: int, start: int) -> spaces.Space[Any]:
    if type(n) is not int or type(start) is not int:
        raise TypeError("expected n and start to be whole numbers")
    kind = DTYPES[dtype].newbyteorder("=")
    bounds = np.iinfo(kind)
    if n < 1 or not bounds.min <= start <= bounds.max - (n - 1):
        raise ValueError(f"expected n from 1, and n numbers from start on in {dtype}, got n={n}, start={start}")
    if kind == np.int64:
        return spaces.Discrete(n, start=start)  # older versions of Gymnasium have no dtype=
    return spaces.Discrete(n, start=start, dtype=kind.type)


def _multi_discrete(nvec: Any, start: Any) -> spaces.Space[Any]:
    sizes, starts = read_array(nvec, "nvec"), read_array(start, "start")
    if starts.dtype != sizes.dtype or starts.shape != sizes.shape:
        raise ValueError(
            f"expected start like nvec, {sizes.dtype} of {sizes.shape}, got {starts.dtype} of {starts.shape}"
        )
    if (sizes < 1).any() or (starts > np.iinfo(sizes.dtype).max - (sizes - 1)).any():
        raise ValueError(f"expected nvec from 1, and numbers from start on in {sizes.dtype}")
    return spaces.MultiDiscrete(sizes, sizes.dtype.type, start=starts)


def _multi_binary(n: Any) -> spaces.Space[Any]:
    return spaces.MultiBinary(_shape([n])[0] if type(n) is int else list(_shape(n)))


_KINDS: dict[str, Callable[..., spaces.Space[Any]]] = {
    "box": _box,
    "discrete": _discrete,
    "multi_discrete": _multi_discrete,
    "multi_binary": _multi_binary,
}


MAX_WEIGHTS_DEPTH = 64
MAX_DIGITS = 4000  # int() refuses more than 4300
_WORD = 2**63


def pack_plain(value: Any, where: str) -> bytes:
    """Pack a tree; `SerialisationError` names a value of another type by its path from `where`."""
    return pack(_write(value, where, 0))


def unpack_plain(data: bytes) -> Any:
    """Unpack a tree; arrays are writable copies. `ProtocolError` if malformed."""
    try:
        return _read(unpack_tree(data), 0)
    except (ValueError, TypeError, LookupError, ArithmeticError) as error:
        raise ProtocolError(f"malformed weights: {type(error).__name__}: {str(error)[:200]}") from None


def _write(value: Any, where: str, depth: int) -> Any:
    kind = type(value)
    if depth > MAX_WEIGHTS_DEPTH:
        raise SerialisationError(f"{where} is nested more than {MAX_WEIGHTS_DEPTH} deep")
    if value is None or kind in (bool, float, str, bytes):
        return value
    if kind is int:
        return value if -_WORD <= value < _WORD else {"$int": str(value)}
    if kind is list:
        return [_write(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    if kind is tuple:
        return {"$tuple": [_write(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]}
    if isinstance(value, dict):
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _write(item, f"{where}[{key!r}]", depth + 1) for key, item in value.items()}
        return {
            "$items": [
                [_write(key, where, depth + 1), _write(item, f"{where}[{key!r}]", depth + 1)]
                for key, item in value.items()
            ]
        }
    if kind is np.ndarray and value.dtype.name in DTYPES:
        return {"$array": write_array(value)}
    if isinstance(value, np.generic) and value.dtype.name in DTYPES:
        return {"$scalar": [value.dtype.name, value.item()]}
    raise SerialisationError(
        f"{where} does not go over a socket: expected numbers, texts, bytes, None, bools, numeric arrays, and lists, "
        f"tuples and dicts of these, got {type(value).__name__}"
    )


def _read(data: Any, depth: int) -> Any:
    if depth > MAX_WEIGHTS_DEPTH:
        raise ProtocolError(f"weights are nested more than {MAX_WEIGHTS_DEPTH} deep")
    if isinstance(data, list):
        return [_read(item, depth + 1) for item in data]
    if not isinstance(data, dict):
        return data
    marks = [key for key in data if not isinstance(key, str) or key.startswith("$")]
    if not marks:
        return {key: _read(item, depth + 1) for key, item in data.items()}
    (mark,) = data
    inner = data[mark]
    match mark:
        case "$array":
            return read_array(inner, "an array of the weights").copy()
        case "$tuple":
            return tuple(_read(item, depth + 1) for item in inner)
        case "$scalar":
            name, number = inner
            if type(number) not in (bool, int, float):
                raise TypeError(f"expected a scalar that is a number, got {type(number).__name__}")
            return DTYPES[name].newbyteorder("=").type(number)
        case "$int":
            if type(inner) is not str or len(inner) > MAX_DIGITS:
                raise ValueError(f"expected an int of at most {MAX_DIGITS} digits")
            return int(inner)
        case "$items":
            return {_read(key, depth + 1): _read(item, depth + 1) for key, item in inner}
    raise ProtocolError(f"expected a key such as $array, got {str(mark)[:60]!r}")
