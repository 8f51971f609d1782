"""`AppendFile`: a file to which whole records are appended, each once, whatever fails meanwhile."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from marlvec.serialization.atomic_file import FilePath

__all__ = ["AppendFile"]


class AppendFile:
    """Records wait until `flush`, which writes all of them.

    Where the disk is full, or Ctrl-C comes at any line, the file has none of those that waited, and they wait for the
    next `flush`. A pipe keeps what it has got.

    Args:
        path: The file. What it holds already stays.

    Raises:
        OSError: It cannot be written to.
    """

    def __init__(self, path: FilePath) -> None:
        self._file = Path(path).open("ab", buffering=0)  # noqa: SIM115  (close() closes it)
        self._waiting: list[bytes] = []

    def add(self, record: bytes) -> None:
        """Have a record wait."""
        self._waiting.append(record)

    def forget(self) -> None:
        """Drop the records that wait."""
        self._waiting = []

    def flush(self) -> None:
        """Write the records that wait, all of them or none.

        Raises:
            OSError: They cannot be written, e.g. because the disk is full.
        """
        if not (waiting := self._waiting):
            return
        size = self.size
        try:
            left = memoryview(b"".join(waiting))
            while left:
                left = left[self._file.write(left) :]
            self._waiting = []
        except BaseException as error:
            self._waiting = waiting
            if size is not None:
                self._file.truncate(size)
            if isinstance(error, OSError):
                error.filename = str(self._file.name)
            raise

    @property
    def size(self) -> int | None:
        """Bytes in the file; None of a pipe."""
        about = os.fstat(self._file.fileno())
        return about.st_size if stat.S_ISREG(about.st_mode) else None

    def truncate(self, size: int) -> None:
        """Cut off what is behind a place."""
        self._file.truncate(size)

    def close(self) -> None:
        """Write what waits, and close the file. May be called twice."""
        if not self._file.closed:
            with self._file:
                self.flush()
