"""`DraftFile`: a file that is hidden until it is complete; `append_lines`: appends all lines of JSON or none."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from marlvec.serialization.atomic_file import draft_of, sync_folder

__all__ = ["DraftFile", "Persist", "append_lines"]

Persist: TypeAlias = Callable[[Callable[[], object]], Any]
"""Calls a function until it raises no `OSError`, and returns what it returns."""


class DraftFile:
    """A file written from beginning to end, and renamed to ``target`` once it is complete. pyarrow uses it as a stream.

    ``persist`` calls a function that writes to the disk, and handles its errors. If the disk is full, `write` blocks in
    it until there is space, so that no format's writer fails halfway. ``size`` and ``crc32`` are of the bytes so far.
    """

    def __init__(self, target: Path, persist: Persist) -> None:
        self._target, self._draft, self._persist = target, draft_of(target), persist
        self.size = self.crc32 = 0
        self._handle: int | None = None
        persist(self._open)

    def _open(self) -> None:
        self._target.parent.mkdir(exist_ok=True)
        self._handle = os.open(self._draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)

    @property
    def closed(self) -> bool:
        """Whether the file accepts no more bytes."""
        return self._handle is None

    def write(self, data: Any) -> int:
        """Write all bytes of ``data``."""
        left = whole = memoryview(data).cast("B")
        handle = self._handle
        assert handle is not None
        while left:
            done = self._persist(partial(os.write, handle, left))
            left = left[done:]
        self.crc32 = zlib.crc32(whole, self.crc32)
        self.size += len(whole)
        return len(whole)

    def tell(self) -> int:
        """Return the number of bytes so far."""
        return self.size

    def flush(self) -> None:
        """Do nothing: `write` buffers no bytes."""

    def publish(self) -> None:
        """Sync the bytes to disk, then rename the file to ``target``."""
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
        """Remove the draft."""
        self._close()
        self._draft.unlink(missing_ok=True)


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
