"""Level-based foraging, exact with lbforaging 2.0's ``ForagingEnv``.

Players and foods have levels. Players beside a food load it if the sum of their levels is at least its level.

lbforaging iterates over loading players in the order of a Python set, which depends on memory addresses. The order
has no effect: foods lie too far apart for a player to be beside two of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray

from marlvec.arguments import check_int
from marlvec.envs.recipes import EnvEntry
from marlvec.errors import ArgumentError
from marlvec.native.kernels import bounded, end_episode, kernel, permutation
from marlvec.native.native_env import Ids, NativeEnv, own_arguments, refuse
from marlvec.native.rng_streams import as_generator

_NORTH, _SOUTH, _WEST, _EAST, _LOAD = 1, 2, 3, 4, 5
_TRIES = 1000  # random cells per player, and for all foods together

Whole = NDArray[np.int64]
Levels = int | Sequence[int]
"""One level for all, or one for each."""


class Foraging(NativeEnv):
    """N fields of level-based foraging; R rows, C columns, P players, F foods. Arguments are lbforaging's.

    Raises ArgumentError also if lbforaging could raise with an argument in the middle of an episode.
    """

    name = "ForagingEnv"
    metadata = {"render_modes": ["human", "rgb_array"], "render_fps": 5}
    viewer_names = ("viewer", "_rendering_initialized")
    state_names = ("pos", "level", "foods", "food_num", "spawned", "steps", "begun")

    def __init__(
        self,
        num_envs: int,
        *,
        players: int,  # may fill half of the field
        min_player_level: Levels,  # limits of a random level; lists are dealt out at random
        max_player_level: Levels,
        min_food_level: Levels,
        max_food_level: Levels | None,  # None: sum of the three lowest players' levels
        field_size: tuple[int, int],
        max_num_food: int,  # F; fewer if the field has no room for them
        sight: int,
        max_episode_steps: int,  # steps after which all players are terminated, as in lbforaging
        force_coop: bool,  # every food has its highest possible level
        normalize_reward: bool = True,  # an episode's rewards add up to 1
        grid_observation: bool = False,  # three planes (players' levels, foods' levels, free cells), not a list
        observe_agent_levels: bool = True,
        penalty: float = 0.0,  # cost of a failed load
    ) -> None:
        self._kwargs = own_arguments(locals())
        super().__init__(num_envs)
        self._size = rows, columns = _field_size(field_size)
        p, f = check_int("players", players, 1), check_int("max_num_food", max_num_food, 1)
        self._sight = check_int("sight", sight, 1 if grid_observation else 0)
        self._limit = check_int("max_episode_steps", max_episode_steps)
        if not isinstance(penalty, (int, float, np.number)):
            raise ArgumentError(f"penalty: expected a number, got {penalty!r}")
        self._penalty = float(penalty)
        self._player_levels = _bounds("player_level", min_player_level, max_player_level, p)
        top = None if max_food_level is None else max_food_level
        self._food_levels = _bounds("food_level", min_food_level, top, f)
        self._sums_levels = max_food_level is None
        self._coop, self._normalize = bool(force_coop), bool(normalize_reward)
        self._grid, self._sees_levels = bool(grid_observation), bool(observe_agent_levels)
        if 2 * p > rows * columns:
            raise refuse(self.name, f"players={p} on {rows} × {columns} cells (more than half of them)")
        lowest = int(np.sort(self._player_levels[:, 0])[:3].sum())
        if self._sums_levels and not self._coop and self._food_levels[:, 0].max() > lowest:
            raise refuse(self.name, f"min_food_level={min_food_level} (players' levels may come to {lowest})")
        reach = 2 * self._sight + 1
        if not self._grid and (min(rows, reach) > columns or min(columns, reach) > rows):
            raise refuse(self.name, f"field_size={(rows, columns)} with sight={self._sight} (outside of its own space)")
        self.agents = tuple(f"agent_{a}" for a in range(p))
        self.observation_spaces = (self._space(p, f),) * p
        self.action_spaces = (Discrete(6),) * p
        self.pos = np.zeros((num_envs, p, 2), np.int64)  # row and column
        self.level = np.zeros((num_envs, p), np.int64)
        self.foods = np.zeros((num_envs, f, 3), np.int64)  # row, column, level of each left, by row and column
        self.food_num, self.spawned, self.steps = np.zeros((3, num_envs), np.int64)
        self.begun = np.zeros(num_envs, np.bool_)  # had an episode: the next one keeps the players' last cells free

    def _space(self, p: int, f: int) -> Box:
        """Return a player's observation space, with lbforaging's bounds."""
        most = int(self._player_levels[:, 1].max())
        if self._sums_levels:
            food = int(np.sort(self._player_levels[:, 1])[:3].sum())
        else:
            food = int(self._food_levels[:, 1].max())
        if self._grid:
            side = 2 * self._sight + 1
            tops = np.array([most if self._sees_levels else 1, food, 1], np.float32)
            high = np.broadcast_to(tops[:, None, None], (3, side, side))
            return Box(np.zeros_like(high), high, dtype=np.float32)
        rows, columns = self._size
        each = 3 if self._sees_levels else 2
        low = [-1, -1, 0] * f + [-1, -1, 0][:each] * p
        top = [columns - 1, rows - 1, food] * f + [columns - 1, rows - 1, most][:each] * p
        return Box(np.array(low), np.array(top), dtype=np.float32)

    def reset(self, ids: Ids) -> None:
        levels = self._player_levels, self._food_levels, self._sums_levels, self._coop
        _reset(ids, self.rng, self._size, *levels, *self._field, self.spawned, self.steps, self.begun)
        self._observe(ids)
        self.set_alive(ids)

    def step(self, ids: Ids) -> None:
        r, rules = self.rows, (self._size, self._penalty, self._normalize, self._limit)
        ends = r.terminated, r.alive, r.acting, r.done
        _step(ids, *rules, *self._field, self.spawned, self.steps, r.actions[0][0], r.reward, *ends)
        self._observe(ids)

    def _observe(self, ids: Ids) -> None:
        seen = self._sight, self._sees_levels, *self._field, self.rows.obs[0][0]
        if self._grid:
            _show_planes(ids, self._size, *seen)
        else:
            _show_lists(ids, *seen)

    @property
    def _field(self) -> tuple[Whole, Whole, Whole, Whole]:
        return self.pos, self.level, self.foods, self.food_num

    def state_limits(self) -> dict[str, tuple[int, int]]:
        return {"food_num": (0, self.foods.shape[1])}

    def reference(self, i: int, render_mode: str | None = None) -> Any:
        build = EnvEntry("lbf", "marlvec.envs.grids.foraging:ForagingEnv", family="lbf", extra="lbf").load()
        env = build(**self._kwargs, render_mode=render_mode)
        env._np_random = as_generator(self.rng[i])
        if not self.begun[i]:
            return env
        for row, column, level in self.foods[i, : self.food_num[i]].tolist():
            env.field[row, column] = level
        for player, place, level in zip(env.players, self.pos[i].tolist(), self.level[i], strict=True):
            player.setup(tuple(place), level, env.field_size)
        env._food_spawned = self.spawned[i]
        env.current_step = int(self.steps[i])
        env._game_over = bool(self.food_num[i] == 0 or self._limit <= self.steps[i])
        env._gen_valid_moves()
        return env


def _field_size(value: Any) -> tuple[int, int]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ArgumentError(f"field_size: expected (rows, columns), got {value!r}")
    return check_int("field_size: rows", value[0], 3), check_int("field_size: columns", value[1], 3)


def _bounds(name: str, least: Any, most: Any, n: int) -> Whole:
    """Return the least and greatest level of each of n bodies, (n, 2) int64; ``most=None``: the least."""
    columns = []
    for which, given in (("min", least), ("max", least if most is None else most)):
        many = list(given) if isinstance(given, (list, tuple, np.ndarray)) else [given] * n
        if len(many) != n:
            raise ArgumentError(f"{which}_{name}: expected one int, or {n}, got {given!r}")
        columns.append([check_int(f"{which}_{name}", one, 0) for one in many])
    bounds = np.array(columns, np.int64).T.copy()
    if (bounds[:, 0] > bounds[:, 1]).any():
        raise ArgumentError(f"min_{name}: expected no more than max_{name}, got {least!r} and {most!r}")
    return bounds


@kernel
def _reset(
    ids: Ids,
    rng: NDArray[np.uint64],
    size: tuple[int, int],
    player_levels: Whole,
    food_levels: Whole,
    sums_levels: bool,
    coop: bool,
    pos: Whole,
    level: Whole,
    foods: Whole,
    food_num: Whole,
    spawned: Whole,
    steps: Whole,
    begun: NDArray[np.bool_],
) -> None:
    p = pos.shape[1]
    order, own_levels = np.empty(p, np.int64), np.empty(p, np.int64)
    food_order = np.empty(foods.shape[1], np.int64)
    for i in ids:
        food_num[i] = 0
        permutation(rng, i, order)
        for a in range(p):
            for _ in range(_TRIES):
                row = bounded(rng, i, size[0])
                column = bounded(rng, i, size[1])
                if not _is_taken(pos, i, row, column, p if begun[i] else a):
                    pos[i, a, 0] = row
                    pos[i, a, 1] = column
                    level[i, a] = _draw(rng, i, player_levels, order[a])
                    break
        begun[i] = True
        own_levels[:] = level[i]
        own_levels.sort()
        permutation(rng, i, food_order)
        highest = own_levels[:3].sum() if sums_levels else -1
        _spawn(rng, i, size, food_levels, food_order, highest, coop, pos, foods, food_num)
        spawned[i] = foods[i, : food_num[i], 2].sum()
        steps[i] = 0


@kernel
def _draw(rng: NDArray[np.uint64], i: int, bounds: Whole, k: int) -> Any:
    return bounds[k, 0] + bounded(rng, i, bounds[k, 1] - bounds[k, 0] + 1)


@kernel
def _is_taken(pos: Whole, i: int, row: int, column: int, count: int) -> bool:
    """Return whether one of the first ``count`` players is in this cell."""
    taken = False
    for a in range(count):
        taken |= pos[i, a, 0] == row and pos[i, a, 1] == column
    return taken


@kernel
def _spawn(
    rng: NDArray[np.uint64],
    i: int,
    size: tuple[int, int],
    bounds: Whole,
    order: Whole,
    highest: int,
    coop: bool,
    pos: Whole,
    foods: Whole,
    food_num: Whole,
) -> None:
    """Place foods apart from each other and from the edge; ``highest`` is every food's greatest level, or -1."""
    f = foods.shape[1]
    done = 0
    for _ in range(_TRIES):
        if done == f:
            break
        row = 1 + bounded(rng, i, size[0] - 2)
        column = 1 + bounded(rng, i, size[1] - 2)
        if _is_taken(pos, i, row, column, pos.shape[1]) or _is_near_food(foods, food_num, i, row, column):
            continue
        most = bounds[order[done], 1] if highest < 0 else highest
        least = most if coop else bounds[order[done], 0]
        level = least + bounded(rng, i, most - least + 1)
        done += 1
        if level:  # level 0: no food
            k = food_num[i]
            while k and (foods[i, k - 1, 0], foods[i, k - 1, 1]) > (row, column):
                foods[i, k] = foods[i, k - 1]
                k -= 1
            foods[i, k, 0] = row
            foods[i, k, 1] = column
            foods[i, k, 2] = level
            food_num[i] += 1


@kernel
def _is_near_food(foods: Whole, food_num: Whole, i: int, row: int, column: int) -> bool:
    for k in range(food_num[i]):
        y, x = abs(foods[i, k, 0] - row), abs(foods[i, k, 1] - column)
        if (y <= 1 and x <= 1) or (y == 0 and x <= 2) or (x == 0 and y <= 2):
            return True
    return False


@kernel
def _step(
    ids: Ids,
    size: tuple[int, int],
    penalty: float,
    normalize: bool,
    limit: int,
    pos: Whole,
    level: Whole,
    foods: Whole,
    food_num: Whole,
    spawned: Whole,
    steps: Whole,
    actions: Whole,
    reward: NDArray[np.float64],
    terminated: NDArray[np.bool_],
    alive: NDArray[np.bool_],
    acting: NDArray[np.bool_],
    done: NDArray[np.bool_],
) -> None:
    p = pos.shape[1]
    to = np.empty((p, 2), np.int64)
    loads = np.empty(p, np.int64)
    for i in ids:
        steps[i] += 1
        someone_loads = False
        for a in range(p):
            loads[a] = _aim(size, pos, foods, food_num, i, a, actions[i, a], to)
            someone_loads |= loads[a] >= 0
        for a in range(p):
            alone = True  # where more than one would be, none goes
            for b in range(p):
                alone &= a == b or to[a, 0] != to[b, 0] or to[a, 1] != to[b, 1]
            if alone:
                pos[i, a, 0] = to[a, 0]
                pos[i, a, 1] = to[a, 1]
        if someone_loads:
            _load(i, penalty, normalize, loads, level, foods, food_num, spawned, reward)
        if food_num[i] == 0 or limit <= steps[i]:
            end_episode(i, terminated, alive, acting, done)


@kernel
def _aim(
    size: tuple[int, int], pos: Whole, foods: Whole, food_num: Whole, i: int, a: int, action: int, to: Whole
) -> int:
    """Write the cell that player ``a`` wants to enter; return the food that it loads, or -1."""
    row, column = pos[i, a, 0], pos[i, a, 1]
    to[a, 0] = row
    to[a, 1] = column
    if action == _LOAD:
        for k in range(food_num[i]):
            if abs(foods[i, k, 0] - row) + abs(foods[i, k, 1] - column) == 1:
                return k
        return -1
    row += int(action == _SOUTH) - int(action == _NORTH)
    column += int(action == _EAST) - int(action == _WEST)
    if row < 0 or column < 0 or row >= size[0] or column >= size[1]:
        return -1
    for k in range(food_num[i]):
        if foods[i, k, 0] == row and foods[i, k, 1] == column:
            return -1
    to[a, 0] = row
    to[a, 1] = column
    return -1


@kernel
def _load(
    i: int,
    penalty: float,
    normalize: bool,
    loads: Whole,
    level: Whole,
    foods: Whole,
    food_num: Whole,
    spawned: Whole,
    reward: NDArray[np.float64],
) -> None:
    """Load foods and reward their loaders; close the gaps in the list of foods."""
    p = len(loads)
    kept = 0
    for k in range(food_num[i]):
        total, someone = 0, False
        for a in range(p):
            if loads[a] == k:
                total += level[i, a]
                someone = True
        loaded = someone and total >= foods[i, k, 2]
        for a in range(p):
            if loads[a] != k:
                continue
            if not loaded:
                reward[i, a] = 0.0 - penalty
            else:
                reward[i, a] = np.float64(level[i, a] * foods[i, k, 2])
                if normalize:
                    reward[i, a] /= np.float64(total * spawned[i])
        if not loaded:
            foods[i, kept] = foods[i, k]
            kept += 1
    food_num[i] = kept


@kernel
def _show_lists(
    ids: Ids,
    sight: int,
    sees_levels: bool,
    pos: Whole,
    level: Whole,
    foods: Whole,
    food_num: Whole,
    obs: NDArray[np.float32],
) -> None:
    """Write foods in sight, the player itself, then others; positions are relative to the window's corner."""
    p, f = pos.shape[1], foods.shape[1]
    for i in ids:
        for a in range(p):
            row, column = pos[i, a, 0], pos[i, a, 1]
            top, left = max(row - sight, 0), max(column - sight, 0)
            k = 0
            for j in range(food_num[i]):
                y, x = foods[i, j, 0], foods[i, j, 1]
                if abs(y - row) <= sight and abs(x - column) <= sight:
                    k = _put(obs, i, a, k, y - top, x - left, foods[i, j, 2], True)
            while k < 3 * f:
                k = _put(obs, i, a, k, -1, -1, 0, True)
            k = _put(obs, i, a, k, row - top, column - left, level[i, a], sees_levels)
            for b in range(p):
                y, x = pos[i, b, 0] - top, pos[i, b, 1] - left
                # Near the edge lbforaging shows players (not foods) up to twice as far away.
                if b != a and min(y, x) >= 0 and max(y, x) <= 2 * sight:
                    k = _put(obs, i, a, k, y, x, level[i, b], sees_levels)
            while k < obs.shape[2]:
                k = _put(obs, i, a, k, -1, -1, 0, sees_levels)


@kernel
def _put(obs: NDArray[np.float32], i: int, a: int, k: int, y: int, x: int, level: int, with_level: bool) -> int:
    obs[i, a, k] = y
    obs[i, a, k + 1] = x
    if not with_level:
        return k + 2
    obs[i, a, k + 2] = level
    return k + 3


@kernel
def _show_planes(
    ids: Ids,
    size: tuple[int, int],
    sight: int,
    sees_levels: bool,
    pos: Whole,
    level: Whole,
    foods: Whole,
    food_num: Whole,
    obs: NDArray[np.float32],
) -> None:
    """Write three planes centred on the player: levels of players, levels of foods, and 1 for each free cell."""
    p, side = pos.shape[1], 2 * sight + 1
    for i in ids:
        for a in range(p):
            top, left = pos[i, a, 0] - sight, pos[i, a, 1] - sight
            obs[i, a, 0] = 0
            obs[i, a, 1] = 0
            for y in range(side):
                for x in range(side):
                    obs[i, a, 2, y, x] = 0 <= y + top < size[0] and 0 <= x + left < size[1]
            for b in range(p):
                y, x = pos[i, b, 0] - top, pos[i, b, 1] - left
                if 0 <= y < side and 0 <= x < side:
                    obs[i, a, 0, y, x] = level[i, b] if sees_levels else 1
                    obs[i, a, 2, y, x] = 0
            for k in range(food_num[i]):
                y, x = foods[i, k, 0] - top, foods[i, k, 1] - left
                if 0 <= y < side and 0 <= x < side:
                    obs[i, a, 1, y, x] = foods[i, k, 2]
                    obs[i, a, 2, y, x] = 0
