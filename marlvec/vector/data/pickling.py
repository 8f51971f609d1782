"""Values pickled one after the other, so that an error names the one that cannot be unpickled."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Sequence
from typing import Any

import cloudpickle

from marlvec.errors import SerialisationError

__all__ = ["dump_each", "load_each", "cannot_unpickle", "summary_of"]


def dump_each(values: Sequence[Any], *, by_value: bool = False) -> bytes:
    """Pickle values one after the other; what they share is pickled once.

    Args:
        values: The values.
        by_value: Whether the process that unpickles them does not know the classes of this process's main module; else
            those alone go by value that cannot be pickled otherwise.
    """
    if by_value:
        return _dump(cloudpickle.Pickler, values)
    try:
        return _dump(pickle.Pickler, values)
    except Exception:
        return _dump(cloudpickle.Pickler, values)


def _dump(kind: Any, values: Sequence[Any]) -> bytes:
    file = io.BytesIO()
    pickler = kind(file, protocol=5)
    for value in values:
        pickler.dump(value)
    return file.getvalue()


def load_each(data: bytes, names: Iterable[str], *, where: str = "this process") -> list[Any]:
    """Rebuild what `dump_each` has pickled.

    Args:
        data: What it gave.
        names: What each value is, for messages.
        where: This process, likewise.

    Raises:
        SerialisationError: One cannot be rebuilt; says which, and why.
    """
    unpickler = pickle.Unpickler(io.BytesIO(data))
    values = []
    for name in names:
        try:
            values.append(unpickler.load())
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # what is in it may raise whatever it likes
            raise cannot_unpickle(name, error, where=where) from error
    return values


def summary_of(error: BaseException) -> str:
    """The type and text of an exception, one line."""
    try:
        text = str(error)
    except Exception as broken:  # an exception whose own __str__ raises is still an exception
        text = f"(its __str__ raised {type(broken).__name__})"
    lines = text.splitlines() or [""]
    first = lines[0] if len(lines[0]) <= 500 else lines[0][:500] + "…"
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def cannot_unpickle(what: str, error: BaseException, *, where: str) -> SerialisationError:
    """The error for something that came through a pipe and could not be rebuilt."""
    return SerialisationError(
        f"{where} cannot unpickle {what}: {summary_of(error)}. Take plain data (numbers, text, arrays), or a class "
        f"that can be imported and rebuilt there; or use backend='sync', which pickles nothing."
    )
