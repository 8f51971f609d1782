"""PettingZoo's own classic envs, built so that a native env's position can be put into them and drawn."""

from __future__ import annotations

from typing import Any

from marlvec.envs.making.catalog import pettingzoo_env

__all__ = ["classic_env"]


def classic_env(name: str, kind: str, render_mode: str | None, **kwargs: Any) -> Any:
    """Build one of PettingZoo's classic envs (``kind``: ``"parallel"`` or ``"aec"``), reset."""
    env = pettingzoo_env(f"classic/{name}", kind, render_mode=render_mode, **kwargs)
    env.reset()
    return env
