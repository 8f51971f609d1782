"""The slot contract: one multi-agent env that writes into its row of the buffers.

Most users write PettingZoo, Gymnasium or RLlib envs, which adapters convert. An env without an adapter derives from
`MultiAgentEnv` itself.

At every moment the following holds for agent ``a`` of one env:

* ``alive[a]``: the agent is in the episode: it has joined and has not ended. An agent that ends in this step is no
  longer alive, and this step's ``obs[a]`` is its last true observation. If the env has no observation for it now, it
  leaves the previous one in the row and sets ``final_missing[a]``: no observation is invented.
* ``acting[a]``: the agent must act now. Implies ``alive[a]``.
* Agents that have ended or not joined have zero observations and rewards and False flags, except in the step in which
  they end.
* An agent that has ended stays ended until the next reset, unless its env sets ``alive[a]`` again in a later step: then
  it is in the episode again, and its steps from then on are a separate trajectory. The APIs behind the adapters do not
  have this, so there it is an error.
* An alive agent that is not acting (it is not its turn) keeps its last observation. Before the first one its row is
  zeros.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from gymnasium.spaces import Space

from marlvec.envs.slot import Slot
from marlvec.envs.spec import EnvSpec, Info
from marlvec.errors import ContractError

__all__ = ["MultiAgentEnv"]


class MultiAgentEnv(ABC):
    """Base class of a single multi-agent env.

    Subclasses set the attributes in ``__init__`` and write into the slot in `reset` and `step`.

    Attributes:
        name: The env's name.
        agents: Agent names; their order is the agent axis.
        observation_spaces: One per agent, in that order, without the action mask.
        action_spaces: One per agent.
        mask_sizes: Length of each agent's action mask, or None; empty means that no agent has one.
        state_space: Space of the global state, or None.
        metadata: Any entries.
        resets_itself: Whether the step that ends an episode also begins the next one; see `Slot.begun`.
    """

    name: str = "env"
    agents: tuple[str, ...]
    observation_spaces: tuple[Space[Any], ...]
    action_spaces: tuple[Space[Any], ...]
    mask_sizes: tuple[int | None, ...] = ()
    state_space: Space[Any] | None = None
    metadata: Mapping[str, Any] = {}
    resets_itself: bool = False

    @abstractmethod
    def reset(self, slot: Slot, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Info | None:
        """Begin an episode.

        On entry the slot's obs rows are zero, ``alive`` and ``acting`` are False and masks allow everything. The env
        writes obs, ``alive``, ``acting`` and masks. It must not write reward and flags: in a same-step autoreset they
        still belong to the episode that just ended.

        Args:
            slot: The env's row.
            seed: New seed, or None to continue the env's own random stream.
            options: The user's options, or None.

        Returns:
            Infos, or None if all are empty. Action masks belong in the slot.
        """

    @abstractmethod
    def step(self, slot: Slot) -> Info | None:
        """Take one step with the slot's actions.

        On entry reward and flags are zero and dead agents' obs rows are zero. The env writes everything that has
        changed, and sets ``slot.done`` when the episode is over.

        Returns:
            Infos, or None if all are empty.
        """

    def cut_short(self, slot: Slot) -> None:
        """End the episode here, between two steps, for a reason outside of the env, such as a time limit.

        Every agent that is alive is truncated. An env whose agents do not observe in every step writes their final
        observations. The next call is a reset.
        """
        slot.cut_short()

    def write_state(self, slot: Slot) -> None:
        """Write the global state into ``slot.state``. Called only if ``state_space`` is given."""
        raise ContractError(f"{self.name} declares a state_space and has no write_state()")

    def state_obstacle(self) -> str | None:
        """Return why the env's state cannot be saved, and what to do, in one sentence; None if it can."""
        kind = type(self)
        if kind.get_state is not MultiAgentEnv.get_state and kind.set_state is not MultiAgentEnv.set_state:
            return None
        return f"{self.name} is a {kind.__name__}, which has no get_state() and set_state(state): give it both"

    def get_state(self) -> Any:
        """Return everything that the next steps depend on, except the slot's contents; called between two steps.

        Returns:
            Plain data: numbers, texts, None, arrays, and lists, tuples and dicts of these; copies, no part of the env.
        """
        raise NotImplementedError(f"{self.name}.get_state()")

    def set_state(self, state: Any) -> None:
        """Restore a state, read from this env or from another of its kind. The env must not keep or change it.

        The caller writes the slot afterwards.
        """
        raise NotImplementedError(f"{self.name}.set_state()")

    def close(self) -> None:
        """Release the env's resources."""

    @property
    def unwrapped(self) -> Any:
        """The user's own env object."""
        return self

    def spec(self) -> EnvSpec:
        """Describe this env.

        Returns:
            Agents, groups, spaces and the kind of state: all that a vectorizer needs before the first reset.

        Raises:
            ContractError: The env has no agents, or a space is missing.
        """
        agents = tuple(self.agents)
        if not agents:
            raise ContractError(f"{self.name} has no agents: possible_agents must name at least one")
        if len(set(agents)) != len(agents):
            raise ContractError(f"{self.name} names an agent twice: {agents}")
        sizes = tuple(self.mask_sizes) or (None,) * len(agents)
        for what, got in (("observation", self.observation_spaces), ("action", self.action_spaces), ("mask", sizes)):
            if len(got) != len(agents):
                raise ContractError(f"{self.name} has {len(agents)} agents and {len(got)} {what} spaces")
        return EnvSpec(
            name=self.name,
            agents=agents,
            observation_spaces=tuple(self.observation_spaces),
            action_spaces=tuple(self.action_spaces),
            mask_sizes=sizes,
            state_space=self.state_space,
            metadata=dict(self.metadata),
        )
