"""Observations of Overcooked: the lossless encoding, 26 layers of the grid; or a vector of features."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from marlvec.native.grids.overcooked.advance import DISH, ONION, SOUP, Objects
from marlvec.native.grids.overcooked.layout import Kitchen, Recipes
from marlvec.native.jit import kernel
from marlvec.native.native_env import Ids

__all__ = ["encode_features", "encode_lossless", "feature_num"]

_URGENT = 40  # steps before the horizon
_PER_POT, _PER_PLAYER = 10, 26


def feature_num(num_pots: int) -> int:
    """Return the length of the feature vector with ``num_pots`` pots."""
    return 2 * (_PER_POT * num_pots + _PER_PLAYER + 2)


@kernel
def encode_lossless(
    ids: Ids,
    kitchen: Kitchen,
    recipes: Recipes,
    horizon: int,
    cells: NDArray[np.int32],
    facing: NDArray[np.int32],
    objects: Objects,
    steps: NDArray[np.int64],
    view: NDArray[np.float32],
) -> None:
    """Write the lossless encodings of these envs, (N, 2, C, 26): each player sees itself first."""
    c, layers = len(kitchen.terrain), kitchen.layers.size
    terrain = kitchen.layers.reshape(layers)
    for i in ids:
        for a in range(2):
            row = view[i, a].reshape(layers)
            for k in range(layers):  # twice as fast as assigning the slice
                row[k] = terrain[k]
            for other in range(2):
                who = a if other == 0 else 1 - a
                view[i, a, cells[i, who], other] = 1.0
                view[i, a, cells[i, who], 2 + 4 * other + facing[i, who]] = 1.0
            if horizon - steps[i] < _URGENT:
                for cell in range(c):
                    view[i, a, cell, 25] = 1.0
        for at in range(c + 2):
            kind = objects.kind[i, at]
            if kind == 0:
                continue
            cell = at if at < c else cells[i, at - c]
            for a in range(2):
                if kind != SOUP:
                    view[i, a, cell, 22 if kind == DISH else 23 if kind == ONION else 24] += 1.0
                    continue
                in_pot, idle = kitchen.terrain[cell] == 2, objects.tick[i, at] < 0
                first = 16 if in_pot and idle else 18
                view[i, a, cell, first] += objects.onions[i, at]
                view[i, a, cell, first + 1] += objects.tomatoes[i, at]
                if not in_pot:
                    view[i, a, cell, 21] += 1.0
                elif not idle:
                    left = recipes.times[objects.onions[i, at], objects.tomatoes[i, at]] - objects.tick[i, at]
                    view[i, a, cell, 20] += left
                    if left <= 0:
                        view[i, a, cell, 21] += 1.0


@kernel
def encode_features(
    ids: Ids,
    kitchen: Kitchen,
    recipes: Recipes,
    height: int,
    cells: NDArray[np.int32],
    facing: NDArray[np.int32],
    objects: Objects,
    view: NDArray[np.float32],
) -> None:
    """Write (N, 2, F): a player's features, the other's, the offset to the other, and its own position."""
    size = _PER_PLAYER + _PER_POT * kitchen.nearest_pots.shape[2]
    for i in ids:
        for a in range(2):
            _put_player(i, a, kitchen, recipes, height, cells, facing, objects, view[i, a, :size])
        for a in range(2):
            view[i, a, size : 2 * size] = view[i, 1 - a, :size]
            x, y = cells[i, a] // height, cells[i, a] % height
            view[i, a, 2 * size] = cells[i, 1 - a] // height - x
            view[i, a, 2 * size + 1] = cells[i, 1 - a] % height - y
            view[i, a, 2 * size + 2] = x
            view[i, a, 2 * size + 3] = y


@kernel
def _put_player(
    i: int,
    a: int,
    kitchen: Kitchen,
    recipes: Recipes,
    height: int,
    cells: NDArray[np.int32],
    facing: NDArray[np.int32],
    objects: Objects,
    out: NDArray[np.float32],
) -> None:
    """Write one player's features. Like the reference's planner, it ignores counters and objects on them."""
    cell, faces = cells[i, a], facing[i, a]
    hand = len(kitchen.terrain) + a
    held = objects.kind[i, hand]
    out[:] = 0.0
    out[faces] = 1.0
    if held == ONION:
        out[4] = 1.0
    elif held == SOUP:
        out[5] = 1.0
    elif held == DISH:
        out[6] = 1.0
    elif held != 0:
        out[7] = 1.0
    for k in range(3):  # onions, tomatoes, dishes; numbered from 1
        if held != k + 1:
            out[8 + 2 * k] = kitchen.nearest[cell, faces, 2 * k]
            out[9 + 2 * k] = kitchen.nearest[cell, faces, 2 * k + 1]
    if held == SOUP:
        out[16] = objects.onions[i, hand]
        out[17] = objects.tomatoes[i, hand]
    out[18] = kitchen.nearest[cell, faces, 6]
    out[19] = kitchen.nearest[cell, faces, 7]
    k = 22
    for j in range(kitchen.nearest_pots.shape[2]):
        pot = kitchen.nearest_pots[cell, faces, j]
        if pot >= 0:
            onions, tomatoes, tick = objects.onions[i, pot], objects.tomatoes[i, pot], objects.tick[i, pot]
            left = recipes.times[onions, tomatoes] - tick if tick >= 0 else 0
            out[k] = 1.0
            out[k + 1] = objects.kind[i, pot] == 0
            out[k + 2] = tick >= 0 or onions + tomatoes == 3
            out[k + 3] = tick >= 0 and left > 0
            out[k + 4] = tick >= 0 and left <= 0
            out[k + 5] = onions
            out[k + 6] = tomatoes
            out[k + 7] = max(left, 0)
            out[k + 8] = pot // height - cell // height
            out[k + 9] = pot % height - cell % height
        k += 10
    for direction in range(4):
        out[k + direction] = kitchen.walls[cell, direction]
