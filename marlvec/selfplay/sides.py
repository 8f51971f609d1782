"""Which agents play together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from marlvec.errors import ArgumentError

__all__ = ["Sides", "sides_of"]

Sides = Mapping[str, Sequence[str]]
"""Name of a side to its agents, who are played by one policy and win or lose together."""


def sides_of(agents: Sequence[str], given: Sides | None = None) -> dict[str, tuple[str, ...]]:
    """The sides of a game.

    Args:
        agents: Names of the env's agents.
        given: Side to its agents; None: each agent is a side of its own.

    Raises:
        ArgumentError: An agent is on no side, on two, or unknown; or there is only one side.
    """
    given = {name: (name,) for name in agents} if given is None else given
    sides = {name: tuple(own) for name, own in given.items()}
    named = [agent for own in sides.values() for agent in own]
    if sorted(named) != sorted(agents):
        raise ArgumentError(f"sides must name each of the agents {list(agents)} once, got {sides}")
    if len(sides) < 2 or not all(sides.values()):
        raise ArgumentError(f"a game needs two sides at least, none of them empty, got {sides}")
    return sides
