"""A person at the keyboard: `HumanPolicy` prompts for each action, `PlayCallback` prints the course of games."""

from __future__ import annotations

import select
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
from gymnasium.spaces import Discrete, Space
from rich.console import Console
from rich.text import Text

from marlvec.cli.game.game_ui import GameUI, game_ui_of
from marlvec.collect import EpisodeRecord
from marlvec.collect.callbacks import Callback, EpisodeStep, RunningEpisode
from marlvec.connectors import Rows
from marlvec.policies import Policy
from marlvec.policies.policy import PolicyOutput
from marlvec.policies.policy_copy import SharedPolicy
from marlvec.trees import map_tree
from marlvec.vector.settings import LONGEST_WAIT

__all__ = ["AnnouncingPolicy", "HumanPolicy", "Quit", "PlayCallback"]

_LEAVE = ("q", "quit", "exit")


class Quit(Exception):
    """Raised when the person quits."""


class HumanPolicy(Policy):
    """Shows each observation, and prompts until an allowed move is typed; raises `Quit`."""

    ui: GameUI

    def __init__(self, game: str, console: Console, render: Callable[[], Text | None]) -> None:
        self._game, self._console, self._render = game, console, render
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

    def text_now(self) -> Text | None:
        """Return the env's own text of the present position, if that is what is shown."""
        return self._render() if self.ui.is_general else None

    def _ask(self, obs: Any, agent: int, allowed: Any) -> int:
        moves = self.ui.moves
        self._console.print(self.text_now() or self.ui.draw(obs, agent))
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


_RESULTS = (("you win", "bold green"), ("a draw", "bold yellow"), ("you lose", "bold red"))


class PlayCallback(Callback):
    """Shows a person the course of games; a callback of the collector that plays them."""

    def __init__(
        self, console: Console, you: HumanPolicy, other: AnnouncingPolicy, name: str, agents: Sequence[str]
    ) -> None:
        self._console, self._you, self._other, self._name, self._agents = console, you, other, name, agents
        self._own_index = 0
        # The game whose end is shown next, the person's agent, and the env's own text of the last position.
        self._ended: tuple[EpisodeRecord, int, Text | None] | None = None
        self._header: str | None = None  # header of the next game
        self._results: Counter[str] = Counter()

    def on_episode_start(self, episode: RunningEpisode) -> None:
        self._own_index = next(a for a, name in enumerate(episode.policies) if name != self._name)
        them = ", ".join(name for a, name in enumerate(self._agents) if a != self._own_index)
        self._header = f"game {episode.number + 1}: you play {self._agents[self._own_index]}, {self._name} plays {them}"
        if self._ended is None:  # otherwise the last game ended in the same step
            self.begin_game()

    def on_episode_step(self, step: EpisodeStep) -> None:
        moves, self._other.noted = self._other.noted, []  # shown only once all have moved
        for agent, action in moves:
            who = self._name if len(self._agents) == 2 else f"{self._name} as {self._agents[agent]}"
            self._print(f"{who} plays {self._you.ui.moves[action - self._you.start]}", "magenta")

    def on_episode_end(self, episode: RunningEpisode, record: EpisodeRecord) -> None:
        self._ended = record, self._own_index, self._you.text_now()

    def begin_game(self) -> None:
        """Print the players of a new game, once."""
        if self._header is not None:
            self._print(self._header, "bold")
        self._header = None

    def end_game(self, obs: Any | None) -> None:
        """Print the last position, as the person observes it, if at all, and the result."""
        assert self._ended is not None  # set by the episode that was just collected
        (record, own_index, text), self._ended = self._ended, None
        if text is not None or obs is not None:
            self._console.print(text or self._you.ui.draw(obs, own_index))
        own = float(record.returns_A[own_index])
        best = max(float(value) for a, value in enumerate(record.returns_A) if a != own_index)
        result, style = _RESULTS[0 if own > best else 1 if own == best else 2]
        self._results[result] += 1
        self._print(f"{result}: {own:g} against {best:g}, after {record.length} moves\n", style)

    def print_results(self) -> None:
        if self._results:
            won, drawn, lost = (self._results[result] for result, _ in _RESULTS)
            self._print(f"games won {won}, drawn {drawn}, lost {lost}", "bold")

    def _print(self, text: str, style: str) -> None:
        self._console.print(Text(text, style))
