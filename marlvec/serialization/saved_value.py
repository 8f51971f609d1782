"""`write_value` and `read_value`: a file that holds one value, such as a state, under the name of what it is."""

from __future__ import annotations

from typing import Any

from marlvec.errors import CheckpointError, MarlvecError
from marlvec.serialization.archive import FilePath, read_archive, write_archive
from marlvec.serialization.values import decode, encode

__all__ = ["read_value", "write_value"]


def write_value(path: FilePath, name: str, value: Any, what: str) -> None:
    """Write a value to a file, which is there whole or not at all, whatever happens meanwhile.

    Args:
        path: The file; an old one is replaced.
        name: What `read_value` is to ask for.
        value: Plain data, as `encode` takes it.
        what: What messages call it.

    Raises:
        SerialisationError: There is something that no file can hold; names it.
        OSError: The file cannot be written; the old one is as it was.
    """
    write_archive(path, {name: encode(value, what)})


def read_value(path: FilePath, name: str, what: str) -> Any:
    """Read what `write_value` wrote under this name; nothing in it is executed.

    Args:
        path: The file.
        name: As it was given then.
        what: What messages call it.

    Raises:
        CheckpointError: There is no such file, it is damaged, of another version, or holds something else.
    """
    found = read_archive(path)
    if found.keys() != {name}:
        raise CheckpointError(path, f"holds no {what}, but {sorted(found)}")
    try:
        return decode(found[name])
    except MarlvecError as error:
        raise CheckpointError(path, f"holds no {what}: {error}") from error
