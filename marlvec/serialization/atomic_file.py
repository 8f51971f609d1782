"""`atomic_file`: a file that appears as a whole, or not at all; `atomic_link`: another name for one, likewise."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

if sys.platform != "win32":
    import fcntl

__all__ = ["FilePath", "atomic_file", "atomic_link", "draft_of", "locked_folder", "remove_drafts", "sync_folder"]

FilePath = str | os.PathLike[str]


@contextmanager
def atomic_file(path: FilePath) -> Iterator[BinaryIO]:
    """A file to write, which takes its place, and that of an old one, when the block ends without an error.

    A reader, now or after a crash, finds the old file or the new one. Killed in between, it may leave a hidden
    ``.tmp`` file. Where the path is a link, what it points to is written.

    Raises:
        OSError: The file cannot be written; the old one is as it was.
    """
    target = Path(os.path.realpath(path))
    temporary = draft_of(target)
    try:
        with temporary.open("x+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = str(target)  # as where the disk is full
        raise
    sync_folder(target)


def atomic_link(source: FilePath, path: FilePath) -> None:
    """Have a file that `atomic_file` wrote be there under another name, too, at once or not at all.

    No bytes are written where the file system has hard links; where it has none the file is copied.

    Raises:
        OSError: There is no such file, or it cannot be written; an old one is as it was.
    """
    target = Path(os.path.realpath(path))
    temporary = draft_of(target)
    try:
        os.link(source, temporary)
    except OSError:
        with atomic_file(target) as file, Path(source).open("rb") as given:
            shutil.copyfileobj(given, file)
        return
    try:
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)  # where both names were of one file nothing was replaced
    sync_folder(target)


@contextmanager
def locked_folder(folder: FilePath, *, shared: bool = False) -> Iterator[None]:
    """Wait until no other process or thread is in such a block with this folder; nothing is written there.

    Without a folder, on a file system without locks, and on Windows, it does not wait.

    Args:
        folder: It.
        shared: Whether others may be in a block that is shared, too.
    """
    handle = None
    try:
        with contextlib.suppress(OSError):
            if sys.platform != "win32":
                handle = os.open(folder, os.O_RDONLY)
                fcntl.flock(handle, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield
    finally:
        if handle is not None:
            os.close(handle)


def remove_drafts(path: FilePath) -> None:
    """Remove what writers of this file have left behind that were killed; a living one's drafts stay.

    On Windows all stay: whether a process lives is not known there.
    """
    target = Path(os.path.realpath(path))
    for draft in target.parent.glob(f".{target.name}.*.tmp"):
        found = _DRAFT.search(draft.name)
        if found is not None and not _is_alive(int(found[1])):
            draft.unlink(missing_ok=True)


_DRAFT = re.compile(r"\.(\d{1,9})-[0-9a-f]{8}\.tmp$", re.ASCII)


def draft_of(target: Path) -> Path:
    """Return a new hidden name beside a file, for what is to take its place; `remove_drafts` finds it."""
    return target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def _is_alive(pid: int) -> bool:
    if sys.platform == "win32":  # there is no asking: signal 0 is Ctrl-C there
        return True
    with contextlib.suppress(PermissionError):  # it is someone else's
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True


def sync_folder(target: Path) -> None:
    """Have a file's new name on the disk, which it is when its folder is. Windows opens no folders."""
    if sys.platform == "win32":
        return
    folder = None
    try:
        folder = os.open(target.parent, os.O_RDONLY)
        os.fsync(folder)
    finally:
        if folder is not None:
            os.close(folder)
