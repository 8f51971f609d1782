"""`DraftFile`: a file that is hidden until it is complete; `append_lines`: appends all lines of JSON or none."""

from __future__ import annotations

import json
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from marlvec.serialization.atomic_file import draft_of, sync_folder

__all__ = ["DraftFile", "Persist", "append_lines"]

Persist: TypeAlias = Callable[[Callable[[], object]], Any]
"""Calls a function until it raises no `OSError`, and returns what it returns."""


class DraftFile:
    """A file written from beginning to end, and renamed to ``target`` once it is complete. pyarrow uses it as a stream.

    ``persist`` calls a function that writes to the disk, and handles its errors. `write` never raises an error of the
    disk, so that no format's writer fails halfway, and never waits: a thread that waits inside pyarrow aborts the
    process if the interpreter ends meanwhile. It keeps bytes that the disk does not take, and `catch_up` writes them.
    ``size`` and ``crc32`` are of the bytes so far.
    """

    def __init__(self, target: Path, persist: Persist) -> None:
        self._target, self._draft, self._persist = target, draft_of(target), persist
        self.size = self.crc32 = 0
        self._handle: int | None = None
        self._kept: deque[bytes] = deque()
        persist(self._open)

    def _open(self) -> None:
        self._target.parent.mkdir(exist_ok=True)
        self._handle = os.open(self._draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)

    @property
    def closed(self) -> bool:
        """Whether the file accepts no more bytes."""
        return self._handle is None

    def write(self, data: Any) -> int:
        """Write all bytes of ``data``, or keep them for `catch_up`; after `discard`, drop them."""
        left = whole = memoryview(data).cast("B")
        if (handle := self._handle) is None:
            return len(whole)
        if not self._kept:
            with suppress(OSError):  # catch_up() tries again
                while left:
                    left = left[os.write(handle, left) :]
        if left:
            self._kept.append(bytes(left))
        self.crc32 = zlib.crc32(whole, self.crc32)
        self.size += len(whole)
        return len(whole)

    def catch_up(self) -> None:
        """Write the bytes that the disk did not take; waits in ``persist``. Call it outside of pyarrow."""
        handle = self._handle
        assert handle is not None
        while self._kept:
            left = memoryview(self._kept[0])
            while left:
                left = left[self._persist(partial(os.write, handle, left)) :]
            self._kept.popleft()

    def tell(self) -> int:
        """Return the number of bytes so far."""
        return self.size

    def flush(self) -> None:
        """Do nothing: `write` buffers no bytes."""

    def publish(self) -> None:
        """Write and sync all bytes to disk, then rename the file to ``target``."""
        self.catch_up()
        handle = self._handle
        assert handle is not None
        self._persist(lambda: os.fsync(handle))
        self._close()
        self._persist(lambda: self._draft.replace(self._target))
        self._persist(lambda: sync_folder(self._target))

    def close(self) -> None:
        """Do nothing: pyarrow calls this; `publish` or `discard` closes the file."""

    def _close(self) -> None:
        if (handle := self._handle) is not None:
            self._handle = None
            os.close(handle)

    def discard(self) -> None:
        """Remove the draft, if the disk lets it."""
        self._kept.clear()
        with suppress(OSError):
            self._close()
        with suppress(OSError):
            self._draft.unlink()


def append_lines(handle: int, end: int, lines: Iterable[Mapping[str, Any]]) -> int:
    """Append all lines of JSON at offset ``end`` (later bytes are overwritten), or none; sync; return the new end."""
    left = memoryview(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    stop = end + len(left)
    try:
        os.ftruncate(handle, end)
        os.lseek(handle, end, os.SEEK_SET)
        while left:
            left = left[os.write(handle, left) :]
        os.fsync(handle)
    except BaseException:
        os.ftruncate(handle, end)
        raise
    return stop
