"""Kuhn poker, by the rules of OpenSpiel's ``kuhn_poker``: three cards, one each, and one chip to bet.

Both put one chip into the pot. The players pass (0) or bet (1) in turn. After two passes, or a bet and a call, the
higher card wins; a player that passes after a bet loses the pot.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray

from marlvec.native.kernels import kernel
from marlvec.native.native_env import Ids, NativeSingleEnv
from marlvec.native.turn_game import TurnGame, deal, finish, pass_turn, start

CARDS = 3
MOVES = 3  # the longest game: pass, bet, and the answer
CARD, BETTING = 2, 5  # offsets of the player's card and the moves in an observation
SHAPE = (11,)


class KuhnPoker(TurnGame):
    """N games of Kuhn poker.

    An observation is OpenSpiel's information state tensor: which player (2), its card (3), and each move as pass or bet
    (3 × 2), all one-hot.
    """

    name = "kuhn_poker"
    agents = ("player_0", "player_1")
    observation_spaces = (Box(0, 1, SHAPE, np.float32),) * 2
    action_spaces = (Discrete(2),) * 2
    mask_sizes = (2, 2)
    metadata = {"render_modes": [], "name": name, "is_parallelizable": False}
    state_names = ("hands", "moves")

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        self.hands = np.zeros((num_envs, 2), np.int8)  # each player's card, 0 to 2
        self.moves = np.full((num_envs, MOVES), -1, np.int8)  # moves so far, 0 or 1; -1: not played yet

    def reset(self, ids: Ids) -> None:
        _reset(ids, self.turn_rows, self.rng, self.hands, self.moves, self.mover)

    def step(self, ids: Ids) -> None:
        _step(ids, self.turn_rows, self.hands, self.moves, self.mover)

    def state_limits(self) -> dict[str, tuple[int, int]]:
        return {**super().state_limits(), "hands": (0, CARDS - 1), "moves": (-1, 1)}

    def cut_short(self, ids: Ids) -> None:
        _observe_all(ids, self.turn_rows.obs, self.hands, self.moves)


def single() -> NativeSingleEnv:
    """Build one game as an env."""
    return NativeSingleEnv(KuhnPoker(1))


@kernel
def _reset(
    ids: Ids, rows: Any, rng: Any, hands: NDArray[np.int8], moves: NDArray[np.int8], mover: NDArray[np.int64]
) -> None:
    for i in ids:
        deal(rng, i, CARDS, hands[i])
        moves[i] = -1
        mover[i] = 0
        rows.obs[i] = 0  # the other player observes when its turn comes
        _observe(rows.obs[i, 0], hands[i], moves[i], 0)
        start(rows, i, 0)


@kernel
def _step(ids: Ids, rows: Any, hands: NDArray[np.int8], moves: NDArray[np.int8], mover: NDArray[np.int64]) -> None:
    for i in ids:
        me = int(mover[i])
        other = 1 - me
        over, gain = _play(hands[i], moves[i], me, rows.actions[i, me])
        mover[i] = other
        _observe(rows.obs[i, other], hands[i], moves[i], other)
        if over:
            finish(rows, i, me, gain, True)
            rows.reward[i, other] = -gain
            _observe(rows.obs[i, me], hands[i], moves[i], me)
        else:
            pass_turn(rows, i, me, other)  # both moves are always allowed


@kernel
def _play(hands: NDArray[np.int8], moves: NDArray[np.int8], me: int, move: int) -> tuple[bool, float]:
    """Make a move; return whether the game is over, and the mover's reward."""
    turn = 0
    while turn < MOVES - 1 and moves[turn] >= 0:
        turn += 1
    moves[turn] = move
    bet_before = turn > 0 and moves[turn - 1] == 1
    if bet_before and move == 0:
        return True, -1.0
    if bet_before or (turn == 1 and move == 0):
        stake = 2.0 if bet_before else 1.0
        return True, stake if hands[me] > hands[1 - me] else -stake
    return False, 0.0


@kernel
def _observe(obs: NDArray[np.float32], hands: NDArray[np.int8], moves: NDArray[np.int8], player: int) -> None:
    for k in range(len(obs)):
        obs[k] = 0
    obs[player] = 1
    obs[CARD + hands[player]] = 1
    for k in range(MOVES):
        if moves[k] >= 0:
            obs[BETTING + 2 * k + moves[k]] = 1


@kernel
def _observe_all(ids: Ids, obs: NDArray[np.float32], hands: NDArray[np.int8], moves: NDArray[np.int8]) -> None:
    for i in ids:
        for a in range(2):
            _observe(obs[i, a], hands[i], moves[i], a)
