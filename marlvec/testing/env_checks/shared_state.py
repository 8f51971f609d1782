"""State that instances of an env share: class attributes, module globals, global random generators."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

from marlvec.envs.wrapper_chain import wrapper_chain

__all__ = ["GENERATORS", "SharedState", "draw_advice", "fingerprint", "reachable"]

GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)
"""Classes of random generators."""
_LIBRARIES = ("abc", "builtins", "collections", "enum", "marlvec", "numpy", "pygame", "torch", "typing")
_BASES = ("gymnasium.core", "gymnasium.spaces", "gymnasium.utils", "gymnasium.wrappers", "pettingzoo.utils")
_MOST_OBJECTS, _MOST_BYTES, _MOST_PLACES = 5_000, 10_000_000, 3

_PROCESS = {
    "np.random": "it draws from np.random, the one generator of the whole process: draw from self.np_random instead of "
    "the functions of numpy.random, and set self.np_random = np.random.default_rng(seed) in reset(seed=…)",
    "random": "it draws from the module random, the one generator of the whole process: draw from self.random instead, "
    "and set self.random = random.Random(seed) in reset(seed=…)",
}
"""Advice on draws from each generator that a process has only once."""


def draw_advice(names: Iterable[str]) -> str:
    """Return the advice on draws from these generators, ``"np.random"`` and ``"random"``; ``""`` without any."""
    return "; ".join(_PROCESS[name] for name in names)


class SharedState:
    """State that two instances of an env share, and which of it changes."""

    def __init__(self, first: Any, second: Any) -> None:
        self._places: dict[str, Callable[[], Any]] = {}
        self._advice: dict[str, str] = {}
        self._moved: dict[str, bool] = {}
        self._generators: set[str] = set()
        layers = list(wrapper_chain(first))
        held = reachable([*layers, getattr(first, "unwrapped", first)])
        others = reachable([*wrapper_chain(second), getattr(second, "unwrapped", second)])
        self._add_globals()
        kinds = {kind for one, _ in held.values() for kind in type(one).__mro__ if not _is_library(kind.__module__)}
        for kind in sorted(kinds, key=lambda kind: (kind.__module__, kind.__qualname__)):
            self._add_data(kind, f"{kind.__qualname__}.", f"{kind.__qualname__}.%s is an attribute of the class")
        found = [module for kind in kinds if (module := sys.modules.get(kind.__module__)) is not None]
        used = {near.__name__: near for module in found for near in _near(module)}
        for name in sorted(used):
            self._add_data(used[name], f"{name}:", f"%s is a global of the module {name}")
        for key, (one, path) in held.items():
            if key in others and path and isinstance(one, (list, dict, set, bytearray, np.ndarray, *GENERATORS)):
                self._add(
                    path,
                    partial(_same, one),
                    f"{path} is the same object in both instances (a default argument, or made outside of the class?): "
                    f"make one for each instance, in __init__() or reset()",
                )
        self._before = {name: fingerprint(read()) for name, read in self._places.items()}

    def update(self) -> None:
        """Record what changed since the last call."""
        for name, read in self._places.items():
            if self._moved.get(name):
                continue
            now = fingerprint(read())
            if now is not None and now != self._before[name]:
                self._moved[name] = True

    def advice(self) -> str:
        """Return what to change; ``""`` if nothing changed."""
        # Generators first: a changed counter may be mere statistics.
        names = sorted(self._moved, key=lambda name: name not in self._generators)
        return "; ".join(self._advice[name] for name in names[:_MOST_PLACES])

    def _add(self, name: str, read: Callable[[], Any], advice: str) -> None:
        self._places[name], self._advice[name] = read, advice
        if isinstance(read(), GENERATORS):
            self._generators.add(name)

    def _add_globals(self) -> None:
        self._generators |= _PROCESS.keys()
        self._add("np.random", np.random.get_state, _PROCESS["np.random"])
        self._add("random", random.getstate, _PROCESS["random"])

    def _add_data(self, owner: Any, prefix: str, text: str) -> None:
        for name, value in list(vars(owner).items()):
            if not name.startswith("__") and _is_data(value):
                self._add(
                    f"{prefix}{name}",
                    lambda name=name: vars(owner).get(name),  # type: ignore[misc]
                    f"{text % name}, which all instances share, and changes while they play: {_fix(name, value)}",
                )


def _near(module: ModuleType) -> Iterator[ModuleType]:
    """Yield a module, and the modules of its own package or folder that it imports from."""
    yield module
    for value in list(vars(module).values()):
        if not isinstance(value, (ModuleType, type, FunctionType)):
            continue
        name = value.__name__ if isinstance(value, ModuleType) else value.__module__
        other = sys.modules.get(name)
        if other is None or _is_library(name):
            continue
        own_package = name.partition(".")[0] == module.__name__.partition(".")[0]
        if own_package or (_folder(other) and _folder(other) == _folder(module)):
            yield other


def _folder(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file).parent if file else None


def _same(value: Any) -> Any:
    return value


def _fix(name: str, value: Any) -> str:
    if isinstance(value, random.Random):
        return f"set self.{name} = random.Random(seed) in reset(seed=…)"
    if isinstance(value, GENERATORS):
        return f"set self.{name} = np.random.default_rng(seed) in reset(seed=…)"
    return f"set self.{name} in __init__() or reset()"


def reachable(roots: list[Any]) -> dict[int, tuple[Any, str]]:
    """Return the objects that an env holds, by id, each with its path; the env's own layers first."""
    found: dict[int, tuple[Any, str]] = {}
    queue: list[tuple[Any, str]] = [(root, "") for root in roots]
    while queue and len(found) < _MOST_OBJECTS:
        one, path = queue.pop(0)
        if id(one) in found:
            continue
        found[id(one)] = one, path
        queue += [(part, where) for part, where in _parts(one, path) if _is_data(part)]
    return found


def _parts(one: Any, path: str) -> Iterator[tuple[Any, str]]:
    if isinstance(one, dict):
        yield from ((part, f"{path}[{key!r}]") for key, part in list(one.items())[:100])
    elif isinstance(one, (list, tuple, set)):
        yield from ((part, f"{path}[{i}]") for i, part in enumerate(list(one)[:100]))
    elif not _is_library(type(one).__module__) or not path:
        yield from ((part, f"{path or 'self'}.{name}") for name, part in list(getattr(one, "__dict__", {}).items()))


def _is_library(module: str) -> bool:
    root = module.partition(".")[0]
    return root in _LIBRARIES or module.startswith(_BASES)


def _is_data(value: Any) -> bool:
    if isinstance(value, (type, ModuleType, property, staticmethod, classmethod)) or callable(value):
        return False
    return not hasattr(type(value), "__get__")


def fingerprint(value: Any) -> int | None:
    """Return a number that changes with the value; None if it cannot be computed."""
    if isinstance(value, random.Random):
        try:
            value = value.getstate()
        except NotImplementedError:  # random.SystemRandom has no state
            return None
    if isinstance(value, np.ndarray) and value.nbytes > _MOST_BYTES:
        return None
    if isinstance(value, (list, dict, set)) and len(value) > _MOST_BYTES // 100:
        return None
    try:
        return hash(pickle.dumps(value, protocol=5))
    except Exception:  # not picklable: other places must show a change
        return None
