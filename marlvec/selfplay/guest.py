"""A policy that plays away from home."""

from __future__ import annotations

from typing import Any

from gymnasium.spaces import Space

from marlvec.connectors import Rows
from marlvec.errors import ArgumentError
from marlvec.policies import Policy
from marlvec.policies.policy import PolicyOutput

__all__ = ["SharedPolicy"]


class SharedPolicy(Policy):
    """A policy that another collector has, or will have: it is set up only if it never was.

    Args:
        name: Its id, for messages.
        host: The policy.

    Attributes:
        host: As given.
    """

    def __init__(self, name: str, host: Policy) -> None:
        self._name, self.host, self.version = name, host, host.version

    def setup(self, observation_space: Space[Any], action_space: Space[Any], *, seed: int) -> None:
        """Set it up, or where that was done see that it fits.

        Raises:
            ArgumentError: It was set up for other spaces.
        """
        if self.host.observation_space is None or self.host.action_space is None:
            self.host.setup(observation_space, action_space, seed=seed)
        for what, own, here in (
            ("observation", self.host.observation_space, observation_space),
            ("action", self.host.action_space, action_space),
        ):
            if own is not None and own != here:
                raise ArgumentError(
                    f"policy {self._name!r} was set up for the {what} space {own}, and here it is {here}: give it the "
                    f"connectors that it has there"
                )
        super().setup(observation_space, action_space, seed=seed)

    def reseed(self, seed: int) -> None:
        self.host.reseed(seed)

    def act(self, rows: Rows, *, explore: bool = True) -> PolicyOutput:
        return self.host.act(rows, explore=explore)

    def __repr__(self) -> str:
        return repr(self.host)
