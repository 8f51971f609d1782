"""One marlvec env as RLlib's MultiAgentEnv."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Self

from gymnasium.spaces import Dict

from marlvec.extras import needs_extra
from marlvec.interop.rllib.dicts import AgentDicts
from marlvec.interop.rows.view_checks import check_view, metadata_of, render_mode_of, viewed
from marlvec.making import make
from marlvec.registry import EnvLike
from marlvec.vector.vector_env import VectorEnv
from marlvec.vector.vector_step import VectorStep

with needs_extra("ray", "RLlibMultiAgentEnv", "pip install 'marlvec[rllib]'"):
    from ray.rllib.env.multi_agent_env import MultiAgentEnv

__all__ = ["RLlibMultiAgentEnv"]


class RLlibMultiAgentEnv(MultiAgentEnv):  # type: ignore[misc]  # Any where ray is not installed
    """A view of the single env of a `VectorEnv`, for code written for RLlib's envs.

    For training, use `marlvec.interop.rllib.RLlibEnvRunner`, which steps many envs at once.
    `marlvec.interop.rllib.dicts.AgentDicts` describes each agent's entries, and time limits.

    Args:
        envs: The vectorizer, made with ``num_envs=1, autoreset_mode="disabled"``, as by `make`. No other code may step
            or reset it.
        action_masks: Whether observations are ``{"observations": …, "action_mask": …}`` wherever actions are discrete.

    Raises:
        MissingExtraError: (By the import.) ray is not installed, or has no RLlib.
        ArgumentError: It has several envs, or resets them itself.

    Attributes:
        envs: The vectorizer.
        possible_agents: All agents' names.
        agents: Names of agents alive now; all before the first reset.
        observation_spaces, action_spaces: Agent to space.
        metadata, render_mode: From the env.
    """

    def __init__(self, envs: VectorEnv, *, action_masks: bool = False) -> None:
        check_view(envs, "RLlibMultiAgentEnv")
        self.envs = envs
        self.possible_agents = list(envs.agents)
        self.agents = list(envs.agents)
        self._agent_ids = set(envs.agents)  # read by RLlib's env check
        self._dicts = AgentDicts(envs, action_masks=action_masks)
        self.observation_spaces, self.action_spaces = self._dicts.observation_spaces, self._dicts.action_spaces
        self.observation_space = Dict(OrderedDict(self.observation_spaces))
        self.action_space = Dict(OrderedDict(self.action_spaces))
        self.metadata = metadata_of(envs)
        self.render_mode = render_mode_of(envs)
        super().__init__()

    @classmethod
    def make(cls, env: EnvLike, *, backend: str = "sync", action_masks: bool = False, **kwargs: Any) -> Self:
        """Build one env and a view of it.

        Args:
            env: As in `marlvec.make`.
            backend: Where it runs; ``"sync"``: in this process.
            action_masks: As in the constructor.
            kwargs: Other arguments of `marlvec.make`, except ``num_envs`` and ``autoreset_mode``.
        """
        envs = make(env, 1, backend=backend, autoreset_mode="disabled", **kwargs)
        return viewed(cls, envs, action_masks=action_masks)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Begin an episode.

        Args:
            seed: For the env, used as it is; None: its random generator continues.
            options: For the env.

        Returns:
            ``(obs, infos)`` of the agents that must act.
        """
        self.envs.reset_send(seed=None if seed is None else [seed], options=options)
        result = self.envs.recv()
        self._note(result)
        given = self._dicts.read(result, begins=True)
        return given.obs[0], given.infos[0]

    def step(
        self, action_dict: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float], dict[str, bool], dict[str, bool], dict[str, dict[str, Any]]]:
        """Step the env.

        Args:
            action_dict: Agent to action, for every agent that must act.

        Returns:
            ``(obs, rewards, terminateds, truncateds, infos)``.

        Raises:
            ActionError: An agent must act and has no action, a name is unknown, or an action is not in its space.
            NotResetError: The episode is over, or none has begun.
        """
        self.envs.step_send(self._dicts.arrays([action_dict]))
        result = self.envs.recv()
        self._note(result)
        given = self._dicts.read(result)
        return given.obs[0], given.rewards[0], given.terminateds[0], given.truncateds[0], given.infos[0]

    def render(self) -> Any:
        """The frame of the env's ``render()``."""
        return self.envs.render()[0]

    def close(self) -> None:
        """Close the vectorizer and the env."""
        self.envs.close()

    def _note(self, result: VectorStep) -> None:
        alive = result.alive[0].tolist()
        self.agents = [name for name, here in zip(self.possible_agents, alive, strict=True) if here]
