"""The catalogue of faults, section G: whatever a client does or is, the server and all others go on."""

from __future__ import annotations

import hmac
import logging
import os
import random
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from marlvec import external
from marlvec.errors import ArgumentError, ConnectionLost, ContractError, EpisodeOver, RefusedError, ResourceError
from marlvec.external import Client, Server, make_token
from marlvec.external import handshake as tokens
from marlvec.external import session_loop as socket_loop
from marlvec.external.connections import Connection, RequestFilter
from marlvec.external.messages import FORMS, Frame, Message, Type, pack_frame, write_array, write_message
from marlvec.external.session import Session
from tests.external.helpers.crowd import crowd
from tests.external.helpers.served import SPACES, Clock, Raw, Served, expected, obs_of, served, wire_obs
from tests.external.protocol.test_fuzz import SEEDS, mutate
from tests.external.protocol.test_messages import SOUND
from tests.external.protocol.test_values import ATTACKS
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[3]
UPGRADE = (
    "GET / HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Protocol: marlvec.v1\r\n{more}\r\n"
)


@contextmanager
def dial(there: Served) -> Iterator[socket.socket]:
    """A bare socket."""
    with socket.create_connection((there.server.host, there.server.port), 5) as sock:
        yield sock


def upgrade(there: Served, **headers: str) -> bytes:
    more = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items() if name != "Host")
    return UPGRADE.format(host=headers.get("Host", f"127.0.0.1:{there.server.port}"), more=more).encode()


def read_all(sock: socket.socket, seconds: float = 60.0) -> bytes:
    """What comes until the server closes."""
    sock.settimeout(seconds)
    found = b""
    with suppress(ConnectionResetError):
        while data := sock.recv(65536):
            found += data
    return found


def masked(payload: bytes, opcode: int = 2, *, fin: bool = True, length: bytes | None = None) -> bytes:
    """One WebSocket frame from a client; its mask is zeros."""
    if length is None:
        n = len(payload)
        length = (
            bytes([0x80 | n])
            if n < 126
            else b"\xfe" + struct.pack(">H", n)
            if n < 65536
            else b"\xff" + struct.pack(">Q", n)
        )
    return bytes([(0x80 if fin else 0) | opcode]) + length + b"\0\0\0\0" + payload


class Honest:
    """A client that plays all the while, and must never see a wrong answer."""

    def __init__(self, there: Served) -> None:
        self._client = Client(there.url, timeout=120)
        self._episode = self._client.start_episode()
        self._stop = threading.Event()
        self.steps, self.error = 0, None
        self._thread = threading.Thread(target=self._play)

    def _play(self) -> None:
        try:
            while not self._stop.is_set():
                obs = obs_of(self.steps % 400)
                answer = self._client.get_action(self._episode, {"a": obs, "b": obs})
                assert answer == {"a": expected(obs), "b": expected(obs)}
                self.steps += 1
                self._stop.wait(0.002)
        except BaseException as error:
            self.error = error

    def __enter__(self) -> Honest:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        before = self.steps
        with suppress(AssertionError):
            until(lambda: self.steps > before + 3 or self.error)
        self._stop.set()
        self._thread.join()
        self._client.close()
        assert self.error is None, self.error
        assert self.steps > before + 3, "the honest client was not answered any more"


# --- G1


@pytest.mark.fault("G1")
@pytest.mark.parametrize("how", ["FIN", "RST", "silence", "goodbye of WebSocket"])
def test_a_client_that_is_gone(how: str) -> None:
    clock = Clock()
    with served(3, resume_seconds=0, heartbeat_seconds=3, clock=clock) as there, Honest(there) as honest:
        raw = Raw(there.url)
        raw.begin()
        raw.step(1)
        slots = len(there.envs.gateway.episodes)
        if how == "RST":
            raw.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if how == "goodbye of WebSocket":
            raw.close()
        elif how != "silence":
            raw.sock.close()
        else:
            for _ in range(4):  # the honest one is heard in between
                clock.advance(2)
                steps = honest.steps
                until(lambda: honest.steps > steps + 2 or honest.error)  # noqa: B023
        until(lambda: len(there.envs.gateway.episodes) == slots - 1)
        until(lambda: any("is gone" in fault.summary for fault in there.envs.faults))
        assert there.envs.faults[-1].summary.startswith("ConnectionLost: client 127.0.0.1:")
        raw.close()


# --- G2


@pytest.mark.fault("G2")
def test_messages_that_come_twice() -> None:
    with served() as there, Raw(there.url) as raw:
        raw.begin()
        data = raw.data(Type.STEP, episode=1, obs=wire_obs(3), rewards={"a": 1.0})
        for _ in range(3):
            raw.link.send(data)
        assert raw.get().type is Type.ACTIONS
        raw.step(4)
        until(lambda: there.server.counters.duplicates == 2)
        assert not raw.inbox
        raw.number += 5
        raw.send(Type.RETURNS, episode=1, rewards={})
        (error,) = [m for m in raw.wait_for_end() if m.type is Type.ERROR]
        assert error.fields["code"] == "protocol"
        assert "some are missing" in error.fields["text"]


@pytest.mark.fault("G2")
@pytest.mark.checklist(124)
def test_a_session_is_resumed_by_its_secret_alone() -> None:
    with served(collect=False) as there:
        raw = Raw(there.url)
        raw.begin()
        data = raw.data(Type.STEP, episode=1, obs=wire_obs(3))
        raw.link.send(data)
        until(lambda: there.envs.gateway.episodes[0].is_waiting)
        raw.sock.close()
        for secret in (b"x" * 32, raw.welcome.session[:-1] + bytes([raw.welcome.session[-1] ^ 1])):
            with pytest.raises(RefusedError, match="no such session") as caught:
                Raw(there.url, session=secret)
            assert caught.value.code == "session"
        back = Raw(there.url, session=raw.welcome.session, received=raw.received)
        assert back.welcome.resumed
        assert back.welcome.received == 2
        back.link.send(data)  # it does not trust the server
        other = Raw(there.url, session=raw.welcome.session, received=raw.received)  # as after a cable was pulled
        (error,) = back.wait_for_end()
        assert error.fields["code"] == "session"
        thread = threading.Thread(target=there.collect)
        thread.start()
        try:
            assert other.get().fields["actions"] == {"a": expected(obs_of(3)), "b": expected(obs_of(3))}
            other.step(4)
        finally:
            there.stop(thread)
        other.sock.close()
        late = Raw(there.url, session=raw.welcome.session, received=2)  # it says that it has not got the last reply
        assert late.get().type is Type.ACTIONS
        assert there.server.counters.duplicates == 1
        assert there.server.counters.resumed == 3
        late.close()


@pytest.mark.fault("G2")
@pytest.mark.checklist(124)
def test_connections_that_break_all_the_time_lose_nothing() -> None:
    with served(2) as there, Client(there.url, timeout=30) as client:
        episode = client.start_episode()
        rng = random.Random(1)
        for t in range(60):
            if t % 4 == 3:
                client._runs._caller._link._sock.shutdown(
                    rng.choice([socket.SHUT_RD, socket.SHUT_WR, socket.SHUT_RDWR])
                )
            obs = obs_of(t)
            assert client.get_action(episode, {"a": obs, "b": obs}) == {"a": expected(obs), "b": expected(obs)}
            client.log_returns(episode, {"a": 1.0})
        client.end_episode(episode)
        assert there.server.counters.resumed >= 10
        assert there.server.counters.sessions == 1
        assert not there.envs.faults


# --- G3, G4, G5

STRANGERS: dict[str, bytes] = {
    "nothing": b"",
    "garbage": bytes(range(256)) * 8,
    "a TLS hello": bytes.fromhex("16030100c8010000c40303") + b"\x11" * 200,
    "HTTP": b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "HTTP POST": b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 5\r\n\r\nhello",
    "another path": UPGRADE.format(host="127.0.0.1", more="").replace("GET / ", "GET /x ").encode(),
    "without the subprotocol": UPGRADE.format(host="127.0.0.1", more="").replace("marlvec.v1", "chat").encode(),
    "a line without end": b"GET /" + b"x" * 10_000,
    "headers without end": b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 2000,
    "a pickle": b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x8c\x06system\x93\x8c\x02id\x85R.",
    "a multiprocessing handshake": b"\x00\x00\x00\x0b#CHALLENGE#",
}


@pytest.mark.mostly_slow("many clients and connections", quick=8)
@pytest.mark.fault("G3")
@pytest.mark.parametrize("what", STRANGERS)
def test_strangers(what: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "marlvec.external")
    with served(collect=False, handshake_seconds=1.0) as there:
        with dial(there) as sock:
            sock.sendall(STRANGERS[what])
            if what == "nothing":
                sock.shutdown(socket.SHUT_WR)
            answer = read_all(sock)
        assert b"101" not in answer[:20]
        until(lambda: there.server.counters.unadmitted == 1)
        assert there.server.clients == 0
        assert len([record for record in caplog.records if record.name == "marlvec.external"]) == 1
        assert there.envs.gateway.episodes == ()


@pytest.mark.slow("many clients and connections")
@pytest.mark.fault("G4")
@pytest.mark.parametrize(
    "length",
    [
        b"\xfe" + struct.pack(">H", 4097),
        b"\xff" + struct.pack(">Q", 2**31),
        b"\xff" + struct.pack(">Q", 2**62),
        b"\xff" + struct.pack(">Q", 2**63),  # a negative one
        b"\xff" + struct.pack(">Q", 2**64 - 1),
        b"\xff" + struct.pack(">d", float("nan")),
    ],
)
def test_frames_that_say_they_are_too_long(length: bytes) -> None:
    with served(collect=False) as there, dial(there) as sock:
        sock.sendall(upgrade(there))
        sock.recv(4096)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        sock.sendall(masked(b"x" * 100, length=length))
        answer = read_all(sock)
        assert struct.pack(">H", 1009) in answer or struct.pack(">H", 1002) in answer
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024  # KiB
        until(lambda: there.server.counters.unadmitted == 1)


@pytest.mark.fault("G4")
def test_after_the_welcome_a_message_may_be_as_long_as_the_limits_say() -> None:
    with served(collect=False, message_bytes=50_000) as there:
        with Raw(there.url) as raw:
            assert raw.welcome.limits["max_message"] == 50_000
            raw.begin()
            raw.send(Type.STEP, episode=1, obs=wire_obs(1), infos={"a": {"x": ["uint8", [48_000], b"x" * 48_000]}})
            raw.send(Type.STEP, episode=1, obs=wire_obs(1), infos={"a": {"x": ["uint8", [50_000], b"x" * 50_000]}})
            raw.wait_for_end()
        with Client(there.url, timeout=5) as client, pytest.raises(ContractError, match="takes 50000"):
            client.log_returns(client.start_episode("e"), {}, {"a": {"x": np.zeros(60_000, np.uint8)}})
            client.get_action("e", {"a": obs_of(1), "b": obs_of(1)})


@pytest.mark.mostly_slow("many clients and connections", quick=2)
@pytest.mark.fault("G5")
@pytest.mark.parametrize("how", ["nothing", "half a request", "a byte at a time", "half a header", "half a message"])
def test_who_never_gets_to_the_point(how: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "marlvec.external")
    with served(collect=False, handshake_seconds=0.5) as there, dial(there) as sock:
        data = upgrade(there)
        if how == "half a request":
            sock.sendall(data[: len(data) // 2])
        elif how == "a byte at a time":
            with suppress(ConnectionError):
                for byte in data[:-4] + b"X" * 4000:  # a header that has no end
                    sock.sendall(bytes([byte]))
                    time.sleep(0.02)
        elif how != "nothing":
            sock.sendall(data)
            sock.recv(4096)
            sock.sendall(masked(b"x" * 200)[: 1 if how == "half a header" else 50])
        read_all(sock)
        until(lambda: there.server.counters.unadmitted == 1)
        assert "no handshake in time" in caplog.text


@pytest.mark.fault("G5")
def test_a_message_that_takes_for_ever() -> None:
    with served(resume_seconds=0, message_seconds=0.4) as there, Honest(there):
        raw = Raw(there.url)
        raw.begin()
        infos = {"a": {"x": "x" * 4000}}
        data = masked(raw.data(Type.STEP, episode=1, obs=wire_obs(1), infos=infos))
        with pytest.raises(ConnectionError):  # a tenth of it would take long enough
            for i in range(len(data)):
                raw.sock.sendall(data[i : i + 1])
                time.sleep(0.05)
        until(lambda: len(there.envs.gateway.episodes) == 1)
        raw.close()


def connection_of(there: Served) -> Connection:
    """The one connection of a client that was let in."""
    (connection,) = [
        one for one, who in there.server._loop.session_manager.connections.items() if isinstance(who, Session)
    ]
    return connection


@pytest.mark.fault("G5")
def test_a_message_in_fragments_that_takes_for_ever() -> None:
    """However many of its fragments come in time, the whole message must."""
    clock = Clock()
    with served(resume_seconds=0, message_seconds=10, clock=clock) as there, Raw(there.url) as raw:
        raw.begin()
        raw.step(1)
        connection = connection_of(there)
        for i in range(4):
            clock.advance(4)
            raw.sock.sendall(masked(b"part", 0 if i else 2, fin=False) + masked(b"I am here", 9))
            until(lambda: connection.heard == clock.now)
        raw.wait_for_end()
        until(lambda: there.envs.faults)
        assert "a message took more than 10 s" in there.envs.faults[-1].summary


@pytest.mark.fault("G5")
def test_messages_one_after_the_other_take_as_long_as_they_like() -> None:
    """Part of the next one is there each time that one is whole: none of them takes long."""
    clock = Clock()
    with served(message_seconds=10, clock=clock) as there, Raw(there.url) as raw:
        raw.begin()
        number = 0
        frames = b""
        for number in range(1, 9):
            rest, frame = frames, masked(raw.data(Type.RETURNS, episode=1, rewards={"a": 1.0}))
            if number % 2:  # of two fragments, in between which the one before ends
                frame = masked(frame[6:][:20], fin=False) + masked(frame[6:][20:], 0)
            raw.sock.sendall(rest + frame[:15])
            if rest:
                assert raw.get().type is Type.OK
            frames = frame[15:]
            clock.advance(4)
        raw.sock.sendall(frames)
        assert raw.get().type is Type.OK


@pytest.mark.fault("G5")
def test_messages_in_fragments() -> None:
    with served() as there, Raw(there.url) as raw:
        raw.begin()
        data = raw.data(Type.STEP, episode=1, obs=wire_obs(1))
        parts = [data[i : i + 10] for i in range(0, len(data), 10)]
        frames = [masked(part, 0 if i else 2, fin=i == len(parts) - 1) for i, part in enumerate(parts)]
        raw.sock.sendall(b"".join(frames[:2]) + masked(b"hello", 9) + b"".join(frames[2:]))  # a ping in between
        assert raw.get().type is Type.ACTIONS
        endless = masked(b"", fin=False) + masked(b"", 0, fin=False) * 5000
        raw.sock.sendall(endless)
        raw.wait_for_end()


# --- G6, G7


@pytest.mark.fault("G6")
@pytest.mark.fault("G7")
def test_hostile_messages_end_the_connection_and_nothing_else() -> None:
    hostile = [message_of(Type.STEP, obs={"a": array}) for array in ATTACKS.values() if isinstance(array, list)]
    hostile += [pack_frame(Frame(Type.STEP, 2, 0, body)) for body in _BODIES]
    with served(resume_seconds=0) as there, Honest(there):
        for data in hostile:
            with Raw(there.url) as raw:
                raw.begin()
                raw.link.send(data)
                errors = [message for message in raw.wait_for_end() if message.type is Type.ERROR]
                assert [error.fields["code"] for error in errors] == ["protocol"], data[:80]
        until(lambda: len(there.envs.gateway.episodes) == 1)


def message_of(kind: Type, number: int = 2, **changed: Any) -> bytes:
    fields = {**SOUND[kind], "episode": 1, **changed}
    return write_message(Message(kind, {k: v for k, v in fields.items() if k not in ("infos", "masks")}, number))


_BODIES = (
    b"\x81\xa1a" * 600,
    b"\xdf\xff\xff\xff\xff",
    b"\x81\xa1a\xdd\xff\xff\xff\xff",
    b"\x82\xa1a\x01\xa1a\x01",
    b"\x81\xa1a\xd4\x01\x00",
    b"\x81\xa1a\xa1\xff",
    b"\x80\x00",
    b"\x80\x04cposix\nsystem\n.",
)

# --- G8


@pytest.mark.mostly_slow("many clients and connections", quick=2)
@pytest.mark.fault("G8")
@pytest.mark.parametrize(
    ("code", "kind", "changed"),
    [
        ("value", Type.STEP, {"obs": {"c": write_array(obs_of(1))}}),
        ("value", Type.STEP, {"obs": {"a": write_array(np.zeros(4, np.float32))}}),
        ("value", Type.STEP, {"obs": {"a": write_array(np.zeros(3))}}),
        ("value", Type.STEP, {"obs": {"a": write_array(np.full(3, np.nan, np.float32))}}),
        ("value", Type.STEP, {"obs": {"a": write_array(np.full(3, 2000, np.float32))}}),
        ("value", Type.STEP, {"obs": {"a": 5}}),
        ("order", Type.STEP, {"obs": {}}),
        ("value", Type.STEP, {"obs": wire_obs(1), "rewards": {"z": 1.0}}),
        ("value", Type.STEP, {"obs": wire_obs(1), "infos": {"a": {"logged_action": 1}}}),
        ("value", Type.STEP, {"obs": wire_obs(1), "infos": {"a": {"off_policy_action": 1}}}),
        ("value", Type.STEP, {"obs": wire_obs(1), "infos": {"__common__": {"training_enabled": False}}}),
        ("value", Type.LOG, {"obs": wire_obs(1), "actions": {"a": 50, "b": 0}}),
        ("value", Type.LOG, {"obs": wire_obs(1), "actions": {"a": 1.5, "b": 0}}),
        ("order", Type.LOG, {"obs": wire_obs(1), "actions": {"a": 1}}),
        ("value", Type.LEAVE, {"obs": wire_obs(1), "terminated": ["a"], "truncated": []}),
        ("value", Type.LEAVE, {"obs": {}, "terminated": ["z"], "truncated": []}),
        ("value", Type.END, {"obs": {"a": {}}, "truncated": False}),
        ("value", Type.BEGIN, {"episode": 2, "training": True, "slot": 99}),
        ("order", Type.BEGIN, {"episode": 1, "training": True}),
        ("episode", Type.STEP, {"episode": 9, "obs": wire_obs(1)}),
        ("weights", Type.PART, {"version": 3, "part": 0}),
    ],
)
def test_sound_messages_that_say_what_cannot_be(code: str, kind: Type, changed: dict[str, Any]) -> None:
    with served() as there, Raw(there.url) as raw:
        raw.begin()
        raw.step(1)
        fields = changed if kind in (Type.PART,) else {"episode": 1, **changed}
        reply = raw.ask(kind, **fields)
        assert (reply.type, reply.fields.get("code")) == (Type.REFUSED, code), reply
        raw.step(2)  # and the episode goes on
        assert raw.ask(Type.END, episode=1, obs=wire_obs(3), truncated=True).type is Type.OK
        assert not there.envs.faults


# --- G9


@pytest.mark.fault("G9")
def test_episodes_of_which_nothing_is_heard_and_that_never_end() -> None:
    clock = Clock()
    with served(3, idle_seconds=10, episode_seconds=50, heartbeat_seconds=1000, clock=clock) as there:
        with Raw(there.url) as silent, Raw(there.url) as endless:
            silent.begin()
            silent.step(1)
            endless.begin()
            for _ in range(3):
                clock.advance(4)
                endless.step(2)
            until(lambda: len(there.envs.gateway.episodes) == 1)
            reply = silent.ask(Type.STEP, episode=1, obs=wire_obs(3))
            assert reply.fields["code"] == "episode"
            assert "no message about episode 1" in reply.fields["text"]
            silent.begin(2)  # the connection is as good as before
            silent.ask(Type.END, episode=2, obs={}, truncated=False)
            for _ in range(9):
                clock.advance(4)
                endless.step(2)
            clock.advance(4)
            until(lambda: not there.envs.gateway.episodes)
            reply = endless.ask(Type.STEP, episode=1, obs=wire_obs(3))
            assert "lasts longer than 50 s" in reply.fields["text"]
            until(lambda: len(there.envs.faults) == 2)
        assert [fault.summary.split(":")[0] for fault in there.envs.faults] == ["ConnectionLost"] * 2


@pytest.mark.fault("G9")
def test_who_waits_for_a_slot_is_told_in_the_end() -> None:
    clock = Clock()
    with served(1, begin_seconds=4, clock=clock) as there, Raw(there.url) as one, Raw(there.url) as other:
        queue = there.server._loop.session_manager._queue
        one.begin()
        other.send(Type.BEGIN, episode=1, training=True)
        until(lambda: len(queue) == 1)
        clock.advance(5)
        assert other.get().fields["code"] == "full"
        number = other.send(Type.BEGIN, episode=2, training=True)
        until(lambda: len(queue) == 1)
        assert one.ask(Type.END, episode=1, obs={}, truncated=False).type is Type.OK
        reply = other.get()
        assert (reply.type, reply.fields["re"]) == (Type.OK, number)
        waiting = other.send(Type.BEGIN, episode=3, training=True)
        assert other.ask(Type.ABANDON, episode=3, reason="never mind").type is Type.OK
        assert waiting


# --- G10


@pytest.mark.fault("G10")
def test_one_client_too_many_and_a_flood() -> None:
    with served(30, clients=20, handshake_seconds=10) as there, Honest(there) as honest:
        clients = [Raw(there.url) for _ in range(19)]
        with pytest.raises(RefusedError, match="as many as may be; come back later") as caught:
            Raw(there.url)
        assert caught.value.code == "full"
        flood = [socket.create_connection((there.server.host, there.server.port), 5) for _ in range(200)]
        steps = honest.steps
        for client in clients[:5]:
            client.begin()
            client.step(1)
        until(lambda: honest.steps > steps + 3 or honest.error)  # in the middle of it
        for sock in flood:
            sock.close()
        for client in clients:
            client.close()
        until(lambda: there.server.counters.unadmitted + there.server.counters.turned_away >= 200)
        Raw(there.url).close()


@pytest.mark.fault("G10")
@pytest.mark.checklist(124)
def test_who_comes_back_is_one_client_more() -> None:
    with served(4, clients=2) as there, Raw(there.url) as stays:
        stays.begin()
        away = Raw(there.url)
        away.begin()
        away.step(1)
        away.sock.close()
        until(lambda: there.server.counters.accepted == 2 and len(there.server._loop.session_manager.connections) == 1)
        with Raw(there.url) as instead:
            for _ in range(3):
                with pytest.raises(RefusedError, match="as many as may be") as caught:
                    Raw(there.url, session=away.welcome.session, received=away.received)
                assert caught.value.code == "full"
            instead.begin()
            instead.step(2)
            with Raw(there.url, session=instead.welcome.session, received=instead.received) as same:
                same.step(3)  # whose old connection goes is no more than before
                assert same.ask(Type.BYE).type is Type.OK
                same.wait_for_end()
        until(lambda: there.server.clients == 2)
        with Raw(there.url, session=away.welcome.session, received=away.received) as back:
            back.step(4)  # nothing is lost meanwhile
            assert back.welcome.resumed
        stays.step(5)


@pytest.mark.fault("G10")
def test_a_client_has_limits_of_its_own() -> None:
    clock = Clock()
    options = {"episodes": 2, "window": 5, "messages_per_second": 200.0}
    with served(8, collect=False, clock=clock, **options) as there:
        with Raw(there.url) as raw, Raw(there.url) as other:
            raw.begin(1)
            raw.begin(2)
            assert raw.ask(Type.BEGIN, episode=3, training=True).fields["code"] == "limit"
            for _ in range(60):
                raw.ask(Type.RETURNS, episode=1, rewards={})
            assert raw.ask(Type.RETURNS, episode=1, rewards={}).type is Type.OK
            ping = masked(write_message(Message(Type.PING, {})))
            before = there.server.counters.messages
            raw.sock.sendall(ping * 400)  # all in one piece, which is charged for once it was read
            until(lambda: there.server.counters.messages == before + 400)
            until(lambda: there.server._loop._slow)
            raw.sock.sendall(ping)
            for _ in range(50):  # others are heard all the while, and it is not
                assert other.ask(Type.WEIGHTS, have=0).type is Type.OFFER
            assert there.server.counters.messages == before + 450
            clock.advance(4)
            until(lambda: there.server.counters.messages == before + 451)
        with Raw(there.url) as raw:
            raw.begin(1)
            raw.send(Type.STEP, episode=1, obs=wire_obs(1))
            raw.begin(2)
            raw.send(Type.STEP, episode=2, obs=wire_obs(1))
            assert raw.ask(Type.RETURNS, episode=1, rewards={}).type is Type.OK
    with served(8, collect=False, window=3, envs_options={"max_backlog": 1}) as there, Raw(there.url) as raw:
        raw.begin(1)
        for _ in range(6):
            raw.send(Type.LOG, episode=1, obs=wire_obs(1), actions={"a": 1, "b": 1})
        errors = [message for message in raw.wait_for_end() if message.type is Type.ERROR]
        assert errors[0].fields["code"] == "limit"
    options = {"max_backlog": 1}
    with served(8, collect=False, held_bytes=500, envs_options=options) as there, Raw(there.url) as raw:
        raw.begin(1)
        for _ in range(6):
            raw.send(Type.LOG, episode=1, obs=wire_obs(1), actions={"a": 1, "b": 1})
        errors = [message for message in raw.wait_for_end() if message.type is Type.ERROR]
        assert "wait for the collector" in errors[0].fields["text"]


@pytest.mark.slow("many clients and connections")
@pytest.mark.fault("G10")
def test_a_thousand_clients_in_small() -> None:
    """Goal R13 with 100 clients; `make soak` has the thousand."""
    seen = crowd(clients=100, idle=80, slow=10, seconds=1.0)
    assert seen.refused_code == "full"
    assert seen.bytes_per_idle < 64 * 1024
    assert seen.answers > 20
    assert seen.wrong == 0


# --- G11


@pytest.mark.slow("many clients and connections")
@pytest.mark.fault("G11")
@pytest.mark.checklist(124)
def test_a_client_that_does_not_read() -> None:
    with served(resume_seconds=0, message_seconds=0.5) as there, Honest(there):
        raw = Raw(there.url)
        raw.begin()
        raw.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.sock.settimeout(5)
        ping = masked(b"x" * 120, 9) * 500
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises((ConnectionError, TimeoutError)):
            for _ in range(2000):
                raw.sock.sendall(ping)
        until(lambda: len(there.envs.gateway.episodes) == 1)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 40 * 1024
        raw.close()


@pytest.mark.fault("G11")
def test_a_client_that_never_tells_what_it_got() -> None:
    with served(collect=False, kept_bytes=2000) as there, Raw(there.url) as raw:
        raw.begin()
        for _ in range(100):
            raw.received = 0
            raw.send(Type.RETURNS, episode=1, rewards={})
        errors = [message for message in raw.wait_for_end() if message.type is Type.ERROR]
        assert errors[0].fields["code"] == "limit"


@pytest.mark.fault("G11")
def test_what_all_clients_cost_together_is_bounded() -> None:
    options = {"max_backlog": 1}
    with served(4, collect=False, total_bytes=300_000, envs_options=options) as there, Raw(there.url) as raw:
        raw.begin()
        data = {"a": {"x": ["uint8", [100_000], b"x" * 100_000]}}
        for _ in range(5):
            raw.send(Type.LOG, episode=1, obs=wire_obs(1), actions={"a": 1, "b": 1}, infos=data)
        errors = [message for message in raw.wait_for_end() if message.type is Type.ERROR]
        assert "all clients together" in errors[0].fields["text"]


# --- G12, G13


@pytest.mark.fault("G12")
@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"mv\0" + message_of(Type.HELLO, 0)[3:], "this side speaks version 1, the message is of version 0"),
        (b"mv\xe7" + message_of(Type.HELLO, 0)[3:], "this side speaks version 1, the message is of version 231"),
        (
            write_message(Message(Type.HELLO, {**SOUND[Type.HELLO], "versions": [999], "features": []})),
            "this server speaks version 1 of the protocol, the client speaks [999]",
        ),
        (
            write_message(Message(Type.HELLO, {**SOUND[Type.HELLO], "features": ["telepathy"]})),
            "the client needs ['telepathy']",
        ),
    ],
)
def test_another_version(data: bytes, what: str) -> None:
    with served(collect=False) as there, Raw(there.url, greet=False) as raw:
        raw.link.send(data)
        (error,) = raw.wait_for_end()
        assert error.fields["code"] == "version"
        assert what in error.fields["text"]


TOKEN = make_token()


@pytest.mark.fault("G13")
def test_tokens(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with served(server_options={"token": TOKEN}) as there, Client(there.url, token=TOKEN, timeout=5) as client:
        for token in (None, make_token()):
            with pytest.raises(RefusedError) as caught:
                Client(there.url, token=token)
            assert caught.value.code == "token"
        assert client.start_episode()
        with served() as other, pytest.raises(RefusedError, match="requires none: it may be another one"):
            Client(other.url, token=TOKEN)
        with pytest.raises(ArgumentError):
            Client(there.url, token="")
        with pytest.raises(ArgumentError):
            Server(there.envs, token="")
    assert TOKEN not in caplog.text


@pytest.mark.fault("G13")
def test_a_proof_heard_elsewhere_is_worth_nothing() -> None:
    with served(server_options={"token": TOKEN}) as one, served(server_options={"token": TOKEN}) as other:
        heard: list[bytes] = []
        raw = Raw(one.url, greet=False)
        send = raw.link.send
        raw.link.send = lambda data: (heard.append(data), send(data))[1]  # type: ignore[method-assign]
        raw.greet(TOKEN)
        raw.close()
        for there in (one, other):
            with Raw(there.url, greet=False) as replay:
                for data in heard:
                    replay.link.send(data)
                error = replay.wait_for_end()[-1]
                assert (error.type, error.fields["code"]) == (Type.ERROR, "token")


@pytest.mark.fault("G13")
def test_wrong_tokens_are_compared_in_constant_time_and_soon_answered_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []

    def compare(own: bytes, other: bytes) -> bool:
        compared.append((len(own), len(other)))
        return hmac.compare_digest(own, other)

    monkeypatch.setattr(tokens, "hmac", type("hmac", (), {"compare_digest": compare, "digest": hmac.digest}))
    clock = Clock()
    with served(server_options={"token": TOKEN}, clock=clock, handshake_seconds=10) as there:
        penalties = there.server._loop.session_manager._penalties
        for _ in range(3):
            with pytest.raises(RefusedError):
                Raw(there.url, make_token())
        for tried in (4, 5):  # from here on it takes its time, which stands
            refused: list[RefusedError] = []

            def knock(refused: list[RefusedError]) -> None:
                with pytest.raises(RefusedError) as caught:
                    Raw(there.url, make_token())
                refused.append(caught.value)

            thread = threading.Thread(target=knock, args=(refused,))
            thread.start()
            until(lambda: penalties)
            Client(there.url, token=TOKEN, timeout=60).close()  # who knows it does not wait
            assert there.server.counters.wrong_tokens == tried
            assert not refused
            clock.advance(2)
            thread.join()
            assert [error.code for error in refused] == ["token"]
        assert compared == [(32, 32)] * (5 + 2 * 2)  # of the wrong ones; and both sides of the right ones
        with Raw(there.url, greet=False) as raw:  # and tries nothing else meanwhile
            raw.link.send(message_of(Type.HELLO, 0)[:0] + hello())
            raw.get()
            for _ in range(50):
                raw.link.send(write_message(Message(Type.AUTH, {"proof": b"p" * 32, "session": b""})))
            until(lambda: penalties)
            clock.advance(2)
            raw.wait_for_end()
        assert there.server.counters.wrong_tokens == 6


def hello() -> bytes:
    return write_message(Message(Type.HELLO, {"versions": [1], "features": [], "name": "", "nonce": b"n" * 32}))


# --- G14

SERVER = """
import sys
from tests.external.helpers.served import served
import threading
with served(2, server_options={"port": int(sys.argv[1])}) as there:
    print(there.server.port, flush=True)
    threading.Event().wait()
"""


def run_server(port: int) -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen([sys.executable, "-c", SERVER, str(port)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


@pytest.mark.slow("many clients and connections")
@pytest.mark.fault("G14")
@pytest.mark.checklist(124)
def test_a_server_that_is_killed_and_comes_back() -> None:
    process, port = run_server(0)
    client = None
    try:
        client = Client(f"ws://127.0.0.1:{port}/", timeout=3, reconnect_timeout=60)
        one = obs_of(1)
        episode = client.start_episode()
        client.get_action(episode, {"a": one, "b": one})
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        with pytest.raises((ConnectionLost, TimeoutError)):
            client.get_action(episode, {"a": one, "b": one})
        process.stdout.close()
        process, _ = run_server(port)
        client.timeout = 60
        with pytest.raises((ConnectionLost, EpisodeOver)):
            client.wait_for_action(episode)
        episode = client.start_episode()
        assert client.get_action(episode, {"a": one, "b": one}) == {"a": expected(one), "b": expected(one)}
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        if client is not None:
            client.close()


# --- G15


@pytest.mark.fault("G15")
def test_where_it_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    with external.make(SPACES, 1) as envs:
        with Server(envs) as server:
            assert server.host == "127.0.0.1"
            with pytest.raises(ResourceError, match=f"port={server.port}.*cannot listen there .*take another port"):
                Server(envs, port=server.port)
        for host in ("0.0.0.0", "::", "192.0.2.1"):
            with pytest.raises(ArgumentError, match="which other machines can reach: say allow_remote=True"):
                Server(envs, host)
            with pytest.raises(ArgumentError, match="give a token"):
                Server(envs, host, allow_remote=True)
        with pytest.raises(ResourceError, match="cannot listen there"):
            Server(envs, "192.0.2.1", allow_remote=True, token=TOKEN)  # not an address of this machine
        with Server(envs, "0.0.0.0", allow_remote=True, token=TOKEN) as server:
            Client(f"ws://127.0.0.1:{server.port}/", token=TOKEN).close()
        with pytest.raises(ArgumentError, match="say allow_remote=True"):
            Server(envs, "0.0.0.0", allow_no_token=True)
        with Server(envs, "0.0.0.0", allow_remote=True, allow_no_token=True) as server:
            Client(f"ws://127.0.0.1:{server.port}/").close()
        with (
            Server(envs, "0.0.0.0", allow_remote=True, allow_no_token=True, token=TOKEN) as server,
            pytest.raises(RefusedError, match="token"),  # it may be asked for all the same
        ):
            Client(f"ws://127.0.0.1:{server.port}/")
        for host, port in (("", 0), (None, 0), ("127.0.0.1", -1), ("127.0.0.1", 70000), ("127.0.0.1", True)):
            with pytest.raises(ArgumentError, match="expected"):
                Server(envs, host, port)  # type: ignore[arg-type]
        with pytest.raises(ResourceError, match="no such address"):
            Server(envs, "no.such.host.invalid")
        real = socket.getaddrinfo
        both = [(2, 1, 6, "", ("127.0.0.1", 0)), (2, 1, 6, "", ("192.0.2.1", 0))]
        monkeypatch.setattr(socket_loop.socket, "getaddrinfo", lambda *a, **k: both)
        with pytest.raises(ArgumentError, match=r"is 192.0.2.1"):  # one of the name's addresses is enough
            Server(envs, "two-faced.example")
        monkeypatch.setattr(socket_loop.socket, "getaddrinfo", real)
        with pytest.raises(ArgumentError, match="ExternalVectorEnv"):
            Server(object())  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="lists of texts"):
            Server(envs, hosts="localhost")


@pytest.mark.fault("G15")
@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
def test_ipv6_alone() -> None:
    with external.make(SPACES, 1) as envs:
        try:
            server = Server(envs, "::1")
        except ResourceError as error:
            assert "::1" in str(error)  # noqa: PT017
            return
        with server:
            assert server.url.startswith("ws://[::1]:")
            with Client(server.url, timeout=5) as client:
                client.start_episode()
            with pytest.raises(ConnectionLost):
                Client(f"ws://127.0.0.1:{server.port}/", reconnect_timeout=0.2)


# --- pages of others (CVE-2026-27482 and its kind)

HEADERS: list[tuple[dict[str, str], int]] = [
    ({}, 101),
    ({"Origin": "http://localhost:8000"}, 101),
    ({"Origin": "http://127.0.0.1"}, 101),
    ({"Origin": "https://[::1]:3000"}, 101),
    ({"Host": "localhost:9999"}, 101),
    ({"Host": "[::1]:80"}, 101),
    ({"Host": "me.example"}, 101),
    ({"Origin": "https://play.example"}, 101),
    ({"Origin": "http://evil.example"}, 403),
    ({"Origin": "http://localhost.evil.example"}, 403),
    ({"Origin": "http://evil.example#localhost"}, 403),
    ({"Origin": "http://localhost@evil.example"}, 403),
    ({"Origin": "http://localhost:80:80"}, 403),
    ({"Origin": "null"}, 403),
    ({"Origin": ""}, 403),
    ({"Origin": "file://"}, 403),
    ({"Origin": "chrome-extension://localhost"}, 403),
    ({"Origin": "http://2130706433"}, 403),
    ({"Host": "evil.example"}, 403),
    ({"Host": "evil.example:80", "Origin": "http://evil.example:80"}, 403),
    ({"Host": "localhost.evil.example"}, 403),
    ({"Host": "user@localhost"}, 403),
    ({"Host": ""}, 403),
    ({"Host": "127.0.0.1/x"}, 403),
]


@pytest.mark.fault("G3")
def test_pages_of_others_do_not_get_in() -> None:
    options = {"hosts": ["me.example"], "origins": ["https://play.example/"]}
    with served(collect=False, server_options=options) as there:
        for headers, status in HEADERS:
            with dial(there) as sock:
                sock.sendall(upgrade(there, **headers))
                assert sock.recv(4096).startswith(f"HTTP/1.1 {status} ".encode()), headers
    twice = {"Host": ["localhost"], "Origin": ["http://localhost"] * 2, "Sec-WebSocket-Protocol": ["marlvec.v1"]}
    assert RequestFilter("127.0.0.1", (), ()).refusal("/", twice) is not None


# --- G16


@pytest.mark.fault("G16")
def test_sound_messages_in_any_order() -> None:
    """What is legal is a matter of the order alone; whatever comes, all others are answered."""
    with served(8, resume_seconds=0, episodes=3, window=50) as there, Honest(there):
        for seed in range(12):
            walk(there, random.Random(seed))
        until(lambda: len(there.envs.gateway.episodes) == 1)
        assert there.server.clients == 1


def walk(there: Served, rng: random.Random) -> None:
    """One client that says sound things at random, and knows which of them are legal."""
    with Raw(there.url) as raw:
        states: dict[int, str] = {}
        last = 0
        for _ in range(40):
            kind = rng.choice(
                [k for k in Type if FORMS[k].sender == "client" and k not in (Type.HELLO, Type.AUTH, Type.BYE)]
            )
            episode = rng.randint(max(0, last - 2), last + 1)
            choices: dict[Type, dict[str, Any]] = {
                Type.BEGIN: {"episode": episode, "training": rng.random() < 0.5},
                Type.STEP: {"episode": episode, "obs": wire_obs(3)},
                Type.LOG: {"episode": episode, "obs": wire_obs(3), "actions": {"a": 1, "b": 2}},
                Type.RETURNS: {"episode": episode, "rewards": {"a": 1.0}},
                Type.LEAVE: {"episode": episode, "obs": {}, "terminated": [], "truncated": []},
                Type.END: {"episode": episode, "obs": {}, "truncated": rng.random() < 0.5},
                Type.ABANDON: {"episode": episode, "reason": "at random"},
                Type.WEIGHTS: {"have": 0},
                Type.PART: {"version": 0, "part": 0},
            }
            reply = raw.ask(kind, **choices[kind])
            legal = "episode" not in choices[kind] or states.get(episode) == "runs"
            if kind is Type.BEGIN:
                legal = episode > last and len(states) < 3
                if legal:
                    states[episode], last = "runs", episode
            elif kind in (Type.END, Type.ABANDON):
                states.pop(episode, None)
            elif kind is Type.PART:
                legal = False
            assert (reply.type is not Type.REFUSED) == legal, (kind, episode, states, reply)
        if rng.random() < 0.3:
            forbidden = rng.choice([k for k in Type if FORMS[k].sender == "server" or k in (Type.HELLO, Type.AUTH)])
            raw.link.send(
                write_message(
                    Message(forbidden, SOUND[forbidden], 0 if not FORMS[forbidden].is_numbered else raw.number + 1)
                )
            )
            raw.wait_for_end()


@pytest.mark.fault("G16")
@pytest.mark.parametrize("connections", [150, pytest.param(50_000, marks=pytest.mark.soak)])
def test_hostile_connections(connections: int) -> None:
    """Goal R12 at the socket: mutated bytes at each stage; an honest client's answers are right throughout."""
    rng = random.Random(connections)
    fds = len(list(Path("/proc/self/fd").iterdir()))
    with served(4, resume_seconds=0, handshake_seconds=1.0) as there, Honest(there):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        settled = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(connections):
            attack(there, rng)
        until(lambda: len(list(Path("/proc/self/fd").iterdir())) <= settled, 4)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024
        until(lambda: len(there.envs.gateway.episodes) == 1)
    until(lambda: len(list(Path("/proc/self/fd").iterdir())) <= fds)


def attack(there: Served, rng: random.Random) -> None:
    stage = rng.randrange(4)
    with suppress(ConnectionError, RefusedError, TimeoutError), dial(there) as sock:
        sock.settimeout(0.001)
        if stage == 0:
            sock.sendall(mutate(upgrade(there), rng))
            return
        sock.sendall(upgrade(there))
        payloads = [mutate(rng.choice(SEEDS), rng) for _ in range(rng.randint(1, 5))]
        if stage > 1:
            auth = write_message(Message(Type.AUTH, {"proof": b"", "session": b""}))
            payloads = [hello(), auth, *payloads]
        frames = b"".join(masked(payload) for payload in payloads)
        sock.sendall(frames if stage < 3 else mutate(frames, rng))
        with suppress(TimeoutError):
            sock.recv(65536)


ODD: tuple[Any, ...] = (
    *(None, True, 0, -1, 2**63 - 1, -(2**63), 1.5, float("nan"), float("inf"), "", "a", "z" * 200, "__common__", "\0"),
    *(b"", b"x" * 20, [], [1], [[]], {}, {"a": {}}, {"": None}, ["a", "a"], ["float32", [3], b"\0" * 11]),
    *(["float32", [-1], b""], ["float64", [3], b"\0" * 24], ["int64", [], b"\0" * 8], wire_obs(1)),
)


def with_an_odd_part(value: Any, rng: random.Random) -> Any:
    """The same with one part, at any depth, that is another, missing, or there twice."""
    if not value or not isinstance(value, (dict, list)) or rng.random() < 0.3:
        return rng.choice(ODD)
    changed = value.copy()
    key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
    if rng.random() < 0.2:
        del changed[key]
    else:
        changed[key] = with_an_odd_part(value[key], rng)
    return changed


@pytest.mark.fault("G16")
@pytest.mark.parametrize("messages", [400, pytest.param(50_000, marks=pytest.mark.soak)])
def test_sound_frames_with_an_odd_part(messages: int, caplog: pytest.LogCaptureFixture) -> None:
    """Frames that can be read, of which one field is another: refused, and no defect of ours; others go on."""
    rng = random.Random(messages)
    kinds = [kind for kind in SOUND if FORMS[kind].sender == "client" and FORMS[kind].is_numbered]
    replies = Counter[Type]()
    with served(4, resume_seconds=0) as there, Honest(there):
        for _ in range(messages):
            kind = rng.choice(kinds)
            fields = {**SOUND[kind], **({"episode": 1} if "episode" in SOUND[kind] else {})}
            with Raw(there.url) as raw, suppress(ConnectionError):
                raw.begin()
                odd = with_an_odd_part(fields, rng)
                if isinstance(odd, dict) and all(isinstance(name, str) for name in odd):
                    replies[raw.ask(kind, **odd).type] += 1
        until(lambda: len(there.envs.gateway.episodes) == 1)
    assert {Type.ERROR, Type.REFUSED, Type.OK} <= replies.keys()
    assert not [record for record in caplog.records if record.exc_info]


def test_nothing_of_it_needs_a_collector(caplog: pytest.LogCaptureFixture) -> None:
    """The server's thread answers what it can, and says nothing of strangers at the level of warnings."""
    with served(collect=False) as there, dial(there) as sock:
        sock.sendall(b"x" * 10_000)
        read_all(sock)
        with Raw(there.url) as raw:
            raw.begin()
            raw.link.send(write_message(Message(Type.PING, {})))
            assert raw.get().type is Type.PONG
            raw.link.send(write_message(Message(Type.PONG, {})))
            raw.sock.sendall(masked(b"text", 1))
            raw.wait_for_end()
    assert not [record for record in caplog.records if record.name.startswith("marlvec.external")]


@pytest.mark.soak
@pytest.mark.fault("G10")
def test_a_thousand_clients() -> None:
    """Goal R13: 1,000 clients, of whom 50 play, and 50 more who say a byte now and then."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    try:
        seen = crowd(clients=1000, idle=950, slow=50, seconds=20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert seen.refused_code == "full"
    assert seen.bytes_per_idle < 64 * 1024
    assert seen.accept_seconds < 5
    assert seen.p99_ms < 100
    assert seen.wrong == 0


@pytest.mark.fault("G16")
def test_a_request_with_something_on_its_heels() -> None:
    """Found by mutated bytes: what follows is looked at before the request is answered."""
    with served() as there, Honest(there):
        for request in (upgrade(there), upgrade(there, Origin="http://evil.example"), b"GET /\r\n\r\n"):
            for rest in (b"\x00" * 50, b"\xff" * 50, masked(b"x" * 5000), masked(hello()), masked(b"", 8)):
                with dial(there) as sock:
                    sock.sendall(request + rest)
                    sock.shutdown(socket.SHUT_WR)
                    read_all(sock)


@pytest.mark.fault("G16")
def test_a_defect_of_our_own_closes_one_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with served() as there, Honest(there), Raw(there.url) as raw:
        session_manager = there.server._loop.session_manager
        receive, accept = session_manager.receive, session_manager.accept

        def fail(connection: Any, data: bytes) -> None:
            if b"defect" in data:
                raise ZeroDivisionError
            receive(connection, data)

        monkeypatch.setattr(session_manager, "receive", fail)
        raw.link.send(b"defect")
        raw.wait_for_end()
        monkeypatch.setattr(session_manager, "accept", lambda connection: (accept(connection), 1 // 0))
        with suppress(ConnectionLost), socket.create_connection((there.server.host, there.server.port)):
            until(lambda: "the server continues" in caplog.text)
        monkeypatch.setattr(session_manager, "accept", accept)
        Raw(there.url).close()
    assert caplog.text.count("a defect in marlvec") == 2


FEW_DESCRIPTORS = """
import os, resource, socket, sys, threading, time
from tests.external.helpers.served import Raw, served
from tests.waiting import until
with served(collect=False, clients=500) as there:
    free = int(sys.argv[1])
    there_are = len(os.listdir("/proc/self/fd")) - 1
    print(there.server.port, flush=True)
    resource.setrlimit(resource.RLIMIT_NOFILE, (there_are + free, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    print("limited", flush=True)
    for line in sys.stdin:
        print(there.server.counters.accepted, flush=True)
"""


@pytest.mark.slow("a server in a process of its own")
@pytest.mark.fault("F3")
@pytest.mark.parametrize("come_and_go", [False, True])
def test_a_server_without_descriptors_warns_once_however_many_clients_wait(come_and_go: bool) -> None:
    """Neither each failed accept() is a line, nor each client that comes where one has left."""
    with subprocess.Popen(
        [sys.executable, "-c", FEW_DESCRIPTORS, "6"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        port = int(process.stdout.readline())
        process.stdout.readline()

        def accepted() -> int:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            return int(process.stdout.readline())

        with ExitStack() as stack:
            waiting = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 5)) for _ in range(40)]
            until(lambda: accepted() >= 1)
            time.sleep(0.5)  # fifty failed calls
            few = accepted()
            assert few < 20
            for sock in waiting[: 40 if come_and_go else 0]:
                sock.close()
            if come_and_go:
                until(lambda: accepted() == 40)
                for _ in range(40):
                    stack.enter_context(socket.create_connection(("127.0.0.1", port), 5))
                until(lambda: accepted() > 40)
        _, err = process.communicate(timeout=60)
    lines = err.splitlines()
    assert len(lines) == 1, err
    assert "no more clients can connect now: Too many open files; " in lines[0]
    assert "(`ulimit -n`) above Limits(clients=500)" in lines[0]
    assert process.returncode == 0
