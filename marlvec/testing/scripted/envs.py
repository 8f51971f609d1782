"""Scripted envs of every API (Parallel, AEC, Gymnasium, RLlib-style dicts), and envs that are slow, raise or hang."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete, Space
from pettingzoo import AECEnv, ParallelEnv

from marlvec.testing.scripted.script import (
    ALIVE_CHECKSUM,
    AgentStep,
    End,
    Script,
    ScriptedState,
    ScriptLike,
    Shell,
    ZooShell,
    next_checksum,
    old_flags,
)


class ScriptedParallelEnv(ZooShell, ParallelEnv):  # type: ignore[misc]  # pettingzoo has no type information
    """A PettingZoo Parallel env driven by a script, whose data name their origin.

    Read observations with `decode`, `checksum` and `draw`, rewards with `decode_reward`.

    Args:
        script: The episodes; None draws one per episode from the env's random stream.
        agent_num: Number of agents.
        state: Whether the env has a global state.
        old_api: Whether ``reset`` returns observations alone and ``step`` four dicts, as before 2022.
        options: See `ScriptedState`.

    Raises:
        ValueError: In ``step``: the actions are not those of the live agents, or one is not allowed.
    """

    def __init__(
        self,
        script: ScriptLike | None = None,
        *,
        agent_num: int = 3,
        state: bool = False,
        old_api: bool = False,
        env_index: int = 0,
        render_mode: str | None = None,
        **options: Any,
    ) -> None:
        self.world = ScriptedState(agent_num, script, env_index=env_index, **options)
        self.metadata = {"name": "scripted_parallel", "render_modes": [], "is_parallelizable": True}
        self.possible_agents = [f"agent_{a}" for a in range(agent_num)]
        self.agents: list[str] = []
        self.render_mode = render_mode
        if state:
            self.state_space = self.world.state_space
        self._old_api = old_api

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        obs = self._begin(seed)
        self.agents = list(obs)
        infos = self._infos(self.agents)
        return obs if self._old_api else (obs, infos)

    def step(self, actions: dict[str, Any]) -> Any:
        """Take one step; exactly the live agents must act."""
        here = self._advance(actions, self.agents)
        obs = {agent: self.world.observe_masked(step.place) for agent, step in here.items()}
        rewards = {agent: step.reward for agent, step in here.items()}
        terminations = {agent: step.terminated for agent, step in here.items()}
        truncations = {agent: step.truncated for agent, step in here.items()}
        infos = self._infos(list(here))
        self.agents = [agent for agent, step in here.items() if step.alive]
        if self._old_api:
            return obs, rewards, *old_flags(terminations, truncations, infos)
        return obs, rewards, terminations, truncations, infos


class CounterEnv(ScriptedParallelEnv):
    """The simplest scripted env: all agents live from the reset to the last step.

    Args:
        length: Steps of an episode, or a list of lengths, repeated.
        agent_num: Number of agents.
        end: How episodes end.
        options: See `ScriptedParallelEnv`.
    """

    def __init__(
        self,
        length: int | list[int] = 5,
        *,
        agent_num: int = 3,
        end: End = "truncated",
        env_index: int = 0,
        **options: Any,
    ) -> None:
        lengths = [length] if isinstance(length, int) else length
        script = [Script.together(agent_num, n, end) for n in lengths]
        super().__init__(script, agent_num=agent_num, env_index=env_index, **options)


class NoOpEnv:
    """A PettingZoo Parallel env that returns the same five dicts in every step.

    Args:
        agent_num: Number of agents.
        width: Size of one agent's observation, float32.
        length: Steps of an episode, which ends by truncation; None: no end.
    """

    def __init__(self, agent_num: int = 3, width: int = 18, length: int | None = None) -> None:
        names = [f"agent_{a}" for a in range(agent_num)]
        self.metadata: dict[str, Any] = {"name": "noop"}
        self.possible_agents = names
        self.agents = names[:]
        self._spaces = Box(-1.0, 1.0, (width,), np.float32), Discrete(5)
        obs = {name: np.full(width, a / agent_num, np.float32) for a, name in enumerate(names)}
        rewards = dict.fromkeys(names, 0.0)
        no, yes = dict.fromkeys(names, False), dict.fromkeys(names, True)
        infos: dict[str, dict[str, Any]] = {name: {} for name in names}
        self._first = obs, infos
        self._step = obs, rewards, no, no, infos
        self._last = obs, rewards, no, yes, infos
        self._length = self._left = -1 if length is None else length

    def observation_space(self, agent: str) -> Space[Any]:
        """Space of every agent's observations."""
        return self._spaces[0]

    def action_space(self, agent: str) -> Space[Any]:
        """Space of every agent's actions."""
        return self._spaces[1]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin an episode."""
        self._left = self._length
        self.agents = self.possible_agents[:]
        return self._first

    def step(self, actions: dict[str, Any]) -> Any:
        """Do nothing."""
        self._left -= 1
        if self._left == 0:
            self.agents = []
            return self._last
        return self._step


class SampledEnv(ParallelEnv):  # type: ignore[misc]  # pettingzoo has no type information
    """A PettingZoo Parallel env with any spaces.

    Observations are samples of the observation space, from the env's random stream. Every action is checked against the
    action space, and an agent's reward is the running checksum of its actions, so that changed or misrouted actions
    show.

    Args:
        observation_space: A space for all agents, or a list with one per agent.
        action_space: As ``observation_space``.
        agent_num: Number of agents.
        length: Steps of an episode, which ends by truncation.

    Raises:
        ValueError: In ``step``: the action is not in the action space.
    """

    def __init__(
        self,
        observation_space: Space[Any] | Sequence[Space[Any]],
        action_space: Space[Any] | Sequence[Space[Any]],
        *,
        agent_num: int = 2,
        length: int = 5,
        env_index: int = 0,
    ) -> None:
        self.metadata = {"name": "sampled", "render_modes": []}
        self.possible_agents = [f"agent_{a}" for a in range(agent_num)]
        self.agents: list[str] = []
        self.render_mode = None
        self.closed = False
        self._observation_spaces = self._by_agent(observation_space)
        self._action_spaces = self._by_agent(action_space)
        # Copies to sample: callers may sample the public spaces, which advances their streams.
        self._sources = {agent: deepcopy(space) for agent, space in self._observation_spaces.items()}
        self._length, self._t = length, 0
        self._checksums: dict[str, int] = {}
        self._seed(env_index)

    def observation_space(self, agent: str) -> Space[Any]:
        return self._observation_spaces[agent]

    def action_space(self, agent: str) -> Space[Any]:
        return self._action_spaces[agent]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if seed is not None:
            self._seed(seed)
        self._t = 0
        self.agents = self.possible_agents[:]
        self._checksums = dict.fromkeys(self.agents, ALIVE_CHECKSUM)
        return self._sample(), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        """Check the actions and draw the next observations."""
        if actions.keys() != set(self.agents):
            raise ValueError(f"expected actions of {self.agents}, got {list(actions)}")
        for agent, action in actions.items():
            if not self._action_spaces[agent].contains(action):
                raise ValueError(f"action {action!r} of {agent} is not in {self._action_spaces[agent]}")
            self._checksums[agent] = next_checksum(self._checksums[agent], action)
        self._t += 1
        obs = self._sample()
        rewards = {agent: float(number) for agent, number in self._checksums.items()}
        over = self._t >= self._length
        truncations = dict.fromkeys(self.agents, over)
        infos: dict[str, dict[str, Any]] = {agent: {} for agent in self.agents}
        self.agents = [] if over else self.agents
        return obs, rewards, dict.fromkeys(self.possible_agents, False), truncations, infos

    def render(self) -> None:
        pass

    def close(self) -> None:
        """Record that the env was closed."""
        self.closed = True

    def _by_agent(self, spaces: Space[Any] | Sequence[Space[Any]]) -> dict[str, Space[Any]]:
        if isinstance(spaces, Space):
            return dict.fromkeys(self.possible_agents, spaces)
        return dict(zip(self.possible_agents, spaces, strict=True))

    def _seed(self, seed: int) -> None:
        for a, source in enumerate(self._sources.values()):
            source.seed(seed + a)

    def _sample(self) -> dict[str, Any]:
        return {agent: source.sample() for agent, source in self._sources.items()}


class TurnEnv(ZooShell, AECEnv):  # type: ignore[misc]  # pettingzoo has no type information
    """A turn-based PettingZoo env driven by a script. Each move rewards every agent in the game, waiting ones too.

    Step ``t`` of the script is the ``t``-th move of the game, whichever agent makes it.

    Args:
        script: The episodes; None draws one per episode from the env's random stream.
        agent_num: Number of agents.
        order: Places on the agent axis in turn order, repeated; None for 0, 1, 2, …. Agents not in the game are
            skipped.
        dead_first: Whether an agent that ends takes its dead step at once, or at its turn.
        state: Whether the env has a global state.
        options: See `ScriptedState`.

    Raises:
        ValueError: In ``step``: the action is not allowed.
    """

    def __init__(
        self,
        script: ScriptLike | None = None,
        *,
        agent_num: int = 2,
        order: Sequence[int] | None = None,
        dead_first: bool = True,
        state: bool = False,
        env_index: int = 0,
        render_mode: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.world = ScriptedState(agent_num, script, env_index=env_index, **options)
        self.metadata = {"name": "turns", "render_modes": [], "is_parallelizable": False}
        self.possible_agents = [f"player_{a}" for a in range(agent_num)]
        self.render_mode = render_mode
        if state:
            self.state_space = self.world.state_space
        self._order = list(range(agent_num)) if order is None else list(order)
        if set(self._order) != set(range(agent_num)):
            raise ValueError(f"order must name every one of {agent_num} agents, got {self._order}")
        self._turn = 0
        self._dead_first = dead_first

    def observe(self, agent: str) -> Any:
        return self.world.observe_masked(self._place(agent), acting=agent == self.agent_selection)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        self.world.reset(seed)
        self.agents: list[str] = []
        self.rewards: dict[str, float] = {}
        self._cumulative_rewards: dict[str, float] = {}
        self.terminations: dict[str, bool] = {}
        self.truncations: dict[str, bool] = {}
        self.infos: dict[str, dict[str, Any]] = {}
        self._skip_agent_selection = None
        self._add_agents()
        self._set_infos()
        self._turn = -1
        self._pass_on()

    def step(self, action: Any) -> None:
        """Let the selected agent move, or take its dead step."""
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            if self.agents and self.agent_selection not in self.agents:
                self._pass_on()
            return
        world, script = self.world, self.world.script
        self._cumulative_rewards[agent] = 0.0
        world.act({self._place(agent): action})
        self._add_agents()
        ended, cut = script.terminated(world.t), script.truncated(world.t)
        for other in self.agents:
            a = self._place(other)
            self.rewards[other] = world.reward(a, action)
            self.terminations[other] = self.terminations[other] or ended[a]
            self.truncations[other] = self.truncations[other] or cut[a]
        self._set_infos()
        self._accumulate_rewards()
        self._pass_on()
        if self._dead_first:
            self._deads_step_first()

    def _add_agents(self) -> None:
        for a, agent in enumerate(self.possible_agents):
            if self.world.script.births[a] == self.world.t:
                self.agents.append(agent)
                self.rewards[agent] = self._cumulative_rewards[agent] = 0.0
                self.terminations[agent] = self.truncations[agent] = False

    def _set_infos(self) -> None:
        self.infos = {agent: self.world.info(self._place(agent)) for agent in self.agents}

    def _pass_on(self) -> None:
        """Give the turn to the next agent in order, dead ones included: they have a step to take."""
        for _ in self._order:
            self._turn = (self._turn + 1) % len(self._order)
            agent = self.possible_agents[self._order[self._turn]]
            if agent in self.agents:
                self.agent_selection = agent
                return


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


class KeyedEnv(Shell):
    """An RLlib-style dict env driven by a script: observed agents act, the others wait.

    Args:
        script: The episodes; None draws one per episode from the env's random stream.
        agent_num: Number of agents.
        waits: Function of (t, a): whether live agent ``a`` is left out of the observations of step ``t``; it still gets
            its reward. None: no agent waits.
        int_ids: Whether agents are named 0, 1, 2, … instead of by strings.
        last_obs: Whether agents get a last observation when they end.
        old_api: Whether ``reset`` returns observations alone and ``step`` four dicts.
        options: See `ScriptedState`.

    Raises:
        ValueError: In ``step``: the actions are not those of the agents observed last, or one is not allowed.
    """

    _common_key = "__common__"

    def __init__(
        self,
        script: ScriptLike | None = None,
        *,
        agent_num: int = 3,
        waits: Callable[[int, int], bool] | None = None,
        int_ids: bool = False,
        last_obs: bool = True,
        old_api: bool = False,
        env_index: int = 0,
        **options: Any,
    ) -> None:
        self.world = ScriptedState(agent_num, script, env_index=env_index, **options)
        self.possible_agents: list[Any] = [a if int_ids else f"agent_{a}" for a in range(agent_num)]
        self.observation_spaces = dict.fromkeys(self.possible_agents, self.world.observation_space)
        self.action_spaces = dict.fromkeys(self.possible_agents, self.world.action_space)
        self._waits, self._last_obs, self._old_api = waits, last_obs, old_api
        self._acting: list[Any] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin the next episode; all agents present at the reset are observed."""
        obs = self._begin(seed)
        self._acting = list(obs)
        return obs if self._old_api else (obs, self._infos(list(obs)))

    def step(self, actions: dict[Any, Any]) -> Any:
        """Take one step."""
        here = self._advance(actions, self._acting)
        obs = {agent: self.world.observe_masked(step.place) for agent, step in here.items() if self._is_observed(step)}
        self._acting = [agent for agent in obs if here[agent].alive]
        rewards = {agent: step.reward for agent, step in here.items()}
        over = not any(step.alive for step in here.values())
        terminateds = {agent: step.terminated for agent, step in here.items()} | {"__all__": over}
        truncateds = {agent: step.truncated for agent, step in here.items()} | {"__all__": False}
        infos = self._infos(list(obs))
        if self._old_api:
            return obs, rewards, *old_flags(terminateds, truncateds, infos)
        return obs, rewards, terminateds, truncateds, infos

    def _is_observed(self, step: AgentStep) -> bool:
        if step.joins:
            return True
        if not step.alive:
            return self._last_obs
        return self._waits is None or not self._waits(self.world.t, step.place)


Operation = Literal["init", "reset", "step", "close"]


class FaultyEnv(CounterEnv):
    """A `CounterEnv` that fails before one of its operations; subclasses define how, in `strike`.

    Args:
        length: See `CounterEnv`.
        where: The operation.
        at: Number of the call that fails, from 0 over the env's life; None: every call.
        only_env: Index of the env that fails; None: all.
        only_incarnation: The incarnation that fails; None: all. Needs ``marks``.
        options: See `CounterEnv`.
    """

    def __init__(
        self,
        length: int | list[int] = 5,
        *,
        where: Operation = "step",
        at: int | None = 0,
        only_env: int | None = None,
        only_incarnation: int | None = None,
        env_index: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(length, env_index=env_index, **options)
        self._where, self._at, self._only_env, self._only_incarnation = where, at, only_env, only_incarnation
        self._calls = 0
        self._strike_at("init")

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._strike_at("reset")
        return super().reset(seed, options)

    def step(self, actions: dict[str, Any]) -> Any:
        self._strike_at("step")
        return super().step(actions)

    def close(self) -> None:
        self._strike_at("close")
        super().close()

    def strike(self) -> None:
        """Fail in this env's way."""

    def _strike_at(self, operation: Operation) -> None:
        if operation != self._where:
            return
        call, self._calls = self._calls, self._calls + 1
        if self._at is not None and call != self._at:
            return
        if self._only_env is not None and self._only_env != self.world.env_index:
            return
        if self._only_incarnation is not None and self._only_incarnation != self.world.incarnation:
            return
        self.strike()


class RaisingEnv(FaultyEnv):
    """An env that raises.

    Args:
        error: Makes the exception.
        options: See `FaultyEnv`.
    """

    def __init__(
        self,
        *args: Any,
        error: Callable[[], BaseException] = lambda: ValueError("scripted failure"),
        env_index: int = 0,
        **options: Any,
    ) -> None:
        self._error = error
        super().__init__(*args, env_index=env_index, **options)

    def strike(self) -> None:
        raise self._error()


class SlowEnv(FaultyEnv):
    """An env that sleeps, in every step unless ``at`` is given.

    Args:
        seconds: Seconds to sleep.
        options: See `FaultyEnv`.
    """

    def __init__(
        self, *args: Any, seconds: float = 0.01, at: int | None = None, env_index: int = 0, **options: Any
    ) -> None:
        self._seconds = seconds
        super().__init__(*args, at=at, env_index=env_index, **options)

    def strike(self) -> None:
        time.sleep(self._seconds)


class HangingEnv(FaultyEnv):
    """An env that never returns."""

    def strike(self) -> None:
        while True:
            time.sleep(3600.0)


class ExitingEnv(FaultyEnv):
    """An env that ends its process. Never run it in a process that you need.

    Args:
        code: Exit code, given to ``os._exit``.
        signal: Signal number to end by instead.
        options: See `FaultyEnv`.
    """

    def __init__(
        self, *args: Any, code: int = 3, signal: int | None = None, env_index: int = 0, **options: Any
    ) -> None:
        self._code, self._signal = code, signal
        super().__init__(*args, env_index=env_index, **options)

    def strike(self) -> None:
        if self._signal is None:
            os._exit(self._code)
        os.kill(os.getpid(), self._signal)
