"""Families of envs that others wrote and no extra brings: how to make each, with short episodes.

Every factory imports its library when called, for these are for an environment of their own (`make families`).
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from pettingzoo import AECEnv, ParallelEnv
from pettingzoo.utils.wrappers import BaseWrapper

__all__ = ["EVERY", "ROWS", "AsParallel", "Every", "LinearTurns", "Row", "momaland", "single"]


@dataclass(frozen=True)
class Row:
    """One env.

    Attributes:
        package: What must be installed.
        name: For the test's name.
        factory: Makes the env as `marlvec.make` gets it.
        kwargs: For `marlvec.make`.
        plainly: What a plain loop over this env needs round it.
        num_envs: So many.
        is_long: Whether it takes seconds, and is left to `make families ARGS="-m soak"`.
    """

    package: str
    name: str
    factory: Callable[[], Any]
    kwargs: dict[str, Any] = field(default_factory=dict)
    plainly: Callable[[Any], Any] | None = None
    num_envs: int = 2
    is_long: bool = False


@dataclass(frozen=True)
class Every:
    """All envs that a package registers.

    Attributes:
        package: Its name.
        one: Some env of it, for a start.
        wrappers: What goes round each.
        not_these: Those that do not run by themselves, or do not repeat themselves: a pattern.
    """

    package: str
    one: str
    wrappers: tuple[Callable[[Any], Any], ...]
    not_these: str


class WithoutDrawnInfo(gymnasium.Wrapper[Any, Any, Any, Any]):
    """highway-env says at a reset what an action would bring that it draws from a space which nobody has seeded."""

    def reset(self, **kwargs: Any) -> Any:
        obs, info = self.env.reset(**kwargs)
        return obs, {key: value for key, value in info.items() if key not in ("action", "rewards")}


class AsParallel(ParallelEnv[str, Any, Any]):
    """A Gymnasium env of several agents, taken apart by hand: rewards and flags are one for all, or one for each."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.possible_agents = [f"agent_{k}" for k in range(len(env.action_space.spaces))]

    def observation_space(self, agent: str) -> Any:
        return self.env.observation_space.spaces[self.possible_agents.index(agent)]

    def action_space(self, agent: str) -> Any:
        return self.env.action_space.spaces[self.possible_agents.index(agent)]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        obs, info = self.env.reset(seed=seed, options=options)
        self.agents = self.possible_agents[:]
        return self._named(obs), {"__common__": info}

    def step(self, actions: dict[str, Any]) -> Any:
        obs, *rest, info = self.env.step(tuple(int(actions.get(agent, 0)) for agent in self.possible_agents))
        rewards, terminated, truncated = (self._named(value) for value in rest)
        live = self.agents
        self.agents = [agent for agent in live if not (terminated[agent] or truncated[agent])]
        said = (
            {agent: values[agent] for agent in live} for values in (self._named(obs), rewards, terminated, truncated)
        )
        return (*said, {"__common__": info})

    def close(self) -> None:
        self.env.close()

    def _named(self, value: Any) -> dict[str, Any]:
        each = value if isinstance(value, tuple) else (value,) * len(self.possible_agents)
        return dict(zip(self.possible_agents, each, strict=True))


class LinearTurns(BaseWrapper[str, Any, Any]):
    """One number of momaland's rewards, agent by agent, for envs with turns.

    Its own wrapper of this name (``aec_wrappers.LinearizeReward``) needs a Gymnasium before 1.0, and alters ``last()``
    alone.
    """

    def __init__(self, env: AECEnv[str, Any, Any], weights: dict[str, Any]) -> None:
        super().__init__(env)
        self.weights = weights

    @property
    def rewards(self) -> dict[str, float]:  # type: ignore[override]  # theirs is an attribute
        return {agent: float(np.dot(reward, self.weights[agent])) for agent, reward in self.env.rewards.items()}


def single(package: str, env_id: str, *wrappers: Callable[[Any], Any], **kwargs: Any) -> Any:
    """A registered Gymnasium env."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what the package uses
        module = importlib.import_module(package)
        if package in ("gymnasium_robotics", "highway_env"):
            gymnasium.register_envs(module)
        env = gymnasium.make(env_id, disable_env_checker=True, **kwargs)
    for wrapper in wrappers:
        env = wrapper(env)
    return env


def linear(env: Any) -> Any:
    """mo-gymnasium's own way to one number, with weights that differ."""
    wrappers = importlib.import_module("mo_gymnasium.wrappers")
    return wrappers.LinearReward(env, weight=np.linspace(1, 2, env.unwrapped.reward_space.shape[0]))


def momaland(name: str, kind: str, *, one_number: bool = True, **kwargs: Any) -> Any:
    """One of momaland's envs, its rewards made one number."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        env = getattr(importlib.import_module(f"momaland.envs.{name}"), kind)(**kwargs)
        weights = {
            agent: np.linspace(1, 2, env.unwrapped.reward_space(agent).shape[0]) for agent in env.possible_agents
        }
        if not one_number:
            return env
        if kind == "env":
            return LinearTurns(env, weights)
        return importlib.import_module("momaland.utils.parallel_wrappers").LinearizeReward(env, weights)


def magent(name: str, kind: str = "parallel_env", **kwargs: Any) -> Any:
    """One of magent2's envs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(importlib.import_module(f"magent2.environments.{name}"), kind)(**kwargs)


def mamujoco(scenario: str, agents: str | None) -> Any:
    """One of MaMuJoCo's envs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module("gymnasium_robotics").mamujoco_v1
        return module.parallel_env(scenario, agents, max_episode_steps=20)


MINIGRID = ("Empty-5x5", "DoorKey-6x6", "FourRooms", "LavaCrossingS9N1", "Fetch-5x5-N2")
BABYAI = ("GoToRedBallNoDists", "PickupLoc")
HIGHWAY = {
    "highway-fast-v0": {"vehicles_count": 5, "duration": 6},
    "parking-v0": {"duration": 8},
    "racetrack-v0": {"duration": 2},
}
OBJECTIVES = ("deep-sea-treasure-v0", "resource-gathering-v0", "four-room-v0", "mo-mountaincar-v0", "minecart-v0")
MAMUJOCO = (
    ("Ant", "4x2"),
    ("HalfCheetah", "2x3"),
    ("Hopper", "3x1"),
    ("Humanoid", "9|8"),
    ("ManySegmentSwimmer", "4x1"),
)
MORE_MAMUJOCO = (("Ant", "2x4"), ("HalfCheetah", "6x1"), ("HumanoidStandup", "9|8"), ("Reacher", "2x1"))
MORE_MAMUJOCO += (("Swimmer", "2x1"), ("Walker2d", "2x3"), ("ManySegmentAnt", "2x3"))
MAGENT = {
    "adversarial_pursuit_v4": {"map_size": 18},
    "battle_v4": {"map_size": 18},
    "battlefield_v5": {"map_size": 46},
    "combined_arms_v6": {"map_size": 18},
    "tiger_deer_v4": {"map_size": 18},
}
# Module, what makes it, kwargs, envs: one where they draw from the generators that all of a process share.
MOMALAND: tuple[tuple[str, str, dict[str, Any], int], ...] = (
    ("beach.mobeach_v0", "parallel_env", {"num_timesteps": 5, "num_agents": 10}, 1),
    ("crazyrl.catch.catch_v0", "parallel_env", {}, 2),
    ("crazyrl.escort.escort_v0", "parallel_env", {}, 2),
    ("crazyrl.surround.surround_v0", "parallel_env", {}, 2),
    ("item_gathering.moitem_gathering_v0", "parallel_env", {"num_timesteps": 12}, 1),
    ("multiwalker_stability.momultiwalker_stability_v0", "parallel_env", {"max_cycles": 20}, 2),
    ("pistonball.mopistonball_v0", "parallel_env", {"max_cycles": 5, "n_pistons": 5}, 2),
    ("breakthrough.mobreakthrough_v0", "env", {"board_width": 5, "board_height": 5}, 2),
    ("connect4.moconnect4_v0", "env", {"board_width": 5, "board_height": 4}, 2),
    ("ingenious.moingenious_v0", "env", {"board_size": 3}, 1),
    ("samegame.mosame_game_v0", "env", {"board_width": 4, "board_height": 4, "num_colors": 3}, 2),
)


def _rows() -> Iterator[Row]:
    for name in (*(f"MiniGrid-{name}-v0" for name in MINIGRID), *(f"BabyAI-{name}-v0" for name in BABYAI)):
        yield Row("minigrid", name, partial(single, "minigrid", name, max_episode_steps=30))
    for name, config in HIGHWAY.items():
        factory = partial(single, "highway_env", name, WithoutDrawnInfo, config=config, max_episode_steps=8)
        yield Row("highway_env", name, factory)
    name = "intersection-multi-agent-v0"
    factory = partial(single, "highway_env", name, WithoutDrawnInfo, config={"duration": 4, "initial_vehicle_count": 2})
    yield Row("highway_env", name, factory, {"agents": "tuple"}, AsParallel)
    for name in OBJECTIVES:
        yield Row("mo_gymnasium", name, partial(single, "mo_gymnasium", name, linear, max_episode_steps=30))
    for name, kind, kwargs, num_envs in MOMALAND:
        yield Row("momaland", name.split(".")[-1], partial(momaland, name, kind, **kwargs), num_envs=num_envs)
    for name, kwargs in MAGENT.items():
        yield Row("magent2", name, partial(magent, name, max_cycles=15, **kwargs))
    yield Row("magent2", "gather_v5", partial(magent, "gather_v5", max_cycles=8), is_long=True)
    turns = partial(magent, "adversarial_pursuit_v4", "env", max_cycles=4, map_size=10)
    yield Row("magent2", "adversarial_pursuit_v4 with turns", turns)
    for scenario, agents in (*MAMUJOCO, *MORE_MAMUJOCO):
        is_long = (scenario, agents) in MORE_MAMUJOCO
        # These write the file of their robot into their package, and remove it: two that are built at once disagree.
        num_envs = 1 if scenario.startswith("ManySegment") else 2
        factory = partial(mamujoco, scenario, agents)
        yield Row("gymnasium_robotics", f"MaMuJoCo {scenario} {agents}", factory, num_envs=num_envs, is_long=is_long)


ROWS = tuple(_rows())

# Files that are not in the wheel; what mujoco 4.0 no longer does, and what mujoco_py did; pictures that two envs draw
# differently, and a package that pip does not bring.
EVERY = (
    Every("minigrid", "MiniGrid-Empty-5x5-v0", (), r"MiniGrid-WFC-.*"),
    Every("mo_gymnasium", "four-room-v0", (linear, WithoutDrawnInfo), r"minecart-rgb-v0|mo-supermario-v0"),
    Every(
        "gymnasium_robotics",
        "PointMaze_UMaze-v3",
        (),
        r"(Fetch|Hand|FrankaKitchen).*|[A-Za-z0-9]+-v2|[A-Z][A-Za-z0-9]+-v3",
    ),
    Every("highway_env", "parking-v0", (WithoutDrawnInfo,), r"intersection-multi-agent-v[12]"),
)
