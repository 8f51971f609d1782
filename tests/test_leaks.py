from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.leaks import SHM, Snapshot, leaks


@pytest.fixture
def before() -> Snapshot:
    return Snapshot.take()


@pytest.fixture
def segment() -> Iterator[Path]:
    path = SHM / f"marlvec-test-{os.getpid()}"
    yield path
    path.unlink(missing_ok=True)


def only(found: list[str]) -> str:
    assert len(found) == 1, found
    return found[0]


def test_nothing_new_is_no_leak(before: Snapshot) -> None:
    assert leaks(before) == []


def test_an_open_file_is_named(before: Snapshot, tmp_path: Path) -> None:
    with (tmp_path / "rows").open("w"):
        assert str(tmp_path / "rows") in only(leaks(before, grace=0))
    assert leaks(before) == []


def test_a_logger_that_is_set_otherwise_is_named(before: Snapshot) -> None:
    log = logging.getLogger("marlvec")
    was = log.level
    try:
        log.setLevel(logging.CRITICAL)
        assert f"level was {was}, is {logging.CRITICAL}" in only(leaks(before, grace=0))
    finally:
        log.setLevel(was)
    assert leaks(before) == []


def test_fonts_that_matplotlib_keeps_open_are_no_leak(before: Snapshot, tmp_path: Path) -> None:
    fonts = tmp_path / "matplotlib" / "mpl-data" / "fonts"
    fonts.mkdir(parents=True)
    with (fonts / "DejaVuSans.ttf").open("w"):
        assert leaks(before, grace=0) == []


def test_a_memfd_and_both_ends_of_a_socket_are_seen(before: Snapshot) -> None:
    fd = os.memfd_create("buffers")
    ours, theirs = socket.socketpair()
    found = leaks(before, grace=0)
    assert len(found) == 3
    assert any("/memfd:buffers" in line for line in found)
    os.close(fd)
    ours.close()
    theirs.close()
    assert leaks(before) == []


def test_one_socket_in_place_of_another_is_no_leak() -> None:
    old = socket.socket()
    try:
        before = Snapshot.take()
        new = socket.socket()
        old.close()
        assert leaks(before, grace=0) == []
        new.close()
    finally:
        old.close()


def test_a_thread_is_named_while_it_runs(before: Snapshot) -> None:
    go = threading.Event()
    thread = threading.Thread(target=go.wait, name="feeder")
    thread.start()
    assert "'feeder'" in only(leaks(before, grace=0))
    go.set()
    thread.join()
    assert leaks(before) == []


def test_what_goes_away_in_time_is_no_leak(before: Snapshot) -> None:
    thread = threading.Thread(target=time.sleep, args=(0.2,))
    thread.start()
    assert leaks(before) == []
    thread.join()


def test_what_only_a_reference_cycle_holds_is_no_leak(before: Snapshot, tmp_path: Path) -> None:
    class Holder:
        def __init__(self) -> None:
            self.me = self
            self.fd = os.open(tmp_path, os.O_RDONLY)

        def __del__(self) -> None:
            os.close(self.fd)

    Holder()
    assert leaks(before, grace=0.1) == []


@pytest.mark.slow("starts programs of its own")
def test_an_unreaped_child_is_a_leak(before: Snapshot) -> None:
    child = subprocess.Popen(["sleep", "60"])
    assert "sleep 60" in only(leaks(before, grace=0))
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # until it is dead, and still to be waited for
    assert "zombie" in only(leaks(before, grace=0.1))
    child.wait()
    assert leaks(before) == []


@pytest.mark.slow("starts programs of its own")
def test_an_orphaned_grandchild_is_still_ours(before: Snapshot) -> None:
    # The shell ends at once, and the kernel gives its child to another process.
    shell = subprocess.run(
        ["sh", "-c", "sleep 61 >/dev/null 2>&1 & echo $!"], capture_output=True, text=True, check=True
    )
    assert "sleep 61" in only(leaks(before, grace=0.1))
    os.kill(int(shell.stdout), signal.SIGKILL)
    assert leaks(before) == []


def test_shared_memory_is_named(before: Snapshot, segment: Path) -> None:
    segment.write_bytes(b"rows")
    assert str(segment) in only(leaks(before, grace=0))
    segment.unlink()
    assert leaks(before) == []


def test_shared_memory_that_others_use_is_theirs(before: Snapshot, segment: Path) -> None:
    segment.write_bytes(b"rows")
    # Not of this run, as far as anybody can tell: no mark in its environment, and its parent is gone.
    hold = f"exec 3<{segment}; {sys.executable} -S -c 'import time; print(flush=True); time.sleep(60)' & echo $!"
    shell = subprocess.Popen(["sh", "-c", hold], env={}, stdout=subprocess.PIPE, text=True)
    assert shell.stdout is not None
    pid = int(shell.stdout.readline())
    shell.stdout.readline()
    shell.stdout.close()
    shell.wait()
    try:
        assert leaks(before, grace=0) == []
    finally:
        os.kill(pid, signal.SIGKILL)
