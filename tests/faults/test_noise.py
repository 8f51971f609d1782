"""Noise in a worker's reply pipe: something in the env writes to a descriptor that is not its own."""

from __future__ import annotations

import os
import select
import stat
import struct
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from marlvec import AsyncVectorEnv
from marlvec.errors import BrokenError, EnvFault, EnvTimeout, FetchTimeout, WorkerDied
from marlvec.testing.scripted import CounterEnv
from marlvec.vector.workers import channel as ch

N, A, NOISY = 4, 3, 1
MODES = ["raise", "restart", "mask"]
HEADER = struct.Struct("<HHIQ")


def scream(data: bytes) -> None:
    """Write to every pipe and socket of this process but its standard streams."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  (numbers are wanted)
        fd = int(name)
        try:
            mode = os.fstat(fd).st_mode
            if fd > 2 and (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
                os.write(fd, data)
        except OSError:  # it is for reading only; or was that of the listing
            continue


# What is written, and whether it has to come to an end of step_timeout to be known for what it is.
NOISES: dict[str, tuple[bytes, bool]] = {
    "one byte": (b"!", False),
    "a line": (b"libfoo: cannot open display, using the null driver\n", False),
    "zeros": (bytes(64), False),
    "more than a pipe holds": (b"spam and eggs\n" * 100_000, False),
    "a huge length": (HEADER.pack(ch.OK, 2, 2, 1 << 62), False),
    "a huge length, marked": (HEADER.pack(ch.OK, 2, 2, ch._MARK | ((1 << 48) - 1)), False),
    "another request's answer": (HEADER.pack(ch.OK, 2, 999, ch._MARK | 1000), False),
    "an answer for too many": (HEADER.pack(ch.OK, 60_000, 3, ch._MARK), False),
    "an answer that is none": (HEADER.pack(ch.OK, 2, 3, ch._MARK | 20) + b"x" * 20, False),
    "more than ever comes": (HEADER.pack(ch.OK, 2, 3, ch._MARK | 100_000), True),
}


class NoisyEnv(CounterEnv):
    """Env 1 screams when it is told so, and may fall silent then."""

    at: str | None = None
    data = b""
    silent = False

    def step(self, actions: Any) -> Any:
        if self.at == "before":
            self._scream()
        result = super().step(actions)
        if self.at == "after":
            self._scream()
        return result

    def _scream(self) -> None:
        self.at = None
        scream(self.data)
        if self.silent:
            time.sleep(3600)


def plan(env: Any, at: str, data: bytes, silent: bool = False) -> None:
    env.at, env.data, env.silent = at, data, silent


def make(**options: Any) -> AsyncVectorEnv:
    return AsyncVectorEnv([partial(NoisyEnv, 10, env_index=i) for i in range(N)], num_workers=2, **options)


def acts() -> Any:
    return np.ones((N, A), np.int64)


def survives(envs: AsyncVectorEnv, on_fault: str, kind: type[EnvFault], words: str, old: int) -> None:
    """A step in which it goes wrong: told as ``on_fault`` says, and the other worker never knows."""
    if on_fault == "raise":
        with pytest.raises(kind, match=words) as caught:
            envs.step(acts())
        assert getattr(caught.value, "lost_env_ids", ()) == (0, 1)
        with pytest.raises(BrokenError, match=r"only close\(\) is left"):
            envs.reset()
        return
    _, _, _, truncated, infos = envs.step(acts())
    assert infos["fault"].tolist() == [True, True, False, False]
    assert truncated.any(axis=1).tolist() == [True, True, False, False]
    (fault,) = envs.faults
    assert fault.lost_env_ids == (0, 1)
    assert not Path(f"/proc/{old}").exists() or "Z" in Path(f"/proc/{old}/stat").read_text(), "it is gone"
    for _ in range(12):  # more than an episode
        *_, infos = envs.step(acts())
        assert infos["alive"].all(axis=1).tolist() == [on_fault == "restart"] * 2 + [True] * 2
    envs.reset(seed=3)
    assert len(envs.faults) == 1


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=2)
@pytest.mark.parametrize("name", NOISES)
@pytest.mark.parametrize("on_fault", MODES)
def test_noise_in_a_step(on_fault: str, name: str) -> None:
    """Also without a deadline; but for what looks like a message that is still on its way."""
    data, must_wait = NOISES[name]
    turn = list(NOISES).index(name) + MODES.index(on_fault)
    timeout = 0.5 if must_wait or turn % 2 else None
    with make(on_fault=on_fault, step_timeout=timeout) as envs:
        envs.reset(seed=0)
        envs.exec_func(plan, [NOISY], ("before", "after")[turn // 2 % 2], data)
        envs._request_number = 2  # what comes next is request 3, which some of the noise pretends to answer
        kind, words = WorkerDied, "invalid data in its reply pipe|answered request"
        if must_wait:
            kind, words = EnvTimeout, "did not come back within step_timeout"  # type: ignore[assignment]
        survives(envs, on_fault, kind, words, envs.worker_pids[0])


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=5)
@pytest.mark.parametrize(
    ("on_fault", "size"), [("raise", 1), ("raise", 1000), ("restart", 15), ("restart", 16), ("mask", 17)]
)
def test_half_a_message_and_then_silence(on_fault: str, size: int) -> None:
    """The deadline holds in the middle of a message, of a header as of what follows it."""
    data = (HEADER.pack(ch.OK, 2, 3, ch._MARK | 100_000) + bytes(100_000))[:size]
    with make(on_fault=on_fault, step_timeout=0.5) as envs:
        envs.reset(seed=0)
        envs.exec_func(plan, [NOISY], "after", data, True)
        envs._request_number = 2
        survives(envs, on_fault, EnvTimeout, "env 1 did not come back within step_timeout.*", envs.worker_pids[0])


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=2)
@pytest.mark.parametrize("fetch", ["step", "recv"])
def test_a_fetch_times_out_in_the_middle_of_a_message(fetch: str) -> None:
    with make() as envs:
        envs.reset(seed=0)
        envs.exec_func(plan, [NOISY], "after", b"half", True)
        if fetch == "step":
            envs.step_send(acts())
        else:
            envs.send(acts())
        with pytest.raises(FetchTimeout, match="did not reply within 0.2 s"):
            envs.step_fetch(timeout=0.2) if fetch == "step" else envs.recv(timeout=0.2)
        start = time.monotonic()
        envs.close(timeout=0.2)
        assert time.monotonic() - start < 5


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=2)
@pytest.mark.parametrize("on_fault", MODES)
def test_noise_between_calls_is_found_by_the_next_one(on_fault: str) -> None:
    """From a thread of an env's, which nobody waits for."""
    with make(on_fault=on_fault) as envs:
        envs.reset(seed=0)
        envs.exec_func(scream_soon, [NOISY])
        pipe = envs._worker_pool.workers[0].channel.read_fd
        assert select.select([pipe], [], [], 20)[0]
        survives(envs, on_fault, WorkerDied, "invalid data in its reply pipe", envs.worker_pids[0])


def scream_soon(env: Any) -> None:
    threading.Timer(0.1, scream, (b"late news",)).start()


class LoudBuilder(NoisyEnv):
    """Screams while it is built."""

    def __init__(self, *args: Any, marks: Path, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.world.env_index == NOISY and not (marks / "done").exists():
            (marks / "done").touch()
            scream(b"building ...")


@pytest.mark.parametrize("on_fault", ["raise", "restart"])
def test_noise_while_envs_are_built(tmp_path: Path, on_fault: str) -> None:
    factories: list[Callable[[], Any]] = [partial(LoudBuilder, 10, env_index=i, marks=tmp_path) for i in range(N)]
    if on_fault == "raise":
        with pytest.raises(WorkerDied, match="invalid data in its reply pipe.*while it built its envs"):
            AsyncVectorEnv(factories, num_workers=2)
        return
    with AsyncVectorEnv(factories, num_workers=2, on_fault=on_fault) as envs:
        assert [fault.lost_env_ids for fault in envs.faults] == [(0, 1)]
        envs.reset(seed=0)
        envs.step(acts())


def test_noise_at_close_does_not_stop_other_closes(tmp_path: Path) -> None:
    class Loud(NoisyEnv):
        def close(self) -> None:
            scream(b"bye " * 100_000)
            (tmp_path / str(self.world.env_index)).touch()

    envs = AsyncVectorEnv([partial(Loud, 5, env_index=i) for i in range(2)], num_workers=2)
    envs.reset(seed=0)
    envs.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"], "and its env has been closed"
