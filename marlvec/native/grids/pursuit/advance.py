"""Episodes of pursuit: agents begin in random cells, none beside another of its kind.

In a step pursuers move one after another, evaders are caught, the others move at random.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from marlvec.native.grids.pursuit.board import Board, Cells, observe
from marlvec.native.jit import kernel
from marlvec.native.native_env import Ids
from marlvec.native.rng_kernels import bounded, uniform

__all__ = ["Rules", "advance", "MOST", "pairwise_sum", "begin"]

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
