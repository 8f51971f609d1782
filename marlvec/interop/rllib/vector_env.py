"""A marlvec vectorizer as RLlib's VectorMultiAgentEnv."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from gymnasium.spaces import Dict
from gymnasium.vector.utils import batch_space

from marlvec.errors import BusyError
from marlvec.extras import needs_extra
from marlvec.interop.rllib.dicts import AgentDicts, EnvDicts
from marlvec.interop.rows.view_checks import check_view, render_mode_of
from marlvec.vector.vector_env import VectorEnv

with needs_extra("ray", "RLlibVectorEnv", "pip install 'marlvec[rllib]'"):
    from ray.rllib.env.multi_agent_env import MultiAgentEnv
    from ray.rllib.env.vector.vector_multi_agent_env import VectorMultiAgentEnv

__all__ = ["RLlibVectorEnv"]


class RLlibVectorEnv(VectorMultiAgentEnv):  # type: ignore[misc]  # Any where ray is not installed
    """A view of a `VectorEnv` with any groups of agents, for RLlib's new API stack.

    `marlvec.interop.rllib.dicts.AgentDicts` describes each agent's entries, and time limits. An env whose episode is
    over ignores its actions in the next call, which returns the next episode's first observations.

    Args:
        envs: The vectorizer, in next-step mode. No other code may step or reset it.
        action_masks: Whether observations are ``{"observations": …, "action_mask": …}`` wherever actions are discrete.

    Raises:
        MissingExtraError: (By the import.) ray is not installed, or has no RLlib.
        ArgumentError: The mode differs, ``copy=False``, or ``on_fault="mask"``.

    Attributes:
        vectorizer: The vectorizer.
        envs: N objects with the spaces of an env, and its ``render``; they cannot be stepped.
        num_envs: N.
        single_observation_spaces, single_action_spaces: Agent to space; without the ``s``, the same as Dict spaces.
        metadata, render_mode: From the envs.
    """

    closed = True  # until the constructor ends; RLlib's __del__ reads it

    def __init__(self, envs: VectorEnv, *, action_masks: bool = False) -> None:
        check_view(envs, "RLlibVectorEnv")
        super().__init__()
        self.vectorizer = envs
        self.num_envs = envs.num_envs
        self.metadata = dict(envs.metadata)
        self.render_mode = render_mode_of(envs)
        self._dicts = AgentDicts(envs, action_masks=action_masks)
        self.single_observation_spaces = self._dicts.observation_spaces
        self.single_action_spaces = self._dicts.action_spaces
        # OrderedDict, since Dict sorts the keys of plain dicts.
        self.single_observation_space = Dict(OrderedDict(self.single_observation_spaces))
        self.single_action_space = Dict(OrderedDict(self.single_action_spaces))
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.envs = [_EnvSpaces(self, i) for i in range(self.num_envs)]
        self.closed = False

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[dict[str, Any]], list[dict[str, dict[str, Any]]]]:
        """Begin new episodes in all envs.

        Args:
            seed: One int, spread over the envs by `marlvec.env_seeds`; or one per env; or None.
            options: For all envs.

        Returns:
            ``(obs, infos)`` of agents that must act, one dict per env.
        """
        self.vectorizer.reset_send(seed=seed, options=options)
        given = self._dicts.read(self.vectorizer.recv(), begins=True)
        return given.obs, given.infos

    def step(self, actions: Sequence[Mapping[str, Any]]) -> EnvDicts:
        """Step all envs.

        Args:
            actions: Per env, agent to action, for every agent that must act.

        Returns:
            ``(obs, rewards, terminateds, truncateds, infos)``, one dict per env in each.

        Raises:
            ActionError: An agent must act and has no action, a name is unknown, or an action is not in its space.
        """
        self.vectorizer.step_send(self._dicts.arrays(actions))
        return self._dicts.read(self.vectorizer.recv())

    def render(self) -> tuple[Any, ...]:
        """The frames of each env's ``render()``."""
        return tuple(self.vectorizer.render())

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every env."""
        return tuple(self.vectorizer.call(name, *args, **kwargs))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return an attribute of every env."""
        return tuple(self.vectorizer.get_attr(name))

    def close_extras(self, **kwargs: Any) -> None:
        """Close the vectorizer."""
        self.vectorizer.close()


class _EnvSpaces(MultiAgentEnv):  # type: ignore[misc]  # Any where ray is not installed
    """One env of an `RLlibVectorEnv`, for code that reads its spaces."""

    def __init__(self, view: RLlibVectorEnv, index: int) -> None:
        self.possible_agents = list(view.vectorizer.agents)
        self.agents = list(self.possible_agents)
        self.observation_spaces, self.action_spaces = view.single_observation_spaces, view.single_action_spaces
        self.observation_space, self.action_space = view.single_observation_space, view.single_action_space
        self.metadata, self.render_mode = view.metadata, view.render_mode
        self._view, self._index = view, index
        super().__init__()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> NoReturn:
        raise self._busy("reset")

    def step(self, action_dict: Mapping[str, Any]) -> NoReturn:
        raise self._busy("step")

    def render(self) -> Any:
        return self._view.vectorizer.render(indices=[self._index])[0]

    def _busy(self, call: str) -> BusyError:
        return BusyError(f"{call}() of env {self._index}: one env cannot step alone; {call}() its RLlibVectorEnv")
