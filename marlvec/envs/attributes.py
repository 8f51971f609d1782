"""The attributes of Python objects as plain data, and back: a deep copy that can be written to a file.

Numbers, texts, arrays, containers, random streams, and objects of classes written in Python are copied; several
references to one object stay references to one copy. Objects that are equal in all envs of a class (functions, classes,
modules, spaces) are not copied, and restoring a state does not change them. Nor are objects that Python cannot read (a
surface of pygame, a simulator in C), or objects with a finaliser (``__del__``), which two copies would run twice:
`AttributeReader.opaque` lists these two kinds.

A state may come from a file of unknown origin. Restoring it runs no constructor and no finaliser, and makes objects
only of classes that the env already uses, or that its package defines. The file determines the values of the
attributes; the env's own code uses them from the next step on.
"""

from __future__ import annotations

import random
import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from enum import Enum
from itertools import chain, islice, repeat
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec

from marlvec.errors import ArgumentError

Plain = dict[str, Any]
"""Plain data; a dict with a ``kind`` for everything but numbers, texts and None."""

_AS_IT_IS = (type(None), bool, int, float, str)
_CONSTANT = (ModuleType, FunctionType, BuiltinFunctionType, type, EnvSpec, np.dtype, np.ufunc, re.Pattern)
_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset", deque: "deque"}
_COLLECTIONS: dict[str, Callable[[Iterator[Any]], Any]] = {"tuple": tuple, "frozenset": frozenset}
_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter", defaultdict: "defaultdict"}
_FACTORIES: dict[Any, str | None] = {
    None: None,
    **{kind: kind.__name__ for kind in (int, float, bool, str, list, dict, set, tuple)},
}
_MISSING: Any = object()
_MODE = "render_mode"
"""Name of an attribute that is not part of the state: an env may be restored with another render mode."""


class AttributeReader:
    """Reads the attributes of some objects, the roots, and of all objects that they refer to."""

    def __init__(self, roots: Sequence[Any]) -> None:
        self._numbers = {id(root): number for number, root in enumerate(roots)}
        self._held: list[Any] = list(roots)  # keeps objects alive, so that no id is reused
        self.opaque: list[str] = []  # objects that cannot be copied: "env.screen (pygame.surface.Surface)"
        # by name, of the objects read
        self.classes: dict[str, type] = {_name(type(root)): type(root) for root in roots}

    def read(self, root: Any, path: str) -> Plain:
        """Return the attributes of one root, which is called `path` in messages."""
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
            return {"kind": "kept", "label": _label(value)}
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
                return self._keep(value, found, path)
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
        """Copy an array, random stream, bytes, or object."""
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
            return self._keep(value, found, path)
        return {**found, "kind": "object", "class": self._note(kind), "attributes": self._read(value, path)}

    def _number(self, value: Any) -> Plain:
        number = self._numbers[id(value)] = len(self._held)
        self._held.append(value)
        return {"number": number}

    def _note(self, kind: type) -> str:
        self.classes[_name(kind)] = kind
        return _name(kind)

    def _keep(self, value: Any, found: Plain, path: str) -> Plain:
        self.opaque.append(f"{path} ({_name(type(value)).replace(':', '.')})")
        return {**found, "kind": "kept", "label": _label(value)}

    def _space(self, space: Any, path: str) -> Plain:
        """Return the random streams of a space and its subspaces; all its other parts are constant."""
        stream = getattr(space, "_np_random", None)
        own = {} if stream is None else {"": self._copy(stream, f"{path}.np_random")}
        inner = {name: self._space(part, path) for name, part in _parts(space)}
        return {**own, **{name: found for name, found in inner.items() if found}}


class AttributeWriter:
    """Sets attributes that an `AttributeReader` has read from objects of the same classes, the roots in its order."""

    def __init__(self, roots: Sequence[Any]) -> None:
        self._roots = list(roots)
        self._made: dict[int, Any] = dict(enumerate(roots))
        # arguments of `_make` for each object in the making, and the number of objects made before
        self._open: dict[int, tuple[tuple[Plain, Any, str], int]] = {}
        self._classes: dict[str, type] | None = None
        self._states: Sequence[Plain] = ()
        # present values at the places of kept objects, by number, or by label if they have none; made when needed
        self._places: dict[Any, list[Any]] | None = None

    def write(self, states: Sequence[Plain], paths: Sequence[str]) -> None:
        """Set the attributes of the first roots, and delete those that are not in the states.

        `ArgumentError`, and no attribute is set: an object in a state has no counterpart here.
        """
        self._states = states
        made = [
            self._make_attributes(state, _attributes(root), path)
            for root, state, path in zip(self._roots, states, paths, strict=False)
        ]
        for root, attributes in zip(self._roots, made, strict=False):
            for name in _attributes(root).keys() - attributes.keys():
                object.__delattr__(root, name)
            _set_attributes(root, attributes)

    def _make_attributes(self, state: Plain, before: Mapping[str, Any], path: str) -> dict[str, Any]:
        return {name: self._make(value, before.get(name, _MISSING), f"{path}.{name}") for name, value in state.items()}

    def _make(self, state: Any, old: Any, path: str) -> Any:
        """Build a value from ``state``; ``old`` is the present value, or `_MISSING`."""
        if not isinstance(state, dict):
            return state
        kind = state["kind"]
        if kind == "kept":
            kept = self._find_kept(state, old, path)
            if "number" in state:
                self._made.setdefault(state["number"], kept)
            return kept
        if kind == "shown":
            return state["mode"] if old is _MISSING else old
        number = state["number"]
        if kind == "again":
            return self._make_again(number, path)
        if number not in self._made:
            self._open[number] = (state, old, path), len(self._made)
            made = _MAKERS[kind](state) if kind in _MAKERS else getattr(self, f"_make_{kind}")(state, old, path)
            self._made.setdefault(number, made)  # a tuple that contains itself is made already, by `_make_again`
            self._open.pop(number, None)
        return self._made[number]

    def _find_kept(self, state: Plain, old: Any, path: str) -> Any:
        """Return this env's object for one that is not copied: the present value, or else that of a later place."""
        label, several = state["label"], 0
        if old is not _MISSING and not isinstance(old, _Keys):
            return old
        if self._places is None:
            self._places = {}
            for root, attributes in zip(self._roots, self._states, strict=False):
                self._find_places_in(attributes, _attributes(root))
        for place in (old, *self._places.get(state.get("number", label), ())):
            if isinstance(place, _Keys):
                found = place.labelled(label)
                several = max(several, len(found))
                if len(found) == 1:
                    return found[0]
            elif place is not _MISSING and _label(place) == label:
                return place
        if several:
            raise ArgumentError(
                f"{path}: expected one object ({label}) that cannot be copied, got {several}, and no sign which of "
                f"them it is"
            )
        raise ArgumentError(
            f"{path}: the saved env has an object there that cannot be copied ({label}), this env has none"
        )

    def _find_places(self, state: Any, old: Any) -> None:
        """Note the present values at all places of kept objects."""
        if not isinstance(state, dict) or old is _MISSING:
            return
        kind = state["kind"]
        if kind in ("kept", "again"):
            assert self._places is not None
            self._places.setdefault(state.get("number", state.get("label")), []).append(old)
        elif kind in _MAPPINGS.values():
            keys, values = _Keys(old), old if isinstance(old, Mapping) else {}
            for key, value in zip(state["keys"], state["values"], strict=True):
                self._find_places(key, keys)
                self._find_places(value, values.get(_plain_key(key), _MISSING))
        elif kind == "object" and _name(type(old)) == state["class"]:
            self._find_places_in(state["attributes"], _attributes(old))
        elif kind == "method":
            self._find_places(state["self"], getattr(old, "__self__", _MISSING))
        elif "items" in state:
            for item, before in zip(state["items"], _before(state, old), strict=True):
                self._find_places(item, before)

    def _find_places_in(self, attributes: Plain, before: Mapping[str, Any]) -> None:
        for name, value in attributes.items():
            self._find_places(value, before.get(name, _MISSING))

    def _make_again(self, number: int, path: str) -> Any:
        """Return the object with this number; one that holds itself is made a second time, as `copy.deepcopy` does."""
        if number in self._made:
            return self._made[number]
        if number not in self._open:
            raise ArgumentError(f"{path}: the state refers to object {number}, which it does not contain before")
        arguments, before = self._open[number]
        if before == len(self._made):  # nothing that can be changed later is on the way: it would never end
            raise ArgumentError(f"{path}: the state has a tuple that contains itself, with no other object between")
        return self._make(*arguments)

    def _items(self, state: Plain, old: Any, path: str) -> Iterator[Any]:
        for k, (item, before) in enumerate(zip(state["items"], _before(state, old), strict=True)):
            yield self._make(item, before, f"{path}[{k}]")

    def _make_list(self, state: Plain, old: Any, path: str) -> list[Any]:
        made: list[Any] = []
        self._made[state["number"]] = made  # it may contain itself
        made.extend(self._items(state, old, path))
        return made

    def _make_deque(self, state: Plain, old: Any, path: str) -> deque[Any]:
        made: deque[Any] = deque(maxlen=state["maxlen"])
        self._made[state["number"]] = made
        made.extend(self._items(state, old, path))
        return made

    def _make_set(self, state: Plain, old: Any, path: str) -> set[Any]:
        made: set[Any] = set()
        self._made[state["number"]] = made
        made.update(self._items(state, old, path))
        _check_number(made, len(state["items"]), path)
        return made

    def _make_collection(self, state: Plain, old: Any, path: str) -> Any:
        made = _COLLECTIONS[state["kind"]](self._items(state, old, path))
        _check_number(made, len(state["items"]), path)
        return made

    _make_tuple = _make_frozenset = _make_collection

    def _make_namedtuple(self, state: Plain, old: Any, path: str) -> Any:
        kind = self._class(state["class"], old, path)
        if not issubclass(kind, tuple):
            raise ArgumentError(f"{path}: {state['class']} is not a named tuple here")
        return tuple.__new__(kind, self._items(state, old, path))

    def _make_mapping(self, state: Plain, old: Any, path: str) -> Any:
        made: Any = {name: kind for kind, name in _MAPPINGS.items()}[state["kind"]]()
        if isinstance(made, defaultdict):
            made.default_factory = {name: kind for kind, name in _FACTORIES.items()}[state["factory"]]
        self._made[state["number"]] = made
        # All keys first, as they were read: a value may refer to a part of a later key.
        keys = [self._make(key, _Keys(old), f"a key of {path}") for key in state["keys"]]
        for key, value in zip(keys, state["values"], strict=True):
            before = old.get(key, _MISSING) if isinstance(old, Mapping) else _MISSING
            made[key] = self._make(value, before, f"{path}[{key!r:.40}]")
        _check_number(made, len(keys), path)
        return made

    _make_dict = _make_OrderedDict = _make_Counter = _make_defaultdict = _make_mapping

    def _make_objects(self, state: Plain, old: Any, path: str) -> Any:
        flat = np.empty(len(state["items"]), np.object_)
        made = self._made[state["number"]] = flat.reshape(state["shape"])  # a view
        for k, item in enumerate(self._items(state, old, path)):
            flat[k] = item
        return made

    def _make_space(self, state: Plain, old: Any, path: str) -> Any:
        if not isinstance(old, gymnasium.Space):
            raise ArgumentError(f"{path}: the saved env has a space there, this env has none")
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
            raise ArgumentError(
                f"{path} is a method {state['name']!r}, which {type(owner).__name__} does not have here"
            )
        return MethodType(found, owner)

    def _make_enum(self, state: Plain, old: Any, path: str) -> Any:
        kind = self._class(state["class"], old, path)
        if not issubclass(kind, Enum):
            raise ArgumentError(f"{path}: {state['class']} is not an enum here")
        return kind[state["name"]]

    def _make_object(self, state: Plain, old: Any, path: str) -> Any:
        kind = self._class(state["class"], old, path)
        if not _is_open(kind):
            raise ArgumentError(f"{path} is an object of the class {state['class']}, which cannot be copied")
        made: Any = object.__new__(kind)
        self._made[state["number"]] = made
        before = _attributes(old) if type(old) is kind else {}
        _set_attributes(made, self._make_attributes(state["attributes"], before, path))
        return made

    def _class(self, name: str, old: Any, path: str) -> type:
        """Return the class of this name that the env uses already, or that is in a package of such a class."""
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
        if not isinstance(found, type) or _name(found) != name:  # a module may have classes that others define
            raise ArgumentError(f"{path} is an object of the class {name}, which this env does not have")
        return found


class _Keys:
    """Present values where a dict has its keys, or a set its members, which have no places of their own."""

    def __init__(self, of: Any) -> None:
        self._of = of if isinstance(of, (Mapping, set, frozenset)) else ()
        self._labelled: dict[str, dict[int, Any]] | None = None

    def labelled(self, label: str) -> list[Any]:
        """Return the keys or members with this label, also in tuples and frozensets."""
        if self._labelled is None:
            self._labelled = {}
            for value in _flat(self._of):
                self._labelled.setdefault(_label(value), {})[id(value)] = value
        return list(self._labelled.get(label, {}).values())


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, frozenset)):
            yield from _flat(value)
        else:
            yield value


def _plain_key(key: Any) -> Any:
    """Return the value of a key that consists of plain values and tuples; else something that is no key."""
    if not isinstance(key, dict):
        return key
    return tuple(map(_plain_key, key["items"])) if key["kind"] == "tuple" else _MISSING


def _before(state: Plain, old: Any) -> Iterator[Any]:
    """Return the present value of each item, or `_MISSING`; of a set, and in keys, all of them each time."""
    if isinstance(old, (_Keys, set, frozenset)):
        return repeat(old if isinstance(old, _Keys) else _Keys(old), len(state["items"]))
    if isinstance(old, np.ndarray) and old.dtype == object:
        old = old.ravel().tolist()
    found = old if isinstance(old, (list, tuple, deque)) else ()
    return islice(chain(found, repeat(_MISSING)), len(state["items"]))


def _check_number(made: Sized, number: int, path: str) -> None:
    """Raise if keys or members that cannot be copied have one counterpart here."""
    if len(made) != number:
        raise ArgumentError(f"{path}: expected {number} different keys or members, got {len(made)}")


def _make_stream(state: Plain) -> Any:
    made = np.random.Generator(_bits_for(state["state"]))
    made.bit_generator.state = _copied(state["state"])
    return made


def _make_random_state(state: Plain) -> Any:
    made = np.random.RandomState(_bits_for(state["state"]))
    made.set_state(_copied(state["state"]))
    return made


def _bits_for(state: Any) -> np.random.BitGenerator:
    """Return a new bit generator for this state; raise if its position is out of range, which numpy does not check."""
    kind = getattr(np.random, str(state["bit_generator"]), None)
    if not (isinstance(kind, type) and issubclass(kind, np.random.BitGenerator)):
        raise ArgumentError(f"numpy has no random stream of the kind {state['bit_generator']!r:.50}")
    place, upto = 0, 0
    if kind is np.random.MT19937:
        place, upto = state["state"]["pos"], 624
    elif kind is np.random.Philox:
        place, upto = state["buffer_pos"], 4
    if not 0 <= place <= upto:
        raise ArgumentError(f"state of a {kind.__name__}: expected a position from 0 to {upto}, got {place!r:.50}")
    made: np.random.BitGenerator = kind(0)
    return made


def _make_random(state: Plain) -> Any:
    made = random.Random(0)
    version, words, rest = state["state"]
    made.setstate((version, tuple(words), rest))
    return made


_MAKERS: dict[str, Callable[[Plain], Any]] = {
    "array": lambda state: np.array(state["array"]),
    "generator": _make_stream,
    "RandomState": _make_random_state,
    "Random": _make_random,
    "bytes": lambda state: state["bytes"].tobytes(),
    "bytearray": lambda state: bytearray(state["bytes"].tobytes()),
    "complex": lambda state: complex(*state["parts"]),
}


def _name(kind: type) -> str:
    return f"{_module(kind)}:{kind.__qualname__}"


def _label(value: Any) -> str:
    """Describe an object that is not copied, so that it is recognised in another env."""
    kind = _name(type(value)).replace(":", ".")
    if isinstance(value, (np.dtype, re.Pattern)):
        return f"{kind} {value!r}"
    if isinstance(value, _CONSTANT):
        name = getattr(value, "__qualname__", getattr(value, "__name__", ""))
        return f"{kind} {getattr(value, '__module__', '')}.{name}"
    return kind


def _module(kind: type) -> str:
    found = getattr(kind, "__module__", "")  # classes that SWIG made have none
    return found if isinstance(found, str) else ""


def _copied(state: Any) -> Any:
    if isinstance(state, Mapping):
        return {key: _copied(value) for key, value in state.items()}
    return state.copy() if isinstance(state, np.ndarray) else state


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        names = vars(base).get("__slots__", ())
        yield from (name for name in ((names,) if isinstance(names, str) else names) if name[:2] != "__")


def _attributes(value: Any) -> dict[str, Any]:
    """Return an object's own attributes, including slots."""
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
            value.__dict__[name] = part  # past properties and __setattr__


def _is_open(kind: type) -> bool:
    """Return whether objects of a class consist of their attributes alone.

    Such a class is written in Python, is not in the standard library, and has no finaliser: what a finaliser frees (a
    handle of a C library, a file) belongs to one object alone.
    """
    if _module(kind).partition(".")[0] in {"", *sys.stdlib_module_names} or hasattr(kind, "__del__"):
        return False
    if not (getattr(kind, "__dictoffset__", 0) or any(True for _ in _slots(kind))):
        return False
    try:
        object.__new__(kind)
    except TypeError:  # a base class is written in C
        return False
    return True


def _parts(space: Any) -> list[tuple[str, Any]]:
    """Return the subspaces of a space, each of which has its own random stream."""
    found: list[tuple[str, Any]] = []
    for name, value in vars(space).items():
        inner = {"": value}
        if isinstance(value, Mapping):
            inner = {f"[{key!r}]": part for key, part in value.items()}
        elif isinstance(value, (list, tuple)):
            inner = {f"[{k}]": part for k, part in enumerate(value)}
        found += [(f"{name}{key}", part) for key, part in inner.items() if isinstance(part, gymnasium.Space)]
    return found
