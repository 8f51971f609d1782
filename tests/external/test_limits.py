"""Whatever a client sends: nothing is run because of it, and the server's memory stays bounded."""

from __future__ import annotations

import base64
import gc
import io
import json
import marshal
import pickle
import re
import socket
import subprocess
import sys
import threading
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import cloudpickle
import msgpack
import numpy as np
import pytest

from marlvec import external
from marlvec.errors import BusyError, ConnectionLost, ProtocolError, RefusedError
from marlvec.external import session
from marlvec.external import session_loop as session_manager
from marlvec.external.exchange import Account
from marlvec.external.messages import Frame, Message, Type, pack_frame, read_message, write_array, write_message
from tests.external.served import SPACES, Raw, Served, obs_of, served, wire_obs
from tests.external.test_messages import ATTACKS
from tests.external.test_socket_faults import masked
from tests.vector.support.reference import refused
from tests.waiting import until

# --- Goal R14: payloads of a corpus are refused, and nothing is unpickled, compiled, imported or run because of them


ROOT = Path(__file__).resolve().parents[2]
SERVER = """
import sys
import marlvec.external.client_episodes, marlvec.external.client_episodes
import marlvec.external.request_channel
from tests.external.served import Raw, served

EVENTS = {"pickle.find_class", "exec", "compile", "import", "os.system", "subprocess.Popen", "marshal.loads", "os.exec",
          "os.posix_spawn", "os.fork", "ctypes.dlopen", "code.__new__", "shutil.rmtree", "os.remove", "open"}
counts = {}
armed = False

def hook(event, args):
    if armed and event in EVENTS:
        key = f"{event} {str(args)[:200]}"
        counts[key] = counts.get(key, 0) + 1

sys.addaudithook(hook)
with served(4, resume_seconds=0) as there:
    with Raw(there.url) as raw:  # whatever is imported at the first time
        raw.begin()
        raw.step(1)
        raw.link.send(b"no message")
        raw.wait_for_end()
    print(there.server.url, flush=True)
    sys.stdin.readline()
    armed = True
    print("armed", flush=True)
    sys.stdin.readline()
    armed = False
    episodes = len(there.envs.gateway.episodes)
    print(repr((there.server.clients, there.server.counters.refused, episodes, counts)), flush=True)
    sys.stdin.readline()
"""


class Bomb:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> Any:
        import os

        return os.system, ("touch /tmp/marlvec-was-here",)


PICKLES = [pickle.dumps(Bomb(), protocol) for protocol in range(6)]
NPY = io.BytesIO()
np.save(NPY, np.array([Bomb()], object), allow_pickle=True)
ZIP = io.BytesIO()
with zipfile.ZipFile(ZIP, "w") as archive:
    archive.writestr("../../etc/passwd", "root")
BLOBS: dict[str, bytes] = {
    **{f"pickle {protocol}": data for protocol, data in enumerate(PICKLES)},
    "cloudpickle": cloudpickle.dumps(lambda: sys.exit(1)),
    "marshal": marshal.dumps(compile("import os; os.system('id')", "x", "exec")),
    "npy of objects": NPY.getvalue(),
    "zip with a path": ZIP.getvalue(),
    "python": b"__import__('os').system('id')",
    "base64 of a pickle": base64.b64encode(PICKLES[4]),
    "yaml": b"!!python/object/apply:os.system ['id']",
    "json": b'{"py/reduce": [{"py/function": "os.system"}, ["id"]]}',
    "jsonpickle": json.dumps({"py/object": "os.system"}).encode(),
}


def payloads() -> Iterator[tuple[str, bytes]]:
    """Name and bytes of one message each, sent as an episode's second request."""
    for name, blob in BLOBS.items():
        yield f"{name} as a message", blob
        yield f"{name} behind a header", pack_frame(Frame(Type.STEP, 2, 0, blob))
        yield f"{name} as an observation", step({"a": blob, "b": blob})
        yield f"{name} in an array", step({"a": ["object", [1], blob], "b": ["|O", [len(blob) // 8], blob]})
        yield f"{name} as an action", message(Type.LOG, obs=wire_obs(1), actions={"a": blob, "b": 1})
        yield f"{name} as infos", message(Type.STEP, obs=wire_obs(1), infos={"a": {"x": blob}})
        yield f"{name} as an extension", raw_step(msgpack.ExtType(0, blob))
        yield f"{name} as a reason", message(Type.ABANDON, reason=blob)
    for name, array in ATTACKS.items():
        yield f"array: {name}", step({"a": array, "b": array})
    for field in ("__class__", "__reduce__", "py/object", "$function", "$connector", "$space", "$array"):
        yield f"{field} as a field", message(Type.STEP, obs=wire_obs(1), **{field: "os.system"})
        yield f"{field} as an observation", step({"a": {field: "os.system"}, "b": {field: 1}})
    for name in ("../../etc/passwd", "a; rm -rf /", "{0.__class__}", "%s%n", "a\0b", "${jndi:ldap://x}", "a" * 300):
        yield f"agent {name[:12]!r}", step({name: write_array(obs_of(1))})
        yield f"weights {name[:12]!r}", message(Type.WEIGHTS, have=name)


def message(kind: Type, **fields: Any) -> bytes:
    common = {} if kind is Type.WEIGHTS else {"episode": 1}
    return write_message(Message(kind, {**common, **fields}, 2))


def step(obs: dict[str, Any]) -> bytes:
    return message(Type.STEP, obs=obs)


def raw_step(extension: Any) -> bytes:
    body = msgpack.packb({"episode": 1, "obs": {"a": extension}})
    return pack_frame(Frame(Type.STEP, 2, 0, body))


@pytest.mark.slow("many clients and connections")
@pytest.mark.fault("G7")
def test_nothing_of_an_attack_is_ever_run() -> None:
    corpus = list(payloads())
    assert len({name for name, _ in corpus}) == len(corpus) >= 40
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def say() -> str:
        process.stdin.write("\n")
        process.stdin.flush()
        return process.stdout.readline()

    try:
        url = process.stdout.readline().strip()
        assert say() == "armed\n"
        for name, data in corpus:
            with Raw(url) as raw:
                raw.begin()
                raw.link.send(data)
                with suppress(ConnectionError):
                    answer = raw.get()
                    rejected = answer.type is Type.ERROR or (answer.type is Type.REFUSED and answer.fields["re"] == 2)
                    assert rejected, (name, answer)
                    said = answer.fields["text"]
                    assert len(said) <= 4000
                    assert not re.search(r"Traceback|File \"", said)
        for blob in BLOBS.values():  # and before anybody was let in
            for data in (blob, pack_frame(Frame(Type.HELLO, 0, 0, blob)), pack_frame(Frame(Type.AUTH, 0, 0, blob))):
                with Raw(url, greet=False) as raw:
                    raw.link.send(data)
                    raw.wait_for_end()
            refused(RefusedError, "", Raw, url, session=(blob * 40)[:32])
        said = say()
        clients, rejected, episodes, counts = eval(said, {"__builtins__": {}})
        assert counts == {}
        assert rejected > len(BLOBS) * 3
        assert (clients, episodes) in ((0, 0), (1, 1))  # the last one may just be going
        assert not Path("/tmp/marlvec-was-here").exists()
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


@pytest.mark.fault("G7")
def test_nothing_there_could_unpickle() -> None:
    """No module of the socket's side names what can build objects from data."""
    forbidden = re.compile(
        r"^\s*(import|from)\s+(pickle|cloudpickle|marshal|shelve|dill|joblib|yaml|torch|multiprocessing)\b"
        r"|(?<![.\w])(eval|exec|compile)\(|allow_pickle|__import__|np\.load\b",
        re.MULTILINE,
    )
    files = [
        path for path in (ROOT / "marlvec/external").glob("*.py") if path.name not in ("__init__.py", "vector_env.py")
    ]
    assert len(files) > 8
    found = {str(path): match[0] for path in files if (match := forbidden.search(path.read_text()))}
    assert found == {}


# --- Whatever a client makes grow is counted: the server's memory stays bounded, and who goes beyond is told


TOTAL = 4 * 2**20
ACTIONS = {"a": 1, "b": 1}
BLOB = {"a": {"x": ["uint8", [100_000], b"x" * 100_000]}}
GREETING = {"proof": b"p" * 32, "session": b""}


def new_keys(i: int) -> dict[str, Any]:
    """Infos as large as one message may have them, whose keys no other message has."""
    return {who: {f"{i} {k} {'k' * 60}": 1000 + k for k in range(64)} for who in ("a", "b", "__common__")}


def begin(raw: Raw, episode: int = 1) -> Message:
    return raw.ask(Type.BEGIN, episode=episode, training=True)


# Each gives the fields of one message after the other; the numbers of the messages are the sender's affair.
Sayings = Iterator[tuple[Type, dict[str, Any]]]


def infos_of_returns() -> Sayings:
    for i in range(2000):
        yield Type.RETURNS, {"episode": 1, "rewards": {"a": 1.0}, "infos": new_keys(i)}


def infos_of_leaves() -> Sayings:
    yield Type.LOG, {"episode": 1, "obs": wire_obs(1), "actions": ACTIONS}
    for i in range(2000):
        yield Type.LEAVE, {"episode": 1, "obs": {}, "terminated": [], "truncated": [], "infos": new_keys(i)}


def rows() -> Sayings:
    for _ in range(800):
        yield Type.LOG, {"episode": 1, "obs": wire_obs(1), "actions": ACTIONS, "infos": BLOB}


def rows_of_many_small_infos() -> Sayings:
    for i in range(2000):
        yield Type.LOG, {"episode": 1, "obs": wire_obs(1), "actions": ACTIONS, "infos": new_keys(i)}


def requests_that_wait() -> Sayings:
    """What they say is nonsense, and nobody has looked: read, it is fifty times as large as it came."""
    for _ in range(3):
        yield Type.LOG, {"episode": 1, "obs": wire_obs(1), "actions": ACTIONS}
    nonsense = {"a": [[{} for _ in range(1000)] for _ in range(10)]}
    for _ in range(200):
        yield Type.LOG, {"episode": 1, "obs": nonsense, "actions": ACTIONS}


GROWS: dict[str, Callable[[], Sayings]] = {
    grow.__name__: grow
    for grow in (infos_of_returns, infos_of_leaves, rows, rows_of_many_small_infos, requests_that_wait)
}


def say(there: Served, raw: Raw, sayings: Sayings) -> list[Message]:
    """Say one thing after the other until the server has enough; returns the last that came from it."""
    heard = there.server.counters.messages
    with suppress(ConnectionError, ConnectionLost):
        for kind, fields in sayings:
            raw.send(kind, **fields)
            heard += 1
            until(lambda: there.server.counters.messages >= heard or not there.server.clients)  # noqa: B023
            if not there.server.clients:
                break
            for data in raw.link.receive(0):
                message = read_message(data, "server")
                raw.received = max(raw.received, message.number)
                if message.type is Type.ERROR:
                    raw.inbox.append(message)
    return [message for message in raw.wait_for_end() if message.type is Type.ERROR]


@pytest.mark.slow("many clients and connections")
@pytest.mark.fault("G10")
@pytest.mark.parametrize("how", GROWS)
def test_whatever_grows_is_counted_and_refused(how: str) -> None:
    """Nobody collects: nothing of what is said is ever taken."""
    options = {"max_backlog": 2 if how == "requests_that_wait" else 1000}
    # An eighth of the whole is as much as one may have in wait, so that either limit may be the first.
    limits = {"total_bytes": TOTAL, "held_bytes": TOTAL // 8}
    with served(16, collect=False, envs_options=options, **limits) as there, Raw(there.url) as raw:
        assert begin(raw).type is Type.OK
        gc.collect()
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            errors = say(there, raw, GROWS[how]())
            _, peak = tracemalloc.get_traced_memory()
            until(lambda: not there.server.clients)
            gc.collect()
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert [error.fields["code"] for error in errors] == ["limit"]
        assert peak - before < 3 * TOTAL, f"{(peak - before) / 2**20:.1f} MiB"
        assert after - before < TOTAL // 2, f"{(after - before) / 2**20:.1f} MiB are kept of who is gone"
        assert there.server._loop.session_manager._all_accounts.rows == 0
        assert there.server._loop.session_manager._all_accounts.pending == 0
        with Raw(there.url) as other:  # and all others are as well off as before
            assert begin(other).type is Type.OK
            assert other.ask(Type.RETURNS, episode=1, rewards={"a": 1.0}).type is Type.OK


@pytest.mark.fault("G10")
def test_a_message_that_never_ends_is_counted() -> None:
    with served(1, collect=False, total_bytes=TOTAL) as there, Raw(there.url) as raw:
        raw.begin()
        raw.sock.settimeout(60)
        with suppress(OSError):
            for i in range(100):
                raw.sock.sendall(masked(b"x" * 100_000, 0 if i else 2, fin=False))
        raw.wait_for_end()  # what it sent and nobody read may take along what it was told
        until(lambda: not there.server.clients)  # for good: its session does not wait for it


@pytest.mark.fault("G10")
def test_rows_of_who_is_gone_count_and_go_before_those_who_are_there() -> None:
    """It ends its episodes, says goodbye, and comes again, all within the rules; others have hardly anything."""
    with served(8, collect=False, total_bytes=TOTAL) as there, Raw(there.url) as modest:
        modest.begin()
        for _ in range(12):
            with Raw(there.url) as raw:
                raw.begin()
                blob = {"a": {"x": ["uint8", [2**20], b"x" * 2**20]}}
                raw.send(Type.LOG, episode=1, obs=wire_obs(1), actions=ACTIONS, infos=blob)
                raw.send(Type.END, episode=1, obs={}, truncated=True)
                raw.send(Type.BYE)
                raw.wait_for_end()
        until(lambda: there.server.clients == 1)
        there.server._loop.session_manager._spare_memory()
        assert there.server._loop.session_manager._all_accounts.rows <= TOTAL
        assert modest.ask(Type.RETURNS, episode=1, rewards={"a": 1.0}).type is Type.OK


@pytest.mark.fault("G10")
def test_who_brings_rows_faster_than_they_are_taken_waits_and_loses_nothing() -> None:
    """Bytes make wait as rows do; and nobody is cut off for being quick."""
    with served(2, collect=False, held_bytes=600_000, total_bytes=TOTAL) as there, Raw(there.url) as raw:
        raw.begin()
        for _ in range(10):  # five have room, and five are held
            raw.send(Type.LOG, episode=1, obs=wire_obs(1), actions=ACTIONS, infos=BLOB, rewards={"a": 1.0})
        heard = there.server.counters.messages
        until(lambda: there.server.counters.messages == heard)
        for _ in range(6):
            assert raw.get().type is Type.OK
        (episode,) = there.envs.gateway.episodes
        assert episode.backlog == 6
        assert not episode.has_room
        refused(BusyError, "6 rows wait", episode.log_action, {"a": obs_of(1)}, {"a": 1})
        thread = threading.Thread(target=there.collect)
        thread.start()
        try:
            for _ in range(4):
                assert raw.get().type is Type.OK
            raw.step(2)
            assert raw.ask(Type.END, episode=1, obs={}, truncated=True).type is Type.OK
            until(lambda: there.server._loop.session_manager._all_accounts.rows == 0)
        finally:
            there.stop(thread)
        assert not there.envs.faults


def test_an_account_follows_what_is_said_and_taken() -> None:
    with external.make(SPACES, 2, max_episode_steps=4) as envs:
        account = Account(10**6)
        episode = envs.gateway.begin(account=account)
        episode.log_returns({"a": 1.0}, {"a": {"x": np.zeros(1000)}})
        said = account.pending
        assert said > 8000
        episode.log_returns({}, {"a": {"x": np.zeros(1000)}})
        assert account.pending == said  # in place of what was there
        episode.log_returns({}, {"a": {"x": 1.0}})
        assert account.pending < 1000
        episode.log_action({"a": obs_of(1), "b": obs_of(1)}, ACTIONS)
        assert account.pending == 0
        assert account.rows > 1000
        episode.end_agents({"a": obs_of(2)})
        assert account.pending > 0
        episode.abandon(RuntimeError())
        assert (account.pending, account.rows) == (0, 0)
        for _ in range(3):
            episode = envs.gateway.begin(account=account)
            episode.log_action({"a": obs_of(1), "b": obs_of(1)}, ACTIONS)
            episode.end()
        rows = account.rows
        envs.gateway.begin(account=Account(1)).log_action({"a": obs_of(1)}, {"a": 1})
        envs.gateway.drop(account, RuntimeError())
        assert account.rows == 0 < rows


def test_a_short_message_takes_as_long_as_it_is_however_much_was_said_before() -> None:
    """Bytes, not seconds: whoever copies all that was said has to put it somewhere."""
    with external.make(SPACES, 1) as envs:
        episode = envs.gateway.begin(account=Account(10**9))
        peaks = []
        for i in range(600):
            episode.log_returns({}, new_keys(i))
            if i in (20, 599):
                known = episode._infos["a"]
                tracemalloc.start()
                episode.log_returns({"a": 1.0}, {"a": {"x": 1}})
                peaks.append(tracemalloc.get_traced_memory()[1])
                tracemalloc.stop()
                assert episode._infos["a"] is known
        assert max(peaks) < 32 * 1024, peaks


@pytest.mark.fault("G10")
def test_what_is_held_is_not_read_again_until_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"max_backlog": 1}
    with served(1, collect=False, envs_options=options) as there, Raw(there.url) as raw:
        raw.begin()
        for _ in range(20):
            raw.send(Type.LOG, episode=1, obs=wire_obs(1), actions=ACTIONS)
        loop = there.server._loop
        until(lambda: there.server.counters.messages >= 23)
        tried: list[int] = []
        retry = loop.session_manager.retry
        monkeypatch.setattr(loop.session_manager, "retry", lambda: (tried.append(1), retry()))
        read: list[int] = []
        monkeypatch.setattr(session, "read_message", lambda *a: (read.append(1), read_message(*a))[1])
        until(lambda: len(tried) > 20)
        assert read == []


@pytest.mark.fault("G11")
def test_replies_count_as_much_as_they_take() -> None:
    """A reply of 30 bytes is kept in ten times as many."""
    with served(1, collect=False, kept_bytes=200_000) as there, Raw(there.url) as raw:
        raw.begin()
        (one,) = there.server._loop.session_manager.sessions.values()
        kept = 0
        with suppress(ConnectionError, ConnectionLost):
            for _ in range(2000):
                raw.received = 0
                raw.ask(Type.RETURNS, episode=1, rewards={})
                kept = max(kept, len(one._stream._kept))
        assert kept < 1000
        until(lambda: not there.server.clients or one.is_leaving)


@pytest.mark.fault("G13")
def test_addresses_of_wrong_tokens_are_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_manager, "_ADDRESSES", 8)
    with served(1, collect=False, server_options={"token": external.make_token()}) as there:
        for i in range(20):
            with socket.create_connection((there.server.host, there.server.port), 60, (f"127.0.0.{i + 2}", 0)) as sock:
                host = f"127.0.0.1:{there.server.port}"
                sock.sendall(
                    f"GET / HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
                    "Sec-WebSocket-Protocol: marlvec.v1\r\n\r\n".encode()
                )
                hello = {"versions": [1], "features": [], "name": "", "nonce": b"n" * 32}
                for kind, fields in ((Type.HELLO, hello), (Type.AUTH, GREETING)):
                    sock.sendall(masked(write_message(Message(kind, fields))))
                while sock.recv(4096):
                    pass
        assert there.server.counters.wrong_tokens == 20
        assert len(there.server._loop.session_manager._failures) <= 8


def test_what_is_wrong_with_a_long_text_is_said_in_a_short_one() -> None:
    """A text that is shown is cut before, not after."""
    text = "\0" * 2**20
    for fields in ({"obs": text}, {"obs": {}, "infos": {"a": {"x": text}}}, {"obs": {}, "infos": {"a": {"x": [text]}}}):
        data = write_message(Message(Type.STEP, {"episode": 1, **fields}, 1))
        tracemalloc.start()
        try:
            caught = refused(ProtocolError, "", read_message, data, "client")
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert len(str(caught)) < 500
        assert peak < 2.5 * 2**20


@pytest.mark.fault("G9")
def test_reasons_of_episodes_that_were_lost_are_few_and_counted() -> None:
    with served(1, collect=False) as there, Raw(there.url) as raw:
        (one,) = there.server._loop.session_manager.sessions.values()
        for episode in range(1, 201):
            raw.begin(episode)
            assert raw.ask(Type.ABANDON, episode=episode, reason="\u0001" * 4000).type is Type.OK
        assert len(one._cut) <= 64
        assert 64 * 100 < one.cost < 64 * 4096
        refused(RefusedError, "", Raw, there.url, session=b"x" * 32)
