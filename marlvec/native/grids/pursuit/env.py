"""Pursuit, exact with PettingZoo's ``sisl/pursuit_v5``: pursuers that are moved, evaders that move at random.

Cells are numbered ``y * x_size + x``; `marlvec.native.grids.pursuit.board` has the map's tables. As in the reference,
pursuers move one after another, and each move rewards all pursuers for the evaders beside them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete

from marlvec.arguments import check_int
from marlvec.envs.making.catalog import pettingzoo_env
from marlvec.errors import ArgumentError, ContractError
from marlvec.native.grids.pursuit.advance import MOST, Rules, advance, begin
from marlvec.native.grids.pursuit.board import make_board, write_state
from marlvec.native.native_env import Ids, NativeEnv, Rows, own_arguments, refuse
from marlvec.native.rng_streams import as_generator

__all__ = ["Pursuit"]

_LARGEST = 2**40  # largest int as a reward: its products are exact in float64
_ENDLESS = 2**62  # steps


class Pursuit(NativeEnv):
    """N envs of pursuit: P pursuers, each of which sees a window of R × R cells, and E evaders."""

    name = "pursuit_v5"
    metadata = {
        "render_modes": ["human", "rgb_array"],
        "name": name,
        "is_parallelizable": True,
        "render_fps": 5,
        "has_manual_policy": True,
    }
    state_names = ("pursuers", "evaders", "gone", "frames")

    def __init__(
        self,
        num_envs: int,
        x_size: int = 16,
        y_size: int = 16,
        max_cycles: int = 500,  # steps after which all pursuers are truncated
        shared_reward: bool | float = True,  # each pursuer gets the mean of all rewards; a number: the mean's share
        n_evaders: int = 30,
        n_pursuers: int = 8,  # 1 to 128
        obs_range: int = 7,
        n_catch: int = 2,  # with surround=False: pursuers in an evader's cell that catch it
        freeze_evaders: bool = False,
        evader_controller: Any = None,  # not supported, nor the pursuers'
        pursuer_controller: Any = None,
        tag_reward: float = 0.01,  # for each evader beside a pursuer, after the move of each pursuer
        catch_reward: float = 5.0,  # for each pursuer that helped to catch
        urgency_reward: float = -0.1,  # for each step
        surround: bool = True,  # evaders are caught by pursuers in all cells beside them
        constraint_window: float = 1.0,  # agents begin in a random window of the map; sides as a fraction of the map's
    ) -> None:
        self._kwargs = own_arguments(locals())
        super().__init__(num_envs)
        for name in ("evader_controller", "pursuer_controller"):
            if self._kwargs[name] is not None:
                raise refuse(self.name, f"{name}=, an object that compiled functions cannot call")
        x_size, y_size = _count("x_size", x_size), _count("y_size", y_size)
        evaders, pursuers = _count("n_evaders", n_evaders), _count("n_pursuers", n_pursuers)
        if pursuers > MOST:
            raise refuse(self.name, f"n_pursuers={pursuers}, more than {MOST}")
        self._range = _count("obs_range", obs_range)
        self._window = _number("constraint_window", constraint_window)
        if not 1 / min(x_size, y_size) <= self._window <= 1:
            raise ArgumentError(
                f"{self.name}: constraint_window: expected a part of each side that has a cell, "
                f"{1 / min(x_size, y_size):.3g} to 1, got {constraint_window!r}"
            )
        self._size = x_size, y_size
        self._rules = Rules(
            _number("tag_reward", tag_reward),
            _number("catch_reward", catch_reward),
            _number("urgency_reward", urgency_reward),
            1.0 - _number("shared_reward", shared_reward),
            min(_count("max_cycles", max_cycles), _ENDLESS),
            max(0, min(check_int("pursuit_v5: n_catch", n_catch), pursuers + 1)),
            bool(surround),
            bool(freeze_evaders),
        )
        self._board = make_board(x_size, y_size, (self._range - 1) // 2)
        self.agents = tuple(f"pursuer_{a}" for a in range(pursuers))
        most = max(pursuers, evaders)
        self.observation_spaces = (Box(0, most, (self._range, self._range, 3), np.float32),) * pursuers
        self.action_spaces = (Discrete(5),) * pursuers
        self.state_space = Box(0, most, (y_size, x_size, 3), np.float32)
        self.pursuers = np.zeros((num_envs, pursuers), np.int32)
        self.evaders = np.zeros((num_envs, evaders), np.int32)  # the last cell if caught
        self.gone = np.zeros((num_envs, evaders), np.bool_)  # caught
        self.frames = np.zeros(num_envs, np.int64)

    def attach(self, rows: Rows) -> None:
        super().attach(rows)
        # Planes of a row lie one after another, so a row of a pursuer's window is contiguous.
        self._view = rows.obs[0][0].reshape(self.num_envs, len(self.agents), self._range, 3 * self._range)
        assert np.shares_memory(self._view, rows.obs[0][0])
        self._state = self.pursuers, self.evaders, self.gone, self.frames, self._view

    def reset(self, ids: Ids) -> None:
        full = begin(ids, self.rng, self._board, self._size, self._window, *self._state)
        if full >= 0:
            raise ContractError(
                f"{self.name}: reset(): env {full}: expected a free cell for each agent, got none: no agent begins "
                f"beside another of its kind (the reference raises, or looks for a cell for ever); take fewer agents "
                f"or a larger map or constraint_window"
            )
        self.set_alive(ids)

    def step(self, ids: Ids) -> None:
        rows = self.rows
        ends = rows.terminated, rows.truncated, rows.alive, rows.acting, rows.done
        advance(ids, self.rng, self._board, self._rules, rows.actions[0][0], *self._state, rows.reward, *ends)

    def write_state(self, ids: Ids) -> None:
        assert self.rows.state is not None
        write_state(ids, self._board, self.pursuers, self.evaders, self.gone, self.rows.state)

    def state_limits(self) -> dict[str, tuple[int, int]]:
        last = self._size[0] * self._size[1] - 1
        return {"pursuers": (0, last), "evaders": (0, last)}

    def reference(self, i: int, render_mode: str | None = None) -> Any:
        env = pettingzoo_env("sisl/pursuit_v5", "parallel", render_mode=render_mode, **self._kwargs)
        env.reset()
        aec = env.unwrapped
        inner = aec.env
        inner.np_random.bit_generator.state = as_generator(self.rng[i]).bit_generator.state
        inner.evaders_gone[:] = self.gone[i]
        inner.evaders[:] = [evader for evader, gone in zip(inner.evaders, self.gone[i], strict=True) if not gone]
        inner.evader_layer.nagents = len(inner.evaders)
        places = [*self.pursuers[i], *self.evaders[i, ~self.gone[i]]]
        for agent, cell in zip([*inner.pursuers, *inner.evaders], places, strict=True):
            y, x = divmod(int(cell), self._size[0])
            agent.set_position(x, y)
        inner.model_state[1] = inner.pursuer_layer.get_state_matrix()
        inner.model_state[2] = inner.evader_layer.get_state_matrix()
        inner.frames = int(self.frames[i])
        aec.steps = inner.frames * len(self.agents)
        return env


def _count(name: str, value: Any) -> int:
    return check_int(f"pursuit_v5: {name}", value, 1)


def _number(name: str, value: Any) -> float:
    """Read a number as a Python float; float32 numbers would give other sums in the reference."""
    if not isinstance(value, (bool, np.bool_, int, float)) or not math.isfinite(value):
        raise ArgumentError(f"pursuit_v5: {name}: expected a finite int or float, got {value!r}")
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise ArgumentError(f"pursuit_v5: {name}: expected at most 2**40, got {value!r}; a float may be larger")
    return float(value)
