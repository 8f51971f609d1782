"""`atomic_file` and `atomic_link`: write a file, or link it to another name, completely or not at all."""

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

FilePath = str | os.PathLike[str]


@contextmanager
def atomic_file(path: FilePath) -> Iterator[BinaryIO]:
    """Open a temporary file for writing, which becomes ``path`` when the block ends without an error.

    A reader, even after a crash, finds the old file or the new one. A killed process may leave a hidden ``.tmp`` file.
    If the path is a link, its target is written.
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
            error.filename = str(target)  # e.g. if the disk is full
        raise
    sync_folder(target)


def atomic_link(source: FilePath, path: FilePath) -> None:
    """Give a file that `atomic_file` wrote a second name, atomically, by a hard link, or else a copy."""
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
        temporary.unlink(missing_ok=True)  # if both names were links to one file, replace() did nothing
    sync_folder(target)


@contextmanager
def locked_folder(folder: FilePath, *, shared: bool = False) -> Iterator[None]:
    """Wait until no other process or thread is in such a block (`shared`: in one not shared). Writes no file."""
    # No wait if the folder does not exist, on a file system without locks, or on Windows.
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
    """Remove temporary files of killed writers of this file; none on Windows, which has no test for life."""
    target = Path(os.path.realpath(path))
    for draft in target.parent.glob(f".{target.name}.*.tmp"):
        found = _DRAFT.search(draft.name)
        if found is not None and not _is_alive(int(found[1])):
            draft.unlink(missing_ok=True)


_DRAFT = re.compile(r"\.(\d{1,9})-[0-9a-f]{8}\.tmp$", re.ASCII)


def draft_of(target: Path) -> Path:
    """Return a new hidden name beside a file, for a draft that will replace it; `remove_drafts` finds the draft."""
    return target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def _is_alive(pid: int) -> bool:
    if sys.platform == "win32":  # no test is possible: signal 0 is Ctrl-C there
        return True
    with contextlib.suppress(PermissionError):  # it belongs to another user
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True


def sync_folder(target: Path) -> None:
    """Sync the target's folder, so that its new name is on the disk. Not possible on Windows."""
    if sys.platform == "win32":
        return
    folder = None
    try:
        folder = os.open(target.parent, os.O_RDONLY)
        os.fsync(folder)
    finally:
        if folder is not None:
            os.close(folder)
