"""`HumanPolicy`: prompts a person at the keyboard for each action."""

from __future__ import annotations

import select
import sys
from operator import itemgetter
from typing import Any

import numpy as np
from gymnasium.spaces import Discrete, Space
from rich.console import Console
from rich.text import Text

from marlvec.cli.game.game_ui import GameUI, game_ui_of
from marlvec.connectors import Rows
from marlvec.policies import Policy
from marlvec.policies.policy import PolicyOutput
from marlvec.policies.policy_copy import SharedPolicy
from marlvec.trees import map_tree
from marlvec.vector.settings import LONGEST_WAIT

__all__ = ["AnnouncingPolicy", "HumanPolicy", "Quit"]

_LEAVE = ("q", "quit", "exit")


class Quit(Exception):
    """Raised when the person quits."""


class HumanPolicy(Policy):
    """Shows each observation, and prompts until an allowed move is typed; raises `Quit`."""

    ui: GameUI

    def __init__(self, game: str, console: Console) -> None:
        self._game, self._console = game, console
        self.start = 0

    def setup(self, observation_space: Space[Any], action_space: Space[Any], *, seed: int) -> None:
        self.ui = game_ui_of(self._game, action_space)
        self.start = int(action_space.start) if isinstance(action_space, Discrete) else 0
        super().setup(observation_space, action_space, seed=seed)

    def act(self, rows: Rows, *, explore: bool = True) -> PolicyOutput:
        masks = rows.get("action_mask", np.ones((len(rows), len(self.ui.moves)), np.bool_))
        agents = rows["agent_index"].tolist()
        return np.array(
            [self._ask(map_tree(itemgetter(i), rows["obs"]), agents[i], masks[i]) for i in range(len(rows))]
        )

    def _ask(self, obs: Any, agent: int, allowed: Any) -> int:
        moves = self.ui.moves
        self._console.print(self.ui.draw(obs, agent))
        prompt = Text.assemble((self.ui.ask, "bold"), (" (q to quit)", "dim"), ": ")
        while True:
            try:
                self._console.print(prompt, end="")
                _wait_for_a_line()
                typed = self._console.input().strip()
            except EOFError:
                self._console.print()
                raise Quit from None
            if typed.lower() in _LEAVE:
                raise Quit
            action = self.ui.action(typed)
            if action is not None and allowed[action]:
                return self.start + action
            why = f"{typed!r} is not a move" if action is None else self.ui.refuse(moves[action])
            legal = ", ".join(name for name, may in zip(moves, allowed, strict=True) if may)
            self._console.print(Text(f"{why}; allowed: {legal}", "yellow"))


def _wait_for_a_line() -> None:
    """Return once a line, or the end of input, can be read from the terminal.

    Ctrl-C just before the wait does not interrupt it, so every wait is short. On Windows, where only sockets can be
    waited for, reading the line waits.
    """
    while sys.platform != "win32" and sys.stdin.isatty() and not select.select([sys.stdin], [], [], LONGEST_WAIT)[0]:
        pass


class AnnouncingPolicy(SharedPolicy):
    """A policy whose moves are recorded, to show them once all agents have moved."""

    def __init__(self, name: str, host: Policy) -> None:
        super().__init__(name, host)
        self.noted: list[tuple[int, int]] = []  # (agent index, action) of moves that were not shown yet

    def act(self, rows: Rows, *, explore: bool = True) -> PolicyOutput:
        output = super().act(rows, explore=explore)
        actions = np.asarray(output[0] if isinstance(output, tuple) else output).tolist()
        self.noted += zip(rows["agent_index"].tolist(), actions, strict=True)
        return output
