"""`PlayCallback`: prints the players of each game, the opponents' moves, and the result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from marlvec.cli.game.human_policy import AnnouncingPolicy, HumanPolicy
from marlvec.collect import EpisodeRecord
from marlvec.collect.callbacks import Callback, EpisodeStep, RunningEpisode

__all__ = ["PlayCallback"]

_RESULTS = (("you win", "bold green"), ("a draw", "bold yellow"), ("you lose", "bold red"))


class PlayCallback(Callback):
    """Shows a person the course of games; a callback of the collector that plays them."""

    def __init__(
        self, console: Console, you: HumanPolicy, other: AnnouncingPolicy, name: str, agents: Sequence[str]
    ) -> None:
        self._console, self._you, self._other, self._name, self._agents = console, you, other, name, agents
        self._own_index = 0
        self._ended: tuple[EpisodeRecord, int] | None = None  # the game whose end is shown next, the person's agent
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
        self._ended = record, self._own_index

    def begin_game(self) -> None:
        """Print the players of a new game, once."""
        if self._header is not None:
            self._print(self._header, "bold")
        self._header = None

    def end_game(self, obs: Any | None) -> None:
        """Print the last position, as the person observes it, if at all, and the result."""
        assert self._ended is not None  # set by the episode that was just collected
        (record, own_index), self._ended = self._ended, None
        if obs is not None:
            self._console.print(self._you.ui.draw(obs, own_index))
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
