"""`EnvWrapper`: base of wrappers of a `MultiAgentEnv`."""

from __future__ import annotations

from typing import Any

from marlvec.envs.adapters.base import Adapter
from marlvec.envs.env import MultiAgentEnv
from marlvec.envs.slot import Slot
from marlvec.envs.spec import EnvSpec, Info

__all__ = ["EnvWrapper", "adapter_in"]


class EnvWrapper(MultiAgentEnv):
    """Forwards all calls to another env; ``unwrapped`` is still the user's env."""

    def __init__(self, env: MultiAgentEnv) -> None:
        self.env = env
        self.name = env.name
        self.agents = env.agents
        self.observation_spaces = env.observation_spaces
        self.action_spaces = env.action_spaces
        self.mask_sizes = env.mask_sizes
        self.state_space = env.state_space
        self.metadata = env.metadata
        self.resets_itself = env.resets_itself

    @property
    def unwrapped(self) -> Any:
        return self.env.unwrapped

    def reset(self, slot: Slot, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Info | None:
        return self.env.reset(slot, seed=seed, options=options)

    def step(self, slot: Slot) -> Info | None:
        return self.env.step(slot)

    def cut_short(self, slot: Slot) -> None:
        self.env.cut_short(slot)

    def write_state(self, slot: Slot) -> None:
        self.env.write_state(slot)

    def spec(self) -> EnvSpec:
        return self.env.spec()

    def state_obstacle(self) -> str | None:
        return super().state_obstacle() or self.env.state_obstacle()

    def close(self) -> None:
        self.env.close()


def adapter_in(env: MultiAgentEnv) -> Adapter | None:
    """Return the adapter inside of marlvec's wrappers; None if the env has none."""
    while isinstance(env, EnvWrapper):
        env = env.env
    return env if isinstance(env, Adapter) else None
