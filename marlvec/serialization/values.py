"""Arrays, spaces, objects and connectors as JSON-able data, and back; `NameTable`: names that a config may use."""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from reprlib import repr as short
from typing import Any, Generic, NamedTuple, TypeVar, overload

import numpy as np
from gymnasium import spaces
from gymnasium.error import Error
from gymnasium.spaces import GraphInstance
from numpy.typing import NDArray

from marlvec.arguments import signature_of
from marlvec.errors import (
    AlreadyRegisteredError,
    ArgumentError,
    CheckpointError,
    MarlvecError,
    RegistryError,
    SerialisationError,
)
from marlvec.serialization.archive import read_archive, write_archive
from marlvec.serialization.atomic_file import FilePath
from marlvec.spaces import AnyText, describe_difference
from marlvec.trees import to_array

Config = dict[str, Any]
"""JSON-able data, except for arrays."""


def encode(value: Any, where: str) -> Any:
    """Turn a value of a kind listed above into JSON-able data, exactly; ``where`` names it in messages."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is list:
        return [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if kind is tuple:
        return {"$tuple": [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, dict):
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: encode(item, f"{where}[{key!r}]") for key, item in value.items()}
        return {"$items": [[encode(key, where), encode(item, f"{where}[{key!r}]")] for key, item in value.items()]}
    if kind is np.ndarray and not value.dtype.hasobject and value.dtype.names is None:
        return value
    if isinstance(value, (np.number, np.bool_)) and isinstance(plain := value.item(), (bool, int, float)):
        return {"$scalar": value.dtype.str, "value": encode(plain, where)}
    if isinstance(value, np.dtype) and np.dtype(value.str) == value:
        return {"$dtype": value.str}
    if isinstance(value, spaces.Space):
        return {
            "$space": _KIND_NAMES.get(kind) or OWN_SPACES.name_of(kind),
            "args": encode(_space_arguments(value, where), where),
        }
    if CLASSES.name_of(kind) is not None:
        return {"$connector": value.to_config()}
    if callable(value):
        return {"$function": _function_name(value, where)}
    raise SerialisationError(
        f"{where} cannot be saved: expected numbers, texts, None, bools, lists, tuples, dicts, plain arrays, "
        f"dtypes, spaces, registered functions and connectors, got {value!r}"
    )


def decode(data: Any) -> Any:
    """Return the value that `encode` was called with; arrays are copied."""
    try:
        return _decode(data)
    except RecursionError as error:
        raise ArgumentError(f"{short(data)} is nested too deeply for a result of encode()") from error


def _decode(data: Any) -> Any:
    if isinstance(data, np.ndarray):
        return data.copy()
    if isinstance(data, list):
        return [_decode(item) for item in data]
    if not isinstance(data, Mapping):
        return data
    mark = str(next(iter(data), ""))
    if not mark.startswith("$"):
        return {key: _decode(item) for key, item in data.items()}
    if mark not in _MARKS:
        raise ArgumentError(f"expected one of {list(_MARKS)}, got {short(mark)}")
    try:
        return _MARKS[mark](data[mark], data)
    except MarlvecError:
        raise
    except (TypeError, ValueError, AttributeError, KeyError, ArithmeticError, MemoryError) as error:
        raise ArgumentError(f"expected a result of encode(), got {short(data)}: {error!r:.300}") from error


def _dtype(text: Any) -> np.dtype[Any]:
    """Return the dtype of a name; refuse what only numpy's larger grammar allows, which uses Python's parser."""
    if not isinstance(text, str) or _DTYPE.fullmatch(text) is None:
        raise ValueError(f"expected a dtype such as '<f4', got {short(text)}")
    return np.dtype(text)


def _scalar(kind: Any, data: Mapping[str, Any]) -> Any:
    dtype, value = _dtype(kind), _decode(data["value"])
    if dtype.kind not in "biuf" or not isinstance(value, (bool, int, float)):
        raise ValueError(f"expected a number and a numeric dtype, got {short(value)} and {dtype}")
    with np.errstate(over="raise"):  # a saved number fits its dtype
        return dtype.type(value)


_DTYPE = re.compile(r"[<>|=]?[a-zA-Z?][0-9]{0,10}(\[[0-9]{0,10}[a-zA-Z]{1,2}\])?", re.ASCII)
_FLOATS = {repr(value): value for value in (math.inf, -math.inf, math.nan)}


T = TypeVar("T", bound=Callable[..., Any])


class NameTable(Generic[T]):
    """A table from names to classes or functions, and back; `kind` and `decorator` are for messages."""

    def __init__(self, kind: str, decorator: str) -> None:
        self.kind = kind
        self.decorator = decorator
        self._things: dict[str, T] = {}

    def add(self, thing: T, name: str | None = None) -> None:
        """Register ``thing`` under ``name``; None: under its own name. Registering it again has no effect."""
        # A thing defined again at the same place, as when a notebook's cell runs twice, replaces the old one.
        name = getattr(thing, "__name__", None) if name is None else name
        if not isinstance(name, str) or not name or name == "<lambda>":
            raise ArgumentError(
                f"{thing!r} needs a name to be registered under, got {name!r}: give {self.kind} name=..."
            )
        if (known := self.name_of(thing)) not in (None, name):
            raise AlreadyRegisteredError(f"{thing!r} is registered as the {self.kind} {known!r} already")
        taken = self._things.get(name)
        if taken is not None and taken is not thing and not _same_place(taken, thing):
            raise AlreadyRegisteredError(
                f"the {self.kind} {name!r} is {_place(taken)} already; register {_place(thing)} with another name=..."
            )
        self._things[name] = thing

    def name_of(self, thing: T) -> str | None:
        """Return a thing's name; None if it is not registered."""
        return next((name for name, known in self._things.items() if known is thing), None)

    def find(self, name: str) -> T:
        """Return the thing with a name; `RegistryError` lists similar names."""
        if name in self._things:
            return self._things[name]
        close = difflib.get_close_matches(name, self._things) if isinstance(name, str) and len(name) < 200 else []
        hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
        raise RegistryError(
            f"no {self.kind} is registered as {name!r:.200}: first import the module that has {self.decorator} over it"
            f"{hint}"
        )


CLASSES: NameTable[type[Any]] = NameTable("connector", "@register_connector")
"""Connector classes: marlvec's own, and others by `register_connector`."""

FUNCTIONS: NameTable[Callable[..., Any]] = NameTable("function", "@register_function")
"""Functions that connectors take as arguments, by `register_function`."""

OWN_SPACES: NameTable[type[Any]] = NameTable("space class", "@register_space")
"""Users' classes of spaces, by `register_space`."""


def _make_space(kind: str, arguments: Sequence[Any]) -> spaces.Space[Any]:
    """Make a space from the name of its class and its arguments; `ArgumentError` if these are invalid."""
    together = _KINDS[_NAMES[kind]].together if kind in _NAMES else OWN_SPACES.find(kind)
    try:
        return together(**arguments) if isinstance(arguments, dict) else together(*arguments)
    except (LookupError, TypeError, ValueError, AssertionError, AttributeError, ArithmeticError, Error) as error:
        raise ArgumentError(f"cannot make a {short(kind)} from {short(arguments)}: {error!r:.300}") from error


_MARKS: dict[str, Callable[[Any, Mapping[str, Any]], Any]] = {
    "$tuple": lambda items, _: tuple(_decode(item) for item in items),
    "$float": lambda text, _: _FLOATS[text],
    "$scalar": _scalar,
    "$dtype": lambda text, _: _dtype(text),
    "$items": lambda pairs, _: {_decode(key): _decode(item) for key, item in pairs},
    "$function": lambda name, _: FUNCTIONS.find(name),
    "$connector": lambda config, _: CLASSES.find(config["connector"]).from_config(config),
    "$space": lambda kind, data: _make_space(kind, _decode(data["args"])),
}


def outline(data: Any) -> list[str]:
    """Return encoded data as lines of text that can be compared; an array by its dtype, its shape and a digest."""
    return json.dumps(data, indent=1, default=_digest).splitlines()


def _digest(array: NDArray[Any]) -> str:
    return f"{array.dtype} array of {array.shape}, sha256 {hashlib.sha256(array.tobytes()).hexdigest()[:16]}"


def _function_name(function: Any, where: str) -> str:
    name = FUNCTIONS.name_of(function)
    if name is None:
        raise SerialisationError(
            f"{where} is {function!r}, which is not registered: write @register_function over its def, or call "
            f"register_function(function, name=...), also where it is loaded"
        )
    return name


# --- spaces


class _Kind(NamedTuple):
    """Functions that read a space's arguments, and that make a space from them."""

    apart: Callable[[Any], Sequence[Any]]
    together: Callable[..., spaces.Space[Any]]


def _discrete(n: int, start: int, dtype: np.dtype[Any]) -> spaces.Space[Any]:
    if dtype == np.int64:
        return spaces.Discrete(n, start=start)  # older versions of Gymnasium have no dtype argument
    return spaces.Discrete(n, start=start, dtype=dtype.type)


_KINDS: dict[type[spaces.Space[Any]], _Kind] = {
    spaces.Box: _Kind(
        lambda s: [s.low, s.high, s.dtype],
        lambda low, high, dtype: spaces.Box(low, high, np.shape(low), dtype.type),
    ),
    spaces.Discrete: _Kind(lambda s: [int(s.n), int(s.start), s.dtype], _discrete),
    spaces.MultiDiscrete: _Kind(
        lambda s: [s.nvec, s.start, s.dtype],
        lambda nvec, start, dtype: spaces.MultiDiscrete(nvec, dtype.type, start=start),
    ),
    spaces.MultiBinary: _Kind(lambda s: [s.n], spaces.MultiBinary),
    spaces.Text: _Kind(
        lambda s: [s.max_length, s.min_length, "".join(s.character_list)],
        lambda most, least, charset: spaces.Text(most, min_length=least, charset=charset),
    ),
    AnyText: _Kind(lambda s: [s.max_length, list(s.examples)], lambda most, texts: AnyText(most, examples=texts)),
    # An OrderedDict keeps the order of keys; keys of a plain dict would be sorted.
    spaces.Dict: _Kind(
        lambda s: [[[key, sub] for key, sub in s.spaces.items()]], lambda items: spaces.Dict(OrderedDict(items))
    ),
    spaces.Tuple: _Kind(lambda s: [list(s.spaces)], spaces.Tuple),
    spaces.OneOf: _Kind(lambda s: [list(s.spaces)], spaces.OneOf),
    spaces.Sequence: _Kind(
        lambda s: [s.feature_space, s.stack], lambda space, stack: spaces.Sequence(space, stack=stack)
    ),
    spaces.Graph: _Kind(lambda s: [s.node_space, s.edge_space], spaces.Graph),
}
_NAMES = {kind.__name__: kind for kind in _KINDS}
_KIND_NAMES = {kind: name for name, kind in _NAMES.items()}

S = TypeVar("S", bound=type[spaces.Space[Any]])


@overload
def register_space(cls: S, *, name: str | None = None) -> S: ...


@overload
def register_space(cls: None = None, *, name: str | None = None) -> Callable[[S], S]: ...


def register_space(cls: S | None = None, *, name: str | None = None) -> S | Callable[[S], S]:
    """Register your own class of spaces for files: ``@register_space``, or as a call.

    Checkpoints, pools of opponents, policies' files and recordings then hold such a space by this name, with the
    arguments of its constructor: store each under its name (``seed`` need not be stored). Spaces are compared by their
    ``==``, without one by their attributes. Register the class also where the files are read.

    Args:
        cls: The class; set by the decorator.
        name: Its name in files, which must stay as long as they are read; None: the class's name.

    Returns:
        The class, unchanged.

    Raises:
        AlreadyRegisteredError: The name belongs to another class, e.g. one of Gymnasium's, or the class has another
            name.
        ArgumentError: ``cls`` is not a class of spaces.
    """
    if cls is None:
        return lambda decorated: register_space(decorated, name=name)
    if not (isinstance(cls, type) and issubclass(cls, spaces.Space)):
        raise ArgumentError(f"expected a class derived from gymnasium.spaces.Space, got {cls!r}")
    if cls in _KINDS or (cls.__name__ if name is None else name) in _NAMES:
        raise AlreadyRegisteredError(
            f"{cls.__name__ if name is None else name!r} is a space that marlvec saves already; register another "
            f"class, with another name=..."
        )
    OWN_SPACES.add(cls, name)
    return cls


def _space_arguments(space: spaces.Space[Any], where: str) -> list[Any] | dict[str, Any]:
    """Return a space's arguments for `_make_space`; subspaces stay spaces."""
    cls = type(space)
    kind = _KINDS.get(cls)
    if kind is not None:
        arguments = list(kind.apart(space))
        again = kind.together(*arguments)
    elif OWN_SPACES.name_of(cls) is not None:
        return _own_arguments(space, where)
    else:
        raise SerialisationError(
            f"{where} is a {cls.__name__}, which is not registered: write @marlvec.register_space over the class, also "
            f"where it is read back; or use one of Gymnasium's spaces or marlvec.spaces.AnyText"
        )
    if (difference := describe_difference(space, again)) is not None:
        raise SerialisationError(f"{where} would be another space when read back: {difference}")
    return arguments


def _own_arguments(space: spaces.Space[Any], where: str) -> dict[str, Any]:
    """Return the arguments of a space of a registered class, by name."""
    cls = type(space)
    found, lost = {}, []
    for name, parameter in signature_of(cls).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            lost.append(str(parameter))
        elif hasattr(space, name) and not (name == "seed" and callable(space.seed)):
            found[name] = getattr(space, name)
        elif name != "seed":
            lost.append(name)
    if lost:
        raise SerialisationError(
            f"{where} is a {cls.__name__}: expected attributes named like the arguments of its constructor, got none "
            f"for {', '.join(lost)}: store them"
        )
    if (difference := describe_difference(space, cls(**found))) is not None:
        raise SerialisationError(
            f"{where} would be another space when read back: {difference}; give {cls.__name__} an __eq__, or store its "
            f"arguments unchanged"
        )
    return found


# --- files


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


_GRAPH = "GraphInstance"


def plain_object(value: Any) -> Any:
    """Return a copy of an object as plain data."""
    if isinstance(value, GraphInstance):
        return {_GRAPH: [plain_object(part) for part in value]}
    if isinstance(value, (tuple, list)):
        return type(value)(plain_object(item) for item in value)
    if isinstance(value, dict):
        return {key: plain_object(item) for key, item in value.items()}
    return value.copy() if isinstance(value, np.ndarray) else value


def object_from(value: Any) -> Any:
    """Return a copy of the object that `plain_object` was called with."""
    if isinstance(value, dict):
        if value.keys() == {_GRAPH}:
            return GraphInstance(*(object_from(part) for part in value[_GRAPH]))
        return {key: object_from(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(object_from(item) for item in value)
    return value.copy() if isinstance(value, np.ndarray) else value


def plain_array(value: Any, where: str) -> Any:
    """Return a copy of an array; for objects on one axis, a list of them as plain data."""
    array = to_array(value)
    if not array.dtype.hasobject:
        return array.copy()
    if array.dtype != object or array.ndim != 1:
        raise SerialisationError(f"{where} holds Python objects in {array.dtype} of {array.shape}")
    return [plain_object(item) for item in array.tolist()]


def array_from(value: Any) -> NDArray[Any]:
    """Return the array that `plain_array` was called with, in new memory."""
    if not isinstance(value, list):
        return np.array(value)
    array = np.empty(len(value), object)
    for i, item in enumerate(value):
        array[i] = object_from(item)
    return array


def _same_place(a: Any, b: Any) -> bool:
    """Return whether two things come from one definition in the source, run twice."""
    return _place(a) == _place(b) and "<" not in _place(a)  # "<locals>" and "<lambda>" are not unique


def _place(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '?')}.{getattr(thing, '__qualname__', '<no name>')}"
