"""Boards and cards as compiled envs, against one game of PettingZoo's, or of OpenSpiel's, at a time.

Run ``python benchmarks/native_boards.py``. Each round times both sides on one core, one right after the other, in the
same process; the figure is the median of the rounds' ratios. Moves are legal ones at random, chosen before the clock
starts: whole games for the reference, and for marlvec the moves that its own masks allowed in a run before.

* The reference's time is a move's, with its share of the ``reset`` of a new game. *loop* is PettingZoo's API as it is
  meant, ``agent_iter()`` with ``last()`` and ``step()``; *bare* has no call that is not needed, ``step()`` and the next
  player's ``observe()``. OpenSpiel's has the information state and the legal actions. Nothing is put into arrays.
* marlvec's is that of ``make(…, backend="native").step()``, everything included, over the envs.

With one thread it is the processor's time that counts, so that other processes do not; with more, the clock's.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import marlvec
from marlvec.envs.builtin_ids import pettingzoo_env

__all__ = ["Native", "OpenSpiel", "PettingZoo", "contest"]

STEPS = 32
MOVES = 1_500  # of the reference, per round
_clock = time.process_time
POKER = {"kuhn_poker", "leduc_poker"}
GAMES = ("tictactoe_v3", "connect_four_v3", "rps_v2", "kuhn_poker", "leduc_poker")


class PettingZoo:
    """One game after another, and the moves that are played in them."""

    def __init__(self, name: str, rng: np.random.Generator) -> None:
        self._parallel = name == "rps_v2"
        self._env = pettingzoo_env(f"classic/{name}", "parallel" if self._parallel else "aec")
        self._games: list[list[Any]] = []
        moves = 0
        while moves < MOVES:
            self._games.append(list(self._parallel_moves(rng) if self._parallel else self._moves(rng)))
            moves += len(self._games[-1])
        self._count = moves

    def _moves(self, rng: np.random.Generator) -> Any:
        self._env.reset()
        while not any(self._env.terminations.values()):
            mask = self._env.observe(self._env.agent_selection)["action_mask"]
            move = int(rng.choice(np.flatnonzero(mask)))
            yield move
            self._env.step(move)

    def _parallel_moves(self, rng: np.random.Generator) -> Any:
        self._env.reset()
        while self._env.agents:
            moves = {agent: int(rng.integers(3)) for agent in self._env.agents}
            yield moves
            self._env.step(moves)

    def run(self) -> float:
        """Play all games as the API has it; seconds a move."""
        if self._parallel:
            return self.run_bare()
        env = self._env
        start = _clock()
        for game in self._games:
            env.reset()
            moves = iter(game)
            for _ in env.agent_iter():
                _, _, terminated, truncated, _ = env.last()
                env.step(None if terminated or truncated else next(moves))
        return (_clock() - start) / self._count

    def run_bare(self) -> float:
        """Play all games with no call that is not needed; seconds a move."""
        env = self._env
        start = _clock()
        for game in self._games:
            env.reset()
            for move in game:
                env.step(move)
                if not self._parallel:
                    env.observe(env.agent_selection)
        return (_clock() - start) / self._count


class OpenSpiel:
    """Likewise, of its states; chance is drawn by the clock too."""

    def __init__(self, name: str, rng: np.random.Generator) -> None:
        import pyspiel

        self._game = pyspiel.load_game(name)
        self._games = []
        self._count = 0
        while self._count < MOVES:
            state, actions = self._game.new_initial_state(), []
            while not state.is_terminal():
                self._count += not state.is_chance_node()
                actions.append(int(rng.choice(state.legal_actions())))
                state.apply_action(actions[-1])
            self._games.append(actions)

    def run(self) -> float:
        """Play all games; seconds a move."""
        start = _clock()
        for actions in self._games:
            state = self._game.new_initial_state()
            for action in actions:
                state.apply_action(action)
                player = state.current_player()
                if player >= 0:
                    state.information_state_tensor(player)
                    state.legal_actions_mask(player)
            state.returns()
        return (_clock() - start) / self._count

    run_bare = run


class Native:
    """Many envs, and actions for them: those that a run before was allowed."""

    def __init__(self, name: str, num_envs: int, num_workers: int, copy: bool, rng: np.random.Generator) -> None:
        self._seed = 0
        self._envs = marlvec.make(name, num_envs=num_envs, backend="native", num_workers=num_workers, copy=copy)
        choices = int(self._envs.spec.action_spaces[0].n)
        self._actions = []
        _, infos = self._envs.reset(seed=self._seed)
        for _ in range(STEPS):
            allowed = infos.get("action_mask", np.True_)
            self._actions.append((rng.random((num_envs, 2, choices)) * allowed).argmax(axis=2))
            *_, infos = self._envs.step(self._actions[-1])

    def run(self) -> float:
        """Step all envs; seconds a move."""
        self._envs.reset(seed=self._seed)
        start = _clock()
        for actions in self._actions:
            self._envs.step(actions)
        return (_clock() - start) / (STEPS * self._envs.num_envs)

    def close(self) -> None:
        """Release everything."""
        self._envs.close()


def contest(name: str, num_envs: int, num_workers: int, copy: bool, rounds: int) -> dict[str, float]:
    """Both sides of one game.

    Returns:
        Medians: seconds a move of the reference, of the bare one and of marlvec; and how many times the first two the
        third is.
    """
    rng = np.random.default_rng(0)
    make: Callable[..., Any] = OpenSpiel if name in POKER else PettingZoo
    plain, native = make(name, rng), Native(name, num_envs, num_workers, copy, rng)
    native.run()
    times = np.array([(plain.run(), plain.run_bare(), native.run()) for _ in range(rounds)])
    native.close()
    ratios = np.median(times[:, :2] / times[:, 2:], axis=0).tolist()
    return dict(
        zip(("loop", "bare", "native", "ratio", "bare ratio"), [*np.median(times, axis=0), *ratios], strict=True)
    )


def main() -> None:
    """Print a table."""
    global _clock
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--num-envs", type=int, nargs="+", default=[16, 1_024, 16_384])
    parser.add_argument("--num-workers", type=int, default=1, help="threads; with 1 all is pinned to one core")
    parser.add_argument("--views", action="store_true", help="copy=False: rows are not copied for the caller")
    parser.add_argument("--games", nargs="+", default=GAMES, choices=GAMES)
    options = parser.parse_args()
    if options.num_workers == 1:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    else:
        _clock = time.perf_counter
    table = Table("game", "envs", "loop, µs", "bare, µs", "native, ns", "loop ÷ native", "bare ÷ native")
    for name in options.games:
        for num_envs in options.num_envs:
            told = contest(name, num_envs, options.num_workers, not options.views, options.rounds)
            times = f"{told['loop'] * 1e6:.1f}", f"{told['bare'] * 1e6:.1f}", f"{told['native'] * 1e9:.0f}"
            table.add_row(name, f"{num_envs:,}", *times, f"{told['ratio']:,.0f}", f"{told['bare ratio']:,.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
