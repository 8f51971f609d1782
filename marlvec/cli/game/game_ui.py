"""`GameUI`: draws boards as text, and names moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.spaces import Discrete, Space
from numpy.typing import NDArray
from rich.text import Text

from marlvec.errors import ArgumentError, MarlvecError
from marlvec.vector import VectorEnv

__all__ = ["GameUI", "RenderedText", "game_ui_of"]

_STONES = (("●", "bold yellow"), ("○", "bold red"))
"""Stones of the first and of the second player; distinct without colours, too."""


@dataclass(frozen=True)
class GameUI:
    """Display and move names of one game."""

    moves: Sequence[str]  # names of actions
    ask: str  # the prompt
    draw: Callable[[Any, int], Text]  # from an observation and its agent's index
    refuse: Callable[[str], str]  # from a move's name to why it is not allowed
    is_general: bool = False  # for any game: the text of the env's own render() is better, if it returns text

    def action(self, typed: str) -> int | None:
        """Return the number of the move with this name or unique prefix; None if there is none."""
        typed = typed.strip().lower()
        found = [i for i, name in enumerate(self.moves) if name == typed]
        found = found or [i for i, name in enumerate(self.moves) if typed and name.startswith(typed)]
        return found[0] if len(found) == 1 else None


def game_ui_of(name: str, action_space: Space[Any]) -> GameUI:
    """Return the display of a game: its own, or a general one of texts and numbers, for any Discrete actions."""
    if not isinstance(action_space, Discrete):
        raise ArgumentError(
            f"{name}: expected a Discrete action space, whose moves a person can type, got {action_space}"
        )
    game = name.rpartition("/")[2].rpartition("_v")[0] or name
    if game in _GAME_UIS:
        return _GAME_UIS[game]
    numbers = [str(i) for i in range(int(action_space.n))]
    return GameUI(
        numbers, f"move, 0 to {len(numbers) - 1}", _as_text, lambda move: f"{move} is not allowed now", is_general=True
    )


class RenderedText:
    """The text of an env's own ``render()``; None for good once it returns something else, or raises."""

    def __init__(self, envs: VectorEnv) -> None:
        self._envs: VectorEnv | None = envs

    def __call__(self) -> Text | None:
        if self._envs is None:
            return None
        try:
            (drawn,) = self._envs.render()
        except MarlvecError:
            drawn = None
        if isinstance(drawn, str) and drawn.strip():
            return Text.from_ansi(drawn)
        self._envs = None
        return None


def _board(obs: NDArray[Any], agent: int, empty: Callable[[int, int], str]) -> list[Text]:
    """Return lines of a board observed as planes of the agent's own stones and of the other's."""
    lines = []
    for row in range(obs.shape[0]):
        line = Text("  ")
        for column in range(obs.shape[1]):
            own, other = obs[row, column, :2]
            if own or other:
                line.append(*_STONES[agent if own else 1 - agent])
            else:
                line.append(empty(row, column), "dim")
            line.append(" ")
        lines.append(line)
    return lines


def _connect_four(obs: Any, agent: int) -> Text:
    board = _board(np.asarray(obs), agent, lambda row, column: "·")
    return Text("\n").join([*board, Text("  1 2 3 4 5 6 7", "cyan")])


def _tictactoe(obs: Any, agent: int) -> Text:
    # Fields have the numbers of the env's actions, row by row.
    return Text("\n").join(_board(np.asarray(obs), agent, lambda row, column: str(3 * row + column + 1)))


def _kuhn(obs: Any, agent: int) -> Text:
    """Draw OpenSpiel's tensor: player (2), card (3), pass or bet of each of three moves (6)."""
    card = "JQK"[int(np.argmax(obs[2:5]))]
    moves = [int(pair.argmax()) for pair in np.reshape(obs[5:11], (3, 2)) if pair.any()]
    own, others = ("you pass", "you bet"), ("the other passes", "the other bets")
    played = [(own if i % 2 == agent else others)[move] for i, move in enumerate(moves)]
    return Text.assemble("  your card ", (card, "bold cyan"), f"; {', '.join(played)}" if played else "")


def _as_text(obs: Any, agent: int) -> Text:
    with np.printoptions(precision=3, suppress=True, threshold=200):
        return Text("\n".join(f"  {line}" for line in str(obs).splitlines()))


_GAME_UIS = {
    "connect_four": GameUI(
        [str(i) for i in range(1, 8)], "column, 1 to 7", _connect_four, lambda move: f"column {move} is full"
    ),
    "tictactoe": GameUI(
        [str(i) for i in range(1, 10)], "field, 1 to 9", _tictactoe, lambda move: f"field {move} is taken"
    ),
    "kuhn_poker": GameUI(["pass", "bet"], "pass or bet", _kuhn, lambda move: f"you cannot {move} now"),
}
