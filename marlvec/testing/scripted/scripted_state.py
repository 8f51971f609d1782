"""`ScriptedState`: clock, checksums and random stream of a scripted env; `Shell`: base of scripted envs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Space
from numpy.typing import DTypeLike, NDArray

from marlvec.testing.scripted.script import Script, ScriptLike, draw_script, script_at
from marlvec.testing.scripted.stamp import (
    ALIVE_CHECKSUM,
    WIDTH,
    Stamp,
    next_checksum,
    reward_of,
    stamp_row,
    stamp_space,
)

__all__ = ["AgentStep", "ScriptedState", "Shell", "ZooShell", "count_incarnation", "old_flags"]


class AgentStep(NamedTuple):
    """Result of a step for one agent."""

    place: int  # on the agent axis
    reward: float
    terminated: bool
    truncated: bool
    alive: bool  # it stays alive
    joins: bool  # it enters now


def count_incarnation(marks: str | Path, env_index: int) -> int:
    """Count the envs built at one index, over all processes: each leaves a file in the folder ``marks``."""
    folder = Path(marks)
    incarnation = 0
    while True:
        try:
            (folder / f"env{env_index}-{incarnation}").touch(exist_ok=False)
        except FileExistsError:
            incarnation += 1
        else:
            return incarnation


class ScriptedState:
    """Clock, checksums, random stream and buffers of one scripted env.

    Args:
        agent_num: Number of agents.
        script: The episodes; None draws one per episode from the env's random stream.
        longest: Longest episode to draw.
        env_index: Index of the env.
        marks: Folder for counting incarnations; None: always incarnation 0.
        dtype: Dtype of the observations.
        reuse_buffer: Whether all observations share one buffer, and all infos one dict, overwritten at each step.
        masked: Whether observations come with an action mask.
        action_space: Action space of every agent; None: ``Discrete(5)``.
    """

    def __init__(
        self,
        agent_num: int,
        script: ScriptLike | None,
        *,
        longest: int = 8,
        env_index: int = 0,
        marks: str | Path | None = None,
        dtype: DTypeLike = np.float64,
        reuse_buffer: bool = False,
        masked: bool = False,
        action_space: Space[Any] | None = None,
    ) -> None:
        self.agent_num = agent_num
        self.env_index = env_index
        self.incarnation = 0 if marks is None else count_incarnation(marks, env_index)
        self.masked = masked
        self.action_space: Space[Any] = Discrete(5) if action_space is None else action_space
        if masked and not isinstance(self.action_space, Discrete):
            raise ValueError(f"masks are for Discrete actions, got {self.action_space}")
        self.observation_space = self._observation_space(dtype)
        self.state_space = Box(0.0, np.inf, (agent_num + 4,), np.float64)
        self.episode, self.t = -1, 0
        self.script = Script.together(agent_num, 1)
        self._scripts, self._longest = script, longest
        self._dtype = np.dtype(dtype)
        self._rng = np.random.default_rng([env_index, self.incarnation])
        self._drawn = 0
        self._checksums = [ALIVE_CHECKSUM] * agent_num
        self._buffer = np.zeros((agent_num, WIDTH), self._dtype) if reuse_buffer else None
        self._info_buffers: dict[int, dict[str, Any]] = {}

    def _observation_space(self, dtype: DTypeLike) -> Space[Any]:
        space = stamp_space(dtype)
        if not isinstance(self.action_space, Discrete) or not self.masked:
            return space
        mask = Box(0, 1, (int(self.action_space.n),), np.int8)
        return Dict({"observation": space, "action_mask": mask})

    def reset(self, seed: int | None) -> None:
        """Begin an episode."""
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        self.episode += 1
        self.t = 0
        self._drawn = int(self._rng.integers(65_536))
        self._checksums = [ALIVE_CHECKSUM] * self.agent_num
        if self._scripts is None:
            self.script = draw_script(self._rng, self.agent_num, self._longest)
        else:
            self.script = script_at(self._scripts, self.episode)
        if len(self.script.births) != self.agent_num:
            raise ValueError(f"the script is for {len(self.script.births)} agents, the env has {self.agent_num}")

    def act(self, actions: Mapping[int, Any]) -> None:
        """Take one step with actions of these agents; `ValueError`: one is not in the action space, or is masked."""
        for a, action in actions.items():
            if not self.action_space.contains(action):
                raise ValueError(f"action {action!r} of agent {a} is not in {self.action_space}")
            if self.masked and not self.mask(a)[int(action)]:
                raise ValueError(f"action {action!r} of agent {a} in step {self.t} is masked: {self.mask(a)}")
        self.t += 1
        for a, action in actions.items():
            self._checksums[a] = next_checksum(self._checksums[a], action)

    def advance(self, actions: Mapping[int, Any]) -> list[AgentStep]:
        """Take one step as `act`; return one entry for each agent in the episode before or after it."""
        before = self.script.alive(self.t)
        self.act(actions)
        script, t = self.script, self.t
        joins = [birth == t for birth in script.births]
        flags = zip(script.terminated(t), script.truncated(t), script.alive(t), joins, strict=True)
        return [
            AgentStep(a, self.reward(a, actions.get(a, 0)), *each)
            for a, each in enumerate(flags)
            if before[a] or joins[a]
        ]

    def observe(self, a: int) -> NDArray[Any]:
        """Return the stamped observation of one agent."""
        stamp = Stamp(self.env_index, self.incarnation, self.episode, self.t, a)
        out = np.empty(WIDTH, self._dtype) if self._buffer is None else self._buffer[a]
        return stamp_row(stamp, self._checksums[a], self._drawn, out)

    def observe_masked(self, a: int, *, acting: bool = True) -> Any:
        """Return the observation of one agent, with its mask if the env has masks (zeros for a waiting agent)."""
        row = self.observe(a)
        if not self.masked:
            return row
        return {"observation": row, "action_mask": self.mask(a) if acting else np.zeros_like(self.mask(a))}

    def mask(self, a: int) -> NDArray[np.int8]:
        """Return the actions that one agent may take now; varies by step, never all zeros."""
        assert isinstance(self.action_space, Discrete)
        return np.array([(self.t + a + k) % 3 != 0 for k in range(int(self.action_space.n))], np.int8)

    def reward(self, a: int, action: Any) -> float:
        """Return the reward of one agent for the step just taken."""
        return reward_of(self.episode, self.t, a, action)

    def info(self, a: int) -> dict[str, Any]:
        """Return the info of one agent; with reused buffers, always the same dict and arrays."""
        info = self.script.infos.get((self.t, a), {})
        if self._buffer is None:
            return {key: value.copy() if isinstance(value, np.ndarray) else value for key, value in info.items()}
        shared = self._info_buffers.setdefault(a, {})
        old = shared.get("marks")
        shared.clear()
        shared.update(info)
        if isinstance(old, np.ndarray) and isinstance(info.get("marks"), np.ndarray):
            old[...] = info["marks"]
            shared["marks"] = old
        elif isinstance(info.get("marks"), np.ndarray):
            shared["marks"] = info["marks"].copy()
        return shared

    def state(self) -> NDArray[np.float64]:
        """Return the global state, shape ``(agent_num + 4,)``: env, incarnation, episode, t, each agent's checksum."""
        return np.array([self.env_index, self.incarnation, self.episode, self.t, *self._checksums], np.float64)


class Shell:
    """A scripted env of several agents.

    Attributes:
        possible_agents: Name of each agent, by its place on the agent axis.
        closed: Whether it was closed.
    """

    world: ScriptedState  # clock, script and numbers of the episode
    possible_agents: list[Any]
    closed = False
    _common_key = "common"

    def close(self) -> None:
        """Record that the env was closed."""
        self.closed = True

    def _begin(self, seed: int | None) -> dict[Any, Any]:
        """Begin an episode; return the first observations."""
        self.world.reset(seed)
        alive = self.world.script.alive(0)
        return {agent: self.world.observe_masked(a) for a, agent in enumerate(self.possible_agents) if alive[a]}

    def _advance(self, actions: Mapping[Any, Any], acting: Sequence[Any]) -> dict[Any, AgentStep]:
        """Take one step with the actions of exactly these agents; return the results by agent."""
        if actions.keys() != set(acting):
            raise ValueError(f"expected actions of {acting}, got {list(actions)}")
        steps = self.world.advance({self._place(agent): action for agent, action in actions.items()})
        return {self.possible_agents[step.place]: step for step in steps}

    def _place(self, agent: Any) -> int:
        return self.possible_agents.index(agent)

    def _infos(self, agents: Sequence[Any]) -> dict[Any, dict[str, Any]]:
        infos = {agent: self.world.info(self._place(agent)) for agent in agents}
        shared = self.world.script.common.get(self.world.t)
        return {**infos, self._common_key: shared} if shared else infos


class ZooShell(Shell):
    """A scripted PettingZoo env."""

    def observation_space(self, agent: str) -> Space[Any]:
        """Space of every agent's observations."""
        return self.world.observation_space

    def action_space(self, agent: str) -> Space[Any]:
        """Space of every agent's actions."""
        return self.world.action_space

    def state(self) -> Any:
        """Global state."""
        return self.world.state()

    def render(self) -> None:
        """Show nothing."""


def old_flags(
    terminated: Mapping[Any, bool], truncated: Mapping[Any, bool], infos: Mapping[Any, Any]
) -> tuple[dict[Any, bool], dict[Any, Any]]:
    """Merge terminated and truncated as before 2022; truncated agents are marked in the infos."""
    dones = {agent: ended or truncated[agent] for agent, ended in terminated.items()}
    cut = {agent: {**infos.get(agent, {}), "TimeLimit.truncated": True} for agent, flag in truncated.items() if flag}
    return dones, {**infos, **cut}
