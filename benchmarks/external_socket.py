"""External envs over a socket, beside a bare WebSocket echo of the same size, in the same run.

    python benchmarks/external_socket.py            a minute or two, on an idle machine
    python benchmarks/external_socket.py --quick    a few seconds

Round trips a second on loopback, with one client: an observation goes there, through connectors and a policy, and the
actions come back. The echo sends the same bytes back as they are: the library `websockets`, its asyncio server and its
blocking client, as anybody would write it. Each server is a process of its own; rounds take turns, and what is told is
the median over rounds. Beside it stands the processor time of both sides for one round trip, which other programs on
the machine change little. Then how long 16 clients wait, each asking again as soon as it is answered.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from websockets.sync.client import connect

from marlvec.external import Client
from marlvec.external.messages import Message, Type, write_array, write_message

AGENTS = tuple(f"agent_{i}" for i in range(3))
SIZE = 18  # as simple_spread has

OURS = f"""
import logging, sys, threading
import numpy as np
import marlvec
from gymnasium.spaces import Box, Discrete
from marlvec import external
from marlvec.policies import FunctionPolicy

spaces = {{name: (Box(-np.inf, np.inf, ({SIZE},)), Discrete(5)) for name in {AGENTS!r}}}
policy = FunctionPolicy(lambda rows: np.zeros(len(rows), np.int64))
with external.make(spaces, 16, copy=False) as envs, external.Server(envs) as server:
    collector = marlvec.Collector(envs, policy, policies_to_train=(), seed=0)
    def collect():
        try:
            while True:
                collector.collect(env_steps=256)
        except Exception:
            pass
    logging.getLogger('marlvec').setLevel(logging.ERROR)  # clients leave in the middle
    threading.Thread(target=collect, daemon=True).start()
    print(server.url, flush=True)
    sys.stdin.read()
"""
BARE = """
import asyncio, sys
from websockets.asyncio.server import serve

async def echo(socket):
    async for message in socket:
        await socket.send(message)

async def main():
    async with serve(echo, "127.0.0.1", 0, compression=None) as server:
        host, port = server.sockets[0].getsockname()[:2]
        print(f"ws://{host}:{port}/", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)

asyncio.run(main())
"""


@contextmanager
def server(program: str) -> Iterator[tuple[str, int]]:
    """Run a program that prints its url, and ends with its input; gives the url, and the process's id."""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip(), process.pid
    finally:
        process.stdin.close()
        process.kill()
        process.wait()
        process.stdout.close()


def obs() -> dict[str, Any]:
    """What one env step shows."""
    return {name: np.full(SIZE, 0.5, np.float32) for name in AGENTS}


def message() -> bytes:
    """The bytes that a client sends for it."""
    return write_message(
        Message(Type.STEP, {"episode": 1, "obs": {name: write_array(o) for name, o in obs().items()}}, 1)
    )


def processor_seconds(pid: int) -> float:
    """Processor time of this process and of another one, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return time.process_time() + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rate(ask: Callable[[], Any], pid: int, seconds: float) -> tuple[float, float]:
    """Calls a second, and microseconds of processor time for each."""
    for _ in range(20):
        ask()
    count, began, busy = 0, time.perf_counter(), processor_seconds(pid)
    while time.perf_counter() - began < seconds:
        for _ in range(20):
            ask()
        count += 20
    return count / (time.perf_counter() - began), (processor_seconds(pid) - busy) / count * 1e6


def one_client(rounds: int, seconds: float) -> Any:
    """What `rate` says of each round: (rounds, ours and the echo's, round trips and processor time)."""
    found = []
    with ExitStack() as stack:
        (url, pid), (bare_url, bare_pid) = (stack.enter_context(server(program)) for program in (OURS, BARE))
        ask, echo = ask_ours(url, stack), ask_bare(bare_url, stack)
        for _ in range(rounds):
            found.append((rate(ask, pid, seconds), rate(echo, bare_pid, seconds)))
    return np.array(found)


def many_clients(ask_of: Callable[[str, ExitStack], Callable[[], Any]], program: str, n: int, seconds: float) -> Any:
    """How long each of n clients waits, in milliseconds: median, 99 %; and answers a second in all."""
    times: list[list[float]] = [[] for _ in range(n)]
    with ExitStack() as stack:
        url, _ = stack.enter_context(server(program))
        asks = [ask_of(url, stack) for _ in range(n)]
        deadline = time.perf_counter() + seconds

        def play(ask: Callable[[], Any], mine: list[float]) -> None:
            while (began := time.perf_counter()) < deadline:
                ask()
                mine.append(time.perf_counter() - began)

        threads = [threading.Thread(target=play, args=pair) for pair in zip(asks, times, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    waits = np.concatenate([np.array(mine) for mine in times]) * 1000
    return np.percentile(waits, 50), np.percentile(waits, 99), len(waits) / seconds


def ask_ours(url: str, stack: ExitStack) -> Callable[[], Any]:
    """One more client of ours."""
    client = stack.enter_context(Client(url, timeout=60))
    episode, seen = client.start_episode(), obs()
    return lambda: client.get_action(episode, seen)


def ask_bare(url: str, stack: ExitStack) -> Callable[[], Any]:
    """One more of the echo's."""
    socket, data = stack.enter_context(connect(url, compression=None)), message()

    def ask() -> None:
        socket.send(data)
        socket.recv()

    return ask


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    rounds, seconds = (3, 0.5) if quick else (9, 2.0)
    found = one_client(rounds, seconds)
    (ours, own_us), (bare, bare_us) = np.median(found, axis=0)
    ratio, share = np.median(found[:, 0] / found[:, 1], axis=0)
    print(f"one client, {len(message())} bytes, 3 agents, {rounds} rounds of {seconds} s each")
    print(f"  marlvec          {ours:8,.0f} round trips/s   {own_us:8,.0f} µs of processor time each")
    print(f"  bare echo        {bare:8,.0f} round trips/s   {bare_us:8,.0f} µs")
    print(f"  marlvec / echo   {ratio:8.2f}                 {share:8.2f}      (asked for: 0.6 of its round trips)")
    for name, ask_of, program in (("marlvec", ask_ours, OURS), ("bare echo", ask_bare, BARE)):
        p50, p99, total = many_clients(ask_of, program, 16, 4 * seconds)
        print(f"16 clients of {name:10} median {p50:6.2f} ms, 99 % {p99:6.2f} ms, {total:8,.0f} round trips/s in all")


if __name__ == "__main__":
    main()
