"""Rendering: one env's frame, checked, and many frames tiled into one picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.arguments import whole_number
from marlvec.envs.env import MultiAgentEnv
from marlvec.envs.wrapper_chain import find_method, get_attribute
from marlvec.errors import ArgumentError, ContractError

__all__ = ["check_frame", "render_env", "render_mode", "tile_frames"]


def render_mode(env: MultiAgentEnv, default: str | None = None) -> Any:
    """Return the render mode of an env's outermost layer that has one."""
    try:
        return get_attribute(env, "render_mode")
    except ArgumentError:
        return default


def render_env(env: MultiAgentEnv) -> Any:
    """Render an env; frames are copied, since envs may draw over them later.

    `ArgumentError`: it has no ``render()``, or was made without a render mode.
    """
    try:
        render = find_method(env, "render")
    except ArgumentError:
        raise ArgumentError(f"{env.name} has no render()") from None
    # An env without the attribute has a single way to render.
    if render_mode(env, default="") is None:
        raise ArgumentError(f'{env.name} was made without a render mode; pass render_mode="rgb_array" to make()')
    try:
        drawn = render()
    except NotImplementedError as error:  # the libraries' base classes raise this
        raise ArgumentError(f"{env.name} has no render() of its own") from error
    if isinstance(drawn, (list, tuple)):
        return type(drawn)(map(_own, drawn)) if type(drawn) in (list, tuple) else drawn
    return _own(drawn)


def check_frame(frame: Any, where: str) -> NDArray[np.uint8]:
    """Return a frame, (H, W, 3) uint8; `ContractError` if it is something else."""
    if isinstance(frame, np.ndarray) and frame.dtype == np.uint8 and frame.shape[2:] == (3,) and frame.size:
        return frame
    got = f"{frame.dtype} of shape {frame.shape}" if isinstance(frame, np.ndarray) else type(frame).__name__
    raise ContractError(f"{where}: expected render() to return a frame, uint8 of shape (H, W, 3), got {got}")


def _own(drawn: Any) -> Any:
    return drawn.copy() if isinstance(drawn, np.ndarray) else drawn


Frame = NDArray[np.uint8]


def tile_frames(
    frames: Sequence[Any] | NDArray[np.uint8],
    columns: int | None = None,
    background: int | tuple[int, int, int] = 0,
) -> Frame:
    """Lay frames out in a grid, row by row, one cell each.

    Every cell is as high as the highest frame and as wide as the widest; smaller frames are centered.

    Args:
        frames: Frames from `VectorEnv.render`, each uint8: (H, W, 3), (H, W, 4), whose transparent parts show the
            background, or grey, (H, W) or (H, W, 1). None is an empty cell.
        columns: Cells in a row; default: ⌈√n⌉ for n frames.
        background: Color around and in place of frames: a grey value or an RGB triple, 0 to 255.

    Returns:
        (rows * H, columns * W, 3) uint8, a new array.

    Raises:
        ArgumentError: An entry is not a frame (names its index and shape), there is none, or an argument is invalid.
    """
    if isinstance(frames, np.ndarray) and frames.ndim == 3 and frames.shape[2] in (3, 4):
        raise ArgumentError(
            f"tile_frames(): expected several frames, got an array of one, {frames.shape}; put it in [ ]"
        )
    if isinstance(frames, (str, bytes)) or not isinstance(frames, (Sequence, np.ndarray)):
        raise ArgumentError(f"tile_frames(): expected a list or tuple of frames, got {type(frames).__name__}")
    colour = _colour(background)
    pictures = [None if frame is None else _rgb(i, frame, colour) for i, frame in enumerate(frames)]
    shapes = [picture.shape for picture in pictures if picture is not None]
    if not shapes:
        raise ArgumentError(f"tile_frames(): expected at least one frame, got {len(pictures)} empty ones")
    if columns is None:
        columns = math.ceil(math.sqrt(len(pictures)))
    elif (whole_number(columns) or 0) < 1:
        raise ArgumentError(f"tile_frames(): columns: expected an int of at least 1, got {columns!r}")
    rows = math.ceil(len(pictures) / columns)
    height, width = (max(shape[axis] for shape in shapes) for axis in (0, 1))
    grid = np.empty((rows * height, columns * width, 3), np.uint8)
    grid[...] = colour
    for i, picture in enumerate(pictures):
        if picture is not None:
            h, w, _ = picture.shape
            top = i // columns * height + (height - h) // 2
            left = i % columns * width + (width - w) // 2
            grid[top : top + h, left : left + w] = picture
    return grid


def _colour(background: Any) -> Frame:
    values = np.asarray(background)
    whole = values.dtype.kind in "iu" and values.shape in ((), (3,))
    if not whole or values.min() < 0 or values.max() > 255:
        raise ArgumentError(
            f"tile_frames(): background: expected an int or three, from 0 to 255 each, got {background!r}"
        )
    return np.broadcast_to(values, (3,)).astype(np.uint8)


def _rgb(i: int, frame: Any, background: Frame) -> Frame:
    """Return frame number ``i`` as (H, W, 3); grey is broadcast."""
    if not isinstance(frame, np.ndarray):
        raise ArgumentError(
            f"tile_frames(): frame {i}: expected an array, uint8 of shape (H, W, 3), got {type(frame).__name__}; "
            f'the envs need render_mode="rgb_array"'
        )
    picture = frame[:, :, np.newaxis] if frame.ndim == 2 else frame
    if frame.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] not in (1, 3, 4) or not frame.size:
        raise ArgumentError(
            f"tile_frames(): frame {i}: expected uint8 of shape (H, W, 3), (H, W, 4) or (H, W), "
            f"got {frame.dtype} of shape {frame.shape}"
        )
    if picture.shape[2] < 4:
        return np.broadcast_to(picture, (*picture.shape[:2], 3))
    alpha = picture[:, :, 3:].astype(np.uint16)
    mixed: Frame = ((picture[:, :, :3] * alpha + background * (255 - alpha) + 127) // 255).astype(np.uint8)
    return mixed
