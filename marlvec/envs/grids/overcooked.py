"""overcooked-ai's gridworld as a PettingZoo Parallel env, with its two encodings of states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete, Space
from numpy.typing import NDArray
from overcooked_ai_py.mdp.actions import Action, Direction
from overcooked_ai_py.mdp.overcooked_mdp import (
    ObjectState,
    OvercookedGridworld,
    OvercookedState,
    PlayerState,
    Recipe,
    SoupState,
)
from pettingzoo import ParallelEnv

from marlvec.arguments import check_choice
from marlvec.errors import ArgumentError

_KINDS = (None, "onion", "tomato", "dish", "soup")


class OvercookedEnv(ParallelEnv):  # type: ignore[misc]  # Any where PettingZoo has no types
    """Two players cook soups, serve them, and both get the reward of each.

    States, rewards and encodings are those of overcooked-ai's ``OvercookedGridworld``. Its own ``OvercookedEnv`` cannot
    be imported with numpy 2; all that it adds is the horizon.

    Args:
        layout: The name of a layout for two players.
        horizon: Steps after which both players are truncated.
        featurization: ``"lossless"``: 26 layers of the grid; ``"features"``: a vector of features.
        num_pots: Number of pots in the features.
        shaping: Factor of shaped rewards (an ingredient in a pot, a useful dish, a soup on a dish), which are added.
        render_mode: ``"rgb_array"``, or None.
        params: Replace values of the layout, as in ``OvercookedGridworld.from_layout_name``.
    """

    metadata = {"name": "overcooked", "render_modes": ["rgb_array"], "is_parallelizable": True}

    def __init__(
        self,
        layout: str,
        horizon: int = 400,
        featurization: str = "lossless",
        num_pots: int = 2,
        shaping: float = 0.0,
        render_mode: str | None = None,
        **params: Any,
    ) -> None:
        check_choice("featurization", featurization, ("lossless", "features"))
        self.render_mode = render_mode
        self._mdp = OvercookedGridworld.from_layout_name(layout, **params)
        if self._mdp.num_players != 2:
            raise ArgumentError(f"overcooked: layout: expected one with two players, got {self._mdp.num_players}")
        self._horizon, self._shaping, self._num_pots = horizon, shaping, num_pots
        self._planner = _planner(self._mdp) if featurization == "features" else None
        self.possible_agents = ["player_0", "player_1"]
        self.agents: list[str] = []
        if self._planner is None:
            self._space = Box(0, np.inf, tuple(map(int, self._mdp.get_lossless_state_encoding_shape())), np.float32)
        else:
            self._space = Box(-np.inf, np.inf, self._mdp.get_featurize_state_shape(num_pots), np.float32)

    def observation_space(self, agent: str) -> Space[Any]:
        return self._space

    def action_space(self, agent: str) -> Space[Any]:
        """North, south, east, west, stay, interact."""
        return Discrete(6)

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin an episode, in which nothing is random."""
        self._configure()
        self.agents = self.possible_agents[:]
        self.overcooked_state = self._mdp.get_standard_start_state()
        return self._observe(), {agent: {} for agent in self.agents}

    def step(self, actions: Mapping[str, int]) -> tuple[dict[str, Any], ...]:
        self._configure()
        joint = tuple(Action.INDEX_TO_ACTION[int(actions[agent])] for agent in self.agents)
        self.overcooked_state, told = self._mdp.get_state_transition(self.overcooked_state, joint)
        served = sum(told["sparse_reward_by_agent"])
        shaped = zip(self.agents, told["shaped_reward_by_agent"], strict=True)
        rewards = {agent: float(served + self._shaping * part) for agent, part in shaped}
        over = self.overcooked_state.timestep >= self._horizon
        obs, agents = self._observe(), self.agents
        if over:
            self.agents = []
        return obs, rewards, dict.fromkeys(agents, False), dict.fromkeys(agents, over), {agent: {} for agent in agents}

    def render(self) -> NDArray[np.uint8] | None:
        """Draw the kitchen as overcooked-ai draws it, (height, width, 3)."""
        if self.render_mode is None:
            return None
        import pygame
        from overcooked_ai_py.visualization.state_visualizer import StateVisualizer

        self._configure()
        surface = StateVisualizer(is_rendering_hud=False).render_state(self.overcooked_state, self._mdp.terrain_mtx)
        return np.ascontiguousarray(pygame.surfarray.array3d(surface).swapaxes(0, 1))

    def put(
        self,
        places: Sequence[tuple[int, int]],
        facing: Sequence[int],
        objects: Sequence[tuple[tuple[int, int], int, int, int, int]],
        timestep: int,
    ) -> None:
        """Continue from another state, that of the compiled env.

        `places`: (x, y) of players; `facing`: their directions, as actions number them; `objects`: place, kind (onion,
        tomato, dish, soup, from 1), onions, tomatoes and tick of each.
        """
        state = self.overcooked_state
        held: dict[tuple[int, int], Any] = {}
        lying: dict[tuple[int, int], Any] = {}
        for place, kind, onions, tomatoes, tick in objects:
            if _KINDS[kind] == "soup":
                thing = SoupState.get_soup(place, num_onions=onions, num_tomatoes=tomatoes, cooking_tick=tick)
            else:
                thing = ObjectState(_KINDS[kind], place)
            (held if place in places else lying)[place] = thing
        players = [
            PlayerState(place, Direction.INDEX_TO_DIRECTION[faces], held.get(place))
            for place, faces in zip(places, facing, strict=True)
        ]
        orders = {"bonus_orders": self._mdp.start_bonus_orders, "all_orders": [r.to_dict() for r in state.all_orders]}
        self.overcooked_state = OvercookedState(players, lying, timestep=timestep, **orders)

    def _configure(self) -> None:
        """Recipes are settings of a class: those of the layout that was built last, unless they are set again."""
        if Recipe._conf is not self._mdp.recipe_config:
            Recipe.configure(self._mdp.recipe_config)

    def _observe(self) -> dict[str, NDArray[np.float32]]:
        if self._planner is None:
            seen = self._mdp.lossless_state_encoding(self.overcooked_state, self._horizon)
        else:
            seen = self._mdp.featurize_state(self.overcooked_state, self._planner, num_pots=self._num_pots)
        return {agent: one.astype(np.float32) for agent, one in zip(self.possible_agents, seen, strict=True)}


class _Planner:
    """What features need of overcooked-ai's planners, with its defaults: no counter is a place to go to."""

    def __init__(self, mdp: Any) -> None:
        from overcooked_ai_py.planning import planners

        planners.np = _NumpyWithInf()
        self.motion_planner = planners.MotionPlanner(mdp, [])


class _NumpyWithInf:
    """numpy with ``Inf``, which overcooked-ai's planners use, and numpy 2 has no more."""

    Inf = np.inf

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


_planners: dict[str, _Planner] = {}


def _planner(mdp: Any) -> _Planner:
    """The planner of a grid; it takes a second or more to build, and all envs of one layout share it."""
    grid = "\n".join(map("".join, mdp.terrain_mtx))
    if grid not in _planners:
        _planners[grid] = _Planner(mdp)
    return _planners[grid]
