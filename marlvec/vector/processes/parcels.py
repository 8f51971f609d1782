"""Values that are pickled one after the other, so that it is known which one cannot be unpickled."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Sequence
from typing import Any

import cloudpickle

from marlvec.vector.faults.failures import cannot_unpickle

__all__ = ["dump_each", "load_each"]


def dump_each(values: Sequence[Any], *, by_value: bool = False) -> bytes:
    """Pickle values one after the other; what they share is pickled once.

    Args:
        values: The values.
        by_value: Whether whoever unpickles them does not know the classes of this process's main module; else those
            alone go by value that cannot be pickled otherwise.
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
