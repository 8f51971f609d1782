"""`WeightStore`: policies' weights in numbered versions, packed once for all clients."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

from marlvec.errors import ArgumentError, RefusedError
from marlvec.external.protocol.messages import Message, Type
from marlvec.external.protocol.weights import pack_plain

__all__ = ["PART_BYTES", "Package", "WeightStore"]

PART_BYTES = 2**20
_KEPT = 2  # versions: a client may finish fetching the previous one


class Package(NamedTuple):
    """One version of the weights, from 1, and its checksum."""

    version: int
    data: bytes
    sha256: bytes

    @property
    def parts(self) -> int:
        """Number of parts in which it is sent."""
        return -(-len(self.data) // PART_BYTES)

    def part(self, number: int) -> bytes:
        return self.data[number * PART_BYTES : (number + 1) * PART_BYTES]


class WeightStore:
    """The last versions of the weights. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._packages: list[Package] = []

    @property
    def version(self) -> int:
        """Number of the newest version; 0: none."""
        newest = self.newest()
        return 0 if newest is None else newest.version

    def newest(self) -> Package | None:
        """Return the newest version, or None."""
        with self._lock:
            return self._packages[-1] if self._packages else None

    def find(self, version: int) -> Package | None:
        """Return a version by its number; None if it is not kept."""
        with self._lock:
            return next((package for package in self._packages if package.version == version), None)

    def answer(self, message: Message, room: int) -> tuple[Type, dict[str, Any]]:
        """Answer a ``weights`` or ``part`` request, in `room` bytes at most.

        `RefusedError`: the part is not kept, or it is larger.
        """
        fields = message.fields
        if message.type is Type.WEIGHTS:
            package = self.newest()
            if package is None or package.version <= fields["have"]:
                return Type.OFFER, {"version": fields["have"], "size": 0, "parts": 0, "sha256": b""}
            size, parts = len(package.data), package.parts
            return Type.OFFER, {"version": package.version, "size": size, "parts": parts, "sha256": package.sha256}
        package = self.find(fields["version"])
        if package is None or fields["part"] >= package.parts:
            what = f"part {fields['part']} of weights {fields['version']}"
            raise RefusedError(f"{what} does not exist, or is no longer kept", "weights")
        data = package.part(fields["part"])
        if len(data) > room:
            raise RefusedError("too many bytes are unconfirmed; ask again", "limit")
        return Type.CHUNK, {"data": data}

    def add(self, content: Mapping[str, Any], version: int | None = None) -> int:
        """Add a version, by default the last plus one; return its number.

        `content`: texts to trees, see `marlvec.external.protocol.weights`; `SerialisationError` if one has no form
        there.
        """
        last = self.version
        number = last + 1 if version is None else version
        if number <= last:
            raise ArgumentError(f"version={version!r}: expected a number above {last}, the last one")
        data = pack_plain({"version": number, **content}, "weights")
        package = Package(number, data, hashlib.sha256(data).digest())
        with self._lock:
            self._packages = [*self._packages, package][-_KEPT:]
        return number
