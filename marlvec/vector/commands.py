"""Commands that run where an env lives: call a method, get or set an attribute, run a function, render.

A command is a name and arguments, which can be pickled. The env gets copies of the arguments, so that no object is
shared between envs, or between the caller and an env.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import methodcaller
from typing import Any, NamedTuple

from marlvec.envs.env import MultiAgentEnv
from marlvec.envs.making.factory import copy_or_share
from marlvec.envs.rendering import render_env
from marlvec.envs.slot import Slot
from marlvec.envs.spec import Info
from marlvec.envs.wrapper_chain import get_attribute, is_wrapped, set_attribute
from marlvec.errors import ArgumentError
from marlvec.vector.data.report import Report
from marlvec.vector.faults.failures import capture

__all__ = ["Command", "CommandTarget", "PerEnv", "call_method", "execute", "run_commands", "set_attributes"]

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


class Command(NamedTuple):
    """One command for one env: a public call (a key of `_FUNCTIONS`), and arguments of its function behind the env."""

    call: str
    args: tuple[Any, ...] = ()

    @property
    def operation(self) -> str:
        """The name that a failure has: the env's own method, or the public call."""
        return str(self.args[0]) if self.call == "call" else self.call


def call_method(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Command:
    """Call a method of the env, or read an attribute, as Gymnasium's vector envs do."""
    if name in _REFUSED:
        raise ArgumentError(f"call({name!r}): only the vectorizer may call this; {_REFUSED[name]}")
    return Command("call", (name, args, kwargs))


def execute(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Command:
    """Call a function with the user's env, including all wrappers."""
    if not callable(function):
        got = f"{type(function).__name__}: {function!r}"
        raise ArgumentError(f"exec_func(): expected a function of an env, got {got}")
    return Command("exec_func", (function, args, kwargs))


def set_attributes(name: str, value: Any, n: int) -> list[Command]:
    """Set an attribute of ``n`` envs, on the layer that owns it."""
    values = value.values if isinstance(value, PerEnv) else (value,) * n
    if len(values) != n:
        raise ArgumentError(
            f"set_attr({name!r}): expected PerEnv with one value for each of {n} envs, got {len(values)}"
        )
    return [Command("set_attr", (name, one)) for one in values]


def _call(env: MultiAgentEnv, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    found = get_attribute(env, name)
    if callable(found):
        return found(*copy_or_share(args), **copy_or_share(kwargs))
    if args or kwargs:
        raise ArgumentError(f"call({name!r}): {type(found).__name__} is not a method; pass no arguments")
    return found


def _execute(env: MultiAgentEnv, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(env.unwrapped, *copy_or_share(args), **copy_or_share(kwargs))


def _set_attribute(env: MultiAgentEnv, name: str, value: Any) -> None:
    set_attribute(env, name, copy_or_share(value))


# Public call → function of a `MultiAgentEnv` and the command's arguments.
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "call": _call,
    "exec_func": _execute,
    "get_attr": get_attribute,
    "set_attr": _set_attribute,
    "env_is_wrapped": is_wrapped,
    "render": render_env,
    "state_obstacles": methodcaller("state_obstacle"),
}


def run_commands(
    ids: Iterable[int],
    commands: Sequence[Command],
    env_of: Callable[[int], MultiAgentEnv],
    first_env_id: int = 0,
    *,
    advice: str = "",
) -> Report:
    """Run one command per env, given by local indices, the keys of the answers. A failure costs no episode."""
    # `first_env_id` is the global index of local env 0; `advice` is appended to an `ArgumentError`.
    report = Report()
    for i, command in zip(ids, commands, strict=True):
        try:
            report.answers[i] = _FUNCTIONS[command.call](env_of(i), *command.args)
        except Exception as error:
            if advice and isinstance(error, ArgumentError):
                error.args = (f"{error} {advice}",)
            report.failures.append(capture(first_env_id + i, command.operation, error))
    return report


class CommandTarget(MultiAgentEnv):
    """Target of commands for one env of a native kernel or a pool, which has no env object; never stepped."""

    def __init__(self, env: Any, name: str) -> None:
        self.name = name
        self._env = env

    def reset(self, slot: Slot, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Info | None:
        raise NotImplementedError

    def step(self, slot: Slot) -> Info | None:
        raise NotImplementedError

    @property
    def unwrapped(self) -> Any:
        return self._env
