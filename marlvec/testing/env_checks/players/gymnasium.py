"""Checks Gymnasium envs."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Tuple

from marlvec.envs.adapters.base import Adapter
from marlvec.envs.adapters.gymnasium import AGENT, joint_keys
from marlvec.envs.adapters.return_values import AgentId
from marlvec.testing.env_checks.findings import Findings
from marlvec.testing.env_checks.players.base import RawPlayer
from marlvec.testing.env_checks.report import short
from marlvec.testing.env_checks.values import check_table

__all__ = ["SinglePlayer"]


class SinglePlayer(RawPlayer):
    """Plays a Gymnasium env as the single agent ``"agent_0"``."""

    def __init__(self, adapter: Adapter, max_steps: int, findings: Findings) -> None:
        super().__init__(adapter, max_steps, findings)
        self._seen: Any = None
        self._info: Any = {}
        self._joint = len(joint_keys(self.env.observation_space, self.env.action_space) or ())
        self._form = "tuple" if isinstance(self.env.observation_space, Tuple) else "dict"

    def space_call(self, kind: str, agent: AgentId) -> str:
        return f"{kind}_space"

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> None:
        result = self.ask_reset(seed, options)
        pair = isinstance(result, tuple) and len(result) == 2
        if not pair:
            self.note_old_reset(type(result).__name__)
        self._seen, self._info = result if pair else (result, {})
        with self.place.logging():
            check_table(self._info, self.place, "info", "infos")
        self.observe(AGENT, self._seen)

    def step(self, rng: np.random.Generator) -> None:
        action = self.draw(AGENT, self.allowed(AGENT, self._seen, self._info), rng)
        result = self.check_step(self.ask(self.env.step, action, given="the action"))
        obs, reward, ended, *cut, self._info = result
        with self.place.logging():
            check_table(self._info, self.place, "info", "infos")
        self._seen = obs
        self.observe(AGENT, obs)
        if self._joint and isinstance(reward, (list, tuple, np.ndarray)) and len(reward) == self._joint:
            change = (
                "if each part of the spaces is one agent's, set self.n_agents to their number, or write make(…, "
                f"agents={self._form!r}), and here marlvec.envs.adapt(env, agents={self._form!r})"
            )
            self.place.fault("form", "the reward", "one number, as of an env of one agent", short(reward), change)
        self.note_reward(AGENT, reward)
        self.over = self.ends(AGENT, ended, cut[0] if cut else False)
        if self.over and self.resets_itself:
            self.check_final(AGENT, self._info, {})
