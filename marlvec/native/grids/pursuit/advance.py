"""One step of pursuit: pursuers move one after another, evaders are caught, the others move at random."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from marlvec.native.grids.pursuit.board import Board, Cells
from marlvec.native.grids.pursuit.pairwise_sum import pairwise_sum
from marlvec.native.grids.pursuit.view import observe
from marlvec.native.jit import kernel
from marlvec.native.native_env import Ids
from marlvec.native.rng_kernels import bounded

__all__ = ["Rules", "advance"]


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
