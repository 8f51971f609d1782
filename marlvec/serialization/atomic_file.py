"""`atomic_file`: a file that appears as a whole, or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

__all__ = ["FilePath", "atomic_file"]

FilePath = str | os.PathLike[str]


@contextmanager
def atomic_file(path: FilePath) -> Iterator[BinaryIO]:
    """A file to write, which takes its place, and that of an old one, when the block ends without an error.

    Whoever reads it, now or after a crash, finds the old file or the new one. Killed in between, it may leave a hidden
    ``.tmp`` file. Where the path is a link, what it points to is written.

    Raises:
        OSError: The file cannot be written; the old one is as it was.
    """
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("x+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(target.parent, os.O_RDONLY)  # the new name is on the disk when its folder is
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
