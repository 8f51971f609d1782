"""One game behind four kinds of API that at times returns what it must not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, Space, Tuple
from pettingzoo import AECEnv, ParallelEnv

__all__ = ["FORMS", "OBS_SPACE", "Game", "Spoil", "good_obs"]

AGENTS = ("ann", "bob")
LENGTH = 3
OBS_SPACE = Dict(
    {
        "grid": Box(-1, 1, (2, 3), np.float32),
        "kind": Discrete(4),
        "pair": Tuple([Box(-9, 9, (), np.float64), MultiBinary(3)]),
    }
)


class Spoil(NamedTuple):
    """What the last agent gets in step 2 in the place of something good.

    Attributes:
        place: ``"obs"`` or a leaf of it, ``"reward"``, ``"terminated"``, ``"truncated"``, ``"info"``, or ``"result"``:
            all that the step returns.
        value: What.
        words: What is said of it, as a pattern.
    """

    place: str
    value: Any
    words: str


def good_obs(t: int, a: int) -> dict[str, Any]:
    """What agent ``a`` sees at time ``t``; all of it differs from step to step and agent to agent."""
    return {
        "grid": np.arange(6, dtype=np.float32).reshape(2, 3) / 10 + np.float32(t / 100 - a / 4),
        "kind": (t + a) % 4,
        "pair": (t - a / 2, np.array([t % 2, a, 1], np.int8)),
    }


class Game:
    """The clock, and what is spoilt.

    Args:
        spoils: All there are; ``options={"spoil": k}`` of a reset chooses one.
        faulty: Whether this env spoils anything.
    """

    def __init__(self, spoils: list[Spoil], faulty: bool, agents: tuple[str, ...]) -> None:
        self._spoils, self._faulty, self.agents = spoils, faulty, agents
        self.t = 0
        self.spoil: Spoil | None = None

    def begin(self, options: dict[str, Any] | None) -> None:
        self.t = 0
        self.spoil = self._spoils[options["spoil"]] if options and self._faulty else None

    def over(self) -> bool:
        return self.t == LENGTH

    def unless_spoilt(self, place: str, agent: str, good: Any) -> Any:
        spoil = self.spoil
        spoils = spoil is not None and (spoil.place, self.t, agent) == (place, 2, self.agents[-1])
        return spoil.value if spoil is not None and spoils else good

    def observe(self, agent: str) -> Any:
        obs = good_obs(self.t, self.agents.index(agent))
        for key in obs:
            obs[key] = self.unless_spoilt(key, agent, obs[key])
        return self.unless_spoilt("obs", agent, obs)

    def tables(self, who: tuple[str, ...]) -> tuple[dict[str, Any], ...]:
        """Observations, rewards, terminations, truncations and infos of these agents."""
        over = self.over()
        goods = {"reward": lambda: 1.0, "terminated": lambda: False, "truncated": lambda: over, "info": dict}
        return (
            {agent: self.observe(agent) for agent in who},
            *({agent: self.unless_spoilt(place, agent, good()) for agent in who} for place, good in goods.items()),
        )


class Parallel(ParallelEnv):  # type: ignore[misc]  # pettingzoo has no type information
    metadata = {"name": "spoilt", "render_modes": []}
    render_mode = None

    def __init__(self, spoils: list[Spoil], faulty: bool) -> None:
        self.possible_agents, self.agents = list(AGENTS), []
        self.game = Game(spoils, faulty, AGENTS)

    def observation_space(self, agent: str) -> Space[Any]:
        return OBS_SPACE

    def action_space(self, agent: str) -> Space[Any]:
        return Discrete(2)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.game.begin(options)
        self.agents = list(AGENTS)
        obs, *_, infos = self.game.tables(AGENTS)
        return obs, infos

    def step(self, actions: dict[str, Any]) -> Any:
        self.game.t += 1
        self.agents = [] if self.game.over() else self.agents
        return self.game.unless_spoilt("result", AGENTS[-1], self.game.tables(AGENTS))


class Keyed:
    """RLlib style."""

    def __init__(self, spoils: list[Spoil], faulty: bool) -> None:
        self.possible_agents = list(AGENTS)
        self.observation_spaces = dict.fromkeys(AGENTS, OBS_SPACE)
        self.action_spaces = dict.fromkeys(AGENTS, Discrete(2))
        self.game = Game(spoils, faulty, AGENTS)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.game.begin(options)
        obs, *_, infos = self.game.tables(AGENTS)
        return obs, infos

    def step(self, actions: dict[str, Any]) -> Any:
        self.game.t += 1
        obs, rewards, ended, cut, infos = self.game.tables(AGENTS)
        flags = ended | {"__all__": False}, cut | {"__all__": self.game.over()}
        return self.game.unless_spoilt("result", AGENTS[-1], (obs, rewards, *flags, infos))


class Single(gymnasium.Env[Any, Any]):
    observation_space = OBS_SPACE
    action_space = Discrete(2)

    def __init__(self, spoils: list[Spoil], faulty: bool) -> None:
        self.game = Game(spoils, faulty, ("agent_0",))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.game.begin(options)
        return self.game.observe("agent_0"), {}

    def step(self, action: Any) -> Any:
        self.game.t += 1
        values = tuple(table["agent_0"] for table in self.game.tables(("agent_0",)))
        return self.game.unless_spoilt("result", "agent_0", values)


class Turns(AECEnv):  # type: ignore[misc]  # pettingzoo has no type information
    """Both move in turn; time is counted in moves. After the second one, ``bob`` has moved and ``ann`` is next."""

    metadata = {"name": "spoilt", "render_modes": []}
    render_mode = None

    def __init__(self, spoils: list[Spoil], faulty: bool) -> None:
        super().__init__()
        self.possible_agents = list(AGENTS)
        # Whoever is next observes: after the second move that is the agent that is spoilt.
        self.game = Game(spoils, faulty, ("bob", "ann"))

    def observation_space(self, agent: str) -> Space[Any]:
        return OBS_SPACE

    def action_space(self, agent: str) -> Space[Any]:
        return Discrete(2)

    def observe(self, agent: str) -> Any:
        return self.game.observe(agent)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        self.game.begin(options)
        self.agents = list(AGENTS)
        self._tell()
        self.agent_selection = AGENTS[0]

    def step(self, action: Any) -> None:
        if action is None:  # the turn of one whose time is up
            self.agents.remove(self.agent_selection)
            self.rewards = dict.fromkeys(self.agents, 0.0)
            self.agent_selection = self.agents[0] if self.agents else self.agent_selection
            return
        self.game.t += 1
        self._tell()
        self.agent_selection = AGENTS[self.game.t % 2]

    def _tell(self) -> None:
        _, rewards, self.terminations, self.truncations, self.infos = self.game.tables(AGENTS)
        self.rewards = rewards


FORMS: dict[str, Callable[[list[Spoil], bool], Any]] = {
    "parallel": Parallel,
    "keyed": Keyed,
    "single": Single,
    "turns": Turns,
}
