"""Scripts for test envs: which agents enter and end in an episode, and how; their observations and their state."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Space
from numpy.typing import ArrayLike, DTypeLike, NDArray

End = Literal["terminated", "truncated", "both"]


@dataclass(frozen=True)
class Script:
    """One episode, agent by agent.

    Attributes:
        births: Step in which each agent enters; 0 is the reset. None: never.
        deaths: Step in which each agent ends, not before its birth (equal if its first observation is its last).
        ends: How each ends.
        infos: Info of each (t, agent); t = 0 is the reset.
        common: Info of the whole env at each t.
    """

    births: Sequence[int | None]
    deaths: Sequence[int]
    ends: Sequence[End]
    infos: Mapping[tuple[int, int], dict[str, Any]] = field(default_factory=dict)
    common: Mapping[int, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not len(self.births) == len(self.deaths) == len(self.ends):
            raise ValueError(f"births, deaths and ends differ in length: {self}")
        for birth, death in zip(self.births, self.deaths, strict=True):
            if death < 1 or (birth is not None and death < birth):
                raise ValueError(f"deaths: expected no step before the birth in step {birth}, got {death}")
        if not any(birth == 0 for birth in self.births):
            raise ValueError(f"births: expected an agent at the reset (0), got {self.births}")
        t = 0  # the last step after which any agent is alive
        for birth, death in sorted((b, d) for b, d in zip(self.births, self.deaths, strict=True) if b is not None):
            if birth > t + 1:
                raise ValueError(f"no agent is alive after step {t + 1}, so none can join in step {birth}")
            t = max(t, death - 1)

    @property
    def length(self) -> int:
        """Steps of the episode."""
        return max(d for b, d in zip(self.births, self.deaths, strict=True) if b is not None)

    def alive(self, t: int) -> list[bool]:
        """Whether each agent is in the episode after step ``t``."""
        return [b is not None and b <= t < d for b, d in zip(self.births, self.deaths, strict=True)]

    def terminated(self, t: int) -> list[bool]:
        """Whether each agent is terminated in step ``t``."""
        return self._ended(t, ("terminated", "both"))

    def truncated(self, t: int) -> list[bool]:
        """Whether each agent is truncated in step ``t``."""
        return self._ended(t, ("truncated", "both"))

    def _ended(self, t: int, kinds: tuple[End, ...]) -> list[bool]:
        rows = zip(self.births, self.deaths, self.ends, strict=True)
        return [birth is not None and death == t and end in kinds for birth, death, end in rows]

    @classmethod
    def together(cls, agent_num: int, length: int, end: End = "truncated") -> Script:
        """Return a script in which all agents live from the reset to step ``length``."""
        return cls([0] * agent_num, [length] * agent_num, [end] * agent_num)


ScriptLike = Script | Sequence[Script] | Callable[[int], Script]
"""A script for all episodes, a list to repeat, or a function of the episode's number."""


def script_at(scripts: ScriptLike, episode: int) -> Script:
    """Return the script of one episode."""
    if isinstance(scripts, Script):
        return scripts
    return scripts(episode) if callable(scripts) else scripts[episode % len(scripts)]


def draw_script(rng: np.random.Generator, agent_num: int, longest: int) -> Script:
    """Draw a script with late births, early deaths, mixed ends and some infos."""
    length = int(rng.integers(1, longest + 1))
    births: list[int | None] = [0] * agent_num
    deaths = [length] * agent_num
    anchor = int(rng.integers(agent_num))  # lives throughout, so that the episode never runs empty
    for a in range(agent_num):
        if a == anchor:
            continue
        births[a] = None if rng.random() < 0.1 else int(rng.integers(0, length)) if rng.random() < 0.3 else 0
        deaths[a] = int(rng.integers(max(1, births[a] or 0), length + 1))
    kinds: tuple[End, ...] = ("terminated", "truncated", "both")
    ends = [kinds[int(k)] for k in rng.integers(0, len(kinds), agent_num)]
    infos = {
        (t, a): {"t": t, "agent": a, "marks": np.array([t, a], np.int64)}
        for t in range(length + 1)
        for a in range(agent_num)
        if rng.random() < 0.2
    }
    common = {t: {"clock": t} for t in range(length + 1) if rng.random() < 0.1}
    return Script(births, deaths, ends, infos, common)


WIDTH = 7
"""Numbers in one observation: the five of the `Stamp`, the checksum, the draw."""

ALIVE_CHECKSUM = 1
"""An agent's checksum before its first action; so a row of zeros is never a live agent's."""

_MODULUS = 65_521


class Stamp(NamedTuple):
    """Origin of an observation.

    Attributes:
        env: Index of the env.
        incarnation: Number of envs built at its index before it.
        episode: Number of resets before this episode's.
        t: Steps since the reset.
        agent: Place on the agent axis.
    """

    env: int
    incarnation: int
    episode: int
    t: int
    agent: int


def stamp_space(dtype: DTypeLike = np.float64) -> Box:
    """Return the space of stamped observations, shape ``(WIDTH,)``."""
    high = float(2**24 if np.dtype(dtype) == np.float32 else 2**53)
    return Box(0.0, high, (WIDTH,), np.dtype(dtype).type)


def stamp_row(stamp: Stamp, actions: int, drawn: int, out: NDArray[Any]) -> NDArray[Any]:
    """Write one observation, shape ``(WIDTH,)``, into ``out`` and return it."""
    out[:] = (*stamp, actions, drawn)
    return out


def decode(obs: ArrayLike) -> Stamp:
    """Read the stamp of one observation, shape ``(WIDTH,)``.

    Raises:
        ValueError: It is not a stamped observation.
    """
    row = np.asarray(obs)
    if row.shape != (WIDTH,):
        raise ValueError(f"expected one observation of shape ({WIDTH},), got shape {row.shape}")
    numbers = [float(x) for x in row[: len(Stamp._fields)]]
    if not all(x.is_integer() and x >= 0 for x in numbers):
        raise ValueError(f"not a stamped observation: {row}")
    return Stamp(*(int(x) for x in numbers))


def checksum(obs: ArrayLike) -> int:
    """Read an observation's checksum of actions."""
    return int(np.asarray(obs)[5])


def draw(obs: ArrayLike) -> int:
    """Read the number that the env drew from its random stream at its last reset."""
    return int(np.asarray(obs)[6])


def action_code(action: Any) -> int:
    """Return a number in 0..4095 for an action: a small int itself, or a hash of the bytes."""
    if isinstance(action, (int, np.integer)) and 0 <= int(action) < 4096:
        return int(action)
    if isinstance(action, dict):
        return zlib.crc32(repr([(key, action_code(action[key])) for key in sorted(action)]).encode()) % 4096
    if isinstance(action, (tuple, list)):
        return zlib.crc32(repr([action_code(part) for part in action]).encode()) % 4096
    return zlib.crc32(np.ascontiguousarray(action).tobytes()) % 4096


def next_checksum(before: int, action: Any) -> int:
    """Return the checksum after one more action."""
    return (before * 31 + action_code(action) + 1) % _MODULUS


def reward_of(episode: int, t: int, agent: int, action: Any = 0) -> float:
    """Return the reward of ``agent`` for its action in step ``t`` (from 1); decodable for t and agent below 1000."""
    return episode * 1_000_000.0 + t * 1_000.0 + agent + action_code(action) / 4096


def decode_reward(reward: float) -> tuple[int, int, int, int]:
    """Read (episode, t, agent, action code) from a reward."""
    whole, code = divmod(reward, 1.0)
    episode, rest = divmod(int(whole), 1_000_000)
    t, agent = divmod(rest, 1_000)
    return episode, t, agent, round(code * 4096)


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
