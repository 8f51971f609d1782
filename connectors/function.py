"""`agent_connector`, `action_connector` and `learner_connector`: decorators that make a function a connector."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

from gymnasium.spaces import Space

from marlvec.connectors.connector import ActionConnector, AgentConnector, Connector, LearnerConnector
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError

RowsFunction = Callable[[Rows], Rows]
SpaceFunction = Callable[[Space[Any]], Space[Any]]


class FunctionConnector(Connector):
    """A connector made of a function; it has no state."""

    def __init__(self, function: RowsFunction, *, name: str | None = None) -> None:
        if not callable(function):
            raise ArgumentError(f"expected a function of rows, got {type(function).__name__}")
        self.function = function
        self.name = name if name is not None else str(getattr(function, "__name__", type(function).__name__))

    def __call__(self, rows: Rows) -> Rows:
        return self.function(rows)

    def __repr__(self) -> str:
        return self.name


class FunctionAgentConnector(FunctionConnector, AgentConnector):
    """An agent-side connector made of a function; see `agent_connector`."""

    def __init__(
        self, function: RowsFunction, *, name: str | None = None, output_space: SpaceFunction | None = None
    ) -> None:
        super().__init__(function, name=name)
        self._space_function = output_space

    def output_space(self, space: Space[Any]) -> Space[Any]:
        return space if self._space_function is None else self._space_function(space)

    def params(self) -> dict[str, Any]:
        return {"function": self.function, "name": self.name, "output_space": self._space_function}


class FunctionActionConnector(FunctionConnector, ActionConnector):
    """An action-side connector made of a function; see `action_connector`."""

    def __init__(
        self, function: RowsFunction, *, name: str | None = None, policy_space: SpaceFunction | None = None
    ) -> None:
        super().__init__(function, name=name)
        self._space_function = policy_space
        self.is_choice = policy_space is None

    def policy_space(self, space: Space[Any]) -> Space[Any]:
        return space if self._space_function is None else self._space_function(space)

    def params(self) -> dict[str, Any]:
        return {"function": self.function, "name": self.name, "policy_space": self._space_function}


class FunctionLearnerConnector(FunctionConnector, LearnerConnector):
    """A learner-side connector made of a function; see `learner_connector`."""

    def __init__(self, function: RowsFunction, *, name: str | None = None, changes_length: bool = False) -> None:
        super().__init__(function, name=name)
        self.changes_length = changes_length


@overload
def agent_connector(function: RowsFunction, /) -> FunctionAgentConnector: ...


@overload
def agent_connector(
    *, name: str | None = None, output_space: SpaceFunction | None = None
) -> Callable[[RowsFunction], FunctionAgentConnector]: ...


def agent_connector(
    function: RowsFunction | None = None, /, *, name: str | None = None, output_space: SpaceFunction | None = None
) -> FunctionAgentConnector | Callable[[RowsFunction], FunctionAgentConnector]:
    """Make an agent-side connector from a function: ``@agent_connector`` or ``@agent_connector(name=...)``.

    Args:
        function: Rows in, rows out; set by the decorator.
        name: Name in pipelines; None: the function's name.
        output_space: Function from the space before the connector to the space after it; None if both are equal.

    Returns:
        The connector; or a decorator, if only options were given.
    """
    if function is not None:
        return FunctionAgentConnector(function, name=name, output_space=output_space)
    return lambda f: FunctionAgentConnector(f, name=name, output_space=output_space)


@overload
def action_connector(function: RowsFunction, /) -> FunctionActionConnector: ...


@overload
def action_connector(
    *, name: str | None = None, policy_space: SpaceFunction | None = None
) -> Callable[[RowsFunction], FunctionActionConnector]: ...


def action_connector(
    function: RowsFunction | None = None, /, *, name: str | None = None, policy_space: SpaceFunction | None = None
) -> FunctionActionConnector | Callable[[RowsFunction], FunctionActionConnector]:
    """Make an action-side connector from a function: ``@action_connector`` or ``@action_connector(name=...)``.

    Args:
        function: Rows in, rows with another ``actions_for_env`` out; set by the decorator.
        name: Name in pipelines; None: the function's name.
        policy_space: Function from the space after the connector to the space before it; None if both are equal. With
            a function the connector is a conversion; without, its changes are the agent's choice, and go into the
            column ``actions_executed`` (`ActionConnector.is_choice`).

    Returns:
        The connector; or a decorator, if only options were given.
    """
    if function is not None:
        return FunctionActionConnector(function, name=name, policy_space=policy_space)
    return lambda f: FunctionActionConnector(f, name=name, policy_space=policy_space)


@overload
def learner_connector(function: RowsFunction, /) -> FunctionLearnerConnector: ...


@overload
def learner_connector(
    *, name: str | None = None, changes_length: bool = False
) -> Callable[[RowsFunction], FunctionLearnerConnector]: ...


def learner_connector(
    function: RowsFunction | None = None, /, *, name: str | None = None, changes_length: bool = False
) -> FunctionLearnerConnector | Callable[[RowsFunction], FunctionLearnerConnector]:
    """Make a learner-side connector from a function: ``@learner_connector`` or ``@learner_connector(name=...)``.

    Args:
        function: Rows of one policy's batch in, rows to learn from out; set by the decorator.
        name: Name in pipelines; None: the function's name.
        changes_length: Whether the function may return another number of rows than it gets.

    Returns:
        The connector; or a decorator, if only options were given.
    """
    if function is not None:
        return FunctionLearnerConnector(function, name=name, changes_length=changes_length)
    return lambda f: FunctionLearnerConnector(f, name=name, changes_length=changes_length)
