"""A small game for two and more, and players of graded strength."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.utils.seeding import np_random
from pettingzoo import AECEnv

from marlvec.connectors import Rows
from marlvec.policies import Policy, ScriptedPolicy


class Nim(AECEnv):  # type: ignore[misc]  # pettingzoo has no type information
    """A pile of stones; whose turn it is takes one, two or three; whoever takes the last one wins.

    The pile is drawn, so that many a game is over before the second player's first move. With three players the
    second in turn after the winner comes last: ranks, not only a winner.

    Args:
        agent_num: Number of players.
        smallest, largest: Of piles.
        draws: Whether games that begin with a multiple of 5 pay nobody.
        raises_in: A file: the first second move of all raises, and makes it; None for no such thing.
    """

    metadata = {"name": "nim", "render_modes": []}

    def __init__(
        self,
        agent_num: int = 2,
        smallest: int = 1,
        largest: int = 14,
        draws: bool = False,
        raises_in: str | None = None,
        render_mode: str | None = None,
    ) -> None:
        super().__init__()
        self.possible_agents = [f"player_{a}" for a in range(agent_num)]
        self._smallest, self._largest, self._draws = smallest, largest, draws
        self._raises_in = raises_in
        self.render_mode = render_mode
        self._obs = Dict({"observation": Box(0, 50, (2,), np.float32), "action_mask": Box(0, 1, (3,), np.int8)})
        self._action = Discrete(3)
        self._rng = np.random.default_rng()

    def observation_space(self, agent: str) -> Any:
        return self._obs

    def action_space(self, agent: str) -> Any:
        return self._action

    def observe(self, agent: str) -> Any:
        mask = (np.arange(3) < self._pile).astype(np.int8)
        return {"observation": np.array([self._pile, self._moves], np.float32), "action_mask": mask}

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        if seed is not None:
            self._rng, _ = np_random(seed)
        self.agents = list(self.possible_agents)
        self._pile = int(self._rng.integers(self._smallest, self._largest + 1))
        self._pays = not (self._draws and self._pile % 5 == 0)
        self._moves = 0
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos: dict[str, Any] = {agent: {} for agent in self.agents}
        self.agent_selection = self.agents[0]

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        if not 0 <= action < min(3, self._pile):
            raise ValueError(f"{agent} takes {action + 1} of {self._pile}")
        if self._raises_in is not None and self._moves and not os.path.exists(self._raises_in):  # noqa: PTH110
            with open(self._raises_in, "w"):  # noqa: PTH123
                raise RuntimeError("once")
        self._cumulative_rewards[agent] = 0.0
        self._clear_rewards()
        self._pile -= int(action) + 1
        self._moves += 1
        place = self.possible_agents.index(agent)
        if self._pile == 0:
            n = len(self.possible_agents)
            for i, name in enumerate(self.possible_agents):
                self.rewards[name] = float(n - 1 - 2 * ((i - place) % n)) * self._pays
                self.terminations[name] = True
        self.agent_selection = self.possible_agents[(place + 1) % len(self.possible_agents)]
        self._accumulate_rewards()


def play(skill: float, obs: Any, agent: int, t: int, memory: Any) -> int:
    """Leaves a multiple of four, with this probability; else takes any number."""
    allowed = int(memory.action_mask.sum())
    best = int(obs[0]) % 4
    if best and memory.rng.random() < skill:
        return best - 1
    return int(memory.rng.integers(allowed))


def player(skill: float) -> ScriptedPolicy:
    """A player who makes the right move with this probability."""
    return ScriptedPolicy(partial(play, skill))


def players(*skills: float) -> dict[str, Policy]:
    return {f"skill {skill}": player(skill) for skill in skills}


class Net(Policy):
    """A table of weights that a test can change, a random stream, and a note of each call.

    Attributes:
        weights: (50, 3) float32, by the size of the pile.
        calls: Per call, the (env, agent, episode) triples it was asked about.
    """

    def __init__(self) -> None:
        self.weights = np.zeros((50, 3), np.float32)
        self.rng = np.random.default_rng(0)
        self.calls: list[list[tuple[int, int, int]]] = []

    def reseed(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def act(self, rows: Rows, *, explore: bool = True) -> Any:
        keys = (rows["env_id"].tolist(), rows["agent_index"].tolist(), rows["eps_id"].tolist())
        self.calls.append(list(zip(*keys, strict=True)))
        said = self.weights[rows["obs"].reshape(len(rows), -1)[:, 0].astype(np.int64) % 50]
        noise = self.rng.gumbel(size=said.shape) if explore else 0.0
        return np.where(rows["action_mask"], said + noise, -np.inf).argmax(axis=1)

    def learn(self, amount: float = 1.0) -> None:
        self.weights += np.float32(amount) * (np.arange(150, dtype=np.float32).reshape(50, 3) % 7)
        self.version += 1

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights.copy(), "rng": self.rng.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.weights = np.array(state["weights"])
        self.rng.bit_generator.state = state["rng"]


def factories(num_envs: int, **options: Any) -> list[Callable[[], Any]]:
    return [partial(Nim, **options) for _ in range(num_envs)]
