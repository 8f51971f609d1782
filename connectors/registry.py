"""Names of connectors in configs, and `catalogue()`: all connectors with what they do."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, overload

from marlvec.connectors import action, agent, learner
from marlvec.connectors.connector import ActionConnector, AgentConnector, Connector, LearnerConnector
from marlvec.connectors.function import FunctionConnector
from marlvec.connectors.pipeline import Pipeline
from marlvec.errors import ArgumentError
from marlvec.serialization.values import CLASSES, FUNCTIONS

C = TypeVar("C", bound=type[Connector])
F = TypeVar("F", bound=Callable[..., Any])


@overload
def register_connector(cls: C, *, name: str | None = None) -> C: ...


@overload
def register_connector(cls: None = None, *, name: str | None = None) -> Callable[[C], C]: ...


def register_connector(cls: C | None = None, *, name: str | None = None) -> C | Callable[[C], C]:
    """Register a connector class for configs and files: ``@register_connector``, or as a call.

    Constructor arguments must define an instance: store them under the arguments' names, or return them from
    `Connector.params`. marlvec's classes need no registration.

    Args:
        cls: The class; set by the decorator.
        name: Its name in configs, which must stay as long as configs are read; None: the class's name.

    Returns:
        The class, unchanged.

    Raises:
        AlreadyRegisteredError: The name belongs to another class, or the class has another name.
        ArgumentError: ``cls`` is not a connector class, or is abstract.
    """
    if cls is None:
        return lambda decorated: register_connector(decorated, name=name)
    if not (isinstance(cls, type) and issubclass(cls, Connector)):
        raise ArgumentError(f"expected a class of connectors, got {cls!r}; a plain function: register_function")
    if inspect.isabstract(cls):
        raise ArgumentError(f"{cls.__name__} is abstract, as it lacks {sorted(cls.__abstractmethods__)}")
    CLASSES.add(cls, name)
    return cls


@overload
def register_function(function: F, *, name: str | None = None) -> F: ...


@overload
def register_function(function: None = None, *, name: str | None = None) -> Callable[[F], F]: ...


def register_function(function: F | None = None, *, name: str | None = None) -> F | Callable[[F], F]:
    """Register a function used by connectors for configs and files: ``@register_function``, or as a call.

    Works above or below ``@agent_connector`` and the other decorators.

    Args:
        function: The function; set by the decorator.
        name: Its name in configs, which must stay as long as configs are read; None: the function's name.

    Returns:
        The function, unchanged.

    Raises:
        AlreadyRegisteredError: The name belongs to another function, or the function has another name.
        ArgumentError: ``function`` is not a function, or a lambda without ``name``.
    """
    if function is None:
        return lambda decorated: register_function(decorated, name=name)
    inner: Any = function.function if isinstance(function, FunctionConnector) else function
    if isinstance(inner, (Connector, type)) or not callable(inner):
        raise ArgumentError(f"expected a function, got {function!r}; a class of connectors: register_connector")
    FUNCTIONS.add(inner, name)
    return function


def connector_from_config(config: Mapping[str, Any]) -> Connector:
    """Build a connector, or a whole pipeline, from its config; see `Connector.from_config` for errors.

    Args:
        config: The result of `Connector.to_config`.

    Returns:
        The connector, without learnt state.
    """
    return Connector.from_config(config)


SIDES: dict[str, type[Any]] = {"agent": AgentConnector, "action": ActionConnector, "learner": LearnerConnector}
"""Where a connector may stand, in the order rows meet them."""


class CatalogueRow(NamedTuple):
    """A connector: its side, its name in ``marlvec.connectors``, and its description in one line."""

    side: str
    name: str
    line: str


def catalogue(name: str = "", side: str | None = None) -> list[CatalogueRow]:
    """List the connectors that ``marlvec.connectors`` exports, by side and name.

    Args:
        name: Only those whose names contain this, in upper or lower case.
        side: Only those of this side; None for all.

    Returns:
        A row a connector, with its side, name and first line.

    Raises:
        ArgumentError: ``side`` does not exist.
    """
    if side is not None and side not in SIDES:
        raise ArgumentError(f"expected a side of {list(SIDES)}, got {side!r}")
    found = {exported: getattr(module, exported) for module in (agent, action, learner) for exported in module.__all__}
    return [
        CatalogueRow(at, exported, _first_line(cls))
        for at, base in SIDES.items()
        for exported, cls in sorted(found.items())
        if side in (None, at) and name.lower() in exported.lower() and _is_piece(cls, base)
    ]


def _is_piece(cls: object, base: type[Any]) -> bool:
    if not isinstance(cls, type) or not issubclass(cls, base):
        return False
    return not inspect.isabstract(cls) and not issubclass(cls, (FunctionConnector, Pipeline))


def _first_line(cls: type[Connector]) -> str:
    """Return the first sentence, or paragraph if that is shorter, of a class's docstring."""
    paragraph = " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split())
    return re.split(r"(?<!\be\.g)\. ", paragraph, maxsplit=1)[0].rstrip(".")
