"""Users' own connectors and functions, registered so that chains of them can be written down and built again."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

from marlvec.connectors.connector import Connector
from marlvec.connectors.function import FunctionConnector
from marlvec.errors import ArgumentError
from marlvec.serialization.name_table import CLASSES, FUNCTIONS

__all__ = ["connector_from_config", "register_connector", "register_function"]

C = TypeVar("C", bound=type[Connector])
F = TypeVar("F", bound=Callable[..., Any])


@overload
def register_connector(cls: C, *, name: str | None = None) -> C: ...


@overload
def register_connector(cls: None = None, *, name: str | None = None) -> Callable[[C], C]: ...


def register_connector(cls: C | None = None, *, name: str | None = None) -> C | Callable[[C], C]:
    """Let a class of connectors be written to configs and files: ``@register_connector``, or as a call.

    Its instances must be what their constructor arguments make them: kept under the arguments' own names, or said by
    `Connector.params`. marlvec's own classes need no registration.

    Args:
        cls: The class; set by the decorator.
        name: What stands for it in configs, for as long as those are to be read; the class's own name where None.

    Returns:
        The class, unchanged.

    Raises:
        AlreadyRegisteredError: The name stands for another class, or the class has another name.
        ArgumentError: This is no class of connectors, or it cannot be built as it is abstract.
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
    """Let a function that connectors take be written to configs and files: ``@register_function``, or as a call.

    It stands over or under ``@agent_connector`` and the other decorators.

    Args:
        function: The function; set by the decorator.
        name: What stands for it in configs, for as long as those are to be read; its own name where None.

    Returns:
        The function, unchanged.

    Raises:
        AlreadyRegisteredError: The name stands for another function, or the function has another name.
        ArgumentError: This is no function, or a lambda without a name.
    """
    if function is None:
        return lambda decorated: register_function(decorated, name=name)
    inner: Any = function.function if isinstance(function, FunctionConnector) else function
    if isinstance(inner, (Connector, type)) or not callable(inner):
        raise ArgumentError(f"expected a function, got {function!r}; a class of connectors: register_connector")
    FUNCTIONS.add(inner, name)
    return function


def connector_from_config(config: Mapping[str, Any]) -> Connector:
    """Build the connector, or whole pipeline, of which this is the config.

    Args:
        config: What `Connector.to_config` returned.

    Returns:
        The connector, in the state of a new one.

    Raises:
        ArgumentError: This is no config.
        RegistryError: Nothing is registered under a name in it.
    """
    return Connector.from_config(config)
