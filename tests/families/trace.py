"""All that a vectorizer returns, byte by byte: a hash for whole runs, and for two that differ, where they do."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np

__all__ = ["Trace", "difference"]


class Trace:
    """SHA-256 of everything that was added, in order."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, result: Any) -> bytes:
        """Take in what a reset or step returned; gives the hash of it alone."""
        own = hashlib.sha256()
        for path, kind, data in _parts(result):
            own.update(f"{path}\0{kind}\0".encode())
            own.update(data)
        self._hash.update(own.digest())
        return own.digest()

    def __str__(self) -> str:
        return self._hash.hexdigest()


def difference(got: Any, expected: Any) -> str:
    """Say where two results differ first, with both arrays; empty if they do not."""
    mine, theirs = ({path: (kind, data) for path, kind, data in _parts(result)} for result in (got, expected))
    if mine.keys() != theirs.keys():
        return f"only one of them has {sorted(mine.keys() ^ theirs.keys())}"
    for path, (kind, data) in mine.items():
        if kind != theirs[path][0]:
            return f"{path}: {kind}, expected {theirs[path][0]}"
        if bytes(data) != bytes(theirs[path][1]):
            return f"{path}:\n{_at(got, path)!r}\nexpected\n{_at(expected, path)!r}"
    return ""


def _parts(value: Any, path: str = "") -> Iterator[tuple[str, str, Any]]:
    """Path, type and bytes of every leaf, keys sorted: dicts that differ in nothing but their order are the same."""
    if isinstance(value, dict):
        for key in sorted(value, key=repr):
            yield from _parts(value[key], f"{path}/{key}")
    elif isinstance(value, (tuple, list)):
        yield path, f"{type(value).__name__} of {len(value)}", b""
        for k, part in enumerate(value):
            yield from _parts(part, f"{path}/{k}")
    elif isinstance(value, np.ndarray) and value.dtype != object:
        yield path, f"{value.dtype.str} {value.shape}", value.tobytes()
    elif isinstance(value, np.ndarray):
        yield path, f"object {value.shape}", b""
        for k, part in enumerate(value.ravel().tolist()):
            yield from _parts(part, f"{path}/[{k}]")
    else:
        yield path, type(value).__name__, repr(value).encode()


def _at(value: Any, path: str) -> Any:
    for key in path.split("/")[1:]:
        if isinstance(value, dict):
            value = next(part for name, part in value.items() if str(name) == key)
        else:
            value = value.ravel()[int(key[1:-1])] if isinstance(value, np.ndarray) else value[int(key)]
    return value
