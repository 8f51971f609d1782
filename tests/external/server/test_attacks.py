"""Goal R14: payloads of a corpus are refused, and nothing is unpickled, compiled, imported or run because of them."""

from __future__ import annotations

import base64
import io
import json
import marshal
import pickle
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import cloudpickle
import msgpack
import numpy as np
import pytest

from marlvec.errors import RefusedError
from marlvec.external.messages import Frame, Message, Type, pack_frame, write_array, write_message
from tests.external.helpers.served import Raw, obs_of, wire_obs
from tests.external.protocol.test_values import ATTACKS

ROOT = Path(__file__).resolve().parents[3]
SERVER = """
import sys
import marlvec.external.client_episodes, marlvec.external.client_episodes
import marlvec.external.request_channel
from tests.external.helpers.served import Raw, served

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
                    refused = answer.type is Type.ERROR or (answer.type is Type.REFUSED and answer.fields["re"] == 2)
                    assert refused, (name, answer)
                    said = answer.fields["text"]
                    assert len(said) <= 4000
                    assert not re.search(r"Traceback|File \"", said)
        for blob in BLOBS.values():  # and before anybody was let in
            for data in (blob, pack_frame(Frame(Type.HELLO, 0, 0, blob)), pack_frame(Frame(Type.AUTH, 0, 0, blob))):
                with Raw(url, greet=False) as raw:
                    raw.link.send(data)
                    raw.wait_for_end()
            with pytest.raises(RefusedError):
                Raw(url, session=(blob * 40)[:32])
        said = say()
        clients, refused, episodes, counts = eval(said, {"__builtins__": {}})
        assert counts == {}
        assert refused > len(BLOBS) * 3
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
