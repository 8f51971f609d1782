"""Files that unpack to much more than they are, and how much memory a call takes."""

from __future__ import annotations

import functools
import hashlib
import io
import tracemalloc
import zipfile
from collections.abc import Callable

from numpy.lib import format as npy

__all__ = ["GIGABYTE", "MB", "deflated", "peak_of", "sealed"]

MB = 10**6
GIGABYTE = 1000 * MB


def sealed(content: bytes, *, digest: bool = True) -> bytes:
    """A zip without a comment, with the end that an archive of marlvec's has, as whoever means harm could make it."""
    end = b"marlvec archive, format 0002, sha256 "
    assert content.endswith(bytes(2))
    content = content[:-2] + (len(end) + 64).to_bytes(2, "little") + end
    return content + (hashlib.sha256(content).hexdigest().encode() if digest else b"0" * 64)


def deflated(entries: dict[str, bytes], name: str) -> bytes:
    """A compressed zip of a megabyte, of these entries and one more: a gigabyte of zeros, as numpy would write it."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for other, content in entries.items():
            archive.writestr(other, content)
        with archive.open(f"{name}.npy", "w") as entry:
            npy.write_array_header_1_0(entry, {"descr": "|i1", "fortran_order": False, "shape": (GIGABYTE,)})  # type: ignore[arg-type]  # it only writes
            for _ in range(GIGABYTE // MB):
                entry.write(_zeros())
    content = file.getvalue()
    assert len(content) < 10 * MB
    return content


@functools.cache
def _zeros() -> bytes:
    return bytes(MB)


def peak_of(call: Callable[[], object]) -> int:
    """Bytes that Python had at the same time, at most, beside those before."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
