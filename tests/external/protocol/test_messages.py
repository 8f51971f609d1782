"""Headers, bodies and fields: what is read is what was written, and nothing else is read."""

from __future__ import annotations

import importlib
import struct
import sys
from typing import Any

import msgpack
import pytest

from marlvec.errors import MissingExtraError, ProtocolError
from marlvec.external import messages as frames
from marlvec.external.messages import (
    FORMS,
    HEADER_SIZE,
    MAX_HANDSHAKE,
    MAX_ITEMS,
    MAX_NUMBER,
    MAX_WIDTH,
    Frame,
    Message,
    Type,
    pack,
    pack_frame,
    read_message,
    unpack,
    unpack_frame,
    write_message,
)

ARRAY = ["float32", [2], b"\0" * 8]
SOUND: dict[Type, dict[str, Any]] = {
    Type.HELLO: {"versions": [1, 7], "features": ["resume"], "name": "a client", "nonce": b"n" * 32},
    Type.CHALLENGE: {"version": 1, "features": [], "server": b"s" * 16, "nonce": b"n" * 32, "wants_token": True},
    Type.AUTH: {"proof": b"p" * 32, "session": b""},
    Type.WELCOME: {
        "proof": b"",
        "session": b"s" * 32,
        "resumed": False,
        "agents": ["agent_0"],
        "groups": [{"agents": ["agent_0"]}],
        "limits": {"window": 4, "idle": 0.5},
        "weights": 0,
    },
    Type.ERROR: {"code": "full", "text": "no"},
    Type.PING: {},
    Type.PONG: {},
    Type.BEGIN: {"episode": 1, "training": True},
    Type.STEP: {
        "episode": 1,
        "obs": {"agent_0": ARRAY},
        "rewards": {"agent_0": 1.5, "agent_1": -2},
        "infos": {"agent_0": {"a": None, "b": True, "c": 1, "d": 0.5, "e": "text", "f": ["int8", [1], b"x"]}},
        "masks": {"agent_0": ["bool", [2], b"\0\1"]},
    },
    Type.LOG: {"episode": 1, "obs": {"agent_0": ARRAY}, "actions": {"agent_0": 1}, "version": 3},
    Type.RETURNS: {"episode": 1, "rewards": {"agent_0": 0}},
    Type.LEAVE: {"episode": 1, "obs": {}, "terminated": ["agent_0"], "truncated": []},
    Type.END: {"episode": 1, "obs": {}, "truncated": True, "rewards": {}},
    Type.ABANDON: {"episode": 1, "reason": ""},
    Type.WEIGHTS: {"have": 0},
    Type.PART: {"version": 1, "part": 0},
    Type.BYE: {},
    Type.OK: {"re": 1},
    Type.ACTIONS: {"re": 1, "actions": {"agent_0": 2}},
    Type.OFFER: {"re": 1, "version": 1, "size": 0, "parts": 0, "sha256": b""},
    Type.CHUNK: {"re": 1, "data": b"data"},
    Type.REFUSED: {"re": 1, "code": "value", "text": "no"},
}


def message(kind: Type, **changed: Any) -> bytes:
    """A sound message of this type, but for what is said; None takes a field out."""
    fields = {key: value for key, value in {**SOUND[kind], **changed}.items() if value is not None}
    return write_message(Message(kind, fields, 5 if FORMS[kind].is_numbered else 0, 3))


@pytest.mark.parametrize("kind", Type)
def test_messages_come_back_as_they_went(kind: Type) -> None:
    sender = FORMS[kind].sender or "client"
    read = read_message(message(kind), sender)
    assert read == Message(kind, SOUND[kind], 5 if FORMS[kind].is_numbered else 0, 3)
    if FORMS[kind].sender is not None:
        with pytest.raises(ProtocolError, match="does not send"):
            read_message(message(kind), "server" if sender == "client" else "client")


def test_the_header_is_as_the_page_says() -> None:
    data = pack_frame(Frame(17, 2**33 + 5, 9, b"body"))
    assert data == bytes.fromhex("6d76 01 11 00000000 0000000200000005 0000000000000009") + b"body"
    assert unpack_frame(data) == Frame(17, 2**33 + 5, 9, b"body")


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "expected at least 24 bytes"),
        (b"mv\1\6" + b"\0" * 19, "expected at least 24 bytes, got 23"),
        (b"vm\1\6" + b"\0" * 20, "not marlvec's"),
        (b"mv\1\6" + struct.pack(">IQQ", 1, 0, 0), "flags must be 0"),
        (b"mv\1\6" + struct.pack(">IQQ", 0, MAX_NUMBER + 1, 0), r"below 2\*\*53"),
        (b"mv\1\6" + struct.pack(">IQQ", 0, 0, 2**64 - 1), r"below 2\*\*53"),
    ],
)
def test_what_is_no_header(data: bytes, what: str) -> None:
    with pytest.raises(ProtocolError, match=what) as caught:
        unpack_frame(data)
    assert caught.value.code == "protocol"


@pytest.mark.fault("G12")
@pytest.mark.parametrize("version", [0, 2, 231])
def test_another_version_is_told_with_both(version: int) -> None:
    with pytest.raises(ProtocolError, match=f"speaks version 1, the message is of version {version}") as caught:
        read_message(b"mv" + bytes([version]) + message(Type.HELLO)[3:], "client")
    assert caught.value.code == "version"


NESTED = b"\x81\xa1a" * 1000
BODIES: dict[str, bytes] = {
    "nothing": b"",
    "a list": msgpack.packb([]),
    "an extension": msgpack.packb({"a": msgpack.ExtType(5, b"data")}),
    "an extension without data": b"\x81\xa1a\xc7\x00\x05",
    "a timestamp": msgpack.packb({"a": msgpack.Timestamp(1)}),
    "a key twice": b"\x82\xa1a\x01\xa1a\x02",
    "a key that is bytes": b"\x81\xc4\x01a\x01",
    "a key that is a number": b"\x81\x01\x01",
    "a key that is a list": b"\x81\x91\x01\x01",
    "no UTF-8": b"\x81\xa1a\xa2\xff\xfe",
    "bytes after the end": msgpack.packb({}) + b"\0",
    "half": msgpack.packb({"abc": 1})[:-1],
    "a byte that is never used": b"\xc1",
    "4e9 items in a list": b"\x81\xa1a\xdd\xff\xff\xff\xff",
    "4e9 items in a dict": b"\xdf\xff\xff\xff\xff",
    "4e9 bytes": b"\x81\xa1a\xc6\xff\xff\xff\xff",
    "4e9 characters": b"\x81\xa1a\xdb\xff\xff\xff\xff",
    "4e9 bytes of an extension": b"\x81\xa1a\xc9\xff\xff\xff\xff\x05",
    "1000 dicts in each other": NESTED,
    "1000 lists in each other": b"\x81\xa1a" + b"\x91" * 1000,
    "a wide list": msgpack.packb({"a": [0] * (MAX_WIDTH + 1)}),
    "many items": msgpack.packb({"a": [[0] * 1000] * (MAX_ITEMS // 1000 + 1)}),
    "many dicts": msgpack.packb({"a": [[{}] * 1000] * (MAX_ITEMS // 1000 + 1)}),
}


@pytest.mark.fault("G6")
@pytest.mark.parametrize("name", BODIES)
def test_what_is_no_body(name: str) -> None:
    with pytest.raises(ProtocolError):
        unpack(BODIES[name])


def test_a_body_may_be_as_large_as_is_said() -> None:
    body = {"a": [[0] * 1000] * (MAX_ITEMS // 1000 - 1)}
    assert unpack(pack(body)) == body


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        (Type.BEGIN, {"episode": None}),
        (Type.BEGIN, {"more": 1}),
        (Type.BEGIN, {"training": 1}),
        (Type.BEGIN, {"episode": True}),
        (Type.BEGIN, {"episode": -1}),
        (Type.BEGIN, {"episode": 2**53}),
        (Type.BEGIN, {"episode": 1.0}),
        (Type.STEP, {"obs": []}),
        (Type.STEP, {"obs": {"": 1}}),
        (Type.STEP, {"obs": {"a" * 257: 1}}),
        (Type.STEP, {"rewards": {"agent_0": float("nan")}}),
        (Type.STEP, {"rewards": {"agent_0": float("-inf")}}),
        (Type.STEP, {"rewards": {"agent_0": True}}),
        (Type.STEP, {"rewards": {"agent_0": "1"}}),
        (Type.STEP, {"infos": {"agent_0": 1}}),
        (Type.STEP, {"infos": {"agent_0": {"a": [1]}}}),
        (Type.STEP, {"infos": {"agent_0": {"a": b"bytes"}}}),
        (Type.STEP, {"infos": {"agent_0": {"a": ["object", [1], b"bytes"]}}}),
        (Type.STEP, {"infos": {"agent_0": {"a": "x" * 4097}}}),
        (Type.STEP, {"infos": {"agent_0": {str(i): 1 for i in range(65)}}}),
        (Type.LEAVE, {"terminated": "agent_0"}),
        (Type.LEAVE, {"terminated": [1]}),
        (Type.HELLO, {"versions": list(range(17))}),
        (Type.HELLO, {"versions": ["1"]}),
        (Type.HELLO, {"nonce": b"n" * 31}),
        (Type.HELLO, {"nonce": "n" * 32}),
        (Type.HELLO, {"name": "x" * 5000}),
        (Type.AUTH, {"proof": b"p"}),
        (Type.AUTH, {"session": [[[]]]}),
        (Type.ABANDON, {"reason": 5}),
    ],
)
@pytest.mark.fault("G6")
def test_fields_that_are_not_as_they_should_be(kind: Type, changed: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match=kind.name.lower()):
        read_message(message(kind, **changed), "client")


def test_a_chunk_holds_bytes() -> None:
    with pytest.raises(ProtocolError, match="chunk data: expected bytes, got 'text'"):
        read_message(message(Type.CHUNK, data="text"), "server")


def test_numbers_belong_to_requests_alone() -> None:
    with pytest.raises(ProtocolError, match="'begin' is numbered, got 0"):
        read_message(write_message(Message(Type.BEGIN, SOUND[Type.BEGIN])), "client")
    with pytest.raises(ProtocolError, match="'ping' is not numbered, got 4"):
        read_message(write_message(Message(Type.PING, {}, 4)), "client")
    with pytest.raises(ProtocolError, match="no message of type 99"):
        read_message(pack_frame(Frame(99, 0, 0, b"\x80")), "client")


@pytest.mark.fault("G4")
def test_small_messages_are_small() -> None:
    with pytest.raises(ProtocolError, match="'auth' may have 4096 bytes, this one has 4097") as caught:
        read_message(pack_frame(Frame(Type.AUTH, 0, 0, b"x" * (MAX_HANDSHAKE + 1 - HEADER_SIZE))), "client")
    assert caught.value.code == "limit"
    # Room for as many items as a list says it has is made at each level: not before the welcome.
    with pytest.raises(ProtocolError, match="exceeds max_array_len"):
        read_message(pack_frame(Frame(Type.AUTH, 0, 0, b"\x81\xa1a" + b"\xdc\x01\x00" * 500)), "client")


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "msgpack", None)
    monkeypatch.delitem(sys.modules, frames.__name__)
    with pytest.raises(MissingExtraError, match=r"pip install 'marlvec\[external\]'"):
        importlib.import_module(frames.__name__)
