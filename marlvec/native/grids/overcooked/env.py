"""Overcooked, exact with overcooked-ai's ``OvercookedGridworld`` (`marlvec.envs.grids.overcooked`)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete

from marlvec.arguments import check_choice, check_int
from marlvec.errors import ArgumentError
from marlvec.native.grids.overcooked.advance import Objects, advance
from marlvec.native.grids.overcooked.encode import encode_features, encode_lossless, feature_num
from marlvec.native.grids.overcooked.layout import read_kitchen, read_layout, read_recipes
from marlvec.native.native_env import Ids, NativeEnv, Rows

__all__ = ["Overcooked"]


class Overcooked(NativeEnv):
    """N kitchens of one layout with C cells."""

    name = "overcooked"
    agents = ("player_0", "player_1")
    action_spaces = (Discrete(6),) * 2
    metadata = {"name": name, "render_modes": ["rgb_array"], "is_parallelizable": True}
    state_names = ("cells", "facing", "objects.kind", "objects.onions", "objects.tomatoes", "objects.tick", "steps")

    def __init__(
        self,
        num_envs: int,
        layout: str,  # a two-player layout of overcooked-ai
        horizon: int = 400,  # steps after which both players are truncated
        featurization: str = "lossless",  # or "features"
        num_pots: int = 2,  # in the feature vector
        shaping: float = 0.0,  # factor of shaped rewards, which are added to rewards
        **params: Any,  # replace the layout's recipes, orders and shaped rewards
    ) -> None:
        super().__init__(num_envs)
        self._kwargs = {
            "layout": layout, "horizon": horizon, "featurization": featurization, "num_pots": num_pots,
            "shaping": shaping, **params,
        }  # fmt: skip
        check_choice("featurization", featurization, ("lossless", "features"))
        self._horizon = _count("horizon", horizon)
        if isinstance(shaping, bool) or not isinstance(shaping, (int, float)) or not math.isfinite(shaping):
            raise ArgumentError(f"overcooked: shaping: expected a finite number, got {shaping!r}")
        self._shaping = float(shaping)
        told = read_layout(layout, params)
        self._recipes = read_recipes(told)
        self._kitchen, (width, self._height) = read_kitchen(told, _count("num_pots", num_pots))
        c = len(self._kitchen.terrain)
        self._lossless = featurization == "lossless"
        if self._lossless:
            space = Box(0, np.inf, (width, self._height, 26), np.float32)
        else:
            space = Box(-np.inf, np.inf, (feature_num(num_pots),), np.float32)
        self.observation_spaces = (space,) * 2
        self.cells = np.zeros((num_envs, 2), np.int32)  # x * height + y
        self.facing = np.zeros((num_envs, 2), np.int32)  # numbered like actions
        kind, onions, tomatoes = (np.zeros((num_envs, c + 2), np.int8) for _ in range(3))
        self.objects = Objects(kind, onions, tomatoes, np.full((num_envs, c + 2), -1, np.int32))
        self.steps = np.zeros(num_envs, np.int64)

    def attach(self, rows: Rows) -> None:
        super().attach(rows)
        obs = rows.obs[0][0]
        self._view = obs.reshape(self.num_envs, 2, -1, 26) if self._lossless else obs
        assert np.shares_memory(self._view, obs)

    def reset(self, ids: Ids) -> None:
        self.cells[ids] = self._kitchen.starts
        self.facing[ids] = 0
        self.objects.kind[ids] = self.objects.onions[ids] = self.objects.tomatoes[ids] = 0
        self.objects.tick[ids] = -1
        self.steps[ids] = 0
        self._encode(ids)
        self.set_alive(ids)

    def step(self, ids: Ids) -> None:
        rows = self.rows
        rules = self._kitchen, self._recipes, self._shaping, self._horizon
        state = self.cells, self.facing, self.objects, self.steps
        ends = rows.truncated, rows.alive, rows.acting, rows.done
        advance(ids, *rules, rows.actions[0][0], *state, rows.reward, *ends)
        self._encode(ids)

    def _encode(self, ids: Ids) -> None:
        state = self.cells, self.facing, self.objects
        if self._lossless:
            encode_lossless(ids, self._kitchen, self._recipes, self._horizon, *state, self.steps, self._view)
        else:
            encode_features(ids, self._kitchen, self._recipes, self._height, *state, self._view)

    def state_limits(self) -> dict[str, tuple[int, int]]:
        last = len(self._kitchen.terrain) - 1
        parts = dict.fromkeys(("objects.onions", "objects.tomatoes"), (0, 3))
        return {"cells": (0, last), "facing": (0, 3), "objects.kind": (0, 4), **parts}

    def reference(self, i: int, render_mode: str | None = None) -> Any:
        from marlvec.envs.grids.overcooked import OvercookedEnv  # imports overcooked-ai

        env = OvercookedEnv(**self._kwargs, render_mode=render_mode)
        env.reset()
        at = [divmod(int(cell), self._height) for cell in (*range(len(self._kitchen.terrain)), *self.cells[i])]
        kind, onions, tomatoes, tick = (part[i].tolist() for part in self.objects)
        objects = [(place, kind[k], onions[k], tomatoes[k], tick[k]) for k, place in enumerate(at) if kind[k]]
        env.put([at[-2], at[-1]], self.facing[i].tolist(), objects, int(self.steps[i]))
        return env


def _count(name: str, value: Any) -> int:
    found = check_int(f"overcooked: {name}", value, 1)
    if found >= 2**40:
        raise ArgumentError(f"overcooked: {name}: expected an int below 2**40, got {value!r}")
    return found
