"""The wrappers of an env, outermost first, and access to attributes of the layer that owns them.

Gymnasium's wrappers do not forward attributes, PettingZoo's forward them for reading only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from marlvec.envs.env import MultiAgentEnv
from marlvec.errors import ArgumentError

__all__ = ["find_method", "get_attribute", "innermost", "is_wrapped", "wrapper_chain", "set_attribute"]

# Attributes that hold the next layer: in wrappers of Gymnasium and PettingZoo, and in PettingZoo's conversions.
_INNER = ("env", "aec_env", "par_env")


def wrapper_chain(env: Any) -> Iterator[Any]:
    """Yield every layer of an env, outermost first."""
    seen: set[int] = set()
    while env is not None and id(env) not in seen:
        seen.add(id(env))
        yield env
        # Not getattr: wrappers that forward attributes would return those of inner layers.
        own = _own_attributes(env)
        env = next((own[name] for name in _INNER if own.get(name) is not None), None)


def innermost(env: MultiAgentEnv) -> Any:
    """Return the user's env without any wrappers."""
    user_env = env.unwrapped
    inner = getattr(user_env, "unwrapped", None)
    return user_env if inner is None else inner


def get_attribute(env: MultiAgentEnv, name: str) -> Any:
    """Read an attribute of the user's env from the outermost layer that has it; does not call it."""
    user_env = env.unwrapped
    for layer in wrapper_chain(user_env):
        if _owns(layer, name):
            return getattr(layer, name)
    try:
        return getattr(user_env, name)  # from a __getattr__
    except AttributeError:
        raise _missing(user_env, name) from None


def set_attribute(env: MultiAgentEnv, name: str, value: Any) -> None:
    """Set an attribute of the user's env on the outermost layer that has it, or else on the innermost one."""
    user_env = env.unwrapped
    every = list(wrapper_chain(user_env))
    owner = next((layer for layer in every if _owns(layer, name)), every[-1])
    try:
        setattr(owner, name, value)
    except AttributeError as error:  # it has slots, or it is a property that can only be read
        raise ArgumentError(
            f"attribute {name!r} of {type(owner).__name__} cannot be set: {error}; "
            f"expected a writable attribute, or a new one on an env without __slots__"
        ) from error


def find_method(env: MultiAgentEnv, name: str) -> Any:
    """Return a method of the outermost layer that has it."""
    found = get_attribute(env, name)
    if not callable(found):
        raise ArgumentError(f"{name!r} is not a method but {type(found).__name__}; get_attr({name!r}) reads it")
    return found


def is_wrapped(env: MultiAgentEnv, cls: type) -> bool:
    """Return whether a layer above the innermost one is an instance of ``cls``."""
    *wrappers, _ = wrapper_chain(env)
    return any(isinstance(layer, cls) for layer in wrappers)


def _own_attributes(layer: Any) -> dict[str, Any]:
    try:
        return dict(vars(layer))
    except TypeError:  # it has slots
        return {name: getattr(layer, name) for name in _INNER if hasattr(type(layer), name) and hasattr(layer, name)}


def _owns(layer: Any, name: str) -> bool:
    return name in getattr(layer, "__dict__", {}) or hasattr(type(layer), name)


def _missing(user_env: Any, name: str) -> ArgumentError:
    found = " → ".join(type(layer).__name__ for layer in wrapper_chain(user_env))
    return ArgumentError(f"no layer of the env has an attribute {name!r}; its layers are {found}.")
