"""`write_value` and `read_value`: a file with one value, such as a state, under the name of its kind."""

from __future__ import annotations

from typing import Any

from marlvec.errors import CheckpointError, MarlvecError
from marlvec.serialization.archive import FilePath, read_archive, write_archive
from marlvec.serialization.values import decode, encode

__all__ = ["read_value", "write_value"]


def write_value(path: FilePath, name: str, value: Any, what: str) -> None:
    """Write plain data to a file atomically, under a name that `read_value` requires; ``what`` names it in messages."""
    write_archive(path, {name: encode(value, what)})


def read_value(path: FilePath, name: str, what: str) -> Any:
    """Read the value that `write_value` wrote under this name; no code is executed. Errors are `CheckpointError`."""
    found = read_archive(path)
    if found.keys() != {name}:
        raise CheckpointError(path, f"holds no {what}, but {sorted(found)}")
    try:
        return decode(found[name])
    except MarlvecError as error:
        raise CheckpointError(path, f"holds no {what}: {error}") from error
