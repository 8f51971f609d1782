"""Commands that run where an env lives: call a method, get or set an attribute, run a function, render.

A command is called with a `MultiAgentEnv` and returns its answer. It is picklable. It passes copies of its arguments
to the env, so that no object is shared between envs, or between the caller and an env.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from marlvec.envs.env import MultiAgentEnv
from marlvec.envs.making.factory import copy_or_share
from marlvec.envs.rendering import render_env
from marlvec.envs.slot import Slot
from marlvec.envs.spec import Info
from marlvec.envs.wrapper_chain import get_attribute, is_wrapped, set_attribute
from marlvec.errors import ArgumentError
from marlvec.vector.data.report import Report
from marlvec.vector.faults.failures import capture

__all__ = [
    "CallMethod",
    "Command",
    "CommandTarget",
    "Execute",
    "GetAttribute",
    "IsWrapped",
    "PerEnv",
    "Render",
    "SetAttribute",
    "StateObstacle",
    "describe",
    "run_commands",
    "spread_attribute",
]

Command = Callable[[MultiAgentEnv], Any]
# Called past the call state machine, these methods would change an env without its rows.
_REFUSED = {
    "reset": "use reset(env_ids=…)",
    "step": "use step() or send()",
    "close": "use close()",
    "seed": "use reset(seed=…)",
}


class PerEnv:
    """One value per env, for `VectorEnv.set_attr`; any other value, even a list, is set on every env unchanged.

    Args:
        values: One per chosen env, in the order of the envs.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = tuple(values)

    def __len__(self) -> int:
        return len(self.values)

    def __repr__(self) -> str:
        return f"PerEnv({list(self.values)!r})"


@dataclass(frozen=True)
class CallMethod:
    """Call a method of the env, or read an attribute, as Gymnasium's vector envs do.

    Attributes:
        name: The method's.
        args: Positional arguments.
        kwargs: Keyword arguments.
    """

    name: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name in _REFUSED:
            raise ArgumentError(f"call({self.name!r}): only the vectorizer may call this; {_REFUSED[self.name]}")

    def __call__(self, env: MultiAgentEnv) -> Any:
        found = get_attribute(env, self.name)
        if callable(found):
            return found(*copy_or_share(self.args), **copy_or_share(dict(self.kwargs)))
        if self.args or self.kwargs:
            raise ArgumentError(f"call({self.name!r}): {type(found).__name__} is not a method; pass no arguments")
        return found


@dataclass(frozen=True)
class GetAttribute:
    """Read an attribute."""

    name: str

    def __call__(self, env: MultiAgentEnv) -> Any:
        return get_attribute(env, self.name)


@dataclass(frozen=True)
class SetAttribute:
    """Set an attribute on the layer that owns it."""

    name: str
    value: Any

    def __call__(self, env: MultiAgentEnv) -> None:
        set_attribute(env, self.name, copy_or_share(self.value))


@dataclass(frozen=True)
class Execute:
    """Call a function with the user's env, including all wrappers."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not callable(self.function):
            got = f"{type(self.function).__name__}: {self.function!r}"
            raise ArgumentError(f"exec_func(): expected a function of an env, got {got}")

    def __call__(self, env: MultiAgentEnv) -> Any:
        return self.function(env.unwrapped, *copy_or_share(self.args), **copy_or_share(dict(self.kwargs)))


@dataclass(frozen=True)
class IsWrapped:
    """Return whether the env is wrapped in ``cls``."""

    cls: type

    def __post_init__(self) -> None:
        if not isinstance(self.cls, type):
            raise ArgumentError(f"env_is_wrapped(): expected a wrapper class, got {self.cls!r}")

    def __call__(self, env: MultiAgentEnv) -> bool:
        return is_wrapped(env, self.cls)


@dataclass(frozen=True)
class Render:
    """Render a frame."""

    def __call__(self, env: MultiAgentEnv) -> Any:
        return render_env(env)


@dataclass(frozen=True)
class StateObstacle:
    """Return why the env's state cannot be saved, or None."""

    def __call__(self, env: MultiAgentEnv) -> str | None:
        return env.state_obstacle()


def describe(command: Command) -> str:
    """Return the name of the public call that made a command, e.g. ``"get_attr"``."""
    names: dict[type, str] = {
        GetAttribute: "get_attr",
        SetAttribute: "set_attr",
        Execute: "exec_func",
        IsWrapped: "env_is_wrapped",
        Render: "render",
        StateObstacle: "state_obstacles",
    }
    return command.name if isinstance(command, CallMethod) else names[type(command)]


def spread_attribute(name: str, value: Any, n: int) -> list[Command]:
    """Return one `SetAttribute` per chosen env.

    Raises:
        ArgumentError: The `PerEnv` does not have ``n`` values.
    """
    if not isinstance(value, PerEnv):
        return [SetAttribute(name, value)] * n
    if len(value) != n:
        raise ArgumentError(
            f"set_attr({name!r}): expected PerEnv with one value for each of {n} envs, got {len(value)}"
        )
    return [SetAttribute(name, one) for one in value.values]


def run_commands(
    ids: Iterable[int],
    commands: Sequence[Command],
    env_of: Callable[[int], MultiAgentEnv],
    first_env_id: int = 0,
    *,
    advice: str = "",
) -> Report:
    """Run one command per env. A failure costs no episode.

    Args:
        ids: Local indices of the envs, which are the keys of the answers.
        commands: One per env.
        env_of: Returns an env by its local index.
        first_env_id: Global index of local env 0, for failures.
        advice: Text to append to an `ArgumentError`.
    """
    report = Report()
    for i, command in zip(ids, commands, strict=True):
        try:
            report.answers[i] = command(env_of(i))
        except Exception as error:
            if advice and isinstance(error, ArgumentError):
                error.args = (f"{error} {advice}",)
            report.failures.append(capture(first_env_id + i, describe(command), error))
    return report


class CommandTarget(MultiAgentEnv):
    """Target of commands for one env of a native kernel or a pool, which has no env object.

    It answers commands, and cannot be reset or stepped.

    Args:
        env: The object that users see as this env.
        name: The env's name.
    """

    def __init__(self, env: Any, name: str) -> None:
        self.name = name
        self._env = env

    def reset(self, slot: Slot, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Info | None:
        """Not supported: all envs are reset in one call."""
        raise NotImplementedError

    def step(self, slot: Slot) -> Info | None:
        """Not supported: all envs are stepped in one call."""
        raise NotImplementedError

    @property
    def unwrapped(self) -> Any:
        """The object that users see as this env."""
        return self._env
