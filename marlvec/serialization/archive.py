"""`write_archive` and `read_archive`: checked ``.npz`` files of plain data, written atomically, never executed.

All that marlvec saves is in this one format: batches, pipelines, policies, pools, ratings. (Parquet is the other
choice for batches.)

The file is an uncompressed zip of ``.npy`` entries, as `numpy.load` opens it with ``allow_pickle=False``. Its entry
``manifest`` holds JSON as bytes: the format, marlvec's version, and the data, in which ``{"$array": name}`` stands for
the array of another entry. The zip's comment, which is the end of the file, holds the format once more and the sha256
of everything before the digest. So a file that was cut, damaged or packed anew is recognised before
anything inside is looked at. (It is no signature: what can write the file can write a digest to it. Nothing inside
is executed even then.) Entries are not compressed, and a file in which one is, is refused; so is an array of items
without bytes, of which a short file could name any number. So arrays take no more memory than the file has bytes, and
what JSON says a small multiple of its text (an empty dict is three bytes there, and 64 in Python).
"""

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

__all__ = ["FilePath", "NamedArray", "UniqueNames", "read_archive", "write_archive"]

_MAX_HEADER = 10_000  # bytes; numpy reads no longer ones either
_SUFFIX = ".npy"
_KEYS = {"descr", "fortran_order", "shape"}


def _check_entries(path: FilePath, archive: zipfile.ZipFile, size: int) -> dict[str, zipfile.ZipInfo]:
    """Look at what a zip says is in it; nothing is read of one whose entries unpack to more than there is.

    Args:
        path: The file, for messages.
        archive: The same, opened.
        size: Its size in bytes.

    Returns:
        Name of each array to its entry, in order.

    Raises:
        CheckpointError: An entry is compressed, encrypted, no array or named as no entry is; or some overlap.
    """
    infos = archive.infolist()
    for info in infos:
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.file_size != info.compress_size:
            raise CheckpointError(
                path, f"holds {info.filename!r:.200} compressed or encrypted; marlvec writes entries as they are"
            )
        if not info.filename.endswith(_SUFFIX) or info.filename.startswith("/"):
            raise CheckpointError(path, f"holds {info.filename!r:.200}; expected arrays, NAME.npy, of relative names")
    entries = {info.filename.removesuffix(_SUFFIX): info for info in infos}
    if len(entries) < len(infos) or sum(info.file_size for info in infos) > size:
        raise CheckpointError(path, "holds entries that overlap, or two of one name")
    return entries


def _read_entry(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> NDArray[Any]:
    """Read one entry, once its header was found to be true; objects, which are pickles, are refused.

    Raises:
        ValueError: It is no array, one of objects, or of another size than it says.
        zipfile.BadZipFile: It is damaged: zips have a checksum of each entry.
    """
    with archive.open(info) as entry:
        shape, dtype = _header(info.filename, entry)
        left = info.file_size - entry.tell()
    if dtype.hasobject:
        raise ValueError(f"{info.filename} holds Python objects")
    if not dtype.itemsize:
        raise ValueError(f"{info.filename} holds items of no bytes, {dtype} of {shape}")
    if math.prod(shape) * dtype.itemsize != left:
        raise ValueError(f"{info.filename} says {dtype} of {shape}, and has {left} bytes")
    with archive.open(info) as entry:  # anew: after a seek, Python looks at no checksum
        array: NDArray[Any] = npy.read_array(entry, allow_pickle=False)
        return array


def _header(name: str, entry: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of an array, as its header says."""
    major, _ = npy.read_magic(entry)
    length = int.from_bytes(entry.read(2 if major == 1 else 4), "little")
    if length > _MAX_HEADER:
        raise ValueError(f"{name} has a header of {length} bytes, more than {_MAX_HEADER}")
    try:
        header = ast.literal_eval(entry.read(length).decode("utf8" if major > 2 else "latin1"))
        dtype = npy.descr_to_dtype(header["descr"])
    except (SyntaxError, RecursionError, MemoryError) as error:  # of the parser, for what is deeply nested
        raise ValueError(f"{name} has a header that is none: {error!r:.200}") from error
    shape = header["shape"]
    if header.keys() != _KEYS or not isinstance(shape, tuple) or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"{name} has a header that is none, its shape is {shape!r:.200}")
    return shape, dtype


FORMAT = 2
_DIGEST = 64
_END = "marlvec archive, format {:04}, sha256 "
_ENDS = re.compile(rb"marlvec archive, format (\d{4}), sha256 ([0-9a-f]{64})")
_END_SIZE = len(_END.format(0)) + _DIGEST
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class NamedArray:
    """An array in the data of an archive whose entry is to be called so, or as close to it as can be.

    Attributes:
        name: E.g. ``"main/obs/camera"``; arrays without one are called ``array_0``, ``array_1``, ….
        array: The array.
    """

    name: str
    array: NDArray[Any]


class UniqueNames:
    """Gives every array a name that no other has and that any archive can hold, as close as can be to its own.

    Args:
        taken: Names that are not to be given.
    """

    def __init__(self, taken: Sequence[str] = ()) -> None:
        self._taken = set(taken)

    def __call__(self, wanted: str) -> str:
        """A free name."""
        plain = "".join(char if char.isprintable() else "_" for char in wanted).strip("/") or "_"
        name, number = plain, 1
        while name in self._taken:
            number += 1
            name = f"{plain}~{number}"
        self._taken.add(name)
        return name


def write_archive(path: FilePath, data: dict[str, Any]) -> None:
    """Write data to a file, so that a reader, now or after a crash, finds the old file or the new one.

    Where several write at once, the last to finish wins. Killed in between, it may leave a hidden ``.tmp`` file.

    Args:
        path: The file; its folder must be there. Where this is a link, what it points to is written.
        data: What JSON has, arrays and `NamedArray`, such as `marlvec.serialization.values.encode` gives.

    Raises:
        OSError: The file cannot be written; the old one is as it was.
        SerialisationError: Items of an array have no bytes; likewise.
    """
    with atomic_file(path) as file:
        _write(file, data)


def read_archive(path: FilePath) -> dict[str, Any]:
    """Read the dict that `write_archive` wrote; arrays that had names are plain ones.

    Raises:
        CheckpointError: There is no such file, or it is not to the bit what was written, or of a newer format.
    """
    try:
        if not stat.S_ISREG(Path(path).stat().st_mode):
            raise CheckpointError(path, "is not a file")
        with Path(path).open("rb") as file:
            return _read(path, file)
    except CheckpointError:  # a RuntimeError, too; it says itself what is wrong
        raise
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror or error}") from error
    except (zipfile.BadZipFile, ValueError, LookupError, TypeError, ArithmeticError, RuntimeError, EOFError) as error:
        raise CheckpointError(path, f"does not hold what its end says: {error!r:.300}") from error
    except MemoryError as error:
        raise CheckpointError(path, "does not fit into memory") from error


def _write(file: BinaryIO, data: Any) -> None:
    arrays: dict[str, NDArray[Any]] = {}
    free = UniqueNames(["manifest"])

    def aside(value: NDArray[Any] | NamedArray) -> dict[str, str]:
        wanted = NamedArray(f"array_{len(arrays)}", value) if isinstance(value, np.ndarray) else value
        if not wanted.array.dtype.itemsize:  # it would not be read again
            raise SerialisationError(f"an array of {wanted.array.dtype}, items of no bytes, has no form in a file")
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
        archive.fp = None  # else it is finished when it is dropped, and raises where an entry is open
        raise
    digest = _digest(file)
    file.seek(-_DIGEST, os.SEEK_END)
    file.write(digest)


def _digest(file: BinaryIO) -> bytes:
    """Hash the file but for the digest at its end."""
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
        raise CheckpointError(path, "is no archive of marlvec's, or its end was lost")
    if int(end[1]) != FORMAT:
        own = sys.modules["marlvec"].__version__
        raise CheckpointError(
            path, f"is of format {int(end[1])}; marlvec {own} reads format {FORMAT}: use the version that wrote it"
        )
    if _digest(file) != end[2]:
        raise CheckpointError(path, "is damaged: its content does not have the sha256 that its end says")
    with zipfile.ZipFile(file) as archive:
        entries = _check_entries(path, archive, size)
        manifest = json.loads(_read_entry(archive, entries.pop("manifest")).tobytes(), parse_constant=_no_constant)
        arrays = {name: _read_entry(archive, info) for name, info in entries.items()}
    data = _with_arrays(manifest["data"], arrays)
    if arrays:
        raise CheckpointError(path, f"holds entries that nothing asks for: {short(sorted(arrays))}")
    if not isinstance(data, dict):
        raise CheckpointError(path, f"holds {type(data).__name__}, not a dict")
    return data


def _with_arrays(data: Any, arrays: dict[str, NDArray[Any]]) -> Any:
    """Put the arrays back where they were, each once: asked for again and again, few bytes would become many."""
    if isinstance(data, list):
        return [_with_arrays(item, arrays) for item in data]
    if not isinstance(data, dict):
        return data
    if "$array" in data:
        return arrays.pop(data["$array"])
    return {key: _with_arrays(item, arrays) for key, item in data.items()}


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")
