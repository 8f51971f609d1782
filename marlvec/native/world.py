"""One world of a native env as an object: what control calls (`exec_func`, `get_attr`, `render`, …) are given."""

from __future__ import annotations

from typing import Any

from marlvec.envs.env import MultiAgentEnv
from marlvec.envs.slot import Slot
from marlvec.envs.spec import Info
from marlvec.native.env_view import NativeWorld

__all__ = ["WorldHandle"]


class WorldHandle(MultiAgentEnv):
    """A world where control commands expect an env; it can be asked, not stepped."""

    def __init__(self, world: NativeWorld, name: str) -> None:
        self.name = name
        self._world = world

    def reset(self, slot: Slot, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Info | None:
        """Not here: the runner resets."""
        raise NotImplementedError

    def step(self, slot: Slot) -> Info | None:
        """Not here: the runner steps."""
        raise NotImplementedError

    @property
    def unwrapped(self) -> Any:
        """The world."""
        return self._world
