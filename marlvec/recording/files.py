"""The files of a recording: the manifest, parts in Parquet or Arrow, and ``schema.json``, each whole or not there."""

from __future__ import annotations

import base64
import json
import os
import re
import sys
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias
from urllib.parse import quote

import numpy as np
from gymnasium.spaces import Space

from marlvec.collect.batch_files import Arrays, TableForm, arrow_array, arrow_libraries, numpy_array
from marlvec.errors import ArgumentError, CheckpointError, MarlvecError, SerialisationError, StateError
from marlvec.serialization.atomic_file import atomic_file, draft_of, sync_folder
from marlvec.serialization.records import Count, PositiveCount, from_plain, read_fields
from marlvec.serialization.values import decode, encode
from marlvec.vector.vector_env import VectorEnv

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


if sys.platform != "win32":
    import fcntl


FORMAT = 1
MANIFEST, SCHEMA = "manifest.jsonl", "schema.json"


class PartFile(NamedTuple):
    """One policy's rows in a part."""

    policy: str
    format: Literal["parquet", "arrow"]
    form: Count  # number of its columns' form
    rows: PositiveCount
    blocks: tuple[Count, ...]  # rows of each block: row group or record batch
    bytes: Count
    crc32: Count  # as zlib.crc32


class Part(NamedTuple):
    """Files with rows from the same batches, one per policy with rows; parts and sessions are numbered 0, 1, 2, …."""

    number: int
    session: int
    env_steps: int
    files: tuple[PartFile, ...]

    def path(self, file: PartFile) -> str:
        """Return the path of one of its files inside the folder."""
        return part_path(file.policy, self.number, file.format)


@dataclass(slots=True)
class RecordingSession:
    """One recorder's writing to the folder, from opening to closing it."""

    about: dict[str, Any]  # facts noted when it began: time, seed, policies
    closed: bool = False  # False while it runs, and if its process was killed


@dataclass(slots=True)
class Manifest:
    """Content of a manifest, in order."""

    sessions: list[RecordingSession] = field(default_factory=list)
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
    files = [file._asdict() for file in part.files]
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
        manifest.sessions.append(RecordingSession(dict(line["about"])))
    elif "form" in line:
        _expect("form", line["form"], len(manifest.forms))
        form = TableForm.from_json(line["columns"], line["forms"])
        manifest.forms.append((from_plain(str, line["policy"], "policy"), form))
    elif "part" in line:
        manifest.parts.append(_part(manifest, line))
    elif "close" in line:
        manifest.sessions[from_plain(Count, line["close"], "close")].closed = True
        _expect("parts", line["parts"], len(manifest.parts))
    else:
        raise ValueError(f"expected a session, form, part or close, got {list(line)}")


def _part(manifest: Manifest, line: Any) -> Part:
    kinds = {"part": Count, "session": Count, "env_steps": Count, "files": tuple[PartFile, ...]}
    number, session, env_steps, files = read_fields(line, "a part", **kinds).values()
    _expect("part", number, len(manifest.parts))
    manifest.sessions[session].closed = False
    for file in files:
        _expect("rows", file.rows, sum(file.blocks))
        _expect("policy", file.policy, manifest.forms[file.form][0])
    if len({file.policy for file in files}) < len(files):
        raise ValueError("a policy has two files")
    return Part(number, session, env_steps, files)


def _expect(name: str, value: Any, expected: Any) -> None:
    if type(value) is not type(expected) or value != expected:
        raise ValueError(f"{name}: expected {expected!r}, got {value!r:.100}")


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


Format: TypeAlias = Literal["parquet", "arrow"]

_BLOCK_BYTES = 4 << 20
_MOST_ROWS = 1 << 16  # rows in a block
_BUFFER_BYTES = 1 << 16  # shorter writes are joined; longer ones write a column's bytes without a copy
_KEY = b"marlvec"


class PartFileWriter:
    """Writes one policy's rows of one part; ``number`` is that of the columns' form in the manifest."""

    def __init__(self, draft: DraftFile, policy_id: str, form: TableForm, number: int, format: Format) -> None:
        self._arrow, self._parquet = arrow_libraries()
        self._draft, self._format = draft, format
        self.policy_id, self.form, self._number = policy_id, form, number
        self._block_rows = max(1, min(_MOST_ROWS, _BLOCK_BYTES // max(1, form.row_bytes)))
        self._waiting: list[tuple[Arrays, int]] = []
        self._waiting_rows = 0
        self._blocks: list[int] = []
        self._stream: Any = None
        self._writer: Any = None

    @property
    def rows(self) -> int:
        """Number of rows added so far."""
        return sum(self._blocks) + self._waiting_rows

    def add(self, arrays: Arrays, n: int) -> None:
        """Add n rows; each full block is written."""
        self._waiting.append((arrays, n))
        self._waiting_rows += n
        if self._waiting_rows >= self._block_rows:
            self._write_waiting()

    def close(self) -> PartFile:
        """Write the remaining rows and the file's footer; publish the file."""
        self._write_waiting()
        self._writer.close()
        self._stream.close()
        self._draft.publish()
        blocks, draft = tuple(self._blocks), self._draft
        return PartFile(self.policy_id, self._format, self._number, sum(blocks), blocks, draft.size, draft.crc32)

    def discard(self) -> None:
        """Delete the file and its rows."""
        self._draft.discard()
        if self._writer is not None:  # they write when they are garbage-collected, too: into nothing now
            self._writer.close()
            self._stream.close()

    def _write_waiting(self) -> None:
        waiting, rows = self._waiting, self._waiting_rows
        if not rows:
            return
        arrays = waiting[0][0]
        if len(waiting) > 1:
            arrays = {name: np.concatenate([part[name] for part, _ in waiting]) for name in arrays}
        self._write(arrays, rows)
        self._waiting, self._waiting_rows = [], 0

    def _write(self, arrays: Arrays, rows: int) -> None:
        """Write rows as blocks, in few calls: each call may wait for the collecting thread (GIL)."""
        made = {name: part for name, array in arrays.items() if (part := arrow_array(array)) is not None}
        fields = [self._arrow.field(name, part.type, nullable=False) for name, part in made.items()]
        table = self._arrow.Table.from_arrays(list(made.values()), schema=self._arrow.schema(fields))
        if self._writer is None:
            note = json.dumps({"format": FORMAT, "policy": self.policy_id, **self.form._asdict()})
            self._writer = self._begin(table.schema.with_metadata({_KEY: note}))
        if made:
            self._writer.write_table(table, self._block_rows)
            self._draft.catch_up()
        self._blocks += [min(self._block_rows, rows - start) for start in range(0, rows, self._block_rows)]

    def _begin(self, schema: Any) -> Any:
        stream = self._arrow.PythonFile(self._draft, mode="w")
        self._stream = self._arrow.BufferedOutputStream(stream, _BUFFER_BYTES)
        if self._format == "arrow":
            return self._arrow.ipc.new_file(self._stream, schema)
        return self._parquet.ParquetWriter(
            self._stream,
            schema,
            compression="lz4",  # zstd: an eighth smaller, but 50 % slower
            use_dictionary=False,
            write_statistics=False,
            write_page_checksum=True,
        )


class BlockReader(Protocol):
    """Reads the blocks of an open part file."""

    def read(self, block: int, names: Collection[str]) -> dict[str, Any]:
        """Return a block's Arrow arrays, one per table column."""

    def close(self) -> None:
        """Close the file."""


def open_part_file(path: Path, file: PartFile, policy_id: str, form: TableForm, *, check_pages: bool) -> BlockReader:
    """Open a part file, and compare it with the manifest; ``check_pages``: verify Parquet pages when they are read."""
    arrow, _ = arrow_libraries()
    reader: BlockReader
    try:
        reader = _ParquetBlocks(path, check_pages) if file.format == "parquet" else _ArrowBlocks(path)
    except (OSError, arrow.ArrowException, ValueError) as error:
        raise CheckpointError(path, f"cannot be read: {error!r:.300}") from error
    try:
        about = json.loads((reader.metadata or {})[_KEY])
        expected = {"format": FORMAT, "policy": policy_id, **form._asdict()}
        if differing := [name for name in expected if about.get(name) != json.loads(json.dumps(expected[name]))]:
            raise CheckpointError(path, f"is not the manifest's file: its {', '.join(differing)} differ")
        if (blocks := reader.blocks) is not None and blocks != list(file.blocks):
            raise CheckpointError(path, f"is not the manifest's file: expected blocks of {file.blocks} rows")
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        reader.close()
        raise CheckpointError(path, f"is not a file of a recording: {error!r:.300}") from error
    except BaseException:
        reader.close()
        raise
    return reader


def read_block(
    reader: BlockReader, block: int, file: PartFile, form: TableForm, names: Collection[str], path: Path
) -> Arrays:
    """Read some of a block's columns; arrays may be read-only. A damaged block raises `CheckpointError`."""
    arrow, _ = arrow_libraries()
    rows = file.blocks[block]
    try:
        columns = reader.read(block, names)
        return {name: numpy_array(columns.get(name), rows, *form.forms[name]) for name in names}
    except (OSError, arrow.ArrowException, ValueError, LookupError, AttributeError) as error:
        raise CheckpointError(path, f"is damaged in its block {block}: {error!r:.300}") from error


class _ParquetBlocks:
    def __init__(self, path: Path, check_pages: bool) -> None:
        _, parquet = arrow_libraries()
        self._file = parquet.ParquetFile(path, page_checksum_verification=check_pages, memory_map=True)
        about = self._file.metadata
        self.metadata = about.metadata
        is_empty = not about.num_columns
        self.blocks = None if is_empty else [about.row_group(k).num_rows for k in range(about.num_row_groups)]

    def read(self, block: int, names: Collection[str]) -> dict[str, Any]:
        table = self._file.read_row_group(block, columns=list(names))
        columns = {name: table.column(name) for name in table.column_names}
        # combine_chunks() copies even a single chunk.
        return {name: one.chunk(0) if one.num_chunks == 1 else one.combine_chunks() for name, one in columns.items()}

    def close(self) -> None:
        self._file.close()


class _ArrowBlocks:
    def __init__(self, path: Path) -> None:
        arrow, _ = arrow_libraries()
        self._map = arrow.memory_map(os.fspath(path))
        try:
            self._file = arrow.ipc.open_file(self._map)
        except BaseException:
            self._map.close()
            raise
        self.metadata = self._file.schema.metadata
        self.blocks = None

    def read(self, block: int, names: Collection[str]) -> dict[str, Any]:
        batch = self._file.get_batch(block)
        known = set(self._file.schema.names)
        return {name: batch.column(name) for name in names if name in known}

    def close(self) -> None:
        self._map.close()


_DTYPE = re.compile(r"[<>|][biuf][1248]", re.ASCII)
_PER_AGENT = ("observation_spaces", "action_spaces")


def describe_envs(envs: VectorEnv) -> dict[str, Any]:
    """Return the name, agents, groups and spaces of envs, JSON-able; None for a space that has no JSON form."""
    spec = envs.spec
    return {
        "name": spec.name,
        "agents": list(spec.agents),
        "groups": {group.name: list(group.agents) for group in spec.groups},
        "observation_spaces": [_space(space) for space in spec.observation_spaces],
        "action_spaces": [_space(space) for space in spec.action_spaces],
        "state_space": None if spec.state_space is None else _space(spec.state_space),
    }


def space_from(data: Any) -> Space[Any] | None:
    """Rebuild a space from `describe_envs`; None for None."""
    space = None if data is None else decode(data)
    if space is not None and not isinstance(space, Space):
        raise ArgumentError(f"expected a space, got {space!r:.100}")
    return space


def check_same_envs(known: Mapping[str, Any], envs: Mapping[str, Any], folder: Path) -> None:
    """Check that envs equal those of a recording; the error names the differences."""
    for name, value in known.items():
        own, other = envs.get(name), value
        if _json_text(own) == _json_text(other):
            continue
        if name in _PER_AGENT:  # agents are compared first
            pairs = zip(known["agents"], own or [], other, strict=True)
            agent, own, other = next(pair for pair in pairs if _json_text(pair[1]) != _json_text(pair[2]))
            name = f"the {name.removesuffix('s').replace('_', ' ')} of {agent!r}"
        raise ArgumentError(
            f"Recorder({str(folder)!r}): the envs differ from the recording's in {name}: expected {_short(other)}, got "
            f"{_short(own)}; record into another folder"
        )


def write_schema(folder: Path, envs: Mapping[str, Any] | None, notes: Mapping[str, Any]) -> None:
    """Write ``schema.json``, atomically."""
    about = {"format": FORMAT, "marlvec": sys.modules["marlvec"].__version__, "envs": envs, "notes": dict(notes)}
    with atomic_file(folder / SCHEMA) as file:
        file.write(_json_text(about, indent=1).encode() + b"\n")


def read_schema(folder: Path) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Read ``schema.json``: the envs, with spaces as JSON; and the notes."""
    path = folder / SCHEMA
    try:
        about = json.loads(path.read_bytes(), object_hook=_array)
        if about["format"] != FORMAT:
            raise CheckpointError(path, f"is of format {about['format']!r:.50}; this marlvec reads {FORMAT}")
        envs, notes = about["envs"], dict(about["notes"])
        if envs is not None:
            agents = [str(agent) for agent in envs["agents"]]
            spaces = [[space_from(space) for space in envs[name]] for name in _PER_AGENT]
            if any(len(each) != len(agents) for each in spaces):
                raise ValueError(f"{len(agents)} agents have {[len(each) for each in spaces]} spaces")
            space_from(envs["state_space"])
    except CheckpointError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, MarlvecError) as error:
        raise CheckpointError(path, f"cannot be read: {error!r:.300}") from error
    return envs, notes


def _space(space: Space[Any]) -> Any:
    try:
        return encode(space, "space")
    except SerialisationError:
        return None


def _json_text(data: Any, indent: int | None = None) -> str:
    return json.dumps(data, default=_plain, indent=indent)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {"$array": value.dtype.str, "shape": list(value.shape), "base64": data}
    if isinstance(value, (np.integer, np.floating, np.bool_)):
        return value.item()
    return str(value)


def _array(data: dict[str, Any]) -> Any:
    if "$array" not in data:
        return data
    if _DTYPE.fullmatch(data["$array"]) is None:
        raise ValueError(f"expected the dtype of numbers, got {data['$array']!r:.50}")
    return np.frombuffer(base64.b64decode(data["base64"]), data["$array"]).reshape(data["shape"])


def _short(value: Any) -> str:
    try:
        space = space_from(value) if isinstance(value, dict) and "$space" in value else value
    except MarlvecError:
        space = value
    return f"{space!r:.300}"
