"""Reading the spaces of PettingZoo envs."""

from __future__ import annotations

from typing import Any

from gymnasium.spaces import Space

from marlvec.envs.adapters.return_values import AgentId

__all__ = ["ZooSpaces"]


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
