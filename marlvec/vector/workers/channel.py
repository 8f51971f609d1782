"""What connects a worker with its parent: messages over two pipes, shared memory, and stacks of a crash.

A closed end of a `Channel` means that the process has ended.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import select
import signal
import struct
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from marlvec.vector import cores as limits

_HEADER = struct.Struct("<HHIQ")
_MARK = 0xA7D3 << 48  # in the last field, above the size
_MAX_SIZE = 1 << 40  # bytes of a payload; a larger size is not valid
_CHUNK = 1 << 16  # bytes to read at a time: as many as a pipe holds

# Codes of requests, and the operations that they request.
INIT, ATTACH, RESET, STEP, SEND, RESTART, STATE, CONTROL, GET_STATE, SET_STATE, CLOSE = range(1, 12)
OPERATIONS = {
    "reset": RESET,
    "step": STEP,
    "send": SEND,
    "restart": RESTART,
    "state": STATE,
    "control": CONTROL,
    "get_state": GET_STATE,
    "set_state": SET_STATE,
}

# Replies.
OK, FAILED = 100, 101

_CODES = frozenset({*range(INIT, CLOSE + 1), OK, FAILED})

MAX_COUNT = 0xFFFF
"""Maximum number of envs in one message."""


class ChannelClosed(Exception):
    """The other end is closed."""


class Garbled(ChannelClosed):
    """The received bytes are not a message: other code has written into the pipe, and the rest cannot be read."""


class ChannelMessage(NamedTuple):
    """One message: a header of 16 bytes (code, envs, sequence number, size and mark), and a payload if not empty."""

    code: int
    envs: int  # in a reply, how many of the request's envs are ready
    number: int  # sequence number of the request
    payload: bytes


class Channel:
    """One end of a two-way channel, which owns its descriptors.

    If reading does not block, `take` never waits, not even for the rest of a message. If writing does not block, `send`
    reads incoming messages while the pipe is full, so that two ends that send large messages cannot wait for each
    other; `take` and `recv` return these messages, in ``inbox``, first.
    """

    __slots__ = ("__weakref__", "_begun", "_close_fds", "_header", "inbox", "is_half_sent", "read_fd", "write_fd")

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self.read_fd = read_fd
        self.write_fd = write_fd
        self._close_fds = closer(read_fd, write_fd)
        self.inbox: deque[ChannelMessage] = deque()
        self.is_half_sent = False
        self._header: tuple[int, int, int, int] | None = None  # complete header of the message being received
        self._begun = bytearray()  # received part of the header, or else of the payload

    def send(self, code: int, number: int, payload: bytes = b"", count: int = 0, timeout: float | None = None) -> None:
        """Send one message about ``count`` envs; `ChannelClosed`: the other end is closed, or does not read."""
        # `timeout`: seconds to wait while the pipe is full, if it does not block.
        data = _HEADER.pack(code, count, number, _MARK | len(payload))
        if payload:
            data += payload
        self.is_half_sent = len(data) > select.PIPE_BUF  # shorter writes are atomic
        try:
            sent = os.write(self.write_fd, data)
            if sent < len(data):
                self._send_rest(memoryview(data)[sent:], timeout)
        except BlockingIOError:
            self._send_rest(memoryview(data), timeout)
        except OSError as error:
            raise ChannelClosed(str(error)) from None
        self.is_half_sent = False

    def _send_rest(self, data: memoryview, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        poll = select.poll()
        poll.register(self.write_fd, select.POLLOUT)
        poll.register(self.read_fd, select.POLLIN)
        while data:
            left = None if deadline is None else max(0, int(1000 * (deadline - time.monotonic())))
            events = poll.poll(left)
            if not events:
                raise ChannelClosed("it does not read")
            for fd, event in events:
                if fd == self.write_fd:
                    try:
                        data = data[os.write(fd, data) :]
                    except BlockingIOError:
                        continue
                    except OSError as error:
                        raise ChannelClosed(str(error)) from None
                elif event & select.POLLIN:
                    if (message := self._receive(None)) is not None:
                        self.inbox.append(message)
                else:
                    raise ChannelClosed("end of file")

    def take(self, number: int | None = None) -> ChannelMessage | None:
        """Return the next message if all of it has arrived; None: a later call returns it."""
        # A wrong sequence number raises Garbled before the payload is read; None: any.
        if self.inbox:
            return self.inbox.popleft()
        if self._header is not None or self._begun:
            return self._receive(number)
        # Nearly always the header has arrived completely and there is no payload.
        try:
            data = os.read(self.read_fd, _HEADER.size)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ChannelClosed(str(error)) from None
        if len(data) == _HEADER.size:
            code, count, own, size = _HEADER.unpack(data)
            if size == _MARK and code in _CODES and (number is None or own == number):
                return ChannelMessage(code, count, own, b"")
        self._keep(data)
        return self._receive(number)

    def recv(self, timeout: float | None = None) -> ChannelMessage:
        """Wait for one message; `ChannelClosed`: the other end is closed, or ``timeout`` seconds are up."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (message := self.take()) is None:
            if not self._more(deadline):
                raise ChannelClosed("time is up")
        return message

    def skip(self, timeout: float) -> None:
        """Drop incoming bytes until the other end is closed or time is up, so that it cannot block while writing."""
        deadline = time.monotonic() + timeout
        try:
            while self._more(deadline) and os.read(self.read_fd, _CHUNK):
                pass
        except OSError:
            return

    def skip_to(self, number: int, timeout: float) -> None:
        """Wait for the reply to this request, and drop it with all bytes before it."""
        # For use after an interrupt, which may have lost a part of the received bytes.
        deadline = time.monotonic() + timeout
        self.inbox.clear()
        self._header = None
        head = _HEADER.pack(OK, 0, number, 0)[: _HEADER.size // 2]
        unread = self._begun
        while True:
            start = unread.find(head)
            if start < 0:
                del unread[: 1 - len(head)]  # the rest may be the beginning of the reply's header
            elif len(unread) >= start + _HEADER.size:
                size = _HEADER.unpack_from(unread, start)[3] & ~_MARK
                if len(unread) >= start + _HEADER.size + size:
                    unread.clear()
                    return
            try:
                data = os.read(self.read_fd, _CHUNK)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise ChannelClosed("time is up") from None
                self._more(min(deadline, time.monotonic() + 1.0))  # Ctrl-C just before a wait does not end it
                continue
            except OSError as error:
                raise ChannelClosed(str(error)) from None
            if not data:
                raise ChannelClosed("end of file")
            unread += data

    @property
    def torn(self) -> str:
        """How much of an incomplete message has arrived, in words; empty if there is none."""
        if self._header is not None:
            return f"{len(self._begun):,} of {self._header[3] & ~_MARK:,} bytes that it had announced"
        return f"{len(self._begun)} of the {_HEADER.size} bytes of a header" if self._begun else ""

    def _more(self, deadline: float | None) -> bool:
        """Wait until there are bytes to read, or the other end is closed."""
        poll = select.poll()
        poll.register(self.read_fd, select.POLLIN)
        left = None if deadline is None else 1000 * (deadline - time.monotonic())
        return bool(poll.poll(left if left is None else max(0, min(left, 2**31 - 1))))

    def _receive(self, number: int | None) -> ChannelMessage | None:
        try:
            if self._header is None:
                data = self._whole(_HEADER.size)
                _check(data, number)
                self._header = _HEADER.unpack(data)
            code, count, own, size = self._header
            payload = self._whole(size & ~_MARK)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ChannelClosed(str(error)) from None
        self._header = None
        return ChannelMessage(code, count, own, payload)

    def _whole(self, size: int) -> bytes:
        """Read ``size`` bytes; if fewer have arrived, keep them for the next call."""
        if not self._begun and size <= _CHUNK:
            data = os.read(self.read_fd, size)
            if len(data) == size:
                return data
            self._keep(data)
        while (missing := size - len(self._begun)) > 0:
            self._keep(os.read(self.read_fd, min(missing, _CHUNK)))
        data, self._begun = bytes(self._begun), bytearray()
        return data

    def _keep(self, data: bytes) -> None:
        if not data:
            raise ChannelClosed("end of file")
        self._begun += data

    def close(self) -> None:
        self.read_fd = self.write_fd = -1
        self._close_fds()


def _check(header: bytes, number: int | None) -> None:
    code, _, own, size = _HEADER.unpack(header)
    if size >> 48 != _MARK >> 48 or code not in _CODES:
        raise Garbled(f"expected a header of {_HEADER.size} bytes, got {header!r}")
    if size & ~_MARK > _MAX_SIZE:
        raise Garbled(f"announced {size & ~_MARK:,} bytes, expected {_MAX_SIZE:,} at most")
    if number is not None and own != number:
        raise Garbled(f"answered request {own}, expected {number}")


class AdaptivePoller:
    """Decides how to wait: poll repeatedly for a short time, or sleep at once.

    A sleeping process wakes 50 to 200 µs late, later if its core sleeps, too, and waking it costs about as much. If
    most recent waits ended within ``window`` seconds, the next wait begins by polling, and yields the core between two
    polls; else it sleeps at once. ``window=0``, if no core is free for polling: always sleep.
    """

    __slots__ = ("_share_short", "_window")

    def __init__(self, window: float) -> None:
        self._window = window
        self._share_short = 0.0  # share of short waits among the recent ones

    def wait(self, poll: select.poll, timeout_ms: int | None = None) -> list[tuple[int, int]]:
        """Wait as ``poll.poll(timeout_ms)`` does, and return the same."""
        if not self._window:
            return poll.poll(timeout_ms)
        start = time.perf_counter()
        events = (self._look(poll, start) if self._share_short > 0.5 else []) or poll.poll(timeout_ms)
        self._learn(time.perf_counter() - start, ended=bool(events))
        return events

    def receive(self, poll: select.poll, channel: Channel) -> ChannelMessage:
        """Wait for a message; it sleeps in the read itself, which saves a system call."""
        start = time.perf_counter()
        self._look(poll, start)
        message = channel.recv()
        self._learn(time.perf_counter() - start, ended=True)
        return message

    def _look(self, poll: select.poll, start: float) -> list[tuple[int, int]]:
        events: list[tuple[int, int]] = []
        if self._share_short > 0.5:
            end = start + self._window
            try:
                while not (events := poll.poll(0)) and time.perf_counter() < end:
                    os.sched_yield()
            except OSError:  # an env has lowered this process's limit of open files below one
                self._window = self._share_short = 0.0
        return events

    def _learn(self, took: float, *, ended: bool) -> None:
        short = took < self._window
        if ended or not short:
            self._share_short += 0.25 * (short - self._share_short)


def pair() -> tuple[Channel, tuple[int, int]]:
    """Make a channel: this process's end, and the two file descriptors (read, write) for the other end."""
    down_r, down_w = os.pipe()
    try:
        up_r, up_w = os.pipe()
    except OSError:
        os.close(down_r)
        os.close(down_w)
        raise
    os.set_blocking(down_w, False)
    os.set_blocking(up_r, False)
    return Channel(up_r, down_w), (down_r, up_w)


def closer(*fds: int) -> Callable[[], object]:
    """Return a function that closes these descriptors, each once, even if it is called again or was interrupted."""
    # The system reuses the number of a closed descriptor, so closing it twice would close another file. Taking it from
    # the iterator and closing it is one step of the interpreter, and interrupts come only between steps.
    return partial(deque, map(os.close, iter(fds)), 0)


if sys.platform != "win32":
    import fcntl


def create(name: str = "marlvec", *, in_file: bool = False) -> int:
    """Open an empty block, private to this user; return its file descriptor, labelled ``name`` in lists of files."""
    # `in_file`: use a file in the temporary folder, as on systems without anonymous shared memory.
    with limits.asked_for("a block of shared memory"):
        if not in_file and sys.platform == "linux" and hasattr(os, "memfd_create"):
            fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.fchmod(fd, 0o600)  # a memfd begins as 0777
            return fd
        with tempfile.TemporaryFile() as file:  # unlinked at once, mode 0600
            return os.dup(file.fileno())


def grow(fd: int, size: int, *, in_file: bool = False) -> None:
    """Give the block its final size, in bytes, and allocate it: a lack of memory raises here, not as SIGBUS later."""
    # Checked before the allocation: a kernel that overcommits, or a memory cgroup, would kill a process instead.
    limits.check_memory(size)
    if sys.platform == "linux":
        with limits.asked_for(f"{size:,} bytes of shared memory"):
            os.posix_fallocate(fd, 0, size)
        if not in_file and hasattr(os, "memfd_create"):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    else:
        os.ftruncate(fd, size)


def map_memory(fd: int, size: int, *, inherit: bool = True) -> mmap.mmap:
    """Map the block into this process. It is unmapped when the last array on it is deleted."""
    # Without `inherit`, on Linux, a forked child that accesses it dies: a child that continues a worker's code must not
    # write into rows.
    block = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    if not inherit and hasattr(mmap, "MADV_DONTFORK"):
        block.madvise(mmap.MADV_DONTFORK)
    return block


ASK = getattr(signal, "SIGUSR2", signal.SIGTERM)
"""The signal that requests a dump from a worker."""

_MAX_BYTES = 16 * 1024
_MAX_DUMP = 1 << 20
_LEFT_OUT = "\n… left out …\n".encode()
_FATAL = b"Fatal Python error"
_QUIET = 0.02  # seconds without new bytes after which a dump counts as complete


class StackDump:
    """Stack dumps of one worker, read in the parent; the worker gets a duplicate of ``fd``."""

    def __init__(self) -> None:
        self.fd = create("stacks")
        self._close_fd = closer(self.fd)
        self._asked = 0  # bytes of requested dumps

    def crash(self) -> str:
        """Return the dump of a crash, at most 16 KiB; empty if there was none, or after `close`."""
        if self.fd < 0:
            return ""
        _, head, rest = os.pread(self.fd, _MAX_DUMP, self._asked).partition(_FATAL)  # an answer may come late
        return _readable(head + rest)

    def ask(self, send: Callable[[], object], timeout: float) -> str:
        """Request a dump from a living worker, by ``send``; return it, at most 16 KiB, empty after ``timeout`` s."""
        if self.fd < 0:
            return ""
        begin = self._size()
        send()
        size, since = begin, time.monotonic()
        deadline = since + timeout
        while (now := time.monotonic()) < deadline and not (size > begin and now - since >= _QUIET):
            time.sleep(0.002)
            if (grown := self._size()) != size:
                size, since = grown, time.monotonic()
        self._asked = size
        return _readable(os.pread(self.fd, min(size - begin, _MAX_DUMP), begin))

    def _size(self) -> int:
        return os.fstat(self.fd).st_size

    def close(self) -> None:
        self.fd = -1
        self._close_fd()


def _readable(data: bytes) -> str:
    """Decode a dump to text without control characters, which file names and env code may contain."""
    if len(data) > _MAX_BYTES:
        # A dump begins with the cause; the main thread, which runs the envs, comes last.
        half = (_MAX_BYTES - len(_LEFT_OUT)) // 2
        data = data[:half] + _LEFT_OUT + data[-half:]
    return "".join(c for c in data.decode(errors="replace") if c in "\n\t" or c.isprintable())


def write_stacks_to(fd: int) -> None:
    """In a worker: write the stacks of all threads to ``fd`` at a crash, and whenever `ASK` is received."""
    # Until this call that signal must be blocked: it kills a process without a handler.
    faulthandler.enable(fd, all_threads=True)
    faulthandler.register(ASK, fd, all_threads=True, chain=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {ASK})
    os.register_at_fork(after_in_child=_forget_in_child)


def _forget_in_child() -> None:
    """Disable dumps in a process that an env forks: its crash is not the worker's."""
    faulthandler.disable()
    faulthandler.unregister(ASK)
    with contextlib.suppress(ValueError):  # not the main thread of the main interpreter
        signal.signal(ASK, signal.SIG_DFL)
