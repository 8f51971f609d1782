"""The attributes of Python objects as plain data, and back: a deep copy that can be written to a file.

Numbers, texts, arrays, containers, random streams, and objects of classes written in Python are copied, with all that
refers to them more than once. What is the same for every env of its kind is not copied, and stays as it is where a
state is put back: functions, classes, modules, spaces. So does what Python cannot look into (a surface of pygame, a
simulator in C), and what frees something when it goes (``__del__``), which two copies would free twice:
`AttributeReader.opaque` lists it.

A state may come from a file of unknown origin. Where it is put back no constructor and no finaliser is run, and
no object is made but of a class that the env which takes the state has already, or that its package defines itself.
What the attributes then are is up to the file; the env's own code works with them from the next step on.
"""

from __future__ import annotations

import random
import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec

from marlvec.errors import ArgumentError

__all__ = ["AttributeReader", "AttributeWriter", "Plain"]

Plain = dict[str, Any]
"""Plain data; a dict with a ``kind`` for all that is no number, text or None."""

_AS_IT_IS = (type(None), bool, int, float, str)
_CONSTANT = (ModuleType, FunctionType, BuiltinFunctionType, type, EnvSpec, np.dtype, np.ufunc, re.Pattern)
_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset", deque: "deque"}
_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter", defaultdict: "defaultdict"}
_FACTORIES: dict[Any, str | None] = {
    None: None,
    **{kind: kind.__name__ for kind in (int, float, bool, str, list, dict, set, tuple)},
}
_MISSING: Any = object()
_MODE = "render_mode"
"""An attribute that says how an env is shown, which is no part of its state: it may be looked at in another mode."""


class AttributeReader:
    """Reads the attributes of some objects, the roots, and of all that they refer to.

    Args:
        roots: The objects. Where one refers to another, that stays a reference.

    Attributes:
        opaque: Where something stands that cannot be copied, and what it is: ``"env.screen (pygame.surface.Surface)"``.
        classes: Name of each class of which an object was found → the class.
    """

    def __init__(self, roots: Sequence[Any]) -> None:
        self._numbers = {id(root): number for number, root in enumerate(roots)}
        self._held: list[Any] = list(roots)  # an object that is gone would leave its id to another one
        self.opaque: list[str] = []
        self.classes: dict[str, type] = {_name(type(root)): type(root) for root in roots}

    def read(self, root: Any, path: str) -> Plain:
        """The attributes of one root.

        Args:
            root: Which.
            path: What to call it in messages.
        """
        return self._read(root, path)

    def _read(self, thing: Any, path: str) -> Plain:
        parts = _attributes(thing).items()
        return {
            name: {"kind": "shown", "mode": value} if name == _MODE else self._copy(value, f"{path}.{name}")
            for name, value in parts
        }

    def _copy(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind in _AS_IT_IS or isinstance(value, (np.number, np.bool_)):
            return value
        if isinstance(value, _CONSTANT):
            return {"kind": "kept"}
        if id(value) in self._numbers:
            return {"kind": "again", "number": self._numbers[id(value)]}
        found = self._number(value)
        if isinstance(value, Enum):
            return {**found, "kind": "enum", "class": self._note(kind), "name": value.name}
        if kind in _SEQUENCES or (isinstance(value, tuple) and hasattr(kind, "_fields")):
            items = [self._copy(item, f"{path}[{k}]") for k, item in enumerate(value)]
            if kind not in _SEQUENCES:
                return {**found, "kind": "namedtuple", "class": self._note(kind), "items": items}
            limit = {"maxlen": value.maxlen} if kind is deque else {}
            return {**found, "kind": _SEQUENCES[kind], "items": items, **limit}
        if kind in _MAPPINGS:
            if kind is defaultdict and value.default_factory not in _FACTORIES:
                return self._keep(value, path)
            factory = {"factory": _FACTORIES[value.default_factory]} if kind is defaultdict else {}
            keys = [self._copy(key, f"a key of {path}") for key in value]
            values = [self._copy(item, f"{path}[{key!r:.40}]") for key, item in value.items()]
            return {**found, "kind": _MAPPINGS[kind], "keys": keys, "values": values, **factory}
        if isinstance(value, gymnasium.Space):
            return {**found, "kind": "space", "parts": self._space(value, path)}
        if kind is MethodType:
            return {**found, "kind": "method", "self": self._copy(value.__self__, path), "name": value.__name__}
        return self._copy_leaf(value, found, path)

    def _copy_leaf(self, value: Any, found: Plain, path: str) -> Plain:
        """Arrays, random streams, bytes, and objects."""
        kind = type(value)
        if kind is np.ndarray and not value.dtype.hasobject and value.dtype.names is None:
            return {**found, "kind": "array", "array": value.copy()}
        if kind is np.ndarray and value.dtype == object:
            items = [self._copy(item, f"{path}[…]") for item in value.ravel().tolist()]
            return {**found, "kind": "objects", "shape": list(value.shape), "items": items}
        if kind is np.random.Generator:
            return {**found, "kind": "generator", "state": _copied(value.bit_generator.state)}
        if kind is np.random.RandomState:
            return {**found, "kind": "RandomState", "state": _copied(value.get_state(legacy=False))}
        if kind is random.Random:
            return {**found, "kind": "Random", "state": value.getstate()}
        if kind in (bytes, bytearray):
            return {**found, "kind": kind.__name__, "bytes": np.frombuffer(value, np.uint8).copy()}
        if kind is complex:
            return {**found, "kind": "complex", "parts": [value.real, value.imag]}
        if not _is_open(kind):
            return self._keep(value, path)
        return {**found, "kind": "object", "class": self._note(kind), "attributes": self._read(value, path)}

    def _number(self, value: Any) -> Plain:
        number = self._numbers[id(value)] = len(self._held)
        self._held.append(value)
        return {"number": number}

    def _note(self, kind: type) -> str:
        self.classes[_name(kind)] = kind
        return _name(kind)

    def _keep(self, value: Any, path: str) -> Plain:
        self.opaque.append(f"{path} ({_name(type(value)).replace(':', '.')})")
        return {"kind": "kept"}

    def _space(self, space: Any, path: str) -> Plain:
        """The random streams of a space and of those in it; all else of it is constant."""
        stream = getattr(space, "_np_random", None)
        own = {} if stream is None else {"": self._copy(stream, f"{path}.np_random")}
        inner = {name: self._space(part, path) for name, part in _parts(space)}
        return {**own, **{name: found for name, found in inner.items() if found}}


class AttributeWriter:
    """Gives objects the attributes that an `AttributeReader` read of others of their kind.

    Args:
        roots: The objects, as many as there were, in that order.
    """

    def __init__(self, roots: Sequence[Any]) -> None:
        self._roots = list(roots)
        self._made: dict[int, Any] = dict(enumerate(roots))
        self._classes: dict[str, type] | None = None

    def write(self, root: Any, state: Plain, path: str) -> None:
        """Give one root its attributes, and take away those that are not in the state.

        Args:
            root: Which.
            state: What `AttributeReader.read` gave.
            path: What to call it in messages.

        Raises:
            ArgumentError: Something in the state has no counterpart here.
        """
        now = _attributes(root)
        made = {name: self._make(value, now.get(name, _MISSING), f"{path}.{name}") for name, value in state.items()}
        for name in now.keys() - made.keys():
            object.__delattr__(root, name)
        _set_attributes(root, made)

    def _make(self, state: Any, old: Any, path: str) -> Any:
        """Build a value.

        Args:
            state: What was read of it.
            old: What stands in its place, or `_MISSING`.
            path: Where that is.
        """
        if not isinstance(state, dict):
            return state
        kind = state["kind"]
        if kind == "kept":
            if old is _MISSING:
                raise ArgumentError(f"{path} is something that cannot be copied, and this env has nothing there")
            return old
        if kind == "shown":
            return state["mode"] if old is _MISSING else old
        number = state["number"]
        if kind == "again":
            return self._made[number]
        if kind in _MAKERS:
            self._made[number] = _MAKERS[kind](state, old)
            return self._made[number]
        self._made[number] = getattr(self, f"_make_{kind}")(state, old, path)
        return self._made[number]

    def _items(self, state: Plain, old: Any, path: str) -> Iterator[Any]:
        before = list(old) if isinstance(old, (list, tuple, deque)) else []
        for k, item in enumerate(state["items"]):
            yield self._make(item, before[k] if k < len(before) else _MISSING, f"{path}[{k}]")

    def _make_list(self, state: Plain, old: Any, path: str) -> list[Any]:
        made: list[Any] = []
        self._made[state["number"]] = made  # it may be in itself
        made.extend(self._items(state, old, path))
        return made

    def _make_deque(self, state: Plain, old: Any, path: str) -> deque[Any]:
        return deque(self._items(state, old, path), state["maxlen"])

    def _make_tuple(self, state: Plain, old: Any, path: str) -> tuple[Any, ...]:
        return tuple(self._items(state, old, path))

    def _make_set(self, state: Plain, old: Any, path: str) -> set[Any]:
        return set(self._items(state, old, path))

    def _make_frozenset(self, state: Plain, old: Any, path: str) -> frozenset[Any]:
        return frozenset(self._items(state, old, path))

    def _make_namedtuple(self, state: Plain, old: Any, path: str) -> Any:
        kind = self._class(state["class"], old, path)
        if not issubclass(kind, tuple):
            raise ArgumentError(f"{path}: {state['class']} is no named tuple here")
        return tuple.__new__(kind, self._items(state, old, path))

    def _make_mapping(self, state: Plain, old: Any, path: str) -> Any:
        made: Any = {name: kind for kind, name in _MAPPINGS.items()}[state["kind"]]()
        if isinstance(made, defaultdict):
            made.default_factory = {name: kind for kind, name in _FACTORIES.items()}[state["factory"]]
        self._made[state["number"]] = made
        for key_state, value in zip(state["keys"], state["values"], strict=True):
            key = self._make(key_state, _MISSING, path)
            before = (
                old.get(key, _MISSING) if isinstance(old, Mapping) and not isinstance(old, defaultdict) else _MISSING
            )
            made[key] = self._make(value, before, f"{path}[{key!r:.40}]")
        return made

    _make_dict = _make_OrderedDict = _make_Counter = _make_defaultdict = _make_mapping

    def _make_objects(self, state: Plain, old: Any, path: str) -> Any:
        items = old.ravel().tolist() if isinstance(old, np.ndarray) else _MISSING
        flat = np.empty(len(state["items"]), np.object_)
        for k, item in enumerate(self._items(state, items, path)):
            flat[k] = item
        return flat.reshape(state["shape"])

    def _make_space(self, state: Plain, old: Any, path: str) -> Any:
        if not isinstance(old, gymnasium.Space):
            raise ArgumentError(f"{path} is a space, and this env has none there")
        self._seed_space(old, state["parts"], path)
        return old

    def _seed_space(self, space: Any, parts: Plain, path: str) -> None:
        space._np_random = self._make(parts[""], _MISSING, path) if "" in parts else None
        for name, part in _parts(space):
            self._seed_space(part, parts.get(name, {}), path)

    def _make_method(self, state: Plain, old: Any, path: str) -> Any:
        of = getattr(old, "__self__", _MISSING)
        owner = self._make(state["self"], of, path)
        found = getattr(type(owner), state["name"], None)
        if not isinstance(found, FunctionType):
            raise ArgumentError(f"{path} is a method {state['name']!r}, which {type(owner).__name__} has not got here")
        return MethodType(found, owner)

    def _make_enum(self, state: Plain, old: Any, path: str) -> Any:
        kind = self._class(state["class"], old, path)
        if not issubclass(kind, Enum):
            raise ArgumentError(f"{path}: {state['class']} is no enum here")
        return kind[state["name"]]

    def _make_object(self, state: Plain, old: Any, path: str) -> Any:
        kind = self._class(state["class"], old, path)
        if not _is_open(kind):
            raise ArgumentError(f"{path} is an object of the class {state['class']}, of which none is copied")
        made: Any = object.__new__(kind)
        self._made[state["number"]] = made
        before = _attributes(old) if type(old) is kind else {}
        attributes = {
            name: self._make(value, before.get(name, _MISSING), f"{path}.{name}")
            for name, value in state["attributes"].items()
        }
        _set_attributes(made, attributes)
        return made

    def _class(self, name: str, old: Any, path: str) -> type:
        """The class of this name that stands here already, or is in a package of which there is one."""
        if _name(type(old)) == name:
            return type(old)
        if self._classes is None:
            reader = AttributeReader(self._roots)
            for root in self._roots:
                reader.read(root, path)
            self._classes = reader.classes
        if name in self._classes:
            return self._classes[name]
        module, _, qualname = name.partition(":")
        found: Any = None
        if module.partition(".")[0] in {known.partition(":")[0].partition(".")[0] for known in self._classes}:
            found = sys.modules.get(module)
            for part in qualname.split("."):
                found = getattr(found, part, None)
        if not isinstance(found, type) or _name(found) != name:  # a module names what others define, too: os, tempfile
            raise ArgumentError(f"{path} is an object of the class {name}, which this env does not have")
        return found


def _make_stream(state: Plain, old: Any) -> Any:
    made = np.random.Generator(_bits_for(state["state"]))
    made.bit_generator.state = _copied(state["state"])
    return made


def _make_random_state(state: Plain, old: Any) -> Any:
    made = np.random.RandomState(_bits_for(state["state"]))
    made.set_state(_copied(state["state"]))
    return made


def _bits_for(state: Any) -> np.random.BitGenerator:
    """A new source of random bits of the kind that is to have this state.

    Raises:
        ArgumentError: There is no such kind, or it would read beside its numbers: numpy believes what it is given.
    """
    kind = getattr(np.random, str(state["bit_generator"]), None)
    if not (isinstance(kind, type) and issubclass(kind, np.random.BitGenerator)):
        raise ArgumentError(f"numpy has no random stream of the kind {state['bit_generator']!r:.50}")
    place, upto = 0, 0
    if kind is np.random.MT19937:
        place, upto = state["state"]["pos"], 624
    elif kind is np.random.Philox:
        place, upto = state["buffer_pos"], 4
    if not 0 <= place <= upto:
        raise ArgumentError(f"the state of a {kind.__name__} has its place at {place!r:.50}, not within 0..{upto}")
    made: np.random.BitGenerator = kind(0)
    return made


def _make_random(state: Plain, old: Any) -> Any:
    made = random.Random(0)
    version, words, rest = state["state"]
    made.setstate((version, tuple(words), rest))
    return made


_MAKERS: dict[str, Callable[[Plain, Any], Any]] = {
    "array": lambda state, _: np.array(state["array"]),
    "generator": _make_stream,
    "RandomState": _make_random_state,
    "Random": _make_random,
    "bytes": lambda state, _: state["bytes"].tobytes(),
    "bytearray": lambda state, _: bytearray(state["bytes"].tobytes()),
    "complex": lambda state, _: complex(*state["parts"]),
}


def _name(kind: type) -> str:
    return f"{_module(kind)}:{kind.__qualname__}"


def _module(kind: type) -> str:
    found = getattr(kind, "__module__", "")  # classes that SWIG made have none
    return found if isinstance(found, str) else ""


def _copied(state: Any) -> Any:
    """Copy the state of a random stream: dicts, numbers, texts and arrays."""
    if isinstance(state, Mapping):
        return {key: _copied(value) for key, value in state.items()}
    return state.copy() if isinstance(state, np.ndarray) else state


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        names = vars(base).get("__slots__", ())
        yield from (name for name in ((names,) if isinstance(names, str) else names) if name[:2] != "__")


def _attributes(value: Any) -> dict[str, Any]:
    """An object's own attributes, those in slots too."""
    own = getattr(value, "__dict__", {})
    found = dict(own) if isinstance(own, dict) else {}
    for name in _slots(type(value)):
        if (part := getattr(value, name, _MISSING)) is not _MISSING:
            found[name] = part
    return found


def _set_attributes(value: Any, attributes: Mapping[str, Any]) -> None:
    slots = set(_slots(type(value)))
    for name, part in attributes.items():
        if name in slots:
            object.__setattr__(value, name, part)
        else:
            value.__dict__[name] = part  # no property and no __setattr__ has a say


def _is_open(kind: type) -> bool:
    """Whether an object of a class is its attributes and nothing else.

    Its class is written in Python, is not Python's own, and has no finaliser: what that frees (a handle of a library in
    C, a file) belongs to one object alone.
    """
    if _module(kind).partition(".")[0] in {"", *sys.stdlib_module_names} or hasattr(kind, "__del__"):
        return False
    if not (getattr(kind, "__dictoffset__", 0) or any(True for _ in _slots(kind))):
        return False
    try:
        object.__new__(kind)
    except TypeError:  # it has a part that is written in C
        return False
    return True


def _parts(space: Any) -> list[tuple[str, Any]]:
    """The spaces in a space, which have random streams of their own."""
    found: list[tuple[str, Any]] = []
    for name, value in vars(space).items():
        inner = {"": value}
        if isinstance(value, Mapping):
            inner = {f"[{key!r}]": part for key, part in value.items()}
        elif isinstance(value, (list, tuple)):
            inner = {f"[{k}]": part for k, part in enumerate(value)}
        found += [(f"{name}{key}", part) for key, part in inner.items() if isinstance(part, gymnasium.Space)]
    return found
