"""How an env is built: `EnvFactory` for a registered entry, `EnvRecipe` with arguments, wrappers and limits.

`load_file` imports a Python file by its path; the file may import the modules of its folder.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from marlvec.arguments import signature_of
from marlvec.envs.adapters.gymnasium import AGENTS
from marlvec.envs.detect import adapt
from marlvec.envs.wrappers import PaddedEnv, TimeLimit, check_limit
from marlvec.errors import ArgumentError, MissingExtraError, RegistryError, UnknownEnvError

OFFERED = ("env_index", "num_envs")
"""Arguments that a vectorizer passes to factories and wrappers that declare them."""


@dataclass(frozen=True)
class EnvEntry:
    """One env that can be built."""

    id: str
    entry_point: str | Callable[..., Any]  # a callable, or "module:attr" or "FILE.py:attr", imported by `load`
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # defaults for its keyword arguments
    family: str = "custom"  # "mpe", "classic", "gymnasium", …
    extra: str | None = None  # of marlvec, which installs its packages
    packages: tuple[str, ...] = ()  # top-level packages that it needs
    max_episode_steps: int | None = None  # where the argument of `write_recipes` is None

    def load(self) -> Callable[..., Any]:
        """Import the entry point.

        `MissingExtraError`: a package is not installed; `UnknownEnvError`: no such file; `RegistryError`: no such
        callable.
        """
        if not isinstance(self.entry_point, str):
            return self.entry_point
        module_name, _, path = self.entry_point.rpartition(":")
        is_file = module_name.endswith(".py")
        try:
            found: Any = load_file(Path(module_name)) if is_file else importlib.import_module(module_name)
        except OSError as error:
            if not is_file or not _is_of(error, module_name):  # raised by the env's code
                raise
            why = "" if isinstance(error, FileNotFoundError) else f" ({error.strerror})"
            raise UnknownEnvError(f"env {self.id!r}: no file {module_name}, seen from {Path.cwd()}{why}") from error
        except SyntaxError as error:
            if not is_file or not (error.filename is None or _is_of(error, module_name)):
                raise
            raise RegistryError(f"env {self.id!r}: {module_name} is not Python: {error}") from error
        except ImportError as error:
            raise self.missing(error) from error
        for part in path.split("."):
            try:
                found = getattr(found, part)
            except AttributeError:
                raise RegistryError(
                    f"env {self.id!r}: module {module_name!r} has no {path!r} (entry point {self.entry_point!r})"
                ) from None
        if not callable(found):
            raise RegistryError(
                f"env {self.id!r}: {self.entry_point!r} is {type(found).__name__}, expected a class or a factory"
                f"{builder_hint(found, self.entry_point)}"
            )
        return found  # type: ignore[no-any-return]  # just tested

    def missing(self, error: Exception) -> MissingExtraError:
        """Return the error for a failed import, with the extra that installs the package."""
        hint = f'install it with: pip install "marlvec[{self.extra}]"' if self.extra else "is its package installed?"
        return MissingExtraError(f"env {self.id!r} needs a package that cannot be imported ({error}); {hint}")


def _is_of(error: OSError | SyntaxError, file: str) -> bool:
    """Return whether an error is about this file, and not about another one that its code reads or imports."""
    return isinstance(error.filename, str) and Path(error.filename).resolve() == Path(file).resolve()


@dataclass(frozen=True)
class EnvFactory:
    """Builds one env each time it is called. Picklable by plain pickle if its entry point is a string."""

    entry: EnvEntry
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # override the entry's defaults

    def with_kwargs(self, **kwargs: Any) -> EnvFactory:
        """Return a copy with these keyword arguments, which override the present ones."""
        return replace(self, kwargs={**self.kwargs, **kwargs}) if kwargs else self

    def takes(self, name: str) -> bool:
        """Return whether the entry point declares an argument of this name; imports it."""
        return name in _declared(self.entry.load())

    def __call__(self, *, env_index: int | None = None, num_envs: int | None = None, **kwargs: Any) -> Any:
        """Build an env, without an adapter; `kwargs` override all others.

        `env_index` and `num_envs` are passed on only to a factory that declares arguments of these names.
        """
        target = self.entry.load()
        given = {name: copy_or_share(value) for name, value in {**self.entry.kwargs, **self.kwargs, **kwargs}.items()}
        return target(**{**offer(target, env_index, num_envs), **given})


def builder_hint(found: Any, name: str) -> str:
    """Return the end of an error message with the function that builds a PettingZoo module's env, or empty text."""
    if isinstance(found, ModuleType):
        for attribute in ("parallel_env", "env"):
            if callable(getattr(found, attribute, None)):
                return f"; take {name}.{attribute}"
    return ""


def offer(target: Callable[..., Any], env_index: int | None, num_envs: int | None) -> dict[str, int]:
    """Return those of the arguments `OFFERED` that a factory or wrapper declares; None is not passed."""
    declares = _declared(target)
    offered = zip(OFFERED, (env_index, num_envs), strict=True)
    return {name: value for name, value in offered if value is not None and name in declares}


def copy_or_share(value: Any) -> Any:
    """Deep-copy an argument, so that envs do not share it. An object that cannot be copied (a lock) is shared."""
    try:
        return deepcopy(value)
    except Exception:
        return value


def _declared(target: Callable[..., Any]) -> frozenset[str]:
    """Return the named parameters of a factory that a `partial` has not bound; ``**kwargs`` does not count."""
    bound = frozenset(target.keywords) if isinstance(target, partial) else frozenset()
    try:
        parameters = signature_of(target).parameters.values()
    except (TypeError, ValueError):
        return frozenset()
    named = (p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    return frozenset(named) - bound


Wrapper = Callable[..., Any]
"""A class or function that takes an env and returns an env."""

EnvKwargs = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
"""Keyword arguments for all envs, or one dict for each."""

RenderModes = str | Sequence[str | None] | None
"""One mode for all envs, ``"single_<mode>"`` for env 0 alone, or one mode or None per env."""

_SINGLE = "single_"


@dataclass(frozen=True)
class EnvRecipe:
    """Everything needed to build env number ``env_index``; ``agents`` and ``lenient`` as in `marlvec.envs.adapt`."""

    factory: EnvFactory
    env_index: int = 0
    num_envs: int = 1
    wrappers: tuple[Wrapper, ...] = ()  # the first one innermost
    render_mode: str | None = None
    max_episode_steps: int | None = None
    pad: bool = False  # agents of different spaces to one group
    agents: str = "auto"
    lenient: bool = False

    def __call__(self) -> Any:
        env = self._build()
        try:
            return self._finish(env)
        except BaseException:
            _close(env)
            raise

    def _build(self) -> Any:
        mode = self.render_mode
        if mode is None:
            return self._call_factory()
        try:
            env = self._call_factory(render_mode=mode)
        except Exception as error:
            self._check_mode(self._modes_of_a_plain_env(), error)
            raise
        try:
            self._check_mode(_render_modes(env))  # most constructors accept any mode; such envs fail when they render
        except ArgumentError:
            _close(env)
            raise
        return env

    def _call_factory(self, **kwargs: Any) -> Any:
        return self.factory(env_index=self.env_index, num_envs=self.num_envs, **kwargs)

    def _check_mode(self, known: list[str] | None, cause: Exception | None = None) -> None:
        if known is not None and self.render_mode not in known:
            supported = ", ".join(map(repr, known)) or "none at all"
            raise ArgumentError(
                f"render_mode={self.render_mode!r}: {self.factory.entry.id} supports {supported}"
            ) from cause

    def _modes_of_a_plain_env(self) -> list[str] | None:
        """Return the render modes of an env built without a mode; None if it cannot be built."""
        try:
            env = self._call_factory()
        except Exception:  # it cannot be built without a mode either
            return None
        known = _render_modes(env)
        _close(env)
        return known

    def _finish(self, env: Any) -> Any:
        for wrapper in self.wrappers:
            env = wrapper(env, **offer(wrapper, self.env_index, self.num_envs))
        if self.pad or self.max_episode_steps is not None or self.agents != "auto" or self.lenient:
            env = adapt(env, agents=self.agents, lenient=self.lenient)
        if self.pad and len(env.spec().groups) > 1:
            env = PaddedEnv(env)
        if self.max_episode_steps is not None:
            env = TimeLimit(env, self.max_episode_steps)
        return env


def write_recipes(
    factories: Sequence[EnvFactory],
    *,
    kwargs: Mapping[str, Any],
    env_kwargs: EnvKwargs = None,
    wrappers: Wrapper | Sequence[Wrapper] = (),
    render_mode: RenderModes = None,
    max_episode_steps: int | None = None,
    pad: bool = False,
    agents: str = "auto",
    lenient: bool = False,
) -> list[EnvRecipe]:
    """Write one recipe per env; arguments as in `marlvec.make`."""
    n = len(factories)
    layers = tuple(wrappers) if isinstance(wrappers, (list, tuple)) else (wrappers,)
    if not all(map(callable, layers)):
        raise ArgumentError(f"wrappers: expected classes or functions from env to env, got {wrappers!r}")
    if max_episode_steps is not None:
        check_limit(max_episode_steps)
    if agents not in AGENTS:
        raise ArgumentError(
            f"agents must be one of {', '.join(map(repr, AGENTS))}, got {agents!r}; an env's own argument of that name "
            f"goes into env_kwargs"
        )
    per_env = zip(factories, _spread_kwargs(env_kwargs, n), _spread_modes(render_mode, n), strict=True)
    recipes = []
    for i, (factory, own, mode) in enumerate(per_env):
        if mode is not None and "render_mode" in own:
            raise ArgumentError(f"render_mode is given twice for env {i}: as an argument, and in env_kwargs")
        # This limit replaces Gymnasium's own one, as in gymnasium.make(max_episode_steps=...).
        limited = max_episode_steps is not None and factory.entry.family == "gymnasium"
        limit = {"max_episode_steps": -1} if limited else {}
        built = factory.with_kwargs(**{**limit, **kwargs, **own})
        steps = factory.entry.max_episode_steps if max_episode_steps is None else max_episode_steps
        recipes.append(EnvRecipe(built, i, n, layers, mode, steps, bool(pad), agents, bool(lenient)))
    return recipes


def _spread_kwargs(env_kwargs: Any, n: int) -> list[dict[str, Any]]:
    if env_kwargs is None or isinstance(env_kwargs, Mapping):
        return [dict(env_kwargs or {})] * n
    if not isinstance(env_kwargs, (list, tuple)) or not all(isinstance(own, Mapping) for own in env_kwargs):
        raise ArgumentError(f"env_kwargs: expected a dict, or a list of one dict per env, got {env_kwargs!r}")
    if len(env_kwargs) != n:
        raise ArgumentError(f"env_kwargs: expected one dict per env, {n} in all, got {len(env_kwargs)}")
    return [dict(own) for own in env_kwargs]


def _spread_modes(render_mode: Any, n: int) -> list[str | None]:
    if isinstance(render_mode, str) and render_mode.startswith(_SINGLE):
        return [render_mode.removeprefix(_SINGLE), *[None] * (n - 1)]
    if render_mode is None or isinstance(render_mode, str):
        return [render_mode] * n
    if not isinstance(render_mode, (list, tuple)) or not all(m is None or isinstance(m, str) for m in render_mode):
        raise ArgumentError(
            f"render_mode: expected a mode such as 'rgb_array', 'single_rgb_array' for env 0 alone, "
            f"or a list of one mode or None per env, got {render_mode!r}"
        )
    if len(render_mode) != n:
        raise ArgumentError(f"render_mode: expected one mode or None per env, {n} in all, got {len(render_mode)}")
    return list(render_mode)


def _render_modes(env: Any) -> list[str] | None:
    """Return the render modes in an env's metadata; None if they are not declared."""
    metadata = getattr(env, "metadata", None)
    if not isinstance(metadata, Mapping):
        return None
    modes = metadata.get("render_modes", metadata.get("render.modes"))
    return [mode for mode in modes if isinstance(mode, str)] if isinstance(modes, (list, tuple, set)) else None


def _close(env: Any) -> None:
    with suppress(Exception):  # the first error is the one to report
        env.close()


_homes: dict[str, Path] = {}  # top-level module that a loaded file has imported → the module's folder
_loaded: dict[Path, tuple[int, ModuleType]] = {}  # path → time of the file's last change, and its module


def load_file(path: Path) -> ModuleType:
    """Import a file under its own name, or with a suffix if another module has that name.

    It is imported again only if it has changed, and then into the same module; a file that raises is not imported. Its
    classes and functions are pickled by value for worker processes that cannot import it by name.
    """
    path = path.resolve(strict=True)
    changed = path.stat().st_mtime_ns
    known = _loaded.get(path)
    module = _new_module(path) if known is None else known[1]
    before = sys.modules.get(module.__name__)
    sys.modules[module.__name__] = module  # dataclasses and pickle need it there
    if known is not None and known[0] == changed:
        return module
    assert module.__spec__ is not None  # `_new_module` has made the module from a spec,
    assert module.__spec__.loader is not None  # which has a loader
    try:
        with _beside(path.parent):
            module.__spec__.loader.exec_module(module)
    except BaseException:
        if before is None:
            del sys.modules[module.__name__]
        else:
            sys.modules[module.__name__] = before
        raise
    _loaded[path] = changed, module
    return module


def _new_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_name_of(path), path)
    assert spec is not None  # every path that ends in .py has one
    return importlib.util.module_from_spec(spec)


def _name_of(path: Path) -> str:
    """Return the file's stem as module name, with a suffix if another module has that name."""
    name = path.stem
    if name in sys.modules:
        origin = getattr(sys.modules[name], "__file__", None) or ""
    else:
        spec = None if "." in name else PathFinder.find_spec(name)
        origin = str(path) if spec is None or spec.origin is None else spec.origin
    is_free = origin == str(path) or (Path(origin).is_file() and path.samefile(origin))
    return name if is_free else f"{name}_{zlib.crc32(bytes(path)):08x}"


@contextmanager
def _beside(folder: Path) -> Iterator[None]:
    """Let imports in the block find modules in a folder, after all others, so that none hides an installed module.

    ``sys.path`` is not changed, since worker processes get a copy of it. Files in two folders may each import a
    neighbour of the same name; each gets the one in its folder.
    """
    folder = folder.resolve()
    for name in [name for name, home in _homes.items() if home != folder]:
        del _homes[name]
        for loaded in [key for key in sys.modules if key == name or key.startswith(f"{name}.")]:
            del sys.modules[loaded]
    finder = _Neighbours(folder)
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Neighbours(MetaPathFinder):
    """Finds top-level modules, whose ``path`` is None, in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is not None:
            return None
        spec = PathFinder.find_spec(fullname, [str(self._folder)], target)
        if spec is not None:
            _homes[fullname] = self._folder
        return spec
