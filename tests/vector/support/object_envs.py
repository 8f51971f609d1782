"""Envs whose observations and actions are Python objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Graph, OneOf, Space, Text, Tuple
from pettingzoo import ParallelEnv

from marlvec import VectorEnv
from tests.vector.support.kinds import vectorize

__all__ = ["OBJECTS", "Card", "Hands", "ObjectEnv", "at", "is_blank", "make_envs"]


class Card:
    """A value of a class of the user's own."""

    def __init__(self, suit: str, rank: int) -> None:
        self.suit, self.rank = suit, rank

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Card) and (self.suit, self.rank) == (other.suit, other.rank)

    __hash__ = None  # type: ignore[assignment]  # it can change

    def __repr__(self) -> str:
        return f"Card({self.suit!r}, {self.rank})"


class Hands(Space[list[Card]]):
    """Lists of cards; without an ``==``, as most spaces of users."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def sample(self, mask: Any = None, probability: Any = None) -> list[Card]:
        n = int(self.np_random.integers(self.most + 1))
        return [Card("cdhs"[self.np_random.integers(4)], int(self.np_random.integers(13))) for _ in range(n)]

    def contains(self, x: Any) -> bool:
        return isinstance(x, list) and len(x) <= self.most and all(isinstance(card, Card) for card in x)


OBJECTS: dict[str, Callable[[], Space[Any]]] = {
    "text": lambda: Text(6, min_length=0),
    "sequence": lambda: gymnasium.spaces.Sequence(Box(0, 1, (2,))),
    "stacked sequence": lambda: gymnasium.spaces.Sequence(Discrete(4), stack=True),
    "graph": lambda: Graph(Box(-1, 1, (3,)), Discrete(4)),
    "graph without edges": lambda: Graph(Discrete(5), None),
    "one of": lambda: OneOf([Discrete(3), Text(4), Box(0, 1, (2,))]),
    "custom": lambda: Hands(3),
    "inside Dict and Tuple": lambda: Dict(
        {
            "pixels": Box(0, 255, (2, 2), np.uint8),
            "words": Tuple([Text(3), Dict({"deep": gymnasium.spaces.Sequence(Text(2)), "n": Discrete(3)})]),
            "hand": Hands(2),
        }
    ),
    "empty Dict": lambda: Dict({}),
    "no entries": lambda: Box(-1, 1, (0,)),
    "no axes": lambda: Box(-1, 1, ()),
    "float16": lambda: Box(-1, 1, (3,), np.float16),
}
"""Each call builds one anew, as each env does. The last ones are arrays, of odd kinds."""


class ObjectEnv(ParallelEnv):  # type: ignore[misc]  # pettingzoo has no type information
    """Draws observations from any space, checks actions, and pays a checksum of what was said.

    Agent 0 lives from first to last, agent 1 dies in step 2, agent 2 is born in step 1 if ``late`` is set.

    Args:
        observation: Name in `OBJECTS`.
        action: Likewise.
        length: Steps of an episode; it is truncated.
        late: Whether agent 2 is born after the reset.
    """

    metadata: dict[str, Any] = {"name": "objects", "render_modes": []}
    render_mode = None

    def __init__(
        self, observation: str, action: str, *, length: int = 4, late: bool = False, env_index: int = 0
    ) -> None:
        self.possible_agents = ["ann", "bob", "cat"]
        self.agents: list[str] = []
        self._spaces = {agent: (OBJECTS[observation](), OBJECTS[action]()) for agent in self.possible_agents}
        self._source = OBJECTS[observation]()
        self._source.seed(env_index)
        self._length, self._late, self._t = length, late, 0

    def observation_space(self, agent: str) -> Space[Any]:
        return self._spaces[agent][0]

    def action_space(self, agent: str) -> Space[Any]:
        return self._spaces[agent][1]

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self._source.seed(int(seed))
        self._t = 0
        self.agents = self.possible_agents[: 2 if self._late else 3]
        return self._look(self.agents), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        assert actions.keys() == set(self.agents)
        for agent, action in actions.items():
            assert self.action_space(agent).contains(action), action
        self._t += 1
        here = [*self.agents, "cat"] if self._late and self._t == 1 else self.agents
        over = self._t == self._length
        ended = {agent: agent == "bob" and self._t == 2 for agent in here}
        self.agents = [] if over else [agent for agent in here if not ended[agent]]
        paid = {agent: crc32(repr(action).encode()) % 9973 for agent, action in actions.items()}
        rewards = {agent: float(paid.get(agent, 0)) for agent in here}
        return self._look(here), rewards, ended, dict.fromkeys(here, over), {agent: {} for agent in here}

    def _look(self, agents: Sequence[str]) -> dict[str, Any]:
        return {agent: self._source.sample() for agent in agents}


def make_envs(backend: str, factories: list[Any], **options: Any) -> VectorEnv:
    """On any backend; processes are forked, which is quick."""
    return vectorize(backend, factories, **({"context": "fork"} if backend == "async" else {}) | options)


def at(space: Space[Any], tree: Any, *where: int) -> Any:
    """One agent's value out of a tree of arrays."""
    if isinstance(space, Dict):
        return {key: at(sub, tree[key], *where) for key, sub in space.spaces.items()}
    if isinstance(space, Tuple):
        return tuple(at(sub, part, *where) for sub, part in zip(space.spaces, tree, strict=True))
    return tree[(*where, ...)] if isinstance(space, Box) else tree[where]


def is_blank(space: Space[Any], value: Any) -> bool:
    """Whether this is what stands where an agent is absent: zeros, and None for objects."""
    if isinstance(space, Dict):
        return all(is_blank(sub, value[key]) for key, sub in space.spaces.items())
    if isinstance(space, Tuple):
        return all(is_blank(sub, part) for sub, part in zip(space.spaces, value, strict=True))
    return not np.any(value) if isinstance(space, (Box, Discrete)) else value is None
