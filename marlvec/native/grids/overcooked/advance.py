"""One step of Overcooked: players use what they face, one after the other; then both move, and pots cook."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from marlvec.native.grids.overcooked.layout import Kitchen, Recipes
from marlvec.native.jit import end_episode, kernel
from marlvec.native.native_env import Ids

__all__ = ["DISH", "ONION", "SOUP", "TOMATO", "Objects", "advance"]

ONION, TOMATO, DISH, SOUP = 1, 2, 3, 4
_COUNTER, _POT, _ONIONS, _TOMATOES, _DISHES, _SERVING = 1, 2, 3, 4, 5, 6  # places in TERRAIN
_STAY, _INTERACT = 4, 5


class Objects(NamedTuple):
    """Objects of N envs: a place for each of C cells, and one for each player's hands; arrays are (N, C + 2)."""

    kind: NDArray[np.int8]  # `ONION`, `TOMATO`, `DISH`, `SOUP`, or 0
    onions: NDArray[np.int8]  # in a soup
    tomatoes: NDArray[np.int8]
    tick: NDArray[np.int32]  # steps a soup has been cooking; -1: not cooking


@kernel
def advance(
    ids: Ids,
    kitchen: Kitchen,
    recipes: Recipes,
    shaping: float,
    horizon: int,
    actions: NDArray[np.int64],
    cells: NDArray[np.int32],
    facing: NDArray[np.int32],
    objects: Objects,
    steps: NDArray[np.int64],
    reward: NDArray[np.float64],
    truncated: NDArray[np.bool_],
    alive: NDArray[np.bool_],
    acting: NDArray[np.bool_],
    done: NDArray[np.bool_],
) -> None:
    """Step these envs; the arrays are attributes of `Overcooked` and its rows."""
    for i in ids:
        waiting = _count_waiting(i, kitchen, objects)
        served = 0.0
        for a in range(2):
            shaped = 0.0
            if actions[i, a] == _INTERACT:
                at = kitchen.beside[cells[i, a], facing[i, a]]
                gained, shaped = _interact(i, a, at, kitchen, recipes, waiting, objects)
                served += gained
            reward[i, a] = shaped
        for a in range(2):
            reward[i, a] = served + shaping * reward[i, a]
        _move(kitchen, actions[i], cells[i], facing[i])
        for pot in kitchen.pots:
            if objects.kind[i, pot] == SOUP and objects.tick[i, pot] >= 0 and not _is_ready(i, pot, recipes, objects):
                objects.tick[i, pot] += 1
        steps[i] += 1
        if steps[i] >= horizon:
            end_episode(i, truncated, alive, acting, done)


@kernel
def _is_ready(i: int, at: int, recipes: Recipes, objects: Objects) -> bool:
    tick = objects.tick[i, at]
    return bool(tick >= 0 and tick >= recipes.times[objects.onions[i, at], objects.tomatoes[i, at]])


@kernel
def _count_waiting(i: int, kitchen: Kitchen, objects: Objects) -> int:
    """Count pots that cook, are ready, or have one or two ingredients: dishes are useful for these."""
    count = 0
    for pot in kitchen.pots:
        inside = objects.onions[i, pot] + objects.tomatoes[i, pot]
        if objects.kind[i, pot] == SOUP and (objects.tick[i, pot] >= 0 or inside < 3):
            count += 1
    return count


@kernel
def _interact(
    i: int, a: int, at: int, kitchen: Kitchen, recipes: Recipes, waiting: int, objects: Objects
) -> tuple[float, float]:
    """Let a player use the place that it faces; return the reward of a served soup, and the shaped reward."""
    hand = len(kitchen.terrain) + a
    terrain = kitchen.terrain[at]
    held = objects.kind[i, hand]
    served, shaped = 0.0, 0.0
    if terrain == _COUNTER:
        if (held != 0) != (objects.kind[i, at] != 0):
            _swap(i, hand, at, objects)
    elif terrain in (_ONIONS, _TOMATOES, _DISHES):
        if held == 0:
            if terrain == _DISHES and _is_dish_useful(i, kitchen, waiting, objects):
                shaped = recipes.dish
            objects.kind[i, hand] = ONION if terrain == _ONIONS else TOMATO if terrain == _TOMATOES else DISH
    elif terrain == _SERVING:
        if held == SOUP:
            served = recipes.values[objects.onions[i, hand], objects.tomatoes[i, hand]]
            _clear(i, hand, objects)
    elif terrain == _POT:
        inside = objects.onions[i, at] + objects.tomatoes[i, at]
        idle = objects.tick[i, at] < 0
        if held == 0:
            if idle and inside > 0:
                objects.tick[i, at] = 0
        elif held == DISH:
            if objects.kind[i, at] == SOUP and _is_ready(i, at, recipes, objects):
                _clear(i, hand, objects)
                _swap(i, hand, at, objects)
                shaped = recipes.soup
        elif held != SOUP and idle and inside < 3:
            objects.kind[i, at] = SOUP
            if held == ONION:
                objects.onions[i, at] += 1
            else:
                objects.tomatoes[i, at] += 1
            _clear(i, hand, objects)
            shaped = recipes.potting
    return served, shaped


@kernel
def _is_dish_useful(i: int, kitchen: Kitchen, waiting: int, objects: Objects) -> bool:
    """Return whether more soups wait than there are dishes in hand, and no dish lies on a counter."""
    c = len(kitchen.terrain)
    for cell in range(c):
        if objects.kind[i, cell] == DISH:
            return False
    held = 0
    for a in range(2):
        held += objects.kind[i, c + a] == DISH
    return held < waiting


@kernel
def _swap(i: int, one: int, other: int, objects: Objects) -> None:
    for part in (objects.kind, objects.onions, objects.tomatoes):
        kept = part[i, one]
        part[i, one] = part[i, other]
        part[i, other] = kept
    tick = objects.tick[i, one]
    objects.tick[i, one] = objects.tick[i, other]
    objects.tick[i, other] = tick


@kernel
def _clear(i: int, at: int, objects: Objects) -> None:
    objects.kind[i, at] = 0
    objects.onions[i, at] = 0
    objects.tomatoes[i, at] = 0
    objects.tick[i, at] = -1


@kernel
def _move(kitchen: Kitchen, actions: Any, cells: Any, facing: Any) -> None:
    """Turn and move both players; if they would collide or swap cells, both only turn."""
    first, second = _find_goal(kitchen, actions, cells, facing, 0), _find_goal(kitchen, actions, cells, facing, 1)
    if first == second or (first == cells[1] and second == cells[0]):
        return
    cells[0], cells[1] = first, second


@kernel
def _find_goal(kitchen: Kitchen, actions: Any, cells: Any, facing: Any, a: int) -> Any:
    """Turn a player; return the cell that it wants to enter."""
    if actions[a] >= _STAY:
        return cells[a]
    facing[a] = actions[a]
    ahead = kitchen.beside[cells[a], actions[a]]
    return ahead if kitchen.terrain[ahead] == 0 else cells[a]
