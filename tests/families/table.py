"""Every env that `marlvec.make` knows from the start, how to make its episodes short, and what is odd about it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pettingzoo.utils import BaseParallelWrapper

from marlvec.envs.builtin_ids import catalog

with warnings.catch_warnings():
    # Its wrapper code warns on import of how SWIG makes types, and where that is an error, the process crashes.
    warnings.simplefilter("ignore", DeprecationWarning)
    import Box2D  # noqa: F401

__all__ = ["ROWS", "Row"]

RENDERS_IN_RESET = "You are calling render method without specifying any render mode"
FLOAT64_BOUNDS = "Box (low|high)'s precision lowered by casting to float32"


class LeavesWhenTruncated(BaseParallelWrapper):
    """PettingZoo's Atari truncates its agents and goes on listing them as live."""

    @property
    def agents(self) -> list[str]:
        return [agent for agent in self.env.agents if agent not in self._cut]

    @agents.setter
    def agents(self, agents: list[str]) -> None:
        """`BaseParallelWrapper` sets them; the env inside knows them."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._cut: set[str] = set()
        return super().reset(seed=seed, options=options)

    def step(self, actions: dict[str, Any]) -> Any:
        result = super().step(actions)
        self._cut |= {agent for agent, truncated in result[3].items() if truncated}
        return result


class WithoutState(BaseParallelWrapper):
    """PettingZoo's multiwalker raises in state() once a walker has fallen and left."""

    state_space = None


@dataclass(frozen=True)
class Row:
    """One env.

    Attributes:
        env: Its id.
        kwargs: For the env.
        label: What tells several rows of one env apart.
        warns: What it prints by itself: a pattern, None for nothing.
        plainly: What a plain loop over this env has to be told, and why stands there.
    """

    env: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    label: str = ""
    warns: str | None = None
    plainly: Callable[[Any], Any] | None = None

    @property
    def name(self) -> str:
        """For the test's name."""
        return f"{self.env}-{self.label}" if self.label else self.env


_SHORT: dict[str, dict[str, Any]] = {
    "pettingzoo/classic/go_v5": {"board_size": 5},
    "pettingzoo/butterfly/cooperative_pong_v6": {"max_cycles": 20},
    "pettingzoo/butterfly/knights_archers_zombies_v11": {"line_death": True},  # so that some die before the others
    "pettingzoo/butterfly/pistonball_v6": {"max_cycles": 15, "n_pistons": 5},
    "pettingzoo/sisl/multiwalker_v9": {"max_cycles": 40},
    "pettingzoo/sisl/pursuit_v5": {"max_cycles": 30},
}
_WARNS = {
    "pettingzoo/butterfly/cooperative_pong_v6": RENDERS_IN_RESET,  # its reset() draws the screen by render()
    "pettingzoo/classic/texas_holdem_no_limit_v6": FLOAT64_BOUNDS,  # the bounds of its observation space
}
_GYMNASIUM: dict[str, dict[str, Any]] = {
    "Acrobot": {"max_episode_steps": 40},
    "BipedalWalker": {"max_episode_steps": 60},
    "Blackjack": {},
    "CarRacing": {"max_episode_steps": 15},
    "CartPole": {},
    "CliffWalking": {"max_episode_steps": 40},
    "FrozenLake": {},
    "FrozenLake8x8": {},
    "LunarLander": {"max_episode_steps": 200},
    "LunarLanderContinuous": {"max_episode_steps": 60},
    "MountainCar": {"max_episode_steps": 40},
    "MountainCarContinuous": {"max_episode_steps": 40},
    "Pendulum": {"max_episode_steps": 40},
    "Taxi": {"max_episode_steps": 40},
}


def _atari(env: str, label: str = "", **kwargs: Any) -> Row:
    return Row(env, {"obs_type": "ram", "max_cycles": 25, **kwargs}, label, plainly=LeavesWhenTruncated)


def _rows() -> Iterator[Row]:
    for entry in catalog():
        if entry.family == "atari":
            yield _atari(entry.id)
        elif entry.family != "cards":  # ours, with no env of PettingZoo's under them
            yield Row(entry.id, _SHORT.get(entry.id, {}), warns=_WARNS.get(entry.id))
    yield Row("mpe/simple_world_comm_v3", {"continuous_actions": True}, "continuous")
    yield Row("pettingzoo/butterfly/pistonball_v6", {"max_cycles": 15, "n_pistons": 5, "continuous": False}, "discrete")
    falling = {"terminate_on_fall": False, "max_cycles": 120}
    yield Row("pettingzoo/sisl/multiwalker_v9", falling, "one by one", plainly=WithoutState)
    yield _atari("pettingzoo/atari/pong_v3", "in colour", obs_type="rgb_image")
    yield _atari("pettingzoo/atari/quadrapong_v4", "in grey", obs_type="grayscale_image")
    for name, kwargs in _GYMNASIUM.items():
        yield Row(f"gymnasium/{name}", kwargs)


ROWS = tuple(_rows())
