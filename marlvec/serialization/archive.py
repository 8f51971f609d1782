"""Checked ``.npz`` files of plain data, written completely or not at all; no code is executed."""

from __future__ import annotations

import ast
import hashlib
import json
import math
import os
import re
import stat
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from marlvec.errors import CheckpointError, SerialisationError
from marlvec.serialization.atomic_file import FilePath, atomic_file

_MAX_HEADER = 10_000  # bytes; the limit of numpy, too
_SUFFIX = ".npy"
_KEYS = {"descr", "fortran_order", "shape"}


def _check_entries(path: FilePath, archive: zipfile.ZipFile, size: int) -> dict[str, zipfile.ZipInfo]:
    """Validate the list of entries of a file with ``size`` bytes, before any is read; return them by array name."""
    infos = archive.infolist()
    for info in infos:
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.file_size != info.compress_size:
            raise CheckpointError(
                path, f"holds {info.filename!r:.200} compressed or encrypted; marlvec writes entries uncompressed"
            )
        if not info.filename.endswith(_SUFFIX) or info.filename.startswith("/"):
            raise CheckpointError(path, f"holds {info.filename!r:.200}; expected arrays, NAME.npy, of relative names")
    entries = {info.filename.removesuffix(_SUFFIX): info for info in infos}
    if len(entries) < len(infos) or sum(info.file_size for info in infos) > size:
        raise CheckpointError(path, "holds entries that overlap, or two of one name")
    return entries


def _read_entry(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> NDArray[Any]:
    """Read one entry, after a check of its header; arrays of objects, which are pickles, are refused."""
    with archive.open(info) as entry:
        shape, dtype = _header(info.filename, entry)
        left = info.file_size - entry.tell()
    if dtype.hasobject:
        raise ValueError(f"{info.filename} holds Python objects")
    if not dtype.itemsize:
        raise ValueError(f"{info.filename} holds items of no bytes, {dtype} of {shape}")
    if math.prod(shape) * dtype.itemsize != left:
        raise ValueError(f"{info.filename}: expected {dtype} of {shape} as in its header, got {left} bytes")
    with archive.open(info) as entry:  # opened again: after a seek, Python does not verify the checksum
        array: NDArray[Any] = npy.read_array(entry, allow_pickle=False)
        return array


def _header(name: str, entry: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    major, _ = npy.read_magic(entry)
    length = int.from_bytes(entry.read(2 if major == 1 else 4), "little")
    if length > _MAX_HEADER:
        raise ValueError(f"{name} has a header of {length} bytes, more than {_MAX_HEADER}")
    try:
        header = ast.literal_eval(entry.read(length).decode("utf8" if major > 2 else "latin1"))
        dtype = npy.descr_to_dtype(header["descr"])
    except (SyntaxError, RecursionError, MemoryError) as error:  # the parser raises these for deeply nested text
        raise ValueError(f"{name} has an invalid header: {error!r:.200}") from error
    shape = header["shape"]
    if header.keys() != _KEYS or not isinstance(shape, tuple) or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"{name} has an invalid header, its shape is {shape!r:.200}")
    return shape, dtype


FORMAT = 2
_DIGEST = 64
_END = "marlvec archive, format {:04}, sha256 "
_ENDS = re.compile(rb"marlvec archive, format (\d{4}), sha256 ([0-9a-f]{64})")
_END_SIZE = len(_END.format(0)) + _DIGEST
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class NamedArray:
    """An array with a name for its entry, e.g. ``"main/obs/camera"``; changed if it is taken or invalid."""

    name: str
    array: NDArray[Any]


class UniqueNames:
    """Makes names unique and valid in an archive, with as few changes as possible."""

    def __init__(self, taken: Sequence[str] = ()) -> None:
        self._taken = set(taken)

    def __call__(self, wanted: str) -> str:
        """Return a free name."""
        plain = "".join(char if char.isprintable() else "_" for char in wanted).strip("/") or "_"
        name, number = plain, 1
        while name in self._taken:
            number += 1
            name = f"{plain}~{number}"
        self._taken.add(name)
        return name


def write_archive(path: FilePath, data: dict[str, Any]) -> None:
    """Write JSON, arrays and `NamedArray` atomically: a reader, even after a crash, finds the old or the new file.

    If several processes write at once, the last to finish wins. See `atomic_file`.
    """
    with atomic_file(path) as file:
        _write(file, data)


def read_archive(path: FilePath) -> dict[str, Any]:
    """Read the dict that `write_archive` wrote; `NamedArray` values are arrays. Every error is a `CheckpointError`."""
    try:
        if not stat.S_ISREG(Path(path).stat().st_mode):
            raise CheckpointError(path, "is not a file")
        with Path(path).open("rb") as file:
            return _read(path, file)
    except CheckpointError:  # a RuntimeError, too, with its own text
        raise
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror or error}") from error
    except (zipfile.BadZipFile, ValueError, LookupError, TypeError, ArithmeticError, RuntimeError, EOFError) as error:
        raise CheckpointError(path, f"has contents that cannot be read: {error!r:.300}") from error
    except MemoryError as error:
        raise CheckpointError(path, "does not fit into memory") from error


def _write(file: BinaryIO, data: Any) -> None:
    arrays: dict[str, NDArray[Any]] = {}
    free = UniqueNames(["manifest"])

    def aside(value: NDArray[Any] | NamedArray) -> dict[str, str]:
        wanted = NamedArray(f"array_{len(arrays)}", value) if isinstance(value, np.ndarray) else value
        if not wanted.array.dtype.itemsize:  # read_archive refuses it
            raise SerialisationError(f"an array of {wanted.array.dtype}, whose items have no bytes, cannot be saved")
        name = free(wanted.name)
        arrays[name] = wanted.array
        return {"$array": name}

    manifest = {"format": FORMAT, "marlvec": sys.modules["marlvec"].__version__, "data": data}
    text = json.dumps(manifest, default=aside, allow_nan=False).encode()
    archive = zipfile.ZipFile(file, "w", zipfile.ZIP_STORED)
    try:
        for name, array in {"manifest": np.frombuffer(text, np.uint8), **arrays}.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as entry:
                npy.write_array(entry, array, allow_pickle=False)
        archive.comment = _END.format(FORMAT).encode() + b"0" * _DIGEST
        archive.close()
    except BaseException:
        archive.fp = None  # else its destructor finishes the file, and raises if an entry is open
        raise
    digest = _digest(file)
    file.seek(-_DIGEST, os.SEEK_END)
    file.write(digest)


def _digest(file: BinaryIO) -> bytes:
    """Hash the file without the digest at its end."""
    left = file.seek(0, os.SEEK_END) - _DIGEST
    file.seek(0)
    digest = hashlib.sha256()
    while left > 0 and (chunk := file.read(min(left, _CHUNK))):
        digest.update(chunk)
        left -= len(chunk)
    return digest.hexdigest().encode()


def _read(path: FilePath, file: BinaryIO) -> dict[str, Any]:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _END_SIZE))
    end = _ENDS.fullmatch(file.read())
    if end is None:
        raise CheckpointError(path, "is not a marlvec archive, or its end is missing")
    if int(end[1]) != FORMAT:
        own = sys.modules["marlvec"].__version__
        raise CheckpointError(
            path, f"is of format {int(end[1])}; marlvec {own} reads format {FORMAT}: use the version that wrote it"
        )
    if _digest(file) != end[2]:
        raise CheckpointError(path, "is damaged: its content does not match the sha256 at its end")
    with zipfile.ZipFile(file) as archive:
        entries = _check_entries(path, archive, size)
        manifest = json.loads(_read_entry(archive, entries.pop("manifest")).tobytes(), parse_constant=_no_constant)
        arrays = {name: _read_entry(archive, info) for name, info in entries.items()}
    data = _with_arrays(manifest["data"], arrays)
    if arrays:
        raise CheckpointError(path, f"holds entries that its manifest does not use: {short(sorted(arrays))}")
    if not isinstance(data, dict):
        raise CheckpointError(path, f"holds {type(data).__name__}, not a dict")
    return data


def _with_arrays(data: Any, arrays: dict[str, NDArray[Any]]) -> Any:
    """Replace references by arrays, each array once, so that a small file cannot expand to a large one."""
    if isinstance(data, list):
        return [_with_arrays(item, arrays) for item in data]
    if not isinstance(data, dict):
        return data
    if "$array" in data:
        return arrays.pop(data["$array"])
    return {key: _with_arrays(item, arrays) for key, item in data.items()}


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")
