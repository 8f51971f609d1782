"""`Saved`: base of objects whose state is a table of attributes; `ProcessBound`: of objects that are of one process."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple, NoReturn, Self

import numpy as np

from marlvec.errors import ArgumentError, SerialisationError, StateError
from marlvec.serialization.plain_objects import array_from, plain_array
from marlvec.serialization.state_fields import State, array_field, check_fields, check_value, number_field

__all__ = ["ProcessBound", "Saved", "SavedField"]


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
