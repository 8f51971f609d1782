"""`EnvFactory`: builds one env from a registered entry; small and picklable."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from marlvec.arguments import signature_of
from marlvec.envs.making.python_file import load_file
from marlvec.errors import MissingExtraError, RegistryError, UnknownEnvError

__all__ = ["OFFERED", "EnvEntry", "EnvFactory", "builder_hint", "copy_or_share", "offer"]

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
