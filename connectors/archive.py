"""Arrays in a zip: what a file says of itself is checked before any of it is believed.

Entries are stored as they are, never compressed: so none is larger than what the file itself has of it, and all
together are no larger than the file. Reading a file takes memory in proportion to its size, whatever it says.
"""

from __future__ import annotations

import ast
import math
import zipfile
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from marlvec.connectors.new_file import FilePath
from marlvec.errors import CheckpointError

__all__ = ["check_entries", "read_entry"]

_MAX_HEADER = 10_000  # bytes; numpy reads no longer ones either
_SUFFIX = ".npy"
_KEYS = {"descr", "fortran_order", "shape"}


def check_entries(path: FilePath, archive: zipfile.ZipFile, size: int) -> dict[str, zipfile.ZipInfo]:
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


def read_entry(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> NDArray[Any]:
    """Read one entry, once its header was found to tell the truth; objects, which are pickles, are refused.

    Raises:
        ValueError: It is no array, one of objects, or of another size than it says.
        zipfile.BadZipFile: It is damaged: zips have a checksum of each entry.
    """
    with archive.open(info) as entry:
        shape, dtype = _header(info.filename, entry)
        left = info.file_size - entry.tell()
    if dtype.hasobject:
        raise ValueError(f"{info.filename} holds Python objects")
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
