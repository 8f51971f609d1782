"""The envs that the vectorizers are tried on, all picklable by name: scripted and real ones, walks that offer their
state, and envs of objects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any
from zlib import crc32

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Graph, OneOf, Space, Text, Tuple
from gymnasium.wrappers import FrameStackObservation, TimeLimit
from pettingzoo import ParallelEnv
from pettingzoo.utils import parallel_to_aec

from marlvec import AsyncVectorEnv, SyncVectorEnv, ThreadVectorEnv, VectorEnv
from marlvec.envs import MultiAgentEnv, Slot
from marlvec.envs.wrappers import SeedStream
from marlvec.registry import resolve_all
from marlvec.testing import KeyedEnv, Script, ScriptedParallelEnv, SingleEnv, TurnEnv
from tests.vector.support.reference import Call, record

AGENTS = ("a", "b", "c")
SIZE = 4


class Walk:
    """The rules: who is where, who is left, and a random stream that goes on from one episode to the next."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.rng = np.random.default_rng()
        self.t = 0
        self.places = np.zeros(len(AGENTS), np.int64)
        self.left: list[int] = []
        self.episode = -1

    def begin(self, seed: int | None) -> None:
        if seed is not None:
            self.rng, self.episode = np.random.default_rng(seed), -1
        self.t, self.episode = 0, self.episode + 1
        self.places = self.rng.integers(0, 100, len(AGENTS))
        self.left = list(range(len(AGENTS)))

    def see(self, a: int) -> np.ndarray[Any, Any]:
        return np.array([self.index, self.episode, self.t, *self.places, a][: SIZE + 2], np.float32)

    def move(self, actions: dict[int, int]) -> tuple[dict[int, float], dict[int, bool], dict[int, bool]]:
        """Rewards, and who is terminated and truncated, of all who were left."""
        self.t += 1
        for a, action in actions.items():
            self.places[a] += action * self.rng.integers(1, 5)
        rewards = {a: float(self.rng.normal()) for a in self.left}
        ended = {a: bool(self.rng.random() < 0.12) for a in self.left}
        cut = {a: self.t >= 9 and not ended[a] for a in self.left}
        self.left = [a for a in self.left if not (ended[a] or cut[a])]
        return rewards, ended, cut

    def get_state(self) -> dict[str, Any]:
        return {
            "rng": self.rng.bit_generator.state,
            "t": self.t,
            "places": self.places,
            "left": self.left,
            "episode": self.episode,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self.rng.bit_generator.state = state["rng"]
        self.t, self.places, self.left = state["t"], state["places"], state["left"]
        self.episode = state["episode"]


SPACE = Box(-np.inf, np.inf, (SIZE + 2,), np.float32)


class ParallelWalk(ParallelEnv[str, Any, Any]):
    metadata = {"name": "walk", "is_parallelizable": True}
    possible_agents = list(AGENTS)
    render_mode = None

    def __init__(self, index: int) -> None:
        self.walk = Walk(index)
        self.agents: list[str] = []

    def observation_space(self, agent: str) -> Any:
        return SPACE

    def action_space(self, agent: str) -> Any:
        return Discrete(3)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.walk.begin(seed)
        self.agents = list(AGENTS)
        return {agent: self.walk.see(a) for a, agent in enumerate(AGENTS)}, {agent: {} for agent in AGENTS}

    def step(self, actions: dict[str, Any]) -> Any:
        before = list(self.agents)
        found = self.walk.move({AGENTS.index(agent): int(action) for agent, action in actions.items()})
        self.agents = [AGENTS[a] for a in self.walk.left]
        rewards, ended, cut = ({AGENTS[a]: value for a, value in table.items()} for table in found)
        infos = {agent: {"draw": self.walk.t} if self.walk.t % 3 == 0 else {} for agent in before}
        return {agent: self.walk.see(AGENTS.index(agent)) for agent in before}, rewards, ended, cut, infos

    def get_state(self) -> Any:
        return {"walk": self.walk.get_state(), "agents": self.agents}

    def set_state(self, state: Any) -> None:
        self.walk.set_state(state["walk"])
        self.agents = state["agents"]


class SingleWalk(gymnasium.Env[Any, Any]):
    observation_space = Dict({"word": Text(12), "sight": SPACE})
    action_space = Discrete(3)

    def __init__(self, index: int) -> None:
        self.walk = Walk(index)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.walk.begin(seed)
        return self._see(), {}

    def step(self, action: Any) -> Any:
        rewards, ended, _ = self.walk.move(dict.fromkeys(self.walk.left[:1], int(action)))
        return self._see(), sum(rewards.values()), ended.get(0, True), False, {"t": self.walk.t}

    def _see(self) -> Any:
        return {"word": f"t{self.walk.t}", "sight": self.walk.see(0)}

    def get_state(self) -> Any:
        return self.walk.get_state()

    def set_state(self, state: Any) -> None:
        self.walk.set_state(state)


class PlainSingleWalk(SingleWalk):
    """Likewise, with observations that are one array."""

    observation_space = SPACE

    def _see(self) -> Any:
        return self.walk.see(0)


class KeyedWalk(ParallelWalk):
    """RLlib's form; who is at an odd place waits."""

    @property
    def observation_spaces(self) -> Any:
        return dict.fromkeys(AGENTS, SPACE)

    action_spaces = dict.fromkeys(AGENTS, Discrete(3))

    def step(self, actions: dict[str, Any]) -> Any:
        obs, rewards, ended, cut, infos = super().step(actions)
        waits = {agent for agent in self.agents[1:] if self.walk.places[AGENTS.index(agent)] % 2}
        ended["__all__"] = not self.agents
        cut["__all__"] = False
        return {agent: seen for agent, seen in obs.items() if agent not in waits}, rewards, ended, cut, infos


class Keyed:
    """`KeyedWalk` without PettingZoo's base class, which would decide what it is."""

    def __init__(self, index: int) -> None:
        self.inner = KeyedWalk(index)
        self.observation_spaces = self.inner.observation_spaces
        self.action_spaces = self.inner.action_spaces

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.inner.reset(seed, options)

    def step(self, actions: Any) -> Any:
        return self.inner.step(actions)

    def get_state(self) -> Any:
        return self.inner.get_state()

    def set_state(self, state: Any) -> None:
        self.inner.set_state(state)


class SlotWalk(MultiAgentEnv):
    name, agents = "slot_walk", AGENTS
    observation_spaces = (SPACE,) * 3
    action_spaces = (Discrete(3),) * 3
    state_space = Box(-np.inf, np.inf, (3,), np.float64)

    def __init__(self, index: int) -> None:
        self.walk = Walk(index)

    def reset(self, slot: Slot, *, seed: int | None = None, options: Any = None) -> Any:
        self.walk.begin(seed)
        for a in range(3):
            slot.write_obs(a, self.walk.see(a))
            slot.alive[a] = slot.acting[a] = True
        return None

    def step(self, slot: Slot) -> Any:
        actions, left = slot.read_actions(), list(self.walk.left)
        rewards, ended, cut = self.walk.move({a: int(actions[a]) for a in left})
        for a in left:
            slot.write_obs(a, self.walk.see(a))
            slot.reward[a], slot.terminated[a], slot.truncated[a] = rewards[a], ended[a], cut[a]
            slot.alive[a] = slot.acting[a] = a in self.walk.left
        slot.done = not self.walk.left
        return None

    def write_state(self, slot: Slot) -> None:
        slot.write_state(self.walk.places.astype(np.float64))

    def get_state(self) -> Any:
        return self.walk.get_state()

    def set_state(self, state: Any) -> None:
        self.walk.set_state(state)


def wrapped_single(index: int) -> Any:
    return TimeLimit(FrameStackObservation(PlainSingleWalk(index), 3), 5)


def turns(index: int) -> Any:
    return SeedStream(parallel_to_aec(ParallelWalk(index)))


WALKS: dict[str, Callable[[int], Any]] = {
    "parallel": ParallelWalk,
    "single": SingleWalk,
    "single in wrappers": wrapped_single,
    "turns": turns,
    "keyed": Keyed,
    "slot": SlotWalk,
}
"""Each offers its state, or is in wrappers round an env that does."""


def walks(kind: str, n: int) -> list[Callable[[], Any]]:
    return [partial(WALKS[kind], i) for i in range(n)]


Factories = list[Callable[[], Any]]


def waits(t: int, a: int) -> bool:
    return (t + a) % 3 == 0


SCRIPTED: dict[str, Callable[..., Any]] = {
    "parallel": partial(ScriptedParallelEnv, state=True),
    "reused buffer": partial(ScriptedParallelEnv, reuse_buffer=True),
    "masked": partial(ScriptedParallelEnv, masked=True),
    "float32": partial(ScriptedParallelEnv, dtype="float32"),
    "turns": partial(TurnEnv, state=True),
    "turns, masked": partial(TurnEnv, masked=True, dead_first=False),
    "turns, reused buffer": partial(TurnEnv, reuse_buffer=True),
    "keyed": partial(KeyedEnv, waits=waits),
    "keyed, no last obs": partial(KeyedEnv, waits=waits, last_obs=False, int_ids=True),
}
"""Agents come and go by scripts drawn anew for each episode: births, deaths, flags and infos of every kind."""

REAL = ("simple_spread", "simple_tag", "pettingzoo/classic/tictactoe")


def build(kind: str, env_index: int, agent_num: int = 3, longest: int = 7) -> Any:
    """One env of a kind."""
    if kind == "single":
        return SingleEnv([3, 1, 5], info_every=2, env_index=env_index)
    return SCRIPTED[kind](agent_num=agent_num, env_index=env_index, longest=longest)


def factories_of(kind: str, n: int, **options: Any) -> Factories:
    """One factory per env: of a kind, or of a registered id."""
    if kind in SCRIPTED or kind == "single":
        return [partial(build, kind, i, **options) for i in range(n)]
    return list(resolve_all(kind, n))


@cache
def recorded(kind: str, n: int, mode: str, seed: int = 0) -> list[Call]:
    """What the reference does on such envs in three episodes each."""
    return record(factories_of(kind, n), mode, seed=seed)


def sync(kind: str, n: int, mode: str = "same_step", **options: Any) -> SyncVectorEnv:
    return SyncVectorEnv(factories_of(kind, n), autoreset_mode=mode, **options)


def asynchronous(kind: str, n: int, mode: str = "same_step", **options: Any) -> AsyncVectorEnv:
    return AsyncVectorEnv(factories_of(kind, n), autoreset_mode=mode, **options)


def vectorize(backend: str, factories: Factories, **options: Any) -> VectorEnv:
    """On the sync backend, or in two workers (one, if there is one env): threads, or processes that share memory, or a
    file.
    """
    if backend == "sync":
        return SyncVectorEnv(factories, **options)
    options = {"num_workers": min(2, len(factories))} | options
    if backend == "thread":
        options.pop("context", None)
        return ThreadVectorEnv(factories, **options)
    return AsyncVectorEnv(factories, shared_memory=backend != "file", **options)


BACKENDS = ("sync", "thread", "async")
HERE_AND_AWAY = ("sync", "async")
"""For what a shard does, which is the same code wherever it runs; tests/properties draws all backends."""


def hooked(kind: Callable[..., Any], *args: Any, hooks: dict[str, Callable[..., Any]], **options: Any) -> Any:
    """Build an env whose calls go through functions of a test.

    Args:
        kind: Builds the env.
        args: Its arguments.
        hooks: By name of a call, a function of the env, its own call and the call's arguments; "init": of the env.
        options: More arguments.
    """
    env = kind(*args, **options)
    for name, hook in hooks.items():
        if name == "init":
            hook(env)
        else:
            setattr(env, name, partial(hook, env, getattr(env, name)))
    return env


def acts(envs: VectorEnv, k: int = 1) -> Any:
    """The same action for every agent of every env."""
    return np.full((envs.num_envs, envs.agent_num), k, np.int64)


def together(agent_num: int, *lengths: int) -> list[Script]:
    """Scripts of these lengths in which everyone lives all the time."""
    return [Script.together(agent_num, length) for length in lengths]


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
