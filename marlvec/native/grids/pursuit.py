"""Pursuit, exact with PettingZoo's ``sisl/pursuit_v5``: pursuers that are moved, evaders that move at random."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray

from marlvec.arguments import check_int
from marlvec.envs.builtin_ids import pettingzoo_env
from marlvec.errors import ArgumentError, ContractError
from marlvec.native.kernels import bounded, kernel, uniform
from marlvec.native.native_env import Ids, NativeEnv, Rows, own_arguments, refuse
from marlvec.native.rng_streams import as_generator

_BESIDE = ((-1, 0), (1, 0), (0, 1), (0, -1))  # (dx, dy) of actions 0 to 3; action 4 stays

Cells = NDArray[np.int32]
"""Cells, each as one number, ``y * x_size + x``; or other numbers about cells."""


class Board(NamedTuple):
    """Tables of a map of C cells."""

    go: Cells  # (C, 5), the cell that an action leads to
    beside: Cells  # (C, 4), neighbours; beyond the edge, the cell itself
    wall: NDArray[np.bool_]  # (C,)
    need: Cells  # (C,), how many neighbours must hold pursuers to surround an evader
    corner: Cells  # (C, 2), row and column of `picture` where a pursuer's window begins
    # (rows, columns, 3), walls without agents, in observation planes, with a margin as wide as a pursuer sees
    picture: NDArray[np.float32]
    sight: int  # cells that a pursuer sees


def make_board(x_size: int, y_size: int, sight: int) -> Board:
    """Build the reference's rectangle map, with a wall in the middle."""
    cells = x_size * y_size
    go = np.zeros((cells, 5), np.int32)
    beside = np.zeros((cells, 4), np.int32)
    need = np.zeros(cells, np.int32)
    corner = np.zeros((cells, 2), np.int32)
    across = [0.3 < x / x_size < 1.0 - 0.3 for x in range(x_size)]
    upward = [0.2 < y / y_size < 1.0 - 0.2 for y in range(y_size)]
    wall = np.outer(upward, across)
    picture = np.zeros((y_size + 2 * sight, x_size + 2 * sight, 3), np.float32)
    picture[:, :, 0] = 1
    picture[sight : sight + y_size, sight : sight + x_size, 0] = wall
    for cell in range(cells):
        y, x = divmod(cell, x_size)
        corner[cell] = y, x
        go[cell] = cell
        need[cell] = 4 - (x in (0, x_size - 1)) - (y in (0, y_size - 1))
        for k, (dx, dy) in enumerate(_BESIDE):
            to_x, to_y = x + dx, y + dy
            inside = 0 <= to_x < x_size and 0 <= to_y < y_size
            beside[cell, k] = to_y * x_size + to_x if inside else cell
            if inside and not wall[to_y, to_x] and not wall[y, x]:
                go[cell, k] = beside[cell, k]
            # The reference ignores the first row and column.
            need[cell] -= inside and to_x > 0 and to_y > 0 and wall[to_y, to_x]
    return Board(go, beside, wall.ravel(), need, corner, picture, sight)


@kernel
def observe(
    i: int,
    board: Board,
    picture: NDArray[np.float32],
    pursuers: Cells,
    evaders: Cells,
    gone: NDArray[np.bool_],
    view: NDArray[np.float32],
) -> None:
    """Draw env ``i``'s agents into the picture, copy each pursuer's window, and erase the agents."""
    sight = board.sight
    _draw(i, board.corner, sight, pursuers, evaders, gone, picture)
    flat = picture.reshape(picture.shape[0], 3 * picture.shape[1])
    side = 2 * sight + 1
    for a in range(pursuers.shape[1]):
        row, column = board.corner[pursuers[i, a], 0], 3 * board.corner[pursuers[i, a], 1]
        for y in range(side):
            for k in range(3 * side):
                view[i, a, y, k] = flat[row + y, column + k]
        if side < view.shape[2]:  # an even side: the last row and column stay unseen
            for y in range(view.shape[2]):
                for k in range(0 if y == side else 3 * side, view.shape[3]):
                    view[i, a, y, k] = 1.0 if k % 3 == 0 else 0.0
    for a in range(pursuers.shape[1]):
        row, column = board.corner[pursuers[i, a]]
        picture[row + sight, column + sight, 1] = 0.0
    for e in range(evaders.shape[1]):
        row, column = board.corner[evaders[i, e]]
        picture[row + sight, column + sight, 2] = 0.0


@kernel
def _draw(
    i: int,
    corner: Cells,
    margin: int,
    pursuers: Cells,
    evaders: Cells,
    gone: NDArray[np.bool_],
    picture: NDArray[np.float32],
) -> None:
    for a in range(pursuers.shape[1]):
        row, column = corner[pursuers[i, a]]
        picture[row + margin, column + margin, 1] += 1.0
    for e in range(evaders.shape[1]):
        if not gone[i, e]:
            row, column = corner[evaders[i, e]]
            picture[row + margin, column + margin, 2] += 1.0


@kernel
def write_state(
    ids: Ids, board: Board, pursuers: Cells, evaders: Cells, gone: NDArray[np.bool_], state: NDArray[np.float32]
) -> None:
    """Write global states, (N, y_size, x_size, 3): the picture without its margin."""
    sight = board.sight
    for i in ids:
        state[i] = board.picture[sight : sight + state.shape[1], sight : sight + state.shape[2]]
        _draw(i, board.corner, 0, pursuers, evaders, gone, state[i])


_PATIENCE = 32  # random tries per cell of the map, before a search for any free cell


@kernel
def begin(
    ids: Ids,
    rng: Any,
    board: Board,
    size: tuple[int, int],
    window: float,
    pursuers: Cells,
    evaders: Cells,
    gone: NDArray[np.bool_],
    frames: NDArray[np.int64],
    view: NDArray[np.float32],
) -> int:
    """Begin episodes; returns the first env whose agents do not fit into its window, or -1."""
    picture = board.picture.copy()
    taken = np.zeros(len(board.wall), np.bool_)
    x_size, y_size = size
    for i in ids:
        left = uniform(rng, i, 0.0, 1.0 - window)
        low = uniform(rng, i, 0.0, 1.0 - window)
        xs = int(x_size * left), int(x_size * (left + window))
        ys = int(y_size * low), int(y_size * (low + window))
        for agents in (pursuers[i], evaders[i]):
            if not _place(rng, i, board, x_size, xs, ys, taken, agents):
                return int(i)
        gone[i] = False
        frames[i] = 0
        observe(i, board, picture, pursuers, evaders, gone, view)
    return -1


@kernel
def _place(
    rng: Any,
    i: int,
    board: Board,
    x_size: int,
    xs: tuple[int, int],
    ys: tuple[int, int],
    taken: NDArray[np.bool_],
    agents: Cells,
) -> bool:
    """Draw a cell for each agent, none beside another's; return False if no cell is left."""
    if xs[1] <= xs[0] or ys[1] <= ys[0]:
        return False
    taken[:] = board.wall
    for a in range(len(agents)):
        tries = 0
        while True:
            x = xs[0] + bounded(rng, i, xs[1] - xs[0])
            y = ys[0] + bounded(rng, i, ys[1] - ys[0])
            cell = y * x_size + x
            if not taken[cell]:
                break
            tries += 1
            if tries % (_PATIENCE * len(taken)) == 0 and not _has_room(taken, x_size, xs, ys):
                return False
        agents[a] = cell
        taken[cell] = True
        for k in range(4):
            taken[board.beside[cell, k]] = True
    return True


@kernel
def _has_room(taken: NDArray[np.bool_], x_size: int, xs: tuple[int, int], ys: tuple[int, int]) -> bool:
    for y in range(ys[0], ys[1]):
        for x in range(xs[0], xs[1]):
            if not taken[y * x_size + x]:
                return True
    return False


MOST = 128
"""How many numbers are added this way. numpy halves longer arrays, and adds the sums of their halves."""


@kernel
def pairwise_sum(values: NDArray[np.float64]) -> Any:
    """Return ``numpy.sum`` of at most `MOST` contiguous float64s, bit for bit. ``numpy.mean`` divides it by n."""
    n = len(values)
    if n < 8:
        total = 0.0
        for k in range(n):
            total += values[k]
        return total
    parts = values[:8].copy()
    whole = n - n % 8
    for k in range(8, whole):
        parts[k % 8] += values[k]
    total = ((parts[0] + parts[1]) + (parts[2] + parts[3])) + ((parts[4] + parts[5]) + (parts[6] + parts[7]))
    for k in range(whole, n):
        total += values[k]
    return total


class Rules(NamedTuple):
    """Arguments that determine rewards and terminations, with the reference's names."""

    tag_reward: float
    catch_reward: float
    urgency_reward: float
    local_ratio: float
    max_cycles: int
    n_catch: int
    surround: bool
    freeze_evaders: bool


@kernel
def advance(
    ids: Ids,
    rng: Any,
    board: Board,
    rules: Rules,
    actions: NDArray[np.int64],
    pursuers: Cells,
    evaders: Cells,
    gone: NDArray[np.bool_],
    frames: NDArray[np.int64],
    view: NDArray[np.float32],
    reward: NDArray[np.float64],
    terminated: NDArray[np.bool_],
    truncated: NDArray[np.bool_],
    alive: NDArray[np.bool_],
    acting: NDArray[np.bool_],
    done: NDArray[np.bool_],
) -> None:
    """Step these envs; the arrays are attributes of `Pursuit` and its rows."""
    agent_num = pursuers.shape[1]
    picture = board.picture.copy()
    crowd = np.zeros(len(board.wall), np.int32)  # evaders in each cell
    held = np.zeros(len(board.wall), np.int32)  # pursuers in each cell
    worth = np.zeros(agent_num)
    total = np.zeros(agent_num)
    helped = np.zeros(agent_num, np.bool_)
    for i in ids:
        for e in range(evaders.shape[1]):
            if not gone[i, e]:
                crowd[evaders[i, e]] += 1
        for a in range(agent_num):
            worth[a] = rules.tag_reward * _count_beside(board, crowd, pursuers[i, a]) / agent_num
        total[:] = 0.0
        for a in range(agent_num):
            cell = board.go[pursuers[i, a], actions[i, a]]
            pursuers[i, a] = cell
            held[cell] += 1
            worth[a] = rules.tag_reward * _count_beside(board, crowd, cell) / agent_num
            if a < agent_num - 1:
                _add_shares(worth, rules.local_ratio, total)
        for e in range(evaders.shape[1]):
            crowd[evaders[i, e]] = 0
        helped[:] = False
        left = _move_evaders(rng, i, board, rules, held, pursuers[i], evaders[i], gone[i], helped)
        for a in range(agent_num):
            held[pursuers[i, a]] = 0
            worth[a] += rules.catch_reward * helped[a]
            worth[a] += rules.urgency_reward
        _add_shares(worth, rules.local_ratio, total)
        reward[i] = total
        frames[i] += 1
        late = frames[i] >= rules.max_cycles
        if late or left == 0:
            done[i] = True
            for a in range(agent_num):
                truncated[i, a] = late
                terminated[i, a] = not late
                alive[i, a] = False
                acting[i, a] = False
        observe(i, board, picture, pursuers, evaders, gone, view)


@kernel
def _count_beside(board: Board, crowd: Cells, cell: int) -> Any:
    """Count evaders in a cell's four neighbours. Beyond the edge the cell counts itself, as in the reference."""
    count = 0
    for k in range(4):
        count += crowd[board.beside[cell, k]]
    return count


@kernel
def _add_shares(worth: NDArray[np.float64], local_ratio: float, total: NDArray[np.float64]) -> None:
    """Add each pursuer's reward for one move: ``local_ratio`` times its reward, the rest times the mean."""
    mean = pairwise_sum(worth) / len(worth)
    for a in range(len(worth)):
        total[a] += local_ratio * worth[a] + (1 - local_ratio) * mean


@kernel
def _move_evaders(
    rng: Any,
    i: int,
    board: Board,
    rules: Rules,
    held: Cells,
    pursuers: Cells,
    evaders: Cells,
    gone: NDArray[np.bool_],
    helped: NDArray[np.bool_],
) -> int:
    """Remove caught evaders and move the others; return how many remain."""
    left = 0
    for e in range(len(evaders)):
        if gone[e]:
            continue
        cell = evaders[e]
        if _is_caught(board, rules, held, cell):
            gone[e] = True
            for a in range(len(pursuers)):
                if rules.surround:
                    for k in range(4):
                        # Beyond the edge the table holds the cell itself, which does not help to surround.
                        if board.beside[cell, k] != cell and pursuers[a] == board.beside[cell, k]:
                            helped[a] = True
                elif pursuers[a] == cell:
                    helped[a] = True
            continue
        left += 1
        if not rules.freeze_evaders:
            evaders[e] = board.go[cell, bounded(rng, i, 5)]
    return left


@kernel
def _is_caught(board: Board, rules: Rules, held: Cells, cell: int) -> bool:
    if not rules.surround:
        return bool(held[cell] >= rules.n_catch)
    count = 0
    for k in range(4):
        if board.beside[cell, k] != cell and held[board.beside[cell, k]] > 0:
            count += 1
    return bool(count == board.need[cell])


_LARGEST = 2**40  # largest int as a reward: its products are exact in float64
_ENDLESS = 2**62  # steps


class Pursuit(NativeEnv):
    """N envs of pursuit: P pursuers, each of which sees a window of R × R cells, and E evaders."""

    name = "pursuit_v5"
    metadata = {
        "render_modes": ["human", "rgb_array"],
        "name": name,
        "is_parallelizable": True,
        "render_fps": 5,
        "has_manual_policy": True,
    }
    state_names = ("pursuers", "evaders", "gone", "frames")

    def __init__(
        self,
        num_envs: int,
        x_size: int = 16,
        y_size: int = 16,
        max_cycles: int = 500,  # steps after which all pursuers are truncated
        shared_reward: bool | float = True,  # each pursuer gets the mean of all rewards; a number: the mean's share
        n_evaders: int = 30,
        n_pursuers: int = 8,  # 1 to 128
        obs_range: int = 7,
        n_catch: int = 2,  # with surround=False: pursuers in an evader's cell that catch it
        freeze_evaders: bool = False,
        evader_controller: Any = None,  # not supported, nor the pursuers'
        pursuer_controller: Any = None,
        tag_reward: float = 0.01,  # for each evader beside a pursuer, after the move of each pursuer
        catch_reward: float = 5.0,  # for each pursuer that helped to catch
        urgency_reward: float = -0.1,  # for each step
        surround: bool = True,  # evaders are caught by pursuers in all cells beside them
        constraint_window: float = 1.0,  # agents begin in a random window of the map; sides as a fraction of the map's
    ) -> None:
        self._kwargs = own_arguments(locals())
        super().__init__(num_envs)
        for name in ("evader_controller", "pursuer_controller"):
            if self._kwargs[name] is not None:
                raise refuse(self.name, f"{name}=, an object that compiled functions cannot call")
        x_size, y_size = _count("x_size", x_size), _count("y_size", y_size)
        evaders, pursuers = _count("n_evaders", n_evaders), _count("n_pursuers", n_pursuers)
        if pursuers > MOST:
            raise refuse(self.name, f"n_pursuers={pursuers}, more than {MOST}")
        self._range = _count("obs_range", obs_range)
        self._window = _number("constraint_window", constraint_window)
        if not 1 / min(x_size, y_size) <= self._window <= 1:
            raise ArgumentError(
                f"{self.name}: constraint_window: expected a part of each side that has a cell, "
                f"{1 / min(x_size, y_size):.3g} to 1, got {constraint_window!r}"
            )
        self._size = x_size, y_size
        self._rules = Rules(
            _number("tag_reward", tag_reward),
            _number("catch_reward", catch_reward),
            _number("urgency_reward", urgency_reward),
            1.0 - _number("shared_reward", shared_reward),
            min(_count("max_cycles", max_cycles), _ENDLESS),
            max(0, min(check_int("pursuit_v5: n_catch", n_catch), pursuers + 1)),
            bool(surround),
            bool(freeze_evaders),
        )
        self._board = make_board(x_size, y_size, (self._range - 1) // 2)
        self.agents = tuple(f"pursuer_{a}" for a in range(pursuers))
        most = max(pursuers, evaders)
        self.observation_spaces = (Box(0, most, (self._range, self._range, 3), np.float32),) * pursuers
        self.action_spaces = (Discrete(5),) * pursuers
        self.state_space = Box(0, most, (y_size, x_size, 3), np.float32)
        self.pursuers = np.zeros((num_envs, pursuers), np.int32)
        self.evaders = np.zeros((num_envs, evaders), np.int32)  # the last cell if caught
        self.gone = np.zeros((num_envs, evaders), np.bool_)  # caught
        self.frames = np.zeros(num_envs, np.int64)

    def attach(self, rows: Rows) -> None:
        super().attach(rows)
        # Planes of a row lie one after another, so a row of a pursuer's window is contiguous.
        self._view = rows.obs[0][0].reshape(self.num_envs, len(self.agents), self._range, 3 * self._range)
        assert np.shares_memory(self._view, rows.obs[0][0])
        self._state = self.pursuers, self.evaders, self.gone, self.frames, self._view

    def reset(self, ids: Ids) -> None:
        full = begin(ids, self.rng, self._board, self._size, self._window, *self._state)
        if full >= 0:
            raise ContractError(
                f"{self.name}: reset(): env {full}: expected a free cell for each agent, got none: no agent begins "
                f"beside another of its kind (the reference raises, or looks for a cell for ever); take fewer agents "
                f"or a larger map or constraint_window"
            )
        self.set_alive(ids)

    def step(self, ids: Ids) -> None:
        rows = self.rows
        ends = rows.terminated, rows.truncated, rows.alive, rows.acting, rows.done
        advance(ids, self.rng, self._board, self._rules, rows.actions[0][0], *self._state, rows.reward, *ends)

    def write_state(self, ids: Ids) -> None:
        assert self.rows.state is not None
        write_state(ids, self._board, self.pursuers, self.evaders, self.gone, self.rows.state)

    def state_limits(self) -> dict[str, tuple[int, int]]:
        last = self._size[0] * self._size[1] - 1
        return {"pursuers": (0, last), "evaders": (0, last)}

    def reference(self, i: int, render_mode: str | None = None) -> Any:
        env = pettingzoo_env("sisl/pursuit_v5", "parallel", render_mode=render_mode, **self._kwargs)
        env.reset()
        aec = env.unwrapped
        inner = aec.env
        inner.np_random.bit_generator.state = as_generator(self.rng[i]).bit_generator.state
        inner.evaders_gone[:] = self.gone[i]
        inner.evaders[:] = [evader for evader, gone in zip(inner.evaders, self.gone[i], strict=True) if not gone]
        inner.evader_layer.nagents = len(inner.evaders)
        places = [*self.pursuers[i], *self.evaders[i, ~self.gone[i]]]
        for agent, cell in zip([*inner.pursuers, *inner.evaders], places, strict=True):
            y, x = divmod(int(cell), self._size[0])
            agent.set_position(x, y)
        inner.model_state[1] = inner.pursuer_layer.get_state_matrix()
        inner.model_state[2] = inner.evader_layer.get_state_matrix()
        inner.frames = int(self.frames[i])
        aec.steps = inner.frames * len(self.agents)
        return env


def _count(name: str, value: Any) -> int:
    return check_int(f"pursuit_v5: {name}", value, 1)


def _number(name: str, value: Any) -> float:
    """Read a number as a Python float; float32 numbers would give other sums in the reference."""
    if not isinstance(value, (bool, np.bool_, int, float)) or not math.isfinite(value):
        raise ArgumentError(f"pursuit_v5: {name}: expected a finite int or float, got {value!r}")
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise ArgumentError(f"pursuit_v5: {name}: expected at most 2**40, got {value!r}; a float may be larger")
    return float(value)
