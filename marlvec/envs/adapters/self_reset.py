"""Envs that reset themselves in the step that ends an episode: how they declare it, and what that step returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from marlvec.envs.adapters.return_values import AgentId, contract_error, mapping
from marlvec.envs.autoreset import AutoresetMode
from marlvec.envs.spec import COMMON, Info
from marlvec.envs.wrapper_chain import wrapper_chain

__all__ = ["EndAndBegin", "resets_itself", "take_finals"]

_OBSERVATION = ("final_observation", "final_obs", "terminal_observation")
_INFO = "final_info"
_NOTHING: Any = object()


class EndAndBegin(NamedTuple):
    """The infos of a step in which an env reset itself, taken apart.

    Attributes:
        observations: Agent name → last observation of the episode that ended.
        ended: Infos of its last step.
        begun: Infos of the reset.
    """

    observations: dict[str, Any]
    ended: Info | None
    begun: Info | None


def resets_itself(env: Any, name: str) -> bool:
    """Whether an env declares that the step that ends an episode begins the next one too.

    It does so by ``has_auto_reset = True`` (OpenRL's way), or in its metadata by ``autoreset_mode`` ``"same_step"`` or
    a true ``autoreset``.

    Args:
        env: The user's env.
        name: What to call it in messages.

    Raises:
        ContractError: It declares another moment at which it resets itself.
    """
    # The outermost layer that has an opinion decides.
    says = (getattr(layer, "has_auto_reset", None) for layer in wrapper_chain(env))
    declared = next((bool(word) for word in says if isinstance(word, (bool, np.bool_))), None)
    if declared is not None:
        return declared
    metadata = getattr(env, "metadata", None)
    if not isinstance(metadata, Mapping):
        return False
    if (word := metadata.get("autoreset_mode")) is None:
        return bool(metadata.get("autoreset", False))
    match AutoresetMode.named(word):
        case AutoresetMode.DISABLED:
            return False
        case AutoresetMode.SAME_STEP:
            return True
    contract_error(
        name,
        "metadata",
        f"autoreset_mode is {word!r}: expected an env that leaves resets to marlvec "
        f"('disabled'), or resets itself in the step that ends its episode ('same_step')",
    )


def take_finals(told: Info | None, ended: Mapping[str, AgentId], env: str) -> EndAndBegin:
    """Find the last observations, and which infos belong to which episode.

    Each agent's last observation is in its own info, or by agent in the common one, under ``"final_observation"``,
    ``"final_obs"`` or ``"terminal_observation"``. Where a ``"final_info"`` stands beside it, that is the info of the
    last step and the rest is that of the reset; without one, all of it tells of the episode that ended.

    Args:
        told: The infos of that step; altered.
        ended: Name → the env's own name, of each agent that ended in that step.
        env: The env's name.

    Raises:
        ContractError: An observation is missing.
    """
    told = {} if told is None else told
    shared = _pop(told.get(COMMON, {}), _OBSERVATION)
    by_id = shared if isinstance(shared, Mapping) else {}
    observations: dict[str, Any] = {}
    for name, agent in ended.items():
        own = told.get(name, {})
        # A Gymnasium env has one agent, whose info is the common one.
        found = shared if name == COMMON else _pop(own, _OBSERVATION)
        found = by_id.get(agent, _NOTHING) if found is _NOTHING else found
        if found is _NOTHING:
            contract_error(
                env,
                "step()",
                f"it resets itself, so the last observation of agent {agent!r} must be in its info under one of "
                f"{', '.join(map(repr, _OBSERVATION))}; got keys {sorted(own)}",
            )
        observations[name] = found
    parts = [(who, info.pop(_INFO)) for who, info in told.items() if _INFO in info]
    rest = {who: info for who, info in told.items() if info} or None
    if not parts:
        return EndAndBegin(observations, rest, None)
    names = {agent: name for name, agent in ended.items()}
    last: Info = {}
    for who, part in parts:
        for key, value in (mapping(part, env, "step()", _INFO) if part is not None else {}).items():
            if who == COMMON and key in names:
                last.setdefault(names[key], {}).update(mapping(value, env, "step()", _INFO))
            else:
                last.setdefault(who, {})[key] = value
    return EndAndBegin(observations, {who: info for who, info in last.items() if info} or None, rest)


def _pop(info: dict[str, Any], keys: tuple[str, ...]) -> Any:
    return next((info.pop(key) for key in keys if key in info), _NOTHING)
