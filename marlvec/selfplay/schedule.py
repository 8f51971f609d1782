"""Which policies meet on which sides, game by game."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import combinations, product

import numpy as np

from marlvec.errors import ArgumentError

__all__ = ["Schedule", "line_ups"]

_STREAM = 0x7363686564756C65  # "schedule"


def line_ups(
    players: Sequence[str], sides: Sequence[str], plays: Mapping[str, Collection[str]] | None = None
) -> list[tuple[str, ...]]:
    """All line-ups of a tournament, each a policy id per side.

    Where every policy can play every side: every choice of as many policies as there are sides, on the sides in
    rotation, so that in all line-ups together each policy has each side equally often. Where there are fewer policies
    than sides, they take turns along them, again in rotation. Where some can play only certain sides: all that is
    possible, without anybody who plays alone on all sides.

    Args:
        players: Policy ids.
        sides: Names of the sides.
        plays: Policy id to the sides it can play; who is not named can play all.

    Raises:
        ArgumentError: There are fewer than two policies, an unknown one or an unknown side in ``plays``, or no line-up.
    """
    plays = plays or {}
    unknown = [name for name in plays if name not in players]
    unknown += [side for own in plays.values() for side in own if side not in sides]
    if len(players) < 2 or unknown:
        what = f"plays names {unknown}, who are unknown" if unknown else f"a match needs two policies, got {players}"
        raise ArgumentError(f"{what}; the policies are {list(players)}, the sides {list(sides)}")
    if plays:
        able = [[name for name in players if name not in plays or side in plays[name]] for side in sides]
        found = [line_up for line_up in product(*able) if len(set(line_up)) > 1]
        if most := max((len(set(line_up)) for line_up in found), default=0):
            return [line_up for line_up in found if len(set(line_up)) == most]
        raise ArgumentError(f"nobody can play: for the sides {list(sides)} there are {able}")
    s = len(sides)
    groups = list(combinations(players, s)) or [tuple(players[i % len(players)] for i in range(s))]
    rotated = [tuple(group[(i + shift) % s] for i in range(s)) for group in groups for shift in range(s)]
    return list(dict.fromkeys(rotated))


class Schedule:
    """Says who plays in the n-th game: all line-ups come once, in an order that is drawn, then all of them again.

    Args:
        line_ups: The line-ups.
        seed: Seed of the order.
    """

    def __init__(self, line_ups: Sequence[tuple[str, ...]], seed: int) -> None:
        self.line_ups, self._seed = tuple(line_ups), seed
        self._round, self._order = -1, np.arange(0)

    def __getitem__(self, game: int) -> tuple[str, ...]:
        """A policy id per side."""
        round_, place = divmod(game, len(self.line_ups))
        if round_ != self._round:
            stream = np.random.SeedSequence(self._seed, spawn_key=(_STREAM, round_))
            self._round, self._order = round_, np.random.default_rng(stream).permutation(len(self.line_ups))
        return self.line_ups[int(self._order[place])]
