"""`StackDump`: the stacks of a worker's threads, written when it crashes or is asked to.

Each worker has a file without a name for it. Python's faulthandler writes there from within a signal handler, so it
works where nothing else does: in the moment of a segmentation fault, and while C code holds the GIL.
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
"""The signal by which a worker is asked."""

_MAX_BYTES = 16 * 1024
_MAX_DUMP = 1 << 20
_LEFT_OUT = "\n… left out …\n".encode()
_FATAL = b"Fatal Python error"
_QUIET = 0.02  # seconds without a new line after which a dump is taken to be whole


class StackDump:
    """What one worker has written about its stacks, as the parent sees it.

    Attributes:
        fd: The file; the worker gets a copy.
    """

    def __init__(self) -> None:
        self.fd = shared_memory.create("stacks")
        self._close_fd = closer(self.fd)
        self._asked = 0  # bytes of answers

    def crash(self) -> str:
        """What a crash left, at most 16 KiB; empty if there was none, or after `close`."""
        if self.fd < 0:
            return ""
        _, head, rest = os.pread(self.fd, _MAX_DUMP, self._asked).partition(_FATAL)  # an answer may come late
        return _readable(head + rest)

    def ask(self, send: Callable[[], object], timeout: float) -> str:
        """Have a living worker asked, and wait for its answer.

        Args:
            send: Sends it `ASK`.
            timeout: Seconds to wait.

        Returns:
            At most 16 KiB; empty if there is no answer when time is up, or after `close`.
        """
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
        """Let go of the file; may be called again."""
        self.fd = -1
        self._close_fd()


def _readable(data: bytes) -> str:
    """As text that does no more to a terminal than to fill lines; file names and env code may hold anything."""
    if len(data) > _MAX_BYTES:
        # At its head a dump says what happened; the main thread, which runs the envs, comes last.
        half = (_MAX_BYTES - len(_LEFT_OUT)) // 2
        data = data[:half] + _LEFT_OUT + data[-half:]
    return "".join(c for c in data.decode(errors="replace") if c in "\n\t" or c.isprintable())


def write_stacks_to(fd: int) -> None:
    """In a worker: write the stacks of all threads there at a crash, and whenever `ASK` comes.

    Until then that signal must be blocked: it kills those that have no use for it.
    """
    faulthandler.enable(fd, all_threads=True)
    faulthandler.register(ASK, fd, all_threads=True, chain=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {ASK})
    os.register_at_fork(after_in_child=_forget_in_child)


def _forget_in_child() -> None:
    """What becomes of a process that an env forks says nothing about its worker."""
    faulthandler.disable()
    faulthandler.unregister(ASK)
    with contextlib.suppress(ValueError):  # not the main thread of the main interpreter
        signal.signal(ASK, signal.SIG_DFL)
