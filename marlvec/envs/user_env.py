"""`UserEnvState`: the state of a user's env, with wrappers of other libraries; and the layers of its wrappers."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from functools import lru_cache
from typing import Any

from marlvec.arguments import signature_of
from marlvec.envs.attributes import AttributeReader, AttributeWriter
from marlvec.envs.env import MultiAgentEnv
from marlvec.errors import ArgumentError, SerialisationError
from marlvec.serialization.values import encode


class UserEnvState:
    """The state of one user's env.

    The outermost layer that has both ``get_state()`` and ``set_state(state)`` provides the state of itself and all
    layers below it. For wrappers above it, their attributes are the state. If no layer has both methods, the attributes
    of all layers are the state, if the user allows it (``env_state="deepcopy"``: `copies_attributes`).
    """

    def __init__(self, env: Any, name: str, *, copies_attributes: bool) -> None:
        self._env = env
        self._name = name
        self._copies_attributes = copies_attributes

    def obstacle(self) -> str | None:
        """Return why the state cannot be read, or None."""
        layers, offering = self._layers()
        if offering == len(layers):
            if self._copies_attributes:
                return None
            return (
                f"{self._name} has no get_state() and set_state(state): give it both, or pass "
                f"env_state='deepcopy' to make() if its whole state is in plain attributes"
            )
        _, opaque = self._read(layers, offering)
        if opaque and not self._copies_attributes:
            return (
                f"{self._name} has get_state(), but a wrapper around it has an object that cannot be copied: "
                f"{opaque[0]}; give that wrapper get_state() and set_state(state), too, or pass env_state='deepcopy' "
                f"to make()"
            )
        return None

    def get(self) -> dict[str, Any]:
        """Return ``layers``, attributes of each layer above that with state methods, and ``env``, its state."""
        layers, offering = self._layers()
        attributes, _ = self._read(layers, offering)
        if offering == len(layers):
            return {"layers": attributes}
        return {"layers": attributes, "env": plain_copy(layers[offering].get_state(), self._name)}

    def set(self, state: dict[str, Any]) -> None:
        """Write a copy of a state, so that several envs may share the original."""
        layers, offering = self._layers()
        expected, got = [type(layer).__name__ for layer in layers[:offering]], [of for of, _ in state["layers"]]
        if expected != got or ("env" in state) != (offering < len(layers)):
            raise ArgumentError(f"{self._name}: expected a state of the layers {expected}, got {got}")
        if "env" in state:
            layers[offering].set_state(deepcopy(state["env"]))
        kinds, attributes = zip(*state["layers"], strict=True) if state["layers"] else ((), ())
        AttributeWriter(layers).write(attributes, kinds)

    def _read(self, layers: list[Any], offering: int) -> tuple[list[tuple[str, Any]], list[str]]:
        reader = AttributeReader(layers)
        return [(type(layer).__name__, reader.read(layer, type(layer).__name__)) for layer in layers[:offering]], (
            reader.opaque
        )

    def _layers(self) -> tuple[list[Any], int]:
        """Return all layers, and the index of the first with state methods, or their number."""
        layers = list(wrapper_chain(self._env))
        kinds: list[Any] = [type(layer) for layer in layers]
        return layers, next((k for k, kind in enumerate(kinds) if _has_state_methods(kind)), len(layers))


@lru_cache(maxsize=64)
def _has_state_methods(kind: Any) -> bool:
    """Return whether a class itself has both state methods; forwarded attributes of wrappers do not count."""
    get, put = (getattr(kind, name, None) for name in ("get_state", "set_state"))
    if not (callable(get) and callable(put)):
        return False
    try:
        signature_of(get).bind(None)
        signature_of(put).bind(None, None)
    except (TypeError, ValueError):  # a method for another purpose: MuJoCo's envs have set_state(qpos, qvel)
        return False
    return True


def plain_copy(state: Any, name: str) -> Any:
    """Copy a state from ``get_state()``; `SerialisationError` names a part that is not plain data."""
    try:
        encode(state, f"the result of {name}.get_state()")
    except SerialisationError as error:
        raise SerialisationError(f"{error}. A state must be plain data, so that it can be written to a file") from None
    return deepcopy(state)


def one_each(values: Any, n: int, where: str) -> list[Any]:
    """Copy a list in a state, which must have one value for each of n agents; else raise `ArgumentError`."""
    if not isinstance(values, list) or len(values) != n:
        raise ArgumentError(f"{where}: expected {n} values, one for each agent, got {values!r:.200}")
    return list(values)


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
