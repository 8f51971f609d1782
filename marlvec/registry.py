"""Names of envs, and resolution of ids, classes and callables to factories, one per env."""

from __future__ import annotations

import difflib
import importlib.util
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import cache, partial
from types import ModuleType
from typing import Any, NamedTuple

import gymnasium

from marlvec.arguments import whole_number
from marlvec.envs.builtin_ids import (
    GRIDS,
    JAX,
    LIBRARIES,
    catalog,
    grid_entry,
    gymnasium_entry,
    library_entry,
    listed_entries,
)
from marlvec.envs.env import MultiAgentEnv
from marlvec.envs.recipes import EnvEntry, EnvFactory, builder_hint
from marlvec.errors import AlreadyRegisteredError, ArgumentError, RegistryError, UnknownEnvError

__all__ = ["EnvRow", "listing", "register", "resolve", "resolve_all", "EnvEntry", "EnvFactory"]

_ID = re.compile(r"[\w.-]+(/[\w.-]+)*")
_ENTRY_POINT = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_VERSION = re.compile(r"(.+)[_-]v(\d+)")
_GYMNASIUM = "gymnasium/"
EnvLike = str | Callable[..., Any] | EnvFactory
"""Specifies an env: a registered id, ``"module:attr"``, ``"FILE.py:attr"``, a class, a factory."""
_entries: dict[str, EnvEntry] = {entry.id: entry for entry in catalog()}


class EnvRow(NamedTuple):
    """One row of `listing`."""

    id: str
    family: str
    extra: str | None
    installed: bool


def register(
    id: str,
    entry_point: str | Callable[..., Any],
    *,
    kwargs: Mapping[str, Any] | None = None,
    extra: str | None = None,
    overwrite: bool = False,
) -> EnvEntry:
    """Register an env under an id for `make`.

    Args:
        id: ``"name"``, ``"name_v1"`` or ``"namespace/name_v1"``. Without its version, the id is that of the highest.
        entry_point: Builds the env: a class, a factory, or ``"module:attr"``, imported only where the env is built;
            or a `marlvec.JaxWorld`.
        kwargs: Defaults for its keyword arguments; copied now, and again for each env.
        extra: The extra of marlvec that installs its packages, for the error if one is missing.
        overwrite: Whether it may replace an env with the same id.

    Returns:
        The entry.

    Raises:
        AlreadyRegisteredError: The id is taken.
        ArgumentError: The id or entry point is malformed.
    """
    if not isinstance(id, str) or not _ID.fullmatch(id):
        raise ArgumentError(f"expected an env id such as 'name', 'name_v1' or 'namespace/name_v1', got {id!r}")
    if isinstance(entry_point, str):
        if not _ENTRY_POINT.fullmatch(entry_point):
            raise ArgumentError(f"env {id!r}: expected an entry point 'module:attr', got {entry_point!r}")
    elif family_of(entry_point) == JAX and not isinstance(entry_point, type):
        entry_point = partial(_itself, entry_point)
    elif not callable(entry_point):
        got = type(entry_point).__name__
        raise ArgumentError(f"env {id!r}: expected a class, a factory or 'module:attr' as entry point, got {got}")
    if id in _entries and not overwrite:
        raise AlreadyRegisteredError(f"env {id!r} is registered already; pass overwrite=True to replace it")
    entry = EnvEntry(id, entry_point, deepcopy(dict(kwargs or {})), family=family_of(entry_point), extra=extra)
    _entries[id] = entry
    _by_name.cache_clear()
    return entry


def resolve(env: EnvLike) -> EnvFactory:
    """Return the factory for an id, ``"module:attr"``, class or callable. Builds and imports nothing but a ``FILE.py``.

    An id may leave out its namespace and its version: ``"simple_spread"`` is the highest version of
    ``"mpe/simple_spread_v3"``. Gymnasium's ids may begin with ``"gymnasium/"``.
    """
    if isinstance(env, EnvFactory):
        return env
    if isinstance(env, str):
        source, _, attribute = env.rpartition(":")
        if source.endswith(".py") and attribute:
            # Workers may be unable to import the file, so the entry has the class or function itself.
            return EnvFactory(EnvEntry(env, EnvEntry(env, env).load()))
        return EnvFactory(_entry_point(env) if ":" in env and not env.startswith(_GYMNASIUM) else _find(env))
    if family_of(env) == JAX:
        if isinstance(env, (type, partial)):
            return EnvFactory(EnvEntry(getattr(env, "__qualname__", type(env).__name__), env, family=JAX))
        world: Any = env
        return EnvFactory(EnvEntry(world.name, partial(_itself, world), family=JAX))
    if isinstance(env, MultiAgentEnv) or (callable(getattr(env, "step", None)) and not isinstance(env, type)):
        name = type(env).__name__
        raise ArgumentError(
            f"got an env of class {name}, expected something that builds envs, e.g. lambda: {name}(): each of the "
            f"num_envs is built where it runs. Pass the class, or a function without arguments that returns a new env"
        )
    if callable(env):
        return EnvFactory(EnvEntry(getattr(env, "__qualname__", type(env).__name__), env))
    if isinstance(env, ModuleType):
        name = env.__name__
        hint = builder_hint(env, name.rpartition(".")[2])
        raise ArgumentError(f"expected an env id, 'module:attr', a class or a factory, got the module {name}{hint}")
    raise ArgumentError(f"expected an env id, 'module:attr', a class or a factory, got {type(env).__name__}: {env!r}")


def family_of(entry_point: Any) -> str:
    """Return `JAX` for a class or instance of `marlvec.JaxWorld`, else ``"custom"``."""
    worlds = sys.modules.get("marlvec.vector.pools.jax")
    if worlds is None:
        return "custom"
    while isinstance(entry_point, partial):
        entry_point = entry_point.args[0] if entry_point.func is _itself else entry_point.func
    is_world = isinstance(entry_point, worlds.JaxWorld)
    return JAX if is_world or (isinstance(entry_point, type) and issubclass(entry_point, worlds.JaxWorld)) else "custom"


def _itself(world: Any) -> Any:
    """Return a world that is already built: it is stateless, so all envs share it."""
    return world


def resolve_all(env: EnvLike | Sequence[EnvLike], num_envs: int | None = None) -> tuple[EnvFactory, ...]:
    """Return one factory per env: ``env`` is one for all, or a list with one per env."""
    count = 1 if num_envs is None else whole_number(num_envs)
    if count is None:
        is_whole = str(num_envs).removesuffix(".0").isdecimal()
        example = str(num_envs).removesuffix(".0") if is_whole else 16
        raise ArgumentError(
            f"num_envs: expected a whole number of at least 1, got {num_envs!r}, a {type(num_envs).__name__}; "
            f"write num_envs={example}"
        )
    if isinstance(env, (list, tuple)):
        if not env:
            raise ArgumentError("expected at least one env, got an empty list")
        if num_envs is not None and count != len(env):
            raise ArgumentError(f"num_envs={num_envs}, but {len(env)} factories were given; leave num_envs out")
        return tuple(resolve(one) for one in env)
    if isinstance(env, Sequence) and not isinstance(env, str):
        raise ArgumentError(f"expected a list of factories, got {type(env).__name__}")
    if count < 1:
        raise ArgumentError(f"num_envs: expected at least 1, got {num_envs!r}")
    return (resolve(env),) * count


def listing(*, with_gymnasium: bool = False) -> list[EnvRow]:
    """Return every registered env, and whether its packages are installed. Imports none of them."""
    entries = [*_entries.values(), *listed_entries()]
    if with_gymnasium:
        entries += map(gymnasium_entry, _gymnasium_ids())
    return [EnvRow(e.id, e.family, e.extra, all(map(_is_installed, _packages(e)))) for e in entries]


def _packages(entry: EnvEntry) -> tuple[str, ...]:
    if entry.packages or not isinstance(entry.entry_point, str):
        return entry.packages
    return (entry.entry_point.partition(":")[0].partition(".")[0],)


def _is_installed(package: str) -> bool:
    if package in sys.modules:
        return sys.modules[package] is not None
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def _entry_point(text: str) -> EnvEntry:
    """Return the entry of a ``"module:attr"``; raise for errors that can be found without an import."""
    if not _ENTRY_POINT.fullmatch(text):
        raise ArgumentError(f"expected 'module:attr' (e.g. 'my_package.envs:MyEnv') or 'FILE.py:attr', got {text!r}")
    module, _, attribute = text.partition(":")
    if module == "__main__":
        # A worker has another main module, so the object is looked up here, and pickled by value.
        found = getattr(sys.modules["__main__"], attribute, None)
        if not callable(found):
            raise UnknownEnvError(f"the main module has no class or factory {attribute!r}")
        return EnvEntry(text, found)
    package = module.partition(".")[0]
    if not _is_installed(package):
        raise UnknownEnvError(f"env {text!r}: no module {package!r} to import; is it installed, and on sys.path?")
    return EnvEntry(text, text, packages=(package,))


def _find(name: str) -> EnvEntry:
    """Look up an id, complete or shortened."""
    if name in _entries:
        return _entries[name]
    family, _, own_name = name.partition("/")
    if own_name and family in LIBRARIES:
        return library_entry(family, own_name)
    if own_name and family in GRIDS:
        return grid_entry(family, own_name)
    wanted, version = _split(name)
    matches = []
    for entries in _by_name().get(wanted, {}).values():
        if found := [(-1 if n is None else n, entry) for n, entry in entries if version in (None, n)]:
            matches.append(found)
    if len(matches) > 1:
        options = ", ".join(sorted(entry.id for found in matches for _, entry in found))
        raise RegistryError(f"env {name!r} may be any of {options}; write the whole id")
    if matches:
        return max(matches[0], key=lambda pair: pair[0])[1]
    if (entry_id := _gymnasium_id(name)) is not None:
        return gymnasium_entry(entry_id)
    raise UnknownEnvError(_unknown(name))


@cache
def _by_name() -> dict[str, dict[str, list[tuple[int | None, EnvEntry]]]]:
    """Return name without version, with or without namespaces → possible stems → their entries."""
    out: dict[str, dict[str, list[tuple[int | None, EnvEntry]]]] = {}
    for entry in _entries.values():
        stem, number = _split(entry.id)
        parts = stem.split("/")
        for k in range(len(parts)):
            out.setdefault("/".join(parts[k:]), {}).setdefault(stem, []).append((number, entry))
    return out


def _split(env_id: str) -> tuple[str, int | None]:
    """Split ``"mpe/simple_spread_v3"`` into stem and version; a version may also be written ``-v3``."""
    match = _VERSION.fullmatch(env_id)
    return (match[1], int(match[2])) if match else (env_id, None)


def _gymnasium_ids() -> list[str]:
    return list(gymnasium.envs.registration.registry)


def _gymnasium_id(name: str) -> str | None:
    """Return Gymnasium's own id for a name with or without ``gymnasium/`` and version, or None."""
    explicit = name.startswith(_GYMNASIUM)
    wanted = name.removeprefix(_GYMNASIUM)
    if explicit and ":" in wanted:
        return wanted  # "gymnasium/module:id": gymnasium.make imports the module where the env is built
    known = _gymnasium_ids()
    if wanted in known:
        return wanted
    split = ((*_split(env_id), env_id) for env_id in known)
    versions = [(number, env_id) for stem, number, env_id in split if stem == wanted and number is not None]
    return max(versions)[1] if versions else None


def _unknown(name: str) -> str:
    """Return the message for an unknown id, with similar ids, and the command that lists all."""
    if name.endswith(".py"):
        return f"unknown env {name!r}: expected FILE.py:ATTR for an env defined in a file, e.g. {name}:MyEnv"
    known: dict[str, str] = {}
    for env_id in (*_entries, *(_GYMNASIUM + env_id for env_id in _gymnasium_ids())):
        stem = _split(env_id)[0]
        for alias in (env_id, stem, env_id.rpartition("/")[2], stem.rpartition("/")[2]):
            known.setdefault(alias.lower(), env_id)
    near = difflib.get_close_matches(name.lower(), known, n=8, cutoff=0.6)
    hits = list(dict.fromkeys(known[alias] for alias in near))[:5]
    hint = f"Did you mean {' or '.join(map(repr, hits))}? " if hits else ""
    return f"unknown env {name!r}. {hint}`marlvec envs` lists all; marlvec.register() adds one"
