"""What an env draws: one frame, or text, or a window of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.envs.env import MultiAgentEnv
from marlvec.envs.layers import find_method, get_attribute
from marlvec.errors import ArgumentError, ContractError

__all__ = ["check_frame", "render_env", "render_mode"]


def render_mode(env: MultiAgentEnv, default: str | None = None) -> Any:
    """The mode that an env was made with: that of its outermost layer that has one.

    Args:
        env: The env.
        default: What to say of an env that has no such attribute at all.
    """
    try:
        return get_attribute(env, "render_mode")
    except ArgumentError:
        return default


def render_env(env: MultiAgentEnv) -> Any:
    """Let an env render itself.

    Returns:
        What its ``render()`` returned; a frame, or a list of frames, is a copy, as envs draw over their own.

    Raises:
        ArgumentError: It has no ``render()``, or was made without a render mode.
    """
    try:
        render = find_method(env, "render")
    except ArgumentError:
        raise ArgumentError(f"{env.name} has no render()") from None
    # An env that knows nothing of modes has but one way to render.
    if render_mode(env, default="") is None:
        raise ArgumentError(f'{env.name} was made without a render mode; pass render_mode="rgb_array" to make()')
    try:
        drawn = render()
    except NotImplementedError as error:  # what the libraries' base classes do
        raise ArgumentError(f"{env.name} has no render() of its own") from error
    if isinstance(drawn, (list, tuple)):
        return type(drawn)(map(_own, drawn)) if type(drawn) in (list, tuple) else drawn
    return _own(drawn)


def check_frame(frame: Any, where: str) -> NDArray[np.uint8]:
    """Make sure that this is a picture.

    Args:
        frame: What ``render()`` returned.
        where: How to name what drew it.

    Returns:
        The frame, (H, W, 3) uint8.

    Raises:
        ContractError: It is something else; says what.
    """
    if isinstance(frame, np.ndarray) and frame.dtype == np.uint8 and frame.shape[2:] == (3,) and frame.size:
        return frame
    got = f"{frame.dtype} of shape {frame.shape}" if isinstance(frame, np.ndarray) else type(frame).__name__
    raise ContractError(f"{where}: expected render() to return a frame, uint8 of shape (H, W, 3), got {got}")


def _own(drawn: Any) -> Any:
    return drawn.copy() if isinstance(drawn, np.ndarray) else drawn
