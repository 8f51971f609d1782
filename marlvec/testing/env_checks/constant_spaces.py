"""Check: spaces are the same objects whenever they are asked for, and do not change."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

from gymnasium.spaces import Space

from marlvec.envs.adapters.return_values import AgentId
from marlvec.spaces import describe_difference
from marlvec.testing.env_checks.report import Place

__all__ = ["ConstantSpaces", "ZooSpaces"]


class ConstantSpaces:
    """All spaces of one env as it first gave them.

    Args:
        env: The env's name.
        read: Asks the env for all its spaces: the call, e.g. ``"observation_space('agent_0')"``, to its answer.

    Raises:
        ContractError: An answer is no space, or another one when it is asked again.
    """

    def __init__(self, env: str, read: Callable[[], dict[str, Any]]) -> None:
        self._env, self._read = env, read
        self._first: dict[str, Space[Any]] = read()
        for call, space in self._first.items():
            if not isinstance(space, Space):
                Place(env, call).broken("the space", "a gymnasium space", type(space).__name__)
        self._copies = deepcopy(self._first)
        self.check(None)

    def check(self, episode: int | None) -> None:
        """Ask again.

        Args:
            episode: The number of the running episode, or None before the first.

        Raises:
            ContractError: A space is another object, or has changed.
        """
        now = self._read()
        for call, space in self._first.items():
            place = Place(self._env, call, episode)
            if call not in now:
                place.broken("the space", "the same as before", "none")
            if now[call] is not space:
                place.broken("the space", "the same object on each call", f"another one, {now[call]}")
            if changed := describe_difference(self._copies[call], space):
                place.broken("the space", "no change while the env lives", f"a change {changed}")


class ZooSpaces:
    """Asks a PettingZoo env for all its spaces.

    Args:
        env: The env.
        agents: Its agents.
    """

    def __init__(self, env: Any, agents: list[AgentId]) -> None:
        self._env, self._agents = env, agents

    def __call__(self) -> dict[str, Any]:
        """The call, as a user would write it, to the space."""
        found = {
            f"{kind}_space({agent!r})": self._ask(f"{kind}_space", agent)
            for kind in ("observation", "action")
            for agent in self._agents
        }
        state = getattr(self._env, "state_space", None)
        return {**found, "state_space": state} if isinstance(state, Space) else found

    def _ask(self, name: str, agent: AgentId) -> Any:
        function = getattr(self._env, name, None)
        # PettingZoo's own default warns and then reads the dict, which is as good: so it is read without the warning.
        inherited = getattr(getattr(function, "__func__", None), "__module__", "") == "pettingzoo.utils.env"
        return function(agent) if callable(function) and not inherited else getattr(self._env, f"{name}s")[agent]
