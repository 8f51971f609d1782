"""`Manifest`: the complete files of a recording, and what they hold; `open_folder`: opened by one recorder at a time.

One line of JSON each, only ever appended:

    {"format": 1, "marlvec": "…", "session": 0, "about": {…}}     a recorder has opened the folder
    {"form": 0, "policy": "main", "columns": […], "forms": {…}}   columns that later files have
    {"part": 0, "session": 0, "env_steps": …, "files": [{"policy": …, "form": 0, …}, …]}
    {"close": 0, "parts": 1}                                      the session was closed: no rows are missing

A part holds the rows of all policies from the same batches, one file per policy with rows. Its line is written once all
its files are on disk. So whenever the process ends, all listed files exist, and hold the first part of the recorded
rows.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from marlvec.collect.batch.arrow_columns import TableForm
from marlvec.errors import ArgumentError, CheckpointError, StateError

if sys.platform != "win32":
    import fcntl

__all__ = [
    "FORMAT",
    "MANIFEST",
    "Manifest",
    "Part",
    "PartFile",
    "SCHEMA",
    "Session",
    "lines_of_part",
    "open_folder",
    "part_path",
    "read_manifest",
    "remove_unlisted",
    "session_line",
]

FORMAT = 1
MANIFEST, SCHEMA = "manifest.jsonl", "schema.json"


class PartFile(NamedTuple):
    """One policy's rows in a part."""

    policy_id: str
    format: str  # "parquet" or "arrow"
    form: int  # number of its columns' form
    rows: int
    blocks: tuple[int, ...]  # rows of each block: row group or record batch
    size: int  # bytes
    crc32: int  # as zlib.crc32


class Part(NamedTuple):
    """Files with rows from the same batches, one per policy with rows; parts and sessions are numbered 0, 1, 2, …."""

    number: int
    session: int
    env_steps: int
    files: tuple[PartFile, ...]

    def path(self, file: PartFile) -> str:
        """Return the path of one of its files inside the folder."""
        return part_path(file.policy_id, self.number, file.format)


@dataclass(slots=True)
class Session:
    """One recorder's writing to the folder, from opening to closing it."""

    about: dict[str, Any]  # facts noted when it began: time, seed, policies
    closed: bool = False  # False while it runs, and if its process was killed


@dataclass(slots=True)
class Manifest:
    """Content of a manifest, in order."""

    sessions: list[Session] = field(default_factory=list)
    forms: list[tuple[str, TableForm]] = field(default_factory=list)  # by form number: policy id, form of its columns
    parts: list[Part] = field(default_factory=list)
    size: int = 0  # bytes up to the end of the last complete line


def part_path(policy_id: str, number: int, suffix: str) -> str:
    """Return a file's path inside the folder, whose ``policy=…`` is a Hive partition for readers that support it."""
    return f"policy={quote(policy_id, safe='', errors='surrogatepass')}/part-{number:06d}.{suffix}"


def lines_of_part(part: Part, forms: Mapping[int, tuple[str, TableForm]]) -> Iterator[dict[str, Any]]:
    """Yield the lines of new forms, then the line of the part."""
    for number, (policy_id, form) in forms.items():
        yield {"form": number, "policy": policy_id, "columns": form.columns, "forms": form.forms}
    files = [
        {
            "policy": file.policy_id,
            "format": file.format,
            "form": file.form,
            "rows": file.rows,
            "blocks": file.blocks,
            "bytes": file.size,
            "crc32": file.crc32,
        }
        for file in part.files
    ]
    yield {"part": part.number, "session": part.session, "env_steps": part.env_steps, "files": files}


def session_line(number: int, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the line that begins a session."""
    return {"format": FORMAT, "marlvec": sys.modules["marlvec"].__version__, "session": number, "about": dict(about)}


def read_manifest(folder: Path) -> Manifest:
    """Read a folder's manifest; ignore an incomplete last line, which a killed process leaves."""
    path = folder / MANIFEST
    try:
        if not folder.is_dir():
            raise CheckpointError(folder, "is not a folder")
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(folder, f"is not a recording: its {MANIFEST} cannot be read ({error})") from error
    content = content[: content.rfind(b"\n") + 1]
    manifest = Manifest(size=len(content))
    for k, line in enumerate(content.splitlines()):
        try:
            _add(manifest, json.loads(line))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(path, f"is damaged: line {k + 1}: {error!r:.300}") from error
        except _OtherFormat as error:
            raise CheckpointError(path, f"is of format {error}; this marlvec reads {FORMAT}") from error
    if not manifest.sessions:
        raise CheckpointError(path, "is damaged: it lists no session")
    return manifest


class _OtherFormat(Exception):
    """Raised: the recording has another format version."""


def _add(manifest: Manifest, line: Any) -> None:
    """Add one line to a manifest; a damaged line raises a plain KeyError, TypeError or ValueError."""
    if not isinstance(line, dict):
        raise ValueError(f"expected an object, got {line!r:.100}")
    if "format" in line:
        if line["format"] != FORMAT:
            raise _OtherFormat(f"{line['format']!r:.50}")
        _expect("session", line["session"], len(manifest.sessions))
        manifest.sessions.append(Session(dict(line["about"])))
    elif "form" in line:
        _expect("form", line["form"], len(manifest.forms))
        manifest.forms.append((_text(line["policy"]), TableForm.from_json(line["columns"], line["forms"])))
    elif "part" in line:
        manifest.parts.append(_part(manifest, line))
    elif "close" in line:
        manifest.sessions[_count(line["close"])].closed = True
        _expect("parts", line["parts"], len(manifest.parts))
    else:
        raise ValueError(f"expected a session, form, part or close, got {list(line)}")


def _part(manifest: Manifest, line: Any) -> Part:
    _expect("part", line["part"], len(manifest.parts))
    session = _count(line["session"])
    manifest.sessions[session].closed = False
    files = []
    for one in line["files"]:
        file = PartFile(
            _text(one["policy"]),
            _text(one["format"]),
            _count(one["form"]),
            _count(one["rows"]),
            tuple(map(_count, one["blocks"])),
            _count(one["bytes"]),
            _count(one["crc32"]),
        )
        _expect("rows", file.rows, sum(file.blocks))
        _expect("policy", file.policy_id, manifest.forms[file.form][0])
        if file.format not in ("parquet", "arrow") or not file.rows:
            raise ValueError(f"no part file is {one!r:.300}")
        files.append(file)
    if len({file.policy_id for file in files}) < len(files):
        raise ValueError("a policy has two files")
    return Part(line["part"], session, _count(line["env_steps"]), tuple(files))


def _expect(name: str, value: Any, expected: Any) -> None:
    if type(value) is not type(expected) or value != expected:
        raise ValueError(f"{name}: expected {expected!r}, got {value!r:.100}")


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"expected a whole number from 0, got {value!r:.100}")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"expected a string, got {value!r:.100}")
    return value


def open_folder(folder: Path, *, append: bool) -> tuple[int, Manifest]:
    """Create a folder, or continue its recording; remove unfinished files of a killed recorder.

    Returns the manifest's file, open for writing and locked, and its content. Refuses a folder with other files, one
    that another recorder writes to (`StateError`), and without ``append`` any recording that holds rows.
    """
    path = folder / MANIFEST
    folder.mkdir(parents=True, exist_ok=True)
    if not path.exists() and (others := [one.name for one in folder.iterdir() if one.name != SCHEMA]):
        raise ArgumentError(f"Recorder({str(folder)!r}): expected a new or empty folder, it holds {sorted(others)[:3]}")
    handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
    try:
        _lock(handle, folder)
        manifest = read_manifest(folder) if os.fstat(handle).st_size else Manifest()
        if not manifest.parts and not append:
            manifest = Manifest()  # nothing was recorded: a program that ended before its first part may be run again
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


def _lock(handle: int, folder: Path) -> None:
    if sys.platform == "win32":
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StateError(f"Recorder({str(folder)!r}): another recorder is writing there; close it first") from error
