"""Envs that reset themselves in the step that ends an episode: their declaration, and the infos of that step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import gymnasium
import numpy as np

from marlvec.envs.adapters.return_values import AgentId, contract_error, mapping, warn_of_contract
from marlvec.envs.autoreset import AutoresetMode
from marlvec.envs.spec import COMMON, Info
from marlvec.envs.wrapper_chain import wrapper_chain

__all__ = ["OBSERVATION_KEYS", "EndAndBegin", "resets_itself", "take_finals"]

OBSERVATION_KEYS = ("final_observation", "final_obs", "terminal_observation")
_INFO = "final_info"
_NOTHING: Any = object()


class EndAndBegin(NamedTuple):
    """The infos of a step in which an env reset itself, by episode."""

    observations: dict[str, Any]  # agent name → final observation of the ended episode
    ended: Info | None  # infos of its last step
    begun: Info | None  # infos of the reset


def resets_itself(env: Any, name: str) -> bool:
    """Return whether an env declares that the step that ends an episode also begins the next one.

    It declares this by ``has_auto_reset = True`` (as in OpenRL), or in its metadata by ``autoreset_mode``
    ``"same_step"`` or a true ``autoreset``. Gymnasium's own enum in the dict of a class is ignored with a
    `ContractWarning`: its vector envs up to 1.2 write their mode there, for all envs of the class.
    """
    # The outermost layer with the attribute decides.
    says = (getattr(layer, "has_auto_reset", None) for layer in wrapper_chain(env))
    declared = next((bool(word) for word in says if isinstance(word, (bool, np.bool_))), None)
    if declared is not None:
        return declared
    metadata = getattr(env, "metadata", None)
    if not isinstance(metadata, Mapping):
        return False
    if (word := metadata.get("autoreset_mode")) is None:
        return bool(metadata.get("autoreset", False))
    if isinstance(word, gymnasium.vector.AutoresetMode) and _is_in_a_class(env, metadata):
        warn_of_contract(
            f"{name}: metadata: autoreset_mode is {word!r} in the dict of a class, where vector envs of Gymnasium up "
            f"to 1.2 write their own mode; it is ignored. If the env resets itself, write 'same_step'"
        )
        return False
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


def _is_in_a_class(env: Any, metadata: Mapping[Any, Any]) -> bool:
    *_, innermost = wrapper_chain(env)
    return any(vars(kind).get("metadata") is metadata for kind in type(innermost).__mro__)


def take_finals(new_infos: Info | None, ended: Mapping[str, AgentId], env: str) -> EndAndBegin:
    """Find the final observations, and split the infos, which are modified, by episode.

    Each agent's final observation is in its own info, or by agent in the common one, under one of `OBSERVATION_KEYS`.
    If there is a ``"final_info"`` beside it, that is the info of the last step, and the rest is the info of the reset;
    without one, all infos belong to the ended episode. `ended`: name → the env's own name, of each agent that ended.
    """
    new_infos = {} if new_infos is None else new_infos
    shared = _pop(new_infos.get(COMMON, {}), OBSERVATION_KEYS)
    by_id = shared if isinstance(shared, Mapping) else {}
    observations: dict[str, Any] = {}
    for name, agent in ended.items():
        own = new_infos.get(name, {})
        # A Gymnasium env has one agent, whose info is the common one.
        found = shared if name == COMMON else _pop(own, OBSERVATION_KEYS)
        found = by_id.get(agent, _NOTHING) if found is _NOTHING else found
        if found is _NOTHING:
            contract_error(
                env,
                "step()",
                f"it resets itself, so the last observation of agent {agent!r} must be in its info under one of "
                f"{', '.join(map(repr, OBSERVATION_KEYS))}; got keys {sorted(own)}",
            )
        observations[name] = found
    parts = [(who, info.pop(_INFO)) for who, info in new_infos.items() if _INFO in info]
    rest = {who: info for who, info in new_infos.items() if info} or None
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
