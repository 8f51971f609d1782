"""`StackDump`: the stacks of a worker's threads, written when it crashes or on request, to an unnamed file.

Python's faulthandler writes them from a signal handler, which works even during a segmentation fault and while C code
holds the GIL.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Callable

from marlvec.vector.processes import shared_memory
from marlvec.vector.processes.channel import closer

__all__ = ["ASK", "StackDump", "write_stacks_to"]

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
        self.fd = shared_memory.create("stacks")
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
