"""One marlvec env as a PettingZoo AEC env: its agents act one after the other."""

from __future__ import annotations

from typing import Any, Self

from gymnasium.spaces import Space
from numpy.typing import NDArray
from pettingzoo import AECEnv

from marlvec.errors import NotResetError
from marlvec.interop.pettingzoo.parallel import ParallelView
from marlvec.registry import EnvLike
from marlvec.vector.vector_env import VectorEnv

__all__ = ["AECView"]


class AECView(AECEnv):  # type: ignore[misc]  # pettingzoo has no type information
    """A view of the single env of a `VectorEnv`, for code written for PettingZoo's AEC envs.

    A turn-based env keeps its turns. Agents that act simultaneously are queried one after the other, in the order of
    ``possible_agents``, and the env is stepped with the last one's action. ``agent_selection`` is the agent whose turn
    it is; agents that have ended come first, to be stepped with None, as PettingZoo requires.

    Observations, infos and names are those of `ParallelView`. `observe` returns an agent's latest observation, also
    while it waits for its turn.

    Args:
        envs: The vectorizer, made with ``num_envs=1, autoreset_mode="disabled"``, as by `make`. No other code may step
            or reset it.

    Raises:
        ArgumentError: It has several envs, or resets them itself.

    Attributes:
        envs: The vectorizer.
        possible_agents: All agents' names.
        agents: Names of agents that are alive, or have ended and were not yet stepped with None.
        agent_selection: The agent to step next.
        observation_spaces, action_spaces: Agent to its space.
        rewards, terminations, truncations, infos: Agent to the results of the env's latest step.
        metadata, render_mode: From the env.
    """

    def __init__(self, envs: VectorEnv) -> None:
        super().__init__()
        self._parallel = ParallelView(envs)
        self.envs = envs
        self.possible_agents = self._parallel.possible_agents
        self.observation_spaces = self._parallel.observation_spaces
        self.action_spaces = self._parallel.action_spaces
        self.metadata = self._parallel.metadata
        self.render_mode = self._parallel.render_mode
        if envs.state_space is not None:
            self.state_space = envs.state_space
        self.agents: list[str] = []
        self.agent_selection: str | None = None
        self._obs: dict[str, Any] = {}
        self._turns: list[str] = []  # agents that have not acted yet in this round
        self._actions: dict[str, Any] = {}  # actions of the agents that have

    @classmethod
    def make(cls, env: EnvLike, *, backend: str = "sync", **kwargs: Any) -> Self:
        """Build one env and a view of it; arguments as in `ParallelView.make`."""
        return cls(ParallelView.make(env, backend=backend, **kwargs).envs)

    def observation_space(self, agent: str) -> Space[Any]:
        """Return one agent's observation space, the same object each time."""
        return self._parallel.observation_space(agent)

    def action_space(self, agent: str) -> Space[Any]:
        """Return one agent's action space, the same object each time."""
        return self._parallel.action_space(agent)

    def observe(self, agent: str) -> Any:
        """Return an agent's latest observation."""
        return self._obs[agent]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Begin an episode.

        Args:
            seed: For the env, used as it is; None: its random generator continues.
            options: For the env.
        """
        self._obs, self.infos = self._parallel.reset(seed, options)
        self.agents = list(self._obs)
        self.rewards: dict[str, float] = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict(self.rewards)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self._skip_agent_selection: str | None = None
        self._next_round(None)

    def step(self, action: Any) -> None:
        """Apply an action of ``agent_selection``; None if that agent has ended.

        Raises:
            ActionError: An agent's action is not in its space. Raised in the step of the round's last agent; nothing
                was stepped, and that agent may act again.
            NotResetError: No episode is running.
            ValueError: An agent that has ended received an action.
        """
        agent = self.agent_selection
        if agent is None or agent not in self.agents:
            raise NotResetError("step(): no episode is running; call reset() first")
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        actions = {**self._actions, agent: action}
        if len(self._turns) > 1:
            self._cumulative_rewards[agent] = 0.0
            self._actions, self._turns = actions, self._turns[1:]
            self._clear_rewards()
            self.agent_selection = self._turns[0]
            return
        result = self._parallel.step(actions)
        self._cumulative_rewards[agent] = 0.0
        self._take(*result)
        self._next_round(agent)

    def state(self) -> NDArray[Any]:
        """Global state, see `ParallelView.state`."""
        return self._parallel.state()

    def render(self) -> Any:
        """The frame of the env's ``render()``."""
        return self._parallel.render()

    def close(self) -> None:
        """Close the vectorizer and the env."""
        self._parallel.close()

    def _take(
        self,
        obs: dict[str, Any],
        rewards: dict[str, float],
        terminations: dict[str, bool],
        truncations: dict[str, bool],
        infos: dict[str, dict[str, Any]],
    ) -> None:
        self._obs = {**self._obs, **obs}
        self.agents = list(rewards)
        self.rewards, self.terminations, self.truncations, self.infos = rewards, terminations, truncations, infos
        self._cumulative_rewards = {
            agent: self._cumulative_rewards.get(agent, 0.0) + reward for agent, reward in rewards.items()
        }

    def _next_round(self, latest: str | None) -> None:
        """Begin the next round, and select the agent, after the ``latest`` one that acted."""
        self._actions = {}
        while True:
            self._turns = [agent for agent in self._parallel.agents if self.infos[agent]["acting"]]
            ended = [agent for agent in self.agents if self.terminations[agent] or self.truncations[agent]]
            if self._turns or ended or not self._parallel.agents:
                break
            self._take(*self._parallel.step({}))  # no agent acts: step the env without actions
        if self._turns:
            self.agent_selection = self._turns[0]
            self._deads_step_first()
        elif ended:  # the episode is over: first the agent after the last one to act
            order = self.possible_agents
            after = order.index(latest) + 1 if latest is not None else 0
            self.agent_selection = next(agent for agent in (*order[after:], *order[:after]) if agent in ended)
        else:
            self.agent_selection = None
