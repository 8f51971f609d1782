"""The server itself: killed, where it listens, pages of others, and clients that say anything (faults G14 to G16)."""

from __future__ import annotations

import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from marlvec import external
from marlvec.errors import ArgumentError, ConnectionLost, EpisodeOver, RefusedError, ResourceError
from marlvec.external import Client, Server, make_token
from marlvec.external import session_loop as socket_loop
from marlvec.external.connections import RequestFilter
from marlvec.external.messages import FORMS, Message, Type, write_message
from tests.external.crowd import crowd
from tests.external.served import (
    SPACES,
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
from tests.external.test_messages import SEEDS, SOUND, mutate
from tests.vector.support.reference import refused
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
TOKEN = make_token()


# --- G14

SERVER = """
import sys
from tests.external.served import served
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
        refused((ConnectionLost, TimeoutError), "", client.get_action, episode, {"a": one, "b": one})
        process.stdout.close()
        process, _ = run_server(port)
        client.timeout = 60
        refused((ConnectionLost, EpisodeOver), "", client.wait_for_action, episode)
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
            refused(ArgumentError, "which other machines can reach: say allow_remote=True", Server, envs, host)
            refused(ArgumentError, "give a token", Server, envs, host, allow_remote=True)
        with pytest.raises(ResourceError, match="cannot listen there"):
            Server(envs, "192.0.2.1", allow_remote=True, token=TOKEN)  # not an address of this machine
        with Server(envs, "0.0.0.0", allow_remote=True, token=TOKEN) as server:
            Client(f"ws://127.0.0.1:{server.port}/", token=TOKEN).close()
        refused(ArgumentError, "say allow_remote=True", Server, envs, "0.0.0.0", allow_no_token=True)
        with Server(envs, "0.0.0.0", allow_remote=True, allow_no_token=True) as server:
            Client(f"ws://127.0.0.1:{server.port}/").close()
        with (
            Server(envs, "0.0.0.0", allow_remote=True, allow_no_token=True, token=TOKEN) as server,
            pytest.raises(RefusedError, match="token"),  # it may be asked for all the same
        ):
            Client(f"ws://127.0.0.1:{server.port}/")
        for host, port in (("", 0), (None, 0), ("127.0.0.1", -1), ("127.0.0.1", 70000), ("127.0.0.1", True)):
            refused(ArgumentError, "expected", Server, envs, host, port)
        refused(ResourceError, "no such address", Server, envs, "no.such.host.invalid")
        real = socket.getaddrinfo
        both = [(2, 1, 6, "", ("127.0.0.1", 0)), (2, 1, 6, "", ("192.0.2.1", 0))]
        monkeypatch.setattr(socket_loop.socket, "getaddrinfo", lambda *a, **k: both)
        with pytest.raises(ArgumentError, match=r"is 192.0.2.1"):  # one of the name's addresses is enough
            Server(envs, "two-faced.example")
        monkeypatch.setattr(socket_loop.socket, "getaddrinfo", real)
        refused(ArgumentError, "ExternalVectorEnv", Server, object())
        refused(ArgumentError, "lists of texts", Server, envs, hosts="localhost")


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
            refused(ConnectionLost, "", Client, f"ws://127.0.0.1:{server.port}/", reconnect_timeout=0.2)


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
from tests.external.served import Raw, served
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
