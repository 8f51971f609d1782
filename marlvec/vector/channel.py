"""A doorbell: one small fixed message each way, and a closed end is the news of a death.

Two pipes without any lock, so a killed process can take nothing along. Each message is a header of 16 bytes (code,
number of envs it is about, sequence number, size of the payload) and, only where there is something to say beyond
numbers in the buffers, a payload.
"""

from __future__ import annotations

import os
import select
import struct
import time
from collections import deque
from typing import NamedTuple

__all__ = ["Channel", "ChannelClosed", "Message", "Patience", "pair"]

_HEADER = struct.Struct("<HHIQ")

# Requests, by number; the names are those of the operations.
INIT, ATTACH, RESET, STEP, SEND, REVIVE, STATE, CONTROL, CLOSE = range(1, 10)
OPERATIONS = {"reset": RESET, "step": STEP, "send": SEND, "revive": REVIVE, "state": STATE, "control": CONTROL}

# Replies.
OK, FAILED = 100, 101

MAX_COUNT = 0xFFFF
"""How many envs one message can be about."""


class ChannelClosed(Exception):
    """The other end is gone."""


class Message(NamedTuple):
    """One message.

    Attributes:
        code: What is asked, or how it went.
        envs: How many envs it is about; of a reply, how many of those that its request named.
        number: Sequence number of the request.
        payload: Whatever else there is to say.
    """

    code: int
    envs: int
    number: int
    payload: bytes


class Channel:
    """One end of a two-way channel.

    Args:
        read_fd: Where the other end's messages come in. Owned by the channel from now on, like ``write_fd``.
        write_fd: Where ours go out. If it does not block, a full pipe is waited for while reading what comes in, so
            that two ends with much to say cannot wait for each other.

    Attributes:
        inbox: Messages that came in while we were sending; `recv` hands them out first.
    """

    __slots__ = ("__weakref__", "inbox", "read_fd", "write_fd")

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self.read_fd = read_fd
        self.write_fd = write_fd
        self.inbox: deque[Message] = deque()

    def send(self, code: int, number: int, payload: bytes = b"", count: int = 0, timeout: float | None = None) -> None:
        """Send one message.

        Args:
            code: What is asked, or how it went.
            number: Sequence number of the request.
            payload: Whatever else there is to say.
            count: How many envs it is about.
            timeout: Seconds to wait while the pipe is full, if it does not block; None for ever.

        Raises:
            ChannelClosed: The other end is gone, or does not read.
        """
        data = _HEADER.pack(code, count, number, len(payload))
        if payload:
            data += payload
        try:
            sent = os.write(self.write_fd, data)
            if sent < len(data):
                self._send_rest(memoryview(data)[sent:], timeout)
        except BlockingIOError:
            self._send_rest(memoryview(data), timeout)
        except OSError as error:
            raise ChannelClosed(str(error)) from None

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
                    self.inbox.append(self._receive())
                else:
                    raise ChannelClosed("end of file")

    def recv(self) -> Message:
        """Wait for one message.

        Raises:
            ChannelClosed: The other end is gone.
        """
        return self.inbox.popleft() if self.inbox else self._receive()

    def _receive(self) -> Message:
        try:
            code, count, number, size = _HEADER.unpack(self._read(_HEADER.size))
            return Message(code, count, number, self._read(size) if size else b"")
        except OSError as error:
            raise ChannelClosed(str(error)) from None

    def _read(self, size: int) -> bytes:
        data = os.read(self.read_fd, size)
        if len(data) == size:
            return data
        parts = bytearray(data)
        while data and len(parts) < size:
            data = os.read(self.read_fd, min(size - len(parts), 1 << 20))
            parts += data
        if len(parts) < size:
            raise ChannelClosed("end of file")
        return bytes(parts)

    def close(self) -> None:
        """Close both pipes; may be called again."""
        for fd in (self.read_fd, self.write_fd):
            if fd >= 0:
                os.close(fd)
        self.read_fd = self.write_fd = -1


class Patience:
    """Decides how to wait: look again and again for a short while, or go to sleep at once.

    A sleeper is woken 50 to 200 µs late, the more so where its core went to sleep with it, and who wakes it pays about
    as much. Where most of the last waits were short, the next one begins by looking, and gives the core away between
    two looks; else it sleeps at once, and nobody's core is taken.

    Args:
        window: Seconds to look for; a wait that ends within them is short. 0 where there is no core to look on: always
            sleep.
    """

    __slots__ = ("_hope", "_window")

    def __init__(self, window: float) -> None:
        self._window = window
        self._hope = 0.0  # share of short waits, of those lately

    def wait(self, poll: select.poll, timeout_ms: int | None = None) -> list[tuple[int, int]]:
        """Do as ``poll.poll(timeout_ms)`` does."""
        if not self._window:
            return poll.poll(timeout_ms)
        start = time.perf_counter()
        events = self._look(poll, start) or poll.poll(timeout_ms)
        self._learn(time.perf_counter() - start, ended=bool(events))
        return events

    def receive(self, poll: select.poll, channel: Channel) -> Message:
        """Wait for a message; to sleep it takes the read itself, which spares a call into the kernel.

        Raises:
            ChannelClosed: The other end is gone.
        """
        start = time.perf_counter()
        self._look(poll, start)
        message = channel.recv()
        self._learn(time.perf_counter() - start, ended=True)
        return message

    def _look(self, poll: select.poll, start: float) -> list[tuple[int, int]]:
        events: list[tuple[int, int]] = []
        if self._hope > 0.5:
            end = start + self._window
            try:
                while not (events := poll.poll(0)) and time.perf_counter() < end:
                    os.sched_yield()
            except OSError:  # an env has taken this process's limit of files down below one
                self._window = self._hope = 0.0
        return events

    def _learn(self, took: float, *, ended: bool) -> None:
        short = took < self._window
        if ended or not short:
            self._hope += 0.25 * (short - self._hope)


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
    return Channel(up_r, down_w), (down_r, up_w)
