"""A doorbell: one small fixed message each way, and a closed end is the news of a death.

Two pipes without any lock, so a killed process can take nothing along. Each message is a header of 16 bytes (code,
sequence number, size of the payload) and, only where there is something to say beyond numbers in the buffers, a
payload.
"""

from __future__ import annotations

import os
import select
import struct
import time

__all__ = ["Channel", "ChannelClosed", "Patience"]

_HEADER = struct.Struct("<IIQ")

# Requests, by number; the names are those of the operations.
INIT, ATTACH, RESET, STEP, STATE, CLOSE = range(1, 7)
OPERATIONS = {"reset": RESET, "step": STEP, "state": STATE}

# Replies.
OK, FAILED = 100, 101


class ChannelClosed(Exception):
    """The other end is gone."""


class Channel:
    """One end of a two-way channel.

    Args:
        read_fd: Where the other end's messages come in. Owned by the channel from now on, like ``write_fd``.
        write_fd: Where ours go out.
    """

    __slots__ = ("__weakref__", "read_fd", "write_fd")

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self.read_fd = read_fd
        self.write_fd = write_fd

    def send(self, code: int, number: int, payload: bytes = b"") -> None:
        """Send one message.

        Raises:
            ChannelClosed: The other end is gone.
        """
        data = _HEADER.pack(code, number, len(payload)) + payload
        try:
            sent = os.write(self.write_fd, data)
            while sent < len(data):
                sent += os.write(self.write_fd, memoryview(data)[sent:])
        except (BrokenPipeError, OSError) as error:
            raise ChannelClosed(str(error)) from None

    def recv(self) -> tuple[int, int, bytes]:
        """Wait for one message: code, sequence number, payload.

        Raises:
            ChannelClosed: The other end is gone.
        """
        try:
            head = self._read(_HEADER.size)
            code, number, size = _HEADER.unpack(head)
            return code, number, self._read(size) if size else b""
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

    Being woken costs 10 to 50 µs, more than a cheap env's whole step. Where the last waits were about that short, the
    next one begins by looking, and gives the core away between two looks; where they were longer, it sleeps at once,
    and nobody's core is taken.
    """

    __slots__ = ("_expected",)

    _SHORT = 100e-6  # seconds; a wait that is longer on average is slept through
    _MEMORY = 0.1  # weight of the last wait in that average

    def __init__(self) -> None:
        self._expected = 1e-3

    def wait(self, poll: select.poll, timeout_ms: int | None = None) -> list[tuple[int, int]]:
        """Do as ``poll.poll(timeout_ms)`` does."""
        start = time.perf_counter()
        expected = self._expected
        events: list[tuple[int, int]] = []
        if expected < self._SHORT:
            end = start + 2 * expected
            while not (events := poll.poll(0)) and time.perf_counter() < end:
                os.sched_yield()
        if not events:
            events = poll.poll(timeout_ms)
        took = min(time.perf_counter() - start, 4 * self._SHORT)
        self._expected = expected + self._MEMORY * (took - expected)
        return events


def pair() -> tuple[Channel, tuple[int, int]]:
    """Make a channel: this process's end, and the two file descriptors (read, write) for the other end."""
    down_r, down_w = os.pipe()
    try:
        up_r, up_w = os.pipe()
    except OSError:
        os.close(down_r)
        os.close(down_w)
        raise
    return Channel(up_r, down_w), (down_r, up_w)
