"""One env of a `NativeEnv` as an object, for control calls (`exec_func`, `get_attr`, `render`, …)."""

from __future__ import annotations

from typing import Any

import numpy as np

from marlvec.native.native_env import NativeEnv

__all__ = ["NativeEnvView"]


class NativeEnvView:
    """Env ``i`` of a `NativeEnv`: an array with one row per env appears as this env's row, which may be written to.

    Attributes common to all envs appear unchanged. Only names with a leading underscore can be set, on this object.
    """

    def __init__(self, env: NativeEnv, i: int, render_mode: str | None) -> None:
        self.render_mode = render_mode
        self._of = env
        self._i = i

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or callable(getattr(type(self._of), name, None)):
            raise AttributeError(name)  # methods of the whole batch are hidden
        value = getattr(self._of, name)
        if isinstance(value, np.ndarray) and value.ndim and len(value) == self._of.num_envs:
            return value[self._i, ...]
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if "_i" in vars(self) and name not in vars(self) and not name.startswith("_"):
            raise AttributeError("compiled envs read only their arrays: write into these by exec_func()")
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        return f"<env {self._i} of {self._of.name}>"

    def render(self) -> Any:
        """Return a frame, drawn by the reference."""
        return self._of.render(self._i, self.render_mode)

    def reference(self) -> Any:
        """Build the reference env in this env's state: an independent copy."""
        return self._of.reference(self._i, self.render_mode)
