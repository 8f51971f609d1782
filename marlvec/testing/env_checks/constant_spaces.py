"""Check: spaces are the same objects whenever they are asked for, and do not change."""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

from gymnasium.spaces import Space

from marlvec.envs.adapters.return_values import AgentId
from marlvec.spaces import describe_difference
from marlvec.testing.env_checks.findings import EpisodeLog
from marlvec.testing.env_checks.report import Place

__all__ = ["ConstantSpaces", "ZooSpaces"]


class ConstantSpaces:
    """All spaces of one env as it first gave them.

    Args:
        env: The env's name.
        read: Asks the env for all its spaces: the call, e.g. ``"observation_space('agent_0')"``, to its answer.
        log: Where findings go.

    Raises:
        Fault: An answer is no space.
    """

    def __init__(self, env: str, read: Callable[[], dict[str, Any]], log: EpisodeLog) -> None:
        self._env, self._read = env, read
        self._first: dict[str, Space[Any]] = read()
        for call, space in self._first.items():
            if not isinstance(space, Space):
                Place(env, call).fault(
                    "spaces",
                    "the space",
                    "a gymnasium space",
                    type(space).__name__,
                    "return a space of gymnasium.spaces",
                )
        self._copies = deepcopy(self._first)
        self.check(Place(env, "", log=log))

    def check(self, place: Place) -> None:
        """Ask again; what has changed goes to the place's log.

        Args:
            place: The episode, and where findings go.
        """
        now = self._read()
        for call, space in self._first.items():
            asked = replace(place, call=call, step=None)
            with asked.going_on():
                self._compare(asked, call, space, now)

    def _compare(self, place: Place, call: str, space: Space[Any], now: dict[str, Any]) -> None:
        kind = re.split(r"\(|\[| of ", call)[0]
        if call not in now:
            place.fault("spaces", "the space", "the same as before", "none", kind=kind)
        if now[call] is not space:
            # marlvec goes on with the first one; it refuses only one that differs.
            equal = isinstance(now[call], Space) and describe_difference(space, now[call]) is None
            got = f"another one, {now[call]}"
            place.fault("spaces", "the space", "the same object on each call", got, kind=kind, minor=equal)
        if changed := describe_difference(self._copies[call], space):
            change = "make a new env for another space; nothing in the env may write to a space it has handed out"
            place.fault(
                "spaces", "the space", "no change while the env lives", f"a change {changed}", change, kind=kind
            )


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
        return {
            f"{kind}_space({agent!r})": self._ask(f"{kind}_space", agent)
            for kind in ("observation", "action")
            for agent in self._agents
        }

    def _ask(self, name: str, agent: AgentId) -> Any:
        function = getattr(self._env, name, None)
        # PettingZoo's own default warns and then reads the dict, which is as good: so it is read without the warning.
        inherited = getattr(getattr(function, "__func__", None), "__module__", "") == "pettingzoo.utils.env"
        return function(agent) if callable(function) and not inherited else getattr(self._env, f"{name}s")[agent]
