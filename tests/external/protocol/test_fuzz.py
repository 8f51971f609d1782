"""Mutated messages: the decoder says `ProtocolError` or gives a sound message, soon and in little room."""

from __future__ import annotations

import random
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from marlvec.errors import ContractError, ProtocolError
from marlvec.external.messages import (
    FORMS,
    MAX_ITEMS,
    MAX_MESSAGE,
    Frame,
    Message,
    Type,
    ValueReader,
    pack,
    pack_frame,
    read_mask,
    read_message,
    read_space,
    unpack_plain,
    write_array,
    write_space,
)
from tests.external.protocol.test_messages import message

SPACE = spaces.Dict(
    image=spaces.Box(0, 255, (3, 2), np.uint8), pair=spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 1, (2,))])
)
READER = ValueReader(SPACE)
SEEDS = [
    *(message(kind) for kind in Type),
    message(Type.STEP, obs={"a": READER.write(SPACE.sample()), "b": READER.write(SPACE.sample())}),
    message(Type.WELCOME, groups=[{"agents": ["a"], "observation": write_space(SPACE), "action": write_space(SPACE)}]),
]
TYPES = list(Type)
COUNTED = 17  # frames, of which the work of one is counted: that takes its time
MOST_CALLS = 10_000  # of one small frame; 700 are usual
MARKS = bytes.fromhex("80 81 90 91 c0 c1 c2 c3 c4 c6 c7 c9 ca cb cf d3 d9 db dc dd de df ff 00 01 7f a1 a5")


def mutate(data: bytes, rng: random.Random) -> bytes:
    """One to three changes of the kinds that parsers trip over."""
    out = bytearray(data)
    dice = rng.getrandbits(64)
    for _ in range((1, 1, 2, 3)[dice & 3]):
        dice = rng.getrandbits(64)
        at, small, mark = dice % (len(out) + 1), 1 + (dice >> 20) % 8, MARKS[(dice >> 24) % len(MARKS)]
        match (dice >> 32) % 12:
            case 0:
                out[at : at + 1] = bytes([(dice >> 40) & 255])
            case 1:
                out[at : at + 1] = bytes([mark])
            case 2:
                del out[at : at + small]
            case 3:
                out[at:at] = bytes([mark]) * small
            case 4:
                out[at:] = SEEDS[(dice >> 40) % len(SEEDS)][at:]
            case 5:
                out[at:at] = out[at : at + 5 * small]
            case 6:
                del out[at:]
            case 7:
                out[2:4] = bytes([1, TYPES[(dice >> 40) % len(TYPES)]])
            case 8 | 9 | 10:
                out[24 + at : 25 + at] = bytes([(dice >> 40) & 127])  # behind the header
            case _:
                if at < len(out):
                    out[at] ^= 1 << ((dice >> 40) & 7)
    return bytes(out)


def look(data: bytes, sender: Any) -> Message | None:
    """All that a server or client does with bytes that come; None where it refuses them."""
    try:
        read = read_message(data, sender)
        for name, value in [*read.fields.get("obs", {}).items(), *read.fields.get("actions", {}).items()]:
            READER.read(value, name)
        for name, value in read.fields.get("masks", {}).items():
            read_mask(value, name)
        for group in read.fields.get("groups", ()):
            if isinstance(group, dict):
                read_space(group.get("observation"))
        if read.type is Type.CHUNK:
            unpack_plain(read.fields["data"])
    except (ProtocolError, ContractError):
        return None
    return read


class Work:
    """How much is done, in calls of functions: as much on every machine, whatever else it has to do."""

    def __init__(self) -> None:
        self.calls = 0

    def count(self, frame: Any, event: str, arg: Any) -> None:
        self.calls += event in ("call", "c_call")


@contextmanager
def counted() -> Iterator[Work]:
    """Count what is done here; what others count goes on afterwards."""
    work, before = Work(), sys.getprofile()
    sys.setprofile(work.count)
    try:
        yield work
    finally:
        sys.setprofile(before)


def hunt(frames: int, seed: int) -> tuple[int, int]:
    """So many mutated frames. Returns how many were sound after all, and the most work of those that were counted."""
    rng = random.Random(seed)
    sound, most = 0, 0
    for i in range(frames):
        whole = SEEDS[i % len(SEEDS)]
        sender = FORMS[Type(whole[3])].sender or "client"
        data = mutate(whole, rng)
        if i % COUNTED:
            read = look(data, sender)
        else:
            with counted() as work:
                read = look(data, sender)
            most = max(most, work.calls)
        if read is not None:
            sound += 1
            form = FORMS[read.type]
            assert form.fields.keys() <= read.fields.keys() <= form.fields.keys() | form.optional.keys()
    return sound, most


@pytest.mark.slow("many clients and connections")
def test_mutated_frames() -> None:
    """A share of what `make soak` does: goal R12."""
    sound, most = hunt(200_000, seed=0)
    assert 1000 < sound < 150_000  # some of them are whole, or nothing behind the first check was tried
    assert 100 < most < MOST_CALLS


@pytest.mark.soak
def test_five_million_mutated_frames() -> None:
    for seed in range(1, 101):
        sound, most = hunt(50_000, seed)
        assert sound
        assert most < MOST_CALLS


LARGE: dict[str, bytes] = {
    "bytes": pack({"a": b"\0" * (MAX_MESSAGE - 100)}),
    "nothings": b"\x81\xa1a\xdd" + (2**24 - 100).to_bytes(4, "big") + b"\xc0" * (MAX_MESSAGE - 100),
    "lists of lists": b"\x81\xa1a\xdc\x04\x00" + (b"\xdc\x04\x00" + b"\x90" * 1024) * 16_000,
    "lists of dicts": b"\x81\xa1a\xdc\x04\x00" + (b"\xdc\x04\x00" + b"\x80" * 1024) * 16_000,
    "numbers at each of 500 levels": b"\x81\xa1a" + (b"\xdc\x04\x00" + b"\xcd\x12\x34" * 1023) * 500,
    "empty lists that say they are long": b"\x81\xa1a" + b"\xdc\x04\x00" * 511,
    "keys": b"\xdf" + (2**20).to_bytes(4, "big") + b"".join(b"\xa4%04x\xc0" % i for i in range(60_000)),
    "one text": b"\x81\xa1a" + b"\xdb" + (MAX_MESSAGE - 200).to_bytes(4, "big") + b"a" * (MAX_MESSAGE - 200),
}


@pytest.mark.mostly_slow("many clients and connections", quick=3)
@pytest.mark.fault("G6")
@pytest.mark.parametrize("name", LARGE)
def test_no_message_makes_more_than_it_is(name: str) -> None:
    data = pack_frame(Frame(Type.STEP, 5, 3, LARGE[name]))
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        assert look(data, "client") is None
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - before <= 2 * MAX_MESSAGE + 2**20, f"{(peak - before) / 2**20:.1f} MiB"
    with counted() as work:
        look(data, "client")
    assert work.calls < 4 * MAX_ITEMS


def test_small_frames_stay_small() -> None:
    """Before anybody has shown a token."""
    worst = 0
    for body in (b"\x81\xa1a" + b"\xdc\x00\x20" * 511, b"\x81\xa1a" + (b"\x9f" + b"\xcd\x12\x34" * 14) * 90):
        data = pack_frame(Frame(Type.AUTH, 0, 0, body[:4000]))
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            assert look(data, "client") is None
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        worst = max(worst, peak - before)
    assert worst < 256 * 1024, f"{worst / 1024:.0f} KiB"


def test_arrays_are_seen_and_not_copied() -> None:
    big = np.zeros((1000, 1000), np.float32)
    data = message(Type.STEP, obs={"a": write_array(big)})
    reader = ValueReader(spaces.Box(-1, 1, (1000, 1000)))
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        read = read_message(data, "client")
        reader.read(read.fields["obs"]["a"], "a")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - before < 1.1 * big.nbytes  # msgpack's one copy
