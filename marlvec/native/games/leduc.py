"""Leduc poker, by the rules of OpenSpiel's ``leduc_poker``: six cards of three ranks, two rounds of betting.

Both put one chip into the pot and get a card. A round is over when both have passed, or one has called the other's
raise; a raise is two chips in the first round and four in the second, and a round has two at most. Between the rounds
a card is revealed. At the end a pair with it wins, else the higher rank; equal ranks share the pot. The moves are fold
(0), only after a raise, call or check (1), and raise (2).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray

from marlvec.native.kernels import kernel
from marlvec.native.native_env import Ids, NativeSingleEnv
from marlvec.native.turn_game import DRAWN, GOES_ON, ILLEGAL, LOST, WON, TurnGame, deal, finish, pass_turn, start

CARDS = 6  # card k has rank k // 2
OPEN = 2  # index of the open card in a deal
ROUNDS, MOVES = 2, 4  # the longest round: check, raise, raise, call
FOLD, CALL, RAISE = 0, 1, 2
MOST_RAISES = 2
PRIVATE, PUBLIC, BETTING = 2, 8, 14  # offsets of the player's card, the open card and the moves in an observation
SHAPE = (30,)


class LeducGame(NamedTuple):
    """State of N games."""

    deals: NDArray[np.int8]  # (N, 3), both players' cards and the open card; all are drawn at the start
    moves: NDArray[np.int8]  # (N, 2, 4), moves of each round; -1: not played yet
    round: NDArray[np.int8]  # (N,), 0 or 1
    pot: NDArray[np.int64]  # (N, 2), chips that each player has put in
    mover: NDArray[np.int64]  # (N,), the player whose turn it is


class LeducPoker(TurnGame):
    """N games of Leduc poker. An illegal move counts as a fold, and also truncates both players.

    An observation is OpenSpiel's information state tensor: which player (2), its card (6), the open card (6), and each
    move of both rounds as call or raise (2 × 4 × 2), all one-hot.
    """

    name = "leduc_poker"
    agents = ("player_0", "player_1")
    observation_spaces = (Box(0, 1, SHAPE, np.float32),) * 2
    action_spaces = (Discrete(3),) * 2
    mask_sizes = (3, 3)
    metadata = {"render_modes": [], "name": name, "is_parallelizable": False}
    state_names = ("game.deals", "game.moves", "game.round", "game.pot")

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        self.game = LeducGame(
            np.zeros((num_envs, OPEN + 1), np.int8),
            np.full((num_envs, ROUNDS, MOVES), -1, np.int8),
            np.zeros(num_envs, np.int8),
            np.ones((num_envs, 2), np.int64),
            self.mover,
        )

    def reset(self, ids: Ids) -> None:
        _reset(ids, self.turn_rows, self.rng, self.game)

    def step(self, ids: Ids) -> None:
        _step(ids, self.turn_rows, self.game)

    def state_limits(self) -> dict[str, tuple[int, int]]:
        own = {"game.deals": (0, CARDS - 1), "game.moves": (-1, RAISE), "game.round": (0, ROUNDS - 1)}
        return {**super().state_limits(), **own}

    def cut_short(self, ids: Ids) -> None:
        _observe_all(ids, self.turn_rows, self.game)


def single() -> NativeSingleEnv:
    """Build one game as an env."""
    return NativeSingleEnv(LeducPoker(1))


@kernel
def _reset(ids: Ids, rows: Any, rng: Any, game: Any) -> None:
    for i in ids:
        deal(rng, i, CARDS, game.deals[i])
        game.moves[i] = -1
        game.round[i] = 0
        game.pot[i] = 1
        game.mover[i] = 0
        rows.obs[i] = 0  # the other player observes when its turn comes
        _observe(rows, game, i, 0)
        start(rows, i, 0)
        _allow(rows, game, i, 0)


@kernel
def _step(ids: Ids, rows: Any, game: Any) -> None:
    for i in ids:
        me = int(game.mover[i])
        outcome = _play(game, i, me, rows.actions[i, me])
        if outcome == GOES_ON:
            after = int(game.mover[i])
            pass_turn(rows, i, me, after)
            _observe(rows, game, i, after)
            _allow(rows, game, i, after)
        else:
            legal = outcome != ILLEGAL
            won = outcome if legal else LOST
            gain = float(won * (game.pot[i, 1 - me] if won == WON else game.pot[i, me]))
            finish(rows, i, me, gain, legal)
            rows.reward[i, 1 - me] = -gain
            _observe(rows, game, i, 0)
            _observe(rows, game, i, 1)


@kernel
def _play(game: Any, i: int, me: int, move: int) -> int:
    pot = game.pot[i]
    moves = game.moves[i, game.round[i]]
    turn, raises = _count(moves)
    if turn == MOVES or (move == FOLD and pot[me] == pot[1 - me]) or (move == RAISE and raises == MOST_RAISES):
        return ILLEGAL
    moves[turn] = move
    if move == FOLD:
        return LOST
    game.mover[i] = 1 - me
    pot[me] = pot[1 - me]
    if move == RAISE:
        pot[me] += 2 * (game.round[i] + 1)
        return GOES_ON
    if raises == 0 and turn == 0:
        return GOES_ON
    if game.round[i] == 0:
        game.round[i] = 1
        game.mover[i] = 0
        return GOES_ON
    return _compare(game.deals[i], me)


@kernel
def _count(moves: NDArray[np.int8]) -> tuple[int, int]:
    """Return the number of moves of a round, and of raises."""
    turn = raises = 0
    while turn < MOVES and moves[turn] >= 0:
        raises += moves[turn] == RAISE
        turn += 1
    return turn, raises


@kernel
def _compare(cards: NDArray[np.int8], me: int) -> int:
    """Return the showdown's result for one player."""
    mine, other, shown = cards[me] // 2, cards[1 - me] // 2, cards[OPEN] // 2
    if mine == other:
        return DRAWN
    if mine == shown or (other != shown and mine > other):
        return WON
    return LOST


@kernel
def _allow(rows: Any, game: Any, i: int, player: int) -> None:
    mask = rows.masks[i, player]
    mask[FOLD] = game.pot[i, player] < game.pot[i, 1 - player]
    mask[CALL] = True
    mask[RAISE] = _count(game.moves[i, game.round[i]])[1] < MOST_RAISES


@kernel
def _observe(rows: Any, game: Any, i: int, player: int) -> None:
    obs = rows.obs[i, player]
    for k in range(len(obs)):
        obs[k] = 0
    obs[player] = 1
    obs[PRIVATE + game.deals[i, player]] = 1
    if game.round[i] == 1:
        obs[PUBLIC + game.deals[i, OPEN]] = 1
    for r in range(ROUNDS):
        for k in range(MOVES):
            move = game.moves[i, r, k]
            if move > FOLD:
                obs[BETTING + 2 * (MOVES * r + k) + move - CALL] = 1


@kernel
def _observe_all(ids: Ids, rows: Any, game: Any) -> None:
    for i in ids:
        for a in range(2):
            _observe(rows, game, i, a)
