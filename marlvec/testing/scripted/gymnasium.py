"""Scripted Gymnasium envs."""

from __future__ import annotations

from typing import Any

import gymnasium

from marlvec.testing.scripted.script import End, Script
from marlvec.testing.scripted.scripted_state import ScriptedState, old_flags

__all__ = ["SingleEnv"]


class SingleEnv(gymnasium.Env[Any, Any]):
    """A Gymnasium env whose data name their origin.

    Args:
        length: Steps of an episode, or a list of lengths, repeated.
        end: How episodes end.
        info_every: Steps between infos; 0 gives none.
        old_api: Whether ``reset`` returns the observation alone and ``step`` four values, as before 2022.
        options: See `ScriptedState`.

    Raises:
        ValueError: In ``step``: the action is not allowed.
    """

    def __init__(
        self,
        length: int | list[int] = 5,
        *,
        end: End = "terminated",
        info_every: int = 0,
        old_api: bool = False,
        env_index: int = 0,
        **options: Any,
    ) -> None:
        lengths = [length] if isinstance(length, int) else length
        self.world = ScriptedState(1, [Script.together(1, n, end) for n in lengths], env_index=env_index, **options)
        self.metadata = {"name": "single", "render_modes": []}
        self.observation_space = self.world.observation_space
        self.action_space = self.world.action_space
        self.closed = False
        self._info_every, self._old_api = info_every, old_api

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.world.reset(seed)
        obs = self.world.observe_masked(0)
        return obs if self._old_api else (obs, self._info())

    def step(self, action: Any) -> Any:
        world = self.world
        world.act({0: action})
        (ended,), (cut,) = world.script.terminated(world.t), world.script.truncated(world.t)
        obs, reward, info = world.observe_masked(0), world.reward(0, action), self._info()
        if not self._old_api:
            return obs, reward, ended, cut, info
        dones, infos = old_flags({0: ended}, {0: cut}, {0: info})
        return obs, reward, dones[0], infos[0]

    def close(self) -> None:
        """Record that the env was closed."""
        self.closed = True

    def _info(self) -> dict[str, Any]:
        return {"t": self.world.t} if self._info_every and self.world.t % self._info_every == 0 else {}
