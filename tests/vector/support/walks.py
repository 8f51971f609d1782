"""A small game with chance, deaths and masks, which offers its state, as an env of each kind that marlvec knows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Text
from gymnasium.wrappers import FrameStackObservation, TimeLimit
from pettingzoo import ParallelEnv
from pettingzoo.utils import parallel_to_aec

from marlvec.envs import MultiAgentEnv, Slot
from marlvec.envs.wrappers import SeedStream

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
