"""Layouts of overcooked-ai: reads its files, and builds tables of recipes and of cells."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from marlvec.arguments import whole_number
from marlvec.errors import ArgumentError, MissingExtraError
from marlvec.native.native_env import refuse

__all__ = ["TERRAIN", "Kitchen", "Recipes", "read_kitchen", "read_layout", "read_recipes"]

TERRAIN = " XPOTDS"
"""What a cell is, by the letter of a layout: free, counter, pot, onions, tomatoes, dishes, where soups are served."""

_DIRECTIONS = ((0, -1), (0, 1), (1, 0), (-1, 0))
_LAYERS = {"P": 10, "X": 11, "O": 12, "T": 13, "D": 14, "S": 15}  # of the lossless encoding
_SHAPING = {"PLACEMENT_IN_POT_REW": 3, "DISH_PICKUP_REWARD": 3, "SOUP_PICKUP_REWARD": 5}
_DEFAULT = 20  # a recipe's value, and its cooking time
_APART = (  # pairs of options that exclude each other in overcooked-ai
    ("tomato_value", "delivery_reward"),
    ("tomato_value", "recipe_values"),
    ("recipe_values", "delivery_reward"),
    ("tomato_time", "cook_time"),
    ("tomato_time", "recipe_times"),
    ("recipe_times", "cook_time"),
)
_TOGETHER = (("tomato_time", "onion_time"), ("tomato_value", "onion_value"))
_KNOWN = {
    "start_all_orders", "start_bonus_orders", "rew_shaping_params", "num_items_for_soup", "order_bonus", "cook_time",
    "delivery_reward", "recipe_values", "recipe_times", "onion_time", "tomato_time", "onion_value", "tomato_value",
}  # fmt: skip


class Kitchen(NamedTuple):
    """Tables of a grid of C cells, numbered ``x * height + y``."""

    terrain: NDArray[np.int8]  # (C,), indices into `TERRAIN`
    beside: NDArray[np.int32]  # (C, 4): north, south, east, west; beyond the edge, the cell itself
    pots: NDArray[np.int32]  # (K,)
    walls: NDArray[np.bool_]  # (C, 4), whether the neighbour is not floor
    layers: NDArray[np.float32]  # (C, 26), the lossless encoding of the grid without players and objects
    # (C, 4, 8), by a player's cell and direction: (dx, dy) to the nearest reachable onions, tomatoes, dishes and
    # serving place; zeros if none is reachable
    nearest: NDArray[np.float32]
    nearest_pots: NDArray[np.int32]  # (C, 4, num_pots), reachable pots, nearest first, filled up with -1
    starts: NDArray[np.int32]  # (2,), players' first cells


class Recipes(NamedTuple):
    """Values and cooking times of soups, by their numbers of onions and tomatoes."""

    values: NDArray[np.float64]  # (4, 4), rewards for serving
    times: NDArray[np.int64]  # (4, 4), steps
    potting: float  # shaped reward for an ingredient in a pot
    dish: float  # … for taking a useful dish
    soup: float  # … for taking up a soup


def read_layout(layout: str, overwrite: Mapping[str, Any]) -> dict[str, Any]:
    """Read one of overcooked-ai's files, with some options replaced.

    Raises MissingExtraError without overcooked-ai, ArgumentError for a layout that compiled envs lack, TypeError for an
    unknown option.
    """
    found = importlib.util.find_spec("overcooked_ai_py")
    if found is None or not found.submodule_search_locations:
        raise MissingExtraError(
            "overcooked: expected overcooked-ai, which has the layouts, to be installed, got no overcooked_ai_py; "
            'install it with: pip install "marlvec[overcooked]"'
        )
    folder = Path(found.submodule_search_locations[0]) / "data" / "layouts"
    names = sorted(path.stem for path in folder.glob("*.layout"))
    if layout not in names:
        raise ArgumentError(f"overcooked: layout: expected one of {', '.join(names)}, got {layout!r}")
    unknown = sorted(set(overwrite) - _KNOWN)
    if unknown:
        raise TypeError(f"overcooked got an unexpected keyword argument {unknown[0]!r}")
    try:
        told = ast.literal_eval((folder / f"{layout}.layout").read_text(encoding="utf-8"))
    except ValueError as error:  # tutorial_3: its order_bonus is infinite
        raise refuse("overcooked", f"layout {layout!r}, which says more than numbers and texts") from error
    if "start_state" in told:
        raise refuse("overcooked", f"layout {layout!r}, which has a start_state")
    return {**told, **overwrite}


def read_recipes(layout: Mapping[str, Any]) -> Recipes:
    """Compute each soup's value and time like overcooked-ai's ``Recipe`` and ``get_recipe_value``."""
    for first, second in _APART:
        if first in layout and second in layout:
            raise ArgumentError(f"overcooked: {first}: expected none beside {second}, got both")
    for first, second in _TOGETHER:
        if (first in layout) is not (second in layout):
            raise ArgumentError(f"overcooked: {first} and {second}: expected both or none, got one")
    every = [(o, t) for o in range(4) for t in range(4) if 1 <= o + t <= 3]
    orders = _orders("start_all_orders", layout.get("start_all_orders")) or every
    bonus = _orders("start_bonus_orders", layout.get("start_bonus_orders"))
    if not set(bonus) <= set(orders):
        raise ArgumentError("overcooked: start_bonus_orders: expected some of start_all_orders, got others")
    order_bonus = _number("order_bonus", layout.get("order_bonus", 2))
    values, times = np.zeros((4, 4)), np.zeros((4, 4), np.int64)
    for soup in every:
        time = _of(soup, layout, orders, "cook_time", "recipe_times", "_time")
        if (whole := whole_number(time)) is None or not 0 <= whole < 2**30:
            raise ArgumentError(f"overcooked: times: expected ints from 0 to 2**30, got {time!r}")
        times[soup] = whole
        if soup in orders:
            value = _number("values", _of(soup, layout, orders, "delivery_reward", "recipe_values", "_value"))
            values[soup] = order_bonus * value if soup in bonus else value
    if not values.max() > 0:
        raise ArgumentError(
            "overcooked: values: expected an order that is worth more than 0, got none (overcooked-ai raises in the "
            "middle of an episode)"
        )
    shaping = layout.get("rew_shaping_params")
    shaping = _SHAPING if shaping is None else shaping
    missing = _SHAPING.keys() - shaping.keys()
    if missing:
        raise ArgumentError(f"overcooked: rew_shaping_params: expected {', '.join(_SHAPING)}, got no {min(missing)}")
    return Recipes(values, times, *(_number(name, shaping[name]) for name in _SHAPING))


def _of(
    soup: tuple[int, int], layout: Mapping[str, Any], orders: Sequence[tuple[int, int]], all_: str, each: str, part: str
) -> Any:
    """Return a soup's value or time: one for all soups, one for each order, by ingredient, or the default."""
    if layout.get(all_):
        return layout[all_]
    if each in layout:
        if not layout.get("start_all_orders") or len(layout[each]) != len(orders):
            raise ArgumentError(f"overcooked: {each}: expected one for each of start_all_orders, got {layout[each]!r}")
        if soup in orders:
            return layout[each][orders.index(soup)]
    onion, tomato = layout.get(f"onion{part}"), layout.get(f"tomato{part}")
    return onion * soup[0] + tomato * soup[1] if onion and tomato else _DEFAULT


def _orders(name: str, orders: Any) -> list[tuple[int, int]]:
    """Read orders: the number of onions and tomatoes of each."""
    found = []
    for order in orders or []:
        parts = list(order["ingredients"]) if isinstance(order, Mapping) and set(order) == {"ingredients"} else []
        if not 1 <= len(parts) <= 3 or set(parts) - {"onion", "tomato"}:
            text = "expected dicts of 1 to 3 ingredients, onion or tomato"
            raise ArgumentError(f"overcooked: {name}: {text}, got {order!r}")
        found.append((parts.count("onion"), parts.count("tomato")))
    if len(set(found)) < len(found):
        raise ArgumentError(f"overcooked: {name}: expected no order twice, got {orders!r}")
    return found


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= 2**40:
        raise ArgumentError(f"overcooked: {name}: expected numbers up to 2**40, got {value!r}")
    return float(value)


def read_kitchen(layout: Mapping[str, Any], num_pots: int) -> tuple[Kitchen, tuple[int, int]]:
    """Build the tables of a layout's grid, which has two players; return them, and (width, height)."""
    rows = [row.strip() for row in layout["grid"].split("\n")]
    width, height = len(rows[0]), len(rows)
    letters = [rows[y][x] for x in range(width) for y in range(height)]
    players = sorted(letter for letter in letters if letter.isdigit())
    if players != ["1", "2"]:
        raise ArgumentError(f"overcooked: layout: expected one with two players, got {len(players)}")
    starts = np.array([letters.index(player) for player in players], np.int32)
    letters = [" " if letter.isdigit() else letter for letter in letters]
    cells = len(letters)
    terrain = np.array([TERRAIN.index(letter) for letter in letters], np.int8)
    beside = np.zeros((cells, 4), np.int32)
    for cell in range(cells):
        x, y = divmod(cell, height)
        for k, (dx, dy) in enumerate(_DIRECTIONS):
            inside = 0 <= x + dx < width and 0 <= y + dy < height
            beside[cell, k] = (x + dx) * height + y + dy if inside else cell
    layers = np.zeros((cells, 26), np.float32)
    for cell, letter in enumerate(letters):
        if letter != " ":
            layers[cell, _LAYERS[letter]] = 1
    # overcooked-ai lists places row by row, and takes the first of equally near ones.
    by_row = sorted(range(cells), key=lambda cell: cell % height)
    places = {letter: [cell for cell in by_row if letters[cell] == letter] for letter in TERRAIN}
    nearest = np.zeros((cells, 4, 8), np.float32)
    nearest_pots = np.full((cells, 4, num_pots), -1, np.int32)
    for cell in places[" "]:
        for direction in range(4):
            costs = _costs(cell, direction, beside, terrain)
            for k, letter in enumerate("OTDS"):
                if reachable := [place for place in places[letter] if place in costs]:
                    place = min(reachable, key=costs.__getitem__)
                    nearest[cell, direction, 2 * k] = place // height - cell // height
                    nearest[cell, direction, 2 * k + 1] = place % height - cell % height
            pots = sorted((pot for pot in places["P"] if pot in costs), key=costs.__getitem__)[:num_pots]
            nearest_pots[cell, direction, : len(pots)] = pots
    walls = terrain[beside] != 0
    all_pots = np.array(places["P"], np.int32)
    return Kitchen(terrain, beside, all_pots, walls, layers, nearest, nearest_pots, starts), (width, height)


def _costs(cell: int, direction: int, beside: NDArray[np.int32], terrain: NDArray[np.int8]) -> dict[int, int]:
    """Return the steps that a player needs until it faces each reachable place, counters excepted."""
    costs: dict[int, int] = {}
    seen = {(cell, direction)}
    now = [(cell, direction)]
    steps = 0
    while now:
        after = []
        for at, faces in now:
            ahead = int(beside[at, faces])
            if terrain[ahead] != 0 and TERRAIN[terrain[ahead]] != "X":
                costs.setdefault(ahead, steps)
            for k in range(4):
                to = int(beside[at, k])
                state = (to if terrain[to] == 0 else at, k)
                if state not in seen:
                    seen.add(state)
                    after.append(state)
        now = after
        steps += 1
    return costs
