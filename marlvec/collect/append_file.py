"""`AppendFile`: appends whole records to a file, each exactly once, even after failed writes."""

from __future__ import annotations

import os
import stat
from hashlib import sha256
from pathlib import Path

from marlvec.serialization.atomic_file import FilePath
from marlvec.serialization.saved import ProcessBound

_END = 4096  # bytes that identify a file


class AppendFile(ProcessBound):
    """Buffers records until `flush`, which appends all of them to a file.

    If the disk is full, or at Ctrl-C, none of the buffered records is in the file, and the next `flush` writes them. A
    pipe cannot take bytes back.
    """

    def __init__(self, path: FilePath) -> None:
        self._file = Path(path).open("ab", buffering=0)  # noqa: SIM115  (close() closes it)
        self._waiting: list[bytes] = []

    def add(self, record: bytes) -> None:
        """Buffer a record."""
        self._waiting.append(record)

    def forget(self) -> None:
        """Drop the buffered records."""
        self._waiting = []

    def flush(self) -> None:
        """Write all buffered records, or none (`OSError`)."""
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
        """Size of the file in bytes; None for a pipe."""
        about = os.fstat(self._file.fileno())
        return about.st_size if stat.S_ISREG(about.st_mode) else None

    def truncate(self, size: int) -> None:
        """Truncate the file to ``size`` bytes."""
        self._file.truncate(size)

    def close(self) -> None:
        """Write the buffered records, and close the file. May be called twice. A forked process writes none."""
        if not self._file.closed:
            with self._file:
                if not self._is_forked:
                    self.flush()


def digest_before(path: Path, size: int) -> str:
    """Return a digest of a file's last bytes before an offset; ``""`` at its beginning."""
    if not size:
        return ""
    with path.open("rb") as file:
        file.seek(max(0, size - _END))
        return sha256(file.read(min(size, _END))).hexdigest()
