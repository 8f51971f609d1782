"""Past PettingZoo's own wrappers to the env that says how things stand."""

from __future__ import annotations

from typing import Any

__all__ = ["teller"]

_SAID = ("agents", "agent_selection", "rewards", "terminations", "truncations", "infos")
_HAND_ON = ("BaseWrapper.__getattr__", "OrderEnforcingWrapper.__getattr__")


def teller(env: Any) -> Any:
    """The env in whose own attributes all that stands that ``env`` says of its agents, once it was reset.

    PettingZoo's wrappers hand a question on to one another, which takes 1 µs each, and a move asks ten. Only its own
    ones are passed, and none that has something to say itself: what a user's wrapper says counts.

    Args:
        env: An AEC env, or anything else, which is its own teller.
    """
    while _hands_on(env):
        env = env.env
    return env


def _hands_on(env: Any) -> bool:
    kind: Any = type(env)
    return (
        kind.__module__.startswith("pettingzoo.utils.wrappers.")
        and getattr(getattr(kind, "__getattr__", None), "__qualname__", "") in _HAND_ON
        and "env" in vars(env)
        and not any(hasattr(kind, name) or name in vars(env) for name in _SAID)
    )
