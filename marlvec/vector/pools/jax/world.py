"""`JaxWorld`: the protocol of an env that is pure functions of JAX; what users write. Needs no jax by itself.

Axis letters: A agents, A_g agents of a group. There is no axis of envs: `marlvec.make` vectorizes with ``jax.vmap``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

from gymnasium.spaces import Space

from marlvec.envs.spec import EnvSpec
from marlvec.errors import ContractError
from marlvec.spaces.action_masks import count_choices

__all__ = ["JaxRows", "JaxWorld"]


class JaxRows(NamedTuple):
    """The rows of all agents of one world, after a reset or a step.

    "By group" means: one array (or tree, for Dict and Tuple spaces) whose first axis is the agents, where all agents
    have equal spaces; else a dict of group names to such arrays, as in `VectorEnv.step`.

    Attributes:
        obs: Observations, by group: (A_g, *shape), of the dtype of the space.
        rewards: (A,) floats. None after a reset, and only then.
        terminated, truncated: (A,) bool, who ends in this step; those of agents that ended before mean nothing. None
            after a reset, and only then.
        acting: (A,) bool, who must act next; None: all that are in the episode.
        action_masks: (A_g, choices) bool by group, for the groups whose ``mask_sizes`` are not None; else None.
        infos: Name → array, of the whole env; none after a reset.
        agent_infos: Name → array (A, …), of each agent; none after a reset.
    """

    obs: Any
    rewards: Any = None
    terminated: Any = None
    truncated: Any = None
    acting: Any = None
    action_masks: Any = None
    infos: Mapping[str, Any] = {}
    agent_infos: Mapping[str, Any] = {}


class JaxWorld(ABC):
    """A multi-agent env as pure functions of JAX; ``marlvec.make(MyWorld, num_envs=1024)`` runs many at once.

    Subclasses set the attributes in ``__init__``. `reset` and `step` are traced by ``jax.jit`` and ``jax.vmap``: they
    must have no side effects, and return arrays of the same shapes and dtypes in every call. They do not reset by
    themselves: a step that ends the episode returns the true last observations.

    Attributes:
        name: Name of the world in messages.
        agents: Agent names; their order is the agent axis.
        observation_spaces: One per agent, in that order, without the action mask.
        action_spaces: One per agent. A Discrete action is an int32, from ``space.start``.
        mask_sizes: Length of each agent's action mask, or None; empty means that no agent has one.
        state_space: Space of the global state, or None; with one, `global_state` returns it.
        metadata: Any entries.
    """

    name: str = "jax world"
    agents: tuple[str, ...]
    observation_spaces: tuple[Space[Any], ...]
    action_spaces: tuple[Space[Any], ...]
    mask_sizes: tuple[int | None, ...] = ()
    state_space: Space[Any] | None = None
    metadata: Mapping[str, Any] = {}

    @abstractmethod
    def reset(self, key: Any) -> tuple[Any, JaxRows]:
        """Begin an episode.

        Args:
            key: A key of ``jax.random``, another one in each call.

        Returns:
            The world's state, any pytree of arrays, and the first rows.
        """

    @abstractmethod
    def step(self, key: Any, state: Any, actions: Any) -> tuple[Any, JaxRows]:
        """Take one step.

        Args:
            key: A key of ``jax.random``, another one in each call.
            state: What `reset` or `step` returned last.
            actions: Actions, by group: (A_g, *shape). Those of agents that do not act lie in the space, and mean
                nothing.

        Returns:
            The next state, of the same structure, shapes and dtypes, and the rows.
        """

    def global_state(self, state: Any) -> Any:
        """Return the global state, an array of ``state_space``; called only if there is one."""
        raise ContractError(f"{self.name} declares a state_space and has no global_state(state)")

    def spec(self) -> EnvSpec:
        """Describe this world.

        Returns:
            Its agents, spaces and masks.

        Raises:
            ContractError: It has no agents, names one twice, a space is missing, or a mask does not fit its space.
        """
        agents = tuple(self.agents)
        if not agents:
            raise ContractError(f"{self.name}.agents: expected at least one agent, got none")
        if len(set(agents)) != len(agents):
            raise ContractError(f"{self.name}.agents: expected each agent once, got {agents}")
        sizes = tuple(self.mask_sizes) or (None,) * len(agents)
        spaces = (tuple(self.observation_spaces), tuple(self.action_spaces))
        for what, got in zip(("observation_spaces", "action_spaces", "mask_sizes"), (*spaces, sizes), strict=True):
            if len(got) != len(agents):
                raise ContractError(
                    f"{self.name}.{what}: expected one for each of {len(agents)} agents, got {len(got)}"
                )
        for agent, space, size in zip(agents, spaces[1], sizes, strict=True):
            if size is not None and size != (choices := count_choices(space)):
                wanted = f"{choices}, one entry per choice" if choices is not None else "None, since it has no choices"
                raise ContractError(
                    f"{self.name}.mask_sizes: agent {agent!r}: expected {wanted} of {space}, got {size}"
                )
        return EnvSpec(self.name, agents, *spaces, sizes, state_space=self.state_space, metadata=dict(self.metadata))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}: {len(self.agents)} agents>"
