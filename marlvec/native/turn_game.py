"""`TurnGame`: base of native two-player games in which players take turns.

Turns work as in `marlvec.envs.adapters.aec`: one step is one move; after it, and after a reset, the next player gets an
observation and its mask; at the end both observe. An illegal move ends the game as in PettingZoo's
``TerminateIllegalWrapper``: both players are terminated *and* truncated.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from marlvec.native.kernels import bounded, kernel
from marlvec.native.native_env import Ids, NativeEnv, Rows
from marlvec.native.rng_streams import Streams

ILLEGAL, LOST, DRAWN, WON, GOES_ON = -2, -1, 0, 1, 2
"""What a move comes to, for the one who made it."""


class TurnRows(NamedTuple):
    """The rows of N two-player envs with equal spaces, as arguments of kernels."""

    obs: NDArray[Any]  # (N, 2, *shape), each player's last observation
    actions: NDArray[np.int64]  # (N, 2); only the mover's is read
    masks: NDArray[np.bool_]  # (N, 2, n)
    reward: NDArray[np.float64]  # (N, 2), as are the flags
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    alive: NDArray[np.bool_]
    acting: NDArray[np.bool_]
    done: NDArray[np.bool_]  # (N,)


class TurnGame(NativeEnv):
    """A turn-based game for two players with equal spaces; kernels keep ``mover`` up to date."""

    state_names: tuple[str, ...] = ("mover",)

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        self.mover = np.zeros(num_envs, np.int64)  # (N,), the player whose turn it is

    def attach(self, rows: Rows) -> None:
        super().attach(rows)
        masks = rows.action_masks[0]
        assert masks is not None
        ends = rows.terminated, rows.truncated, rows.alive, rows.acting, rows.done
        self.turn_rows = TurnRows(rows.obs[0][0], rows.actions[0][0], masks, rows.reward, *ends)

    def state_limits(self) -> dict[str, tuple[int, int]]:
        return {"mover": (0, len(self.agents) - 1)}

    @abstractmethod
    def cut_short(self, ids: Ids) -> None:
        """Write both players' final observations at a time limit."""


@kernel
def start(rows: Any, i: int, mover: int) -> None:
    """Set both players of env ``i`` alive, and give ``mover`` the turn."""
    for a in range(2):
        rows.alive[i, a] = True
        rows.acting[i, a] = a == mover


@kernel
def pass_turn(rows: Any, i: int, before: int, after: int) -> None:
    """Pass the turn from player ``before`` to ``after``; the caller writes the mask."""
    rows.acting[i, before] = False
    for k in range(rows.masks.shape[2]):
        rows.masks[i, before, k] = True
    rows.acting[i, after] = True


@kernel
def finish(rows: Any, i: int, mover: int, gain: float, legal: bool) -> None:
    """End the game in env ``i``: write the reward ``gain`` of the last move's player, and let no agent act."""
    rows.reward[i, mover] = gain
    for a in range(2):
        rows.terminated[i, a] = True
        rows.truncated[i, a] = not legal
        rows.alive[i, a] = False
        rows.acting[i, a] = False
        rows.masks[i, a] = True
    rows.done[i] = True


@kernel
def deal(rng: Streams, i: int, size: int, hand: NDArray[np.int8]) -> None:
    """Deal ``hand``, (n,), from a shuffled deck of cards 0 to ``size`` - 1, each with one draw from env ``i``'s stream.

    ``Generator.integers(cards left)`` is an index into the remaining cards, in ascending order.
    """
    for k in range(len(hand)):
        card = bounded(rng, i, size - k)
        # Skip the cards dealt before, lowest first.
        lowest = -1
        for _ in range(k):
            following = size
            for j in range(k):
                if lowest < hand[j] < following:
                    following = hand[j]
            if following <= card:
                card += 1
            lowest = following
        hand[k] = card
