"""The catalogue of faults, section G: whatever a client does or is, the server and all others go on."""

from __future__ import annotations

import hmac
import logging
import random
import resource
import socket
import struct
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from marlvec.errors import ArgumentError, ContractError, RefusedError
from marlvec.external import Client, Server, make_token, tokens
from marlvec.external.connections import Connection
from marlvec.external.messages import Frame, Message, Type, pack_frame, write_array, write_message
from marlvec.external.session import Session
from tests.external.crowd import crowd
from tests.external.served import (
    UPGRADE,
    Clock,
    Honest,
    Raw,
    Served,
    dial,
    expected,
    hello,
    masked,
    obs_of,
    read_all,
    served,
    upgrade,
    wire_obs,
)
from tests.external.test_messages import ATTACKS, SOUND
from tests.vector.support.reference import refused
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]


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
            caught = refused(RefusedError, "no such session", Raw, there.url, session=secret)
            assert caught.code == "session"
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
        caught = refused(RefusedError, "as many as may be; come back later", Raw, there.url)
        assert caught.code == "full"
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
            caught = refused(RefusedError, "", Client, there.url, token=token)
            assert caught.code == "token"
        assert client.start_episode()
        with served() as other, pytest.raises(RefusedError, match="requires none: it may be another one"):
            Client(other.url, token=TOKEN)
        refused(ArgumentError, "", Client, there.url, token="")
        refused(ArgumentError, "", Server, there.envs, token="")
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
            refused(RefusedError, "", Raw, there.url, make_token())
        for tried in (4, 5):  # from here on it takes its time, which stands
            rejected: list[RefusedError] = []

            def knock(rejected: list[RefusedError]) -> None:
                caught = refused(RefusedError, "", Raw, there.url, make_token())
                rejected.append(caught)

            thread = threading.Thread(target=knock, args=(rejected,))
            thread.start()
            until(lambda: penalties)
            Client(there.url, token=TOKEN, timeout=60).close()  # who knows it does not wait
            assert there.server.counters.wrong_tokens == tried
            assert not rejected
            clock.advance(2)
            thread.join()
            assert [error.code for error in rejected] == ["token"]
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
