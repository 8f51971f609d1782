"""One world of a native env as an object: what control calls (`exec_func`, `get_attr`, `render`, …) are given."""

from __future__ import annotations

from typing import Any

import numpy as np

from marlvec.native.native_env import NativeEnv

__all__ = ["NativeEnvView"]


class NativeEnvView:
    """World ``i`` of a native env.

    An array that the env keeps for all its worlds shows as this world's row, which may be written to; what is the same
    in all worlds shows as it is. Names that begin with an underscore may be set, and stay with this object; others may
    not: no world would read them.

    Args:
        env: The env.
        i: Which world.
        render_mode: ``"rgb_array"``, or None.
    """

    def __init__(self, env: NativeEnv, i: int, render_mode: str | None) -> None:
        self.render_mode = render_mode
        self._of = env
        self._i = i

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or callable(getattr(type(self._of), name, None)):
            raise AttributeError(name)  # methods of all worlds are none of one
        value = getattr(self._of, name)
        if isinstance(value, np.ndarray) and value.ndim and len(value) == self._of.num_envs:
            return value[self._i, ...]
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if "_i" in vars(self) and name not in vars(self) and not name.startswith("_"):
            raise AttributeError("no world would read it; exec_func() can write into the arrays that are there")
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        return f"<world {self._i} of {self._of.name}>"

    def render(self) -> Any:
        """Let the reference draw this world."""
        return self.reference().render()

    def reference(self) -> Any:
        """Build the reference env in the state that this world is in: a copy, which goes its own way."""
        return self._of.reference(self._i, self.render_mode)
