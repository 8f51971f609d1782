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
"""What a vectorizer offers to every factory and wrapper; only one that declares it gets it."""


@dataclass(frozen=True)
class EnvEntry:
    """One env that can be built.

    Attributes:
        id: The name it goes by.
        entry_point: What builds the env: a callable, or ``"module:attr"`` or ``"FILE.py:attr"``, imported by `load`.
        kwargs: Defaults for its keyword arguments.
        family: Which collection it belongs to: ``"mpe"``, ``"classic"``, ``"gymnasium"``, …, ``"custom"``.
        extra: The extra of marlvec that installs what it needs, or None.
        packages: Top-level packages it needs.
    """

    id: str
    entry_point: str | Callable[..., Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    family: str = "custom"
    extra: str | None = None
    packages: tuple[str, ...] = ()

    def load(self) -> Callable[..., Any]:
        """Import the entry point.

        Raises:
            MissingExtraError: A package it needs is not installed.
            RegistryError: There is no such file, the module has no such attribute, or it is not callable.
        """
        if not isinstance(self.entry_point, str):
            return self.entry_point
        module_name, _, path = self.entry_point.rpartition(":")
        is_file = module_name.endswith(".py")
        try:
            found: Any = load_file(Path(module_name)) if is_file else importlib.import_module(module_name)
        except FileNotFoundError as error:
            if not is_file or Path(module_name).exists():  # the env's own
                raise
            raise UnknownEnvError(f"env {self.id!r}: no file {module_name}, seen from {Path.cwd()}") from error
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
        """Say which extra brings what was not there."""
        hint = f'install it with: pip install "marlvec[{self.extra}]"' if self.extra else "is its package installed?"
        return MissingExtraError(f"env {self.id!r} needs something that cannot be imported ({error}); {hint}")


@dataclass(frozen=True)
class EnvFactory:
    """Builds one env each time it is called. Picklable by plain pickle if its entry point is a string.

    Attributes:
        entry: What to build.
        kwargs: Keyword arguments over the entry's defaults.
    """

    entry: EnvEntry
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def with_kwargs(self, **kwargs: Any) -> EnvFactory:
        """Return the same with these keyword arguments over the present ones."""
        return replace(self, kwargs={**self.kwargs, **kwargs}) if kwargs else self

    def takes(self, name: str) -> bool:
        """Whether what builds the env declares an argument of this name; imports it."""
        return name in _declared(self.entry.load())

    def __call__(self, *, env_index: int | None = None, num_envs: int | None = None, **kwargs: Any) -> Any:
        """Build an env.

        Args:
            env_index: Its place among the envs; passed on only to a factory that declares an argument of this name.
            num_envs: Their number; likewise.
            kwargs: Keyword arguments over all others.

        Returns:
            The env as its factory returned it, without an adapter.

        Raises:
            MissingExtraError: A package it needs is not installed.
            TypeError: The factory does not take an argument.
        """
        target = self.entry.load()
        given = {name: copy_or_share(value) for name, value in {**self.entry.kwargs, **self.kwargs, **kwargs}.items()}
        return target(**{**offer(target, env_index, num_envs), **given})


def builder_hint(found: Any, name: str) -> str:
    """Return the end of a message that names the function of a PettingZoo module that builds its env.

    Args:
        found: What was given as an env.
        name: How its user named it.
    """
    if isinstance(found, ModuleType):
        for attribute in ("parallel_env", "env"):
            if callable(getattr(found, attribute, None)):
                return f"; take {name}.{attribute}"
    return ""


def offer(target: Callable[..., Any], env_index: int | None, num_envs: int | None) -> dict[str, int]:
    """What of an env's place a factory or wrapper declares an argument for.

    Args:
        target: The factory or wrapper.
        env_index: The env's place among the envs, if it has one.
        num_envs: Their number.
    """
    declares = _declared(target)
    offered = zip(OFFERED, (env_index, num_envs), strict=True)
    return {name: value for name, value in offered if value is not None and name in declares}


def copy_or_share(value: Any) -> Any:
    """Deep-copy an argument, so that envs do not share it, whatever process they are in; a lock or a socket is shared.

    Args:
        value: The argument.
    """
    try:
        return deepcopy(value)
    except Exception:
        return value


def _declared(target: Callable[..., Any]) -> frozenset[str]:
    """Parameters a factory declares by name and has no value for yet; ``**kwargs`` declares nothing."""
    bound = frozenset(target.keywords) if isinstance(target, partial) else frozenset()
    try:
        parameters = signature_of(target).parameters.values()
    except (TypeError, ValueError):
        return frozenset()
    named = (p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    return frozenset(named) - bound
