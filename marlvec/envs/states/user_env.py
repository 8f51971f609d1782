"""`UserEnvState`: reads and writes the state of a user's env, wrappers of other libraries and all."""

from __future__ import annotations

from copy import deepcopy
from functools import lru_cache
from typing import Any

from marlvec.arguments import signature_of
from marlvec.envs.states.attributes import AttributeReader, AttributeWriter
from marlvec.envs.states.plain import plain_copy
from marlvec.envs.wrapper_chain import wrapper_chain
from marlvec.errors import ArgumentError

__all__ = ["UserEnvState"]


class UserEnvState:
    """The state of one user's env.

    The outermost layer that has both ``get_state()`` and ``set_state(state)`` speaks for itself and all below it. Of
    the wrappers above, their attributes are the state. Where no layer has the two, the attributes of all layers are,
    if the user says so (``env_state="deepcopy"``).

    Args:
        env: The user's env.
        name: What to call it in messages.
        copies_attributes: Whether attributes may stand for a state.
    """

    def __init__(self, env: Any, name: str, *, copies_attributes: bool) -> None:
        self._env = env
        self._name = name
        self._copies_attributes = copies_attributes

    def obstacle(self) -> str | None:
        """Why the state cannot be read, or None."""
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
                f"{self._name} has get_state(), and a wrapper around it keeps what cannot be copied: {opaque[0]}; give "
                f"that wrapper get_state() and set_state(state), too, or pass env_state='deepcopy' to make()"
            )
        return None

    def get(self) -> dict[str, Any]:
        """Read the state.

        Returns:
            Plain data: ``layers``, the attributes of each layer above the one that speaks for itself, and ``env``,
            what that one says.

        Raises:
            SerialisationError: What the env's ``get_state()`` returned is no plain data; names the part.
        """
        layers, offering = self._layers()
        attributes, _ = self._read(layers, offering)
        if offering == len(layers):
            return {"layers": attributes}
        said = plain_copy(layers[offering].get_state(), self._name)
        return {"layers": attributes, "env": said}

    def set(self, state: dict[str, Any]) -> None:
        """Write a state; a copy of it, so that many envs may be given the same one.

        Raises:
            ArgumentError: It is of an env with other layers.
        """
        layers, offering = self._layers()
        expected, got = [type(layer).__name__ for layer in layers[:offering]], [of for of, _ in state["layers"]]
        if expected != got or ("env" in state) != (offering < len(layers)):
            raise ArgumentError(f"{self._name}: the state is of the layers {got}, expected {expected}")
        if "env" in state:
            layers[offering].set_state(deepcopy(state["env"]))
        writer = AttributeWriter(layers)
        for layer, (kind, attributes) in zip(layers, state["layers"], strict=False):
            writer.write(layer, attributes, kind)

    def _read(self, layers: list[Any], offering: int) -> tuple[list[tuple[str, Any]], list[str]]:
        reader = AttributeReader(layers)
        return [(type(layer).__name__, reader.read(layer, type(layer).__name__)) for layer in layers[:offering]], (
            reader.opaque
        )

    def _layers(self) -> tuple[list[Any], int]:
        """All layers, and the place of the first that speaks for itself, or their number."""
        layers = list(wrapper_chain(self._env))
        kinds: list[Any] = [type(layer) for layer in layers]
        return layers, next((k for k, kind in enumerate(kinds) if _speaks(kind)), len(layers))


@lru_cache(maxsize=64)
def _speaks(kind: Any) -> bool:
    """Whether layers of a class have both methods themselves; a wrapper may hand on what it has not got."""
    get, put = (getattr(kind, name, None) for name in ("get_state", "set_state"))
    if not (callable(get) and callable(put)):
        return False
    try:
        signature_of(get).bind(None)
        signature_of(put).bind(None, None)
    except (TypeError, ValueError):  # of another use: MuJoCo's envs have set_state(qpos, qvel)
        return False
    return True
