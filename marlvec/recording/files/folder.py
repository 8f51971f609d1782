"""The folder of a recording, open for writing to one recorder at a time."""

from __future__ import annotations

import os
import sys
from hashlib import sha256
from pathlib import Path

from marlvec.errors import ArgumentError, StateError
from marlvec.recording.files.manifest import MANIFEST, Manifest, read_manifest
from marlvec.recording.files.schema import SCHEMA

if sys.platform != "win32":
    import fcntl

__all__ = ["digest_before", "open_folder", "remove_unlisted"]

_END = 4096  # bytes that identify a manifest


def open_folder(folder: Path, *, append: bool) -> tuple[int, Manifest]:
    """Create a folder, or continue its recording; remove unfinished files of a killed recorder.

    Returns the manifest's file, open for writing and locked, and its content. Refuses a folder with other files, one
    that another recorder writes to (`StateError`), and without ``append`` any recording.
    """
    path = folder / MANIFEST
    folder.mkdir(parents=True, exist_ok=True)
    if not path.exists() and (others := [one.name for one in folder.iterdir() if one.name != SCHEMA]):
        raise ArgumentError(f"Recorder({str(folder)!r}): expected a new or empty folder, it holds {sorted(others)[:3]}")
    handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
    try:
        _lock(handle, folder)
        manifest = read_manifest(folder) if os.fstat(handle).st_size else Manifest()
        if manifest.sessions and not append:
            raise ArgumentError(
                f"Recorder({str(folder)!r}): expected a new or empty folder, it holds a recording; give another, or "
                f"append=True"
            )
        os.ftruncate(handle, manifest.size)
        remove_unlisted(folder, manifest)
    except BaseException:
        os.close(handle)
        raise
    return handle, manifest


def remove_unlisted(folder: Path, manifest: Manifest) -> None:
    """Remove part files that the manifest does not list, and drafts."""
    listed = {folder / part.path(file) for part in manifest.parts for file in part.files}
    for pattern in ("policy=*/part-*.parquet", "policy=*/part-*.arrow", "policy=*/.part-*.tmp"):
        for path in folder.glob(pattern):
            if path not in listed:
                path.unlink()


def digest_before(folder: Path, size: int) -> str:
    """Return a digest of the manifest's last bytes before an offset."""
    with (folder / MANIFEST).open("rb") as file:
        file.seek(max(0, size - _END))
        return sha256(file.read(min(size, _END))).hexdigest()


def _lock(handle: int, folder: Path) -> None:
    if sys.platform == "win32":
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StateError(f"Recorder({str(folder)!r}): another recorder is writing there; close it first") from error
