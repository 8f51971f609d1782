"""Overcooked, exact with overcooked-ai's ``OvercookedGridworld``: layouts, one step, and observations."""

from __future__ import annotations

import ast
import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray

from marlvec.arguments import check_choice, check_int, whole_number
from marlvec.errors import ArgumentError, MissingExtraError
from marlvec.native.kernels import end_episode, kernel
from marlvec.native.native_env import Ids, NativeEnv, Rows, refuse

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


class Overcooked(NativeEnv):
    """N kitchens of one layout with C cells."""

    name = "overcooked"
    agents = ("player_0", "player_1")
    action_spaces = (Discrete(6),) * 2
    metadata = {"name": name, "render_modes": ["rgb_array"], "is_parallelizable": True}
    state_names = ("cells", "facing", "objects.kind", "objects.onions", "objects.tomatoes", "objects.tick", "steps")

    def __init__(
        self,
        num_envs: int,
        layout: str,  # a two-player layout of overcooked-ai
        horizon: int = 400,  # steps after which both players are truncated
        featurization: str = "lossless",  # or "features"
        num_pots: int = 2,  # in the feature vector
        shaping: float = 0.0,  # factor of shaped rewards, which are added to rewards
        **params: Any,  # replace the layout's recipes, orders and shaped rewards
    ) -> None:
        super().__init__(num_envs)
        self._kwargs = {
            "layout": layout, "horizon": horizon, "featurization": featurization, "num_pots": num_pots,
            "shaping": shaping, **params,
        }  # fmt: skip
        check_choice("featurization", featurization, ("lossless", "features"))
        self._horizon = _count("horizon", horizon)
        if isinstance(shaping, bool) or not isinstance(shaping, (int, float)) or not math.isfinite(shaping):
            raise ArgumentError(f"overcooked: shaping: expected a finite number, got {shaping!r}")
        self._shaping = float(shaping)
        told = read_layout(layout, params)
        self._recipes = read_recipes(told)
        self._kitchen, (width, self._height) = read_kitchen(told, _count("num_pots", num_pots))
        c = len(self._kitchen.terrain)
        self._lossless = featurization == "lossless"
        if self._lossless:
            space = Box(0, np.inf, (width, self._height, 26), np.float32)
        else:
            space = Box(-np.inf, np.inf, (feature_num(num_pots),), np.float32)
        self.observation_spaces = (space,) * 2
        self.cells = np.zeros((num_envs, 2), np.int32)  # x * height + y
        self.facing = np.zeros((num_envs, 2), np.int32)  # numbered like actions
        kind, onions, tomatoes = (np.zeros((num_envs, c + 2), np.int8) for _ in range(3))
        self.objects = Objects(kind, onions, tomatoes, np.full((num_envs, c + 2), -1, np.int32))
        self.steps = np.zeros(num_envs, np.int64)

    def attach(self, rows: Rows) -> None:
        super().attach(rows)
        obs = rows.obs[0][0]
        self._view = obs.reshape(self.num_envs, 2, -1, 26) if self._lossless else obs
        assert np.shares_memory(self._view, obs)

    def reset(self, ids: Ids) -> None:
        self.cells[ids] = self._kitchen.starts
        self.facing[ids] = 0
        self.objects.kind[ids] = self.objects.onions[ids] = self.objects.tomatoes[ids] = 0
        self.objects.tick[ids] = -1
        self.steps[ids] = 0
        self._encode(ids)
        self.set_alive(ids)

    def step(self, ids: Ids) -> None:
        rows = self.rows
        rules = self._kitchen, self._recipes, self._shaping, self._horizon
        state = self.cells, self.facing, self.objects, self.steps
        ends = rows.truncated, rows.alive, rows.acting, rows.done
        advance(ids, *rules, rows.actions[0][0], *state, rows.reward, *ends)
        self._encode(ids)

    def _encode(self, ids: Ids) -> None:
        state = self.cells, self.facing, self.objects
        if self._lossless:
            encode_lossless(ids, self._kitchen, self._recipes, self._horizon, *state, self.steps, self._view)
        else:
            encode_features(ids, self._kitchen, self._recipes, self._height, *state, self._view)

    def state_limits(self) -> dict[str, tuple[int, int]]:
        last = len(self._kitchen.terrain) - 1
        parts = dict.fromkeys(("objects.onions", "objects.tomatoes"), (0, 3))
        return {"cells": (0, last), "facing": (0, 3), "objects.kind": (0, 4), **parts}

    def reference(self, i: int, render_mode: str | None = None) -> Any:
        from marlvec.envs.grids.overcooked import OvercookedEnv  # imports overcooked-ai

        env = OvercookedEnv(**self._kwargs, render_mode=render_mode)
        env.reset()
        at = [divmod(int(cell), self._height) for cell in (*range(len(self._kitchen.terrain)), *self.cells[i])]
        kind, onions, tomatoes, tick = (part[i].tolist() for part in self.objects)
        objects = [(place, kind[k], onions[k], tomatoes[k], tick[k]) for k, place in enumerate(at) if kind[k]]
        env.put([at[-2], at[-1]], self.facing[i].tolist(), objects, int(self.steps[i]))
        return env


def _count(name: str, value: Any) -> int:
    found = check_int(f"overcooked: {name}", value, 1)
    if found >= 2**40:
        raise ArgumentError(f"overcooked: {name}: expected an int below 2**40, got {value!r}")
    return found
