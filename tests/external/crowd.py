"""Very many clients at one server: goal R13."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from marlvec.errors import RefusedError
from marlvec.external.messages import Type
from tests.external.served import Raw, expected, obs_of, wire_obs

ROOT = Path(__file__).resolve().parents[2]
_SERVER = """
import sys, resource
from tests.external.served import served
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
def rss():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
clients = int(sys.argv[1])
with served(64, clients=clients, handshake_seconds=60, heartbeat_seconds=60) as there:
    print(there.server.url, flush=True)
    for line in sys.stdin:
        print(rss(), len(there.server._loop.session_manager.connections), flush=True)
"""


@dataclass(frozen=True)
class Seen:
    """What was measured.

    Attributes:
        accept_seconds: Until all were in.
        bytes_per_idle: Of the server's memory, for each client that does nothing.
        p50_ms, p99_ms: How long the active ones waited for an answer.
        answers, wrong: How many there were, and how many were not what the policy says.
        refused_code: What the one too many was told.
    """

    accept_seconds: float
    bytes_per_idle: float
    p50_ms: float
    p99_ms: float
    answers: int
    wrong: int
    refused_code: str


def crowd(clients: int, idle: int, slow: int, seconds: float) -> Seen:
    """Run a server in a process of its own, and so many clients against it.

    Args:
        clients: How many in all, as many as the server lets in.
        idle: Of those, how many do nothing.
        slow: How many say one byte now and then, and are never let in: beside the others.
        seconds: How long the rest play.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER, str(clients)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    raws: list[Raw] = []
    lorises: list[socket.socket] = []
    try:
        url = process.stdout.readline().strip()

        def ask() -> tuple[int, int]:
            process.stdin.write("\n")
            process.stdin.flush()
            rss, there = process.stdout.readline().split()
            return int(rss), int(there)

        Raw(url).close()  # whatever the first one costs
        time.sleep(0.3)
        before, _ = ask()
        began = time.monotonic()
        raws = [Raw(url) for _ in range(clients)]
        accept_seconds = time.monotonic() - began
        after, there = ask()
        assert there >= clients
        code = ""
        try:
            Raw(url).close()
        except RefusedError as error:
            code = error.code
        host, port = url.removeprefix("ws://").rstrip("/").split(":")
        lorises = [socket.create_connection((host, int(port)), 5) for _ in range(slow)]
        times, wrong = _play(raws[idle:], lorises, seconds)
        return Seen(
            accept_seconds,
            (after - before) / clients,
            float(np.percentile(times, 50)) * 1000,
            float(np.percentile(times, 99)) * 1000,
            len(times),
            wrong,
            code,
        )
    finally:
        for raw in raws:
            raw.close()
        for sock in lorises:
            sock.close()
        process.stdin.close()
        process.wait()
        process.stdout.close()


def _play(active: list[Raw], lorises: list[socket.socket], seconds: float) -> tuple[list[float], int]:
    stop = threading.Event()

    def drip() -> None:
        rng = random.Random(0)
        while not stop.wait(0.02):
            for sock in lorises:
                sock.sendall(bytes([rng.choice(b"GET / HTTP/1.1 X:")]))

    thread = threading.Thread(target=drip)
    thread.start()
    times: list[float] = []
    wrong = 0
    try:
        for raw in active:
            raw.begin()
        deadline = time.monotonic() + seconds
        number = 0
        while time.monotonic() < deadline:
            number += 1
            for raw in active:  # each has one question on its way
                raw.asked_at = time.monotonic()  # type: ignore[attr-defined]
                raw.send(Type.STEP, episode=1, obs=wire_obs(number % 400))
            action = expected(obs_of(number % 400))
            for raw in active:
                reply: Any = raw.get(30)
                times.append(time.monotonic() - raw.asked_at)  # type: ignore[attr-defined]
                wrong += reply.fields.get("actions") != {"a": action, "b": action}
    finally:
        stop.set()
        thread.join()
    return times, wrong


if __name__ == "__main__":
    import resource

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    sys.stdout.write(json.dumps(crowd(1000, 950, 50, float(sys.argv[1])).__dict__, indent=1) + "\n")
