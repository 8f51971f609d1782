"""`Saved`: base of objects whose state is a table of their attributes; checks of a state's fields."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, NoReturn, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from marlvec.errors import ArgumentError, SerialisationError, StateError
from marlvec.serialization.values import array_from, plain_array


class ProcessBound:
    """Base of objects that hold threads, locks, processes or sockets, which no copy of the object has.

    Pickling and copying raise `SerialisationError`. After ``os.fork()``, calls in the child raise `StateError`.
    """

    _made_in: int  # pid of the process
    _instead = "make one in each process"  # advice of the errors

    def __new__(cls, *_: Any, **__: Any) -> Self:
        made = super().__new__(cls)
        made._made_in = os.getpid()
        return made

    @property
    def _is_forked(self) -> bool:
        return self._made_in != os.getpid()

    def _check_process(self, call: str) -> None:
        """Raise if this process was forked from the process that made the object."""
        if self._is_forked:
            raise StateError(
                f"{call} in process {os.getpid()}, a fork of process {self._made_in}, which made this "
                f"{type(self).__name__} and has its threads and workers: {self._instead}"
            )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise SerialisationError(
            f"{type(self).__name__} cannot be pickled or copied: it holds threads, locks or processes; {self._instead}"
        )


class SavedField(NamedTuple):
    """A field of a state: an array, a list of arrays or an integer, like the object's attribute."""

    attribute: str
    shape: tuple[int | None, ...] | None = None  # as the attribute's now if None; (3, None): an axis of any length

    def save(self, value: Any) -> Any:
        """Return a copy of the attribute as plain data."""
        if isinstance(value, list):
            return [plain_array(array, self.attribute) for array in value]
        return value.copy() if isinstance(value, np.ndarray) else value

    def load(self, own: Any, state: State, name: str, where: str) -> Any:
        """Return a copy of the field of a state; `ArgumentError` if it is unlike ``own``, the present attribute."""
        if isinstance(own, np.ndarray):
            return array_field(state, name, own.dtype, own.shape if self.shape is None else self.shape, where)
        if isinstance(own, int):
            return number_field(state, name, where)
        saved = state[name]
        if not isinstance(saved, list) or len(saved) != len(own):
            raise ArgumentError(f"{where}: {name}: expected {len(own)} arrays, got {saved!r:.200}")
        return [
            check_value(array_from(one), like.dtype, like.shape, f"{where}: {name}[{k}]")
            for k, (one, like) in enumerate(zip(saved, own, strict=True))
        ]


class Saved:
    """An object whose state is some of its attributes; a subclass names it and lists its fields."""

    saved_as: ClassVar[str]  # name of the state in messages
    saved_fields: ClassVar[Mapping[str, SavedField]]

    def get_state(self) -> State:
        """Return copies of all fields."""
        return {name: field.save(getattr(self, field.attribute)) for name, field in self.saved_fields.items()}

    def prepare(self, state: State) -> Callable[[], None]:
        """Validate a state from `get_state`; return a function that installs it."""
        where = self.saved_as
        check_fields(state, self.saved_fields, where)
        values = {
            field.attribute: field.load(getattr(self, field.attribute), state, name, where)
            for name, field in self.saved_fields.items()
        }
        return partial(self.install, self.derive(values))

    def derive(self, values: dict[str, Any]) -> dict[str, Any]:
        """Check loaded attributes against each other (`ArgumentError`); return all attributes to set."""
        return values

    def install(self, values: Mapping[str, Any]) -> None:
        """Set attributes that `derive` returned."""
        vars(self).update(values)


State = dict[str, Any]
"""A result of ``get_state()``: arrays, numbers and texts, in dicts and lists; later calls do not change it."""


def check_fields(state: Any, names: Collection[str], where: str) -> Mapping[str, Any]:
    """Return a state, after a check that it is a dict with exactly these fields."""
    if not isinstance(state, Mapping):
        raise ArgumentError(f"{where}: expected a saved state, got {state!r:.200}")
    missing = [name for name in names if name not in state]
    unknown = [name for name in state if name not in names]
    if missing or unknown:
        raise ArgumentError(f"{where}: expected other fields; missing {missing}, unknown {unknown}")
    return state


def array_field(
    state: Mapping[Any, Any], name: Any, dtype: DTypeLike, shape: Sequence[int | None], where: str
) -> NDArray[Any]:
    """Return a copy of an array in a state, after `check_array`."""
    return check_array(state, name, dtype, shape, where).copy()


def check_array(
    state: Mapping[Any, Any], name: Any, dtype: DTypeLike, shape: Sequence[int | None], where: str
) -> NDArray[Any]:
    """Return an array of a state, after a check of its dtype and shape; None in ``shape`` is an axis of any length."""
    return check_value(state.get(name), dtype, shape, f"{where}: {name}")


def check_value(value: Any, dtype: DTypeLike, shape: Sequence[int | None], where: str) -> NDArray[Any]:
    """Return a value, after a check that it is an array of this dtype and shape."""
    if (
        isinstance(value, np.ndarray)
        and (value.dtype, value.ndim) == (dtype, len(shape))
        and all(wanted in (None, got) for wanted, got in zip(shape, value.shape, strict=True))
    ):
        return value
    lengths = ", ".join("any" if length is None else str(length) for length in shape)
    got = f"{value.dtype} of {value.shape}" if isinstance(value, np.ndarray) else f"{value!r:.200}"
    raise ArgumentError(f"{where}: expected {np.dtype(dtype)} of ({lengths}), got {got}")


def arrays_like(state: Mapping[Any, Any], own: Mapping[Any, NDArray[Any]], where: str) -> dict[Any, NDArray[Any]]:
    """Return copies of a state's arrays, each with the dtype and shape of the array in ``own`` of the same name."""
    return {name: array_field(state, name, array.dtype, array.shape, where) for name, array in own.items()}


def flag_field(state: Mapping[str, Any], name: str, where: str) -> bool:
    """Return a bool of a state."""
    value = state.get(name)
    if not isinstance(value, bool):
        raise ArgumentError(f"{where}: {name}: expected True or False, got {value!r:.200}")
    return value


def number_field(state: Mapping[str, Any], name: str, where: str, *, least: int = 0) -> int:
    """Return an integer of a state, at least ``least``."""
    value = state.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ArgumentError(f"{where}: {name}: expected an integer of at least {least}, got {value!r:.200}")
    return value
