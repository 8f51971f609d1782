"""`Game`: the sides and scores of one finished game."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from marlvec.collect.metrics.metrics import EpisodeRecord
from marlvec.errors import ArgumentError, ContractError

__all__ = ["Sides", "sides_of", "Game", "ScoreFunction", "game_of"]

Sides = Mapping[str, Sequence[str]]
"""Side name to its agents, which one policy plays, and which win or lose together."""


def sides_of(agents: Sequence[str], given: Sides | None = None) -> dict[str, tuple[str, ...]]:
    """Return the sides of a game, by default one per agent; refuse empty, overlapping, missing or too few sides."""
    given = {name: (name,) for name in agents} if given is None else given
    sides = {name: tuple(own) for name, own in given.items()}
    named = [agent for own in sides.values() for agent in own]
    if sorted(named) != sorted(agents):
        raise ArgumentError(f"sides: expected each of the agents {list(agents)} once, got {sides}")
    if len(sides) < 2 or not all(sides.values()):
        raise ArgumentError(f"sides: expected at least two, none of them empty, got {sides}")
    return sides


ScoreFunction = Callable[[EpisodeRecord], Sequence[float]]
"""Function of a finished episode to one number per side; more is better, equal numbers are a draw."""


@dataclass(frozen=True, slots=True)
class Game:
    """The result of one game.

    Attributes:
        sides: Names of the sides.
        players: For each side, the ids of the policies that played it, each once.
        scores: For each side, its score; more is better.
        length: Env steps.
        truncated: Whether an agent was truncated: the game was cut short.
        unmoved: Sides without a decision: the game was over before their first move.
        env_id: The env in which it was played.
        number: Number of the episode in that env, from 0.
    """

    sides: tuple[str, ...]
    players: tuple[tuple[str, ...], ...]
    scores: tuple[float, ...]
    length: int
    truncated: bool
    unmoved: tuple[str, ...]
    env_id: int
    number: int

    @property
    def is_draw(self) -> bool:
        """Whether all sides have the same score."""
        return len(set(self.scores)) == 1

    @property
    def winners(self) -> tuple[str, ...]:
        """Sides with the highest score; none if all are equal."""
        if self.is_draw:
            return ()
        return tuple(side for side, score in zip(self.sides, self.scores, strict=True) if score == max(self.scores))

    def score_of(self, player: str, against: str | None = None) -> float | None:
        """Return a policy's result: 1 a win, 0.5 a draw, 0 a loss; with several other sides, their mean.

        ``against`` is the policy whose sides count; None: all others. ``player`` is the policy's id.

        Returns:
            The result; None if the two did not meet.
        """
        results = [
            1.0 if mine > other else 0.5 if mine == other else 0.0
            for us, mine in zip(self.players, self.scores, strict=True)
            for them, other in zip(self.players, self.scores, strict=True)
            if player in us and player not in them and (against is None or against in them)
        ]
        return sum(results) / len(results) if results else None


def game_of(
    record: EpisodeRecord, agents: Sequence[str], sides: Mapping[str, Sequence[str]], score: ScoreFunction | None = None
) -> Game:
    """Read a game from an episode's record; without ``score``, a side's score is the sum of its agents' returns."""
    places = [[agents.index(name) for name in own] for own in sides.values()]
    if score is None:
        scores = [float(record.returns_A[own].sum()) for own in places]
    else:
        scores = [float(number) for number in score(record)]
    if len(scores) != len(places) or any(map(math.isnan, scores)):
        raise ContractError(
            f"score() of env {record.env_id}, episode {record.number}: expected one number for each of the sides "
            f"{list(sides)}, got {scores}"
        )
    return Game(
        sides=tuple(sides),
        players=tuple(tuple(dict.fromkeys(record.policies[a] for a in own)) for own in places),
        scores=tuple(scores),
        length=record.length,
        truncated=bool(record.truncated_A.any()),
        unmoved=tuple(side for side, own in zip(sides, places, strict=True) if not record.lengths_A[own].any()),
        env_id=record.env_id,
        number=record.number,
    )
