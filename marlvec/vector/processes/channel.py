"""`Channel`: a fixed header each way, a payload behind it if there is one; a closed end is an ended process.

Two pipes without any lock, so a killed process can take nothing along. Each message is a header of 16 bytes (code,
number of envs it is about, sequence number, size of the payload with a mark that no other writer knows) and, only where
there is something to say beyond numbers in the buffers, a payload.

What an env runs can write to any descriptor of its process, these pipes too. So a header is checked before it is
believed, nothing is made room for before it has come, and the parent never waits in the middle of a message.
"""

from __future__ import annotations

import os
import select
import struct
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

__all__ = ["Channel", "ChannelClosed", "Garbled", "Message", "AdaptivePoller", "closer", "pair"]

_HEADER = struct.Struct("<HHIQ")
_MARK = 0xA7D3 << 48  # in the last field, above the size
_MAX_SIZE = 1 << 40  # bytes of a payload; more is no size but noise
_CHUNK = 1 << 16  # bytes to read at a time: as many as a pipe holds

# Requests, by number; the names are those of the operations.
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
"""How many envs one message can be about."""


class ChannelClosed(Exception):
    """The other end is gone."""


class Garbled(ChannelClosed):
    """What came in is no message: something else than its owner wrote into the pipe, and what follows means nothing."""


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
        read_fd: Where the other end's messages come in. Owned by the channel from now on, like ``write_fd``. If it does
            not block, `take` never waits, not even for the rest of a message.
        write_fd: Where ours go out. If it does not block, a full pipe is waited for while reading what comes in, so
            that two ends with much to say cannot wait for each other.

    Attributes:
        inbox: Messages that came in while we were sending; `take` and `recv` hand them out first.
        is_half_sent: Whether an exception came while a message was sent, so that some of it may be missing there.
    """

    __slots__ = ("__weakref__", "_begun", "_close_fds", "_header", "inbox", "is_half_sent", "read_fd", "write_fd")

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self.read_fd = read_fd
        self.write_fd = write_fd
        self._close_fds = closer(read_fd, write_fd)
        self.inbox: deque[Message] = deque()
        self.is_half_sent = False
        self._header: tuple[int, int, int, int] | None = None  # of the message that is coming in, once it is whole
        self._begun = bytearray()  # what has come of its header, or then of its payload

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
        data = _HEADER.pack(code, count, number, _MARK | len(payload))
        if payload:
            data += payload
        self.is_half_sent = len(data) > select.PIPE_BUF  # what is shorter goes as a whole, or not at all
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

    def take(self, number: int | None = None) -> Message | None:
        """Take the next message if all of it is there.

        Args:
            number: The one that it must have; None for any. A wrong one raises before its payload is waited for.

        Returns:
            The message; None if some of it is yet to come, which is left to the next call.

        Raises:
            Garbled: What came in is no message, or one with another number.
            ChannelClosed: The other end is gone.
        """
        if self.inbox:
            return self.inbox.popleft()
        if self._header is not None or self._begun:
            return self._receive(number)
        # Nearly always the whole header is there, and there is nothing behind it.
        try:
            data = os.read(self.read_fd, _HEADER.size)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ChannelClosed(str(error)) from None
        if len(data) == _HEADER.size:
            code, count, own, size = _HEADER.unpack(data)
            if size == _MARK and code in _CODES and (number is None or own == number):
                return Message(code, count, own, b"")
        self._keep(data)
        return self._receive(number)

    def recv(self, timeout: float | None = None) -> Message:
        """Wait for one message.

        Args:
            timeout: Seconds for all of it, where reading does not block; None for ever.

        Raises:
            Garbled: What came in is no message.
            ChannelClosed: The other end is gone, or time is up.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (message := self.take()) is None:
            if not self._more(deadline):
                raise ChannelClosed("time is up")
        return message

    def skip(self, timeout: float) -> None:
        """Throw away what comes in, until the other end is closed or time is up: it must not be stuck in writing."""
        deadline = time.monotonic() + timeout
        try:
            while self._more(deadline) and os.read(self.read_fd, _CHUNK):
                pass
        except OSError:
            return

    def skip_to(self, number: int, timeout: float) -> None:
        """Wait for the reply to this request, and throw it away with all that comes before it, whatever that is.

        After an interrupt, which may have lost some of what came in.

        Args:
            number: The request's.
            timeout: Seconds.

        Raises:
            ChannelClosed: The other end is gone, or time is up.
        """
        deadline = time.monotonic() + timeout
        self.inbox.clear()
        self._header = None
        head = _HEADER.pack(OK, 0, number, 0)[: _HEADER.size // 2]
        unread = self._begun
        while True:
            start = unread.find(head)
            if start < 0:
                del unread[: 1 - len(head)]  # the rest may be the beginning of it
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
        """What there is of a message that has begun to come in, in words; empty if there is none."""
        if self._header is not None:
            return f"{len(self._begun):,} of {self._header[3] & ~_MARK:,} bytes that it had announced"
        return f"{len(self._begun)} of the {_HEADER.size} bytes of a header" if self._begun else ""

    def _more(self, deadline: float | None) -> bool:
        """Wait until there is something to read, or the other end is closed."""
        poll = select.poll()
        poll.register(self.read_fd, select.POLLIN)
        left = None if deadline is None else 1000 * (deadline - time.monotonic())
        return bool(poll.poll(left if left is None else max(0, min(left, 2**31 - 1))))

    def _receive(self, number: int | None) -> Message | None:
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
        return Message(code, count, own, payload)

    def _whole(self, size: int) -> bytes:
        """Read so many bytes; what has come is kept where it is not all."""
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
        """Close both pipes; may be called again."""
        self.read_fd = self.write_fd = -1
        self._close_fds()


def _check(header: bytes, number: int | None) -> None:
    """Raise what is wrong with a header."""
    code, _, own, size = _HEADER.unpack(header)
    if size >> 48 != _MARK >> 48 or code not in _CODES:
        raise Garbled(f"expected a header of {_HEADER.size} bytes, got {header!r}")
    if size & ~_MARK > _MAX_SIZE:
        raise Garbled(f"announced {size & ~_MARK:,} bytes, expected {_MAX_SIZE:,} at most")
    if number is not None and own != number:
        raise Garbled(f"answered request {own}, expected {number}")


class AdaptivePoller:
    """Decides how to wait: look again and again for a short while, or go to sleep at once.

    A sleeper is woken 50 to 200 µs late, the more so where its core went to sleep with it, and waking it costs about
    as much. Where most of the last waits were short, the next one begins by looking, and gives the core away between
    two looks; else it sleeps at once, and no core is taken.

    Args:
        window: Seconds to look for; a wait that ends within them is short. 0 where there is no core to look on: always
            sleep.
    """

    __slots__ = ("_share_short", "_window")

    def __init__(self, window: float) -> None:
        self._window = window
        self._share_short = 0.0  # share of short waits, of those lately

    def wait(self, poll: select.poll, timeout_ms: int | None = None) -> list[tuple[int, int]]:
        """Do as ``poll.poll(timeout_ms)`` does."""
        if not self._window:
            return poll.poll(timeout_ms)
        start = time.perf_counter()
        events = (self._look(poll, start) if self._share_short > 0.5 else []) or poll.poll(timeout_ms)
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
        if self._share_short > 0.5:
            end = start + self._window
            try:
                while not (events := poll.poll(0)) and time.perf_counter() < end:
                    os.sched_yield()
            except OSError:  # an env has taken this process's limit of files down below one
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
    """What closes these, each once, however often it is called, and whatever has ended a call in the middle.

    The number of a closed descriptor is the next one that is given away: who closes it again closes what is not theirs.
    So it is taken from the list and closed in one step of the interpreter; an interrupt comes between steps alone.
    """
    return partial(deque, map(os.close, iter(fds)), 0)
