"""Envs that reset themselves in the step that ends an episode: how they declare it, and what that step returns."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from textwrap import dedent
from typing import Any, NamedTuple

import gymnasium
import numpy as np

from marlvec.envs.adapters.return_values import AgentId, contract_error, mapping
from marlvec.envs.autoreset import AutoresetMode
from marlvec.envs.spec import COMMON, Info
from marlvec.envs.wrapper_chain import wrapper_chain

__all__ = ["OBSERVATION_KEYS", "EndAndBegin", "resets_itself", "take_finals"]

OBSERVATION_KEYS = ("final_observation", "final_obs", "terminal_observation")
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
    a true ``autoreset``. What Gymnasium's vector envs wrote into the metadata of its class does not count.

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
    if _is_of_a_vector_env(env, metadata, word):
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
        f"('disabled'), or resets itself in the step that ends its episode ('same_step'). "
        f"If a vector env of Gymnasium's wrote it there: del env.metadata['autoreset_mode']",
    )


def _is_of_a_vector_env(env: Any, metadata: Mapping[Any, Any], word: Any) -> bool:
    """Whether a mode in the metadata is another's word.

    Up to 1.2, Gymnasium's vector envs write theirs into the metadata of their first env. That is the dict of its class,
    and says it of all envs of that class from then on. It does not count where the sources say that the class has a
    dict of its own without a mode, and that no class of the env's writes one. Where they cannot be read, it counts.
    """
    layers = list(wrapper_chain(env))
    owner = next((kind for kind in type(layers[-1]).__mro__ if vars(kind).get("metadata") is metadata), None)
    if owner is None or not isinstance(word, gymnasium.vector.AutoresetMode):
        return False
    kinds = {kind for layer in layers for kind in type(layer).__mro__ if kind.__module__ not in ("builtins", "typing")}
    try:
        sources = {kind: inspect.getsource(kind) for kind in kinds}
        return _has_plain_metadata(sources[owner]) and not any("autoreset_mode" in text for text in sources.values())
    except (OSError, TypeError, SyntaxError):
        return False


def _has_plain_metadata(source: str) -> bool:
    """Whether a class's body writes its ``metadata`` out, key by key."""
    (kind,) = ast.parse(dedent(source)).body
    assert isinstance(kind, ast.ClassDef)
    values = [
        node.value
        for node in kind.body
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name) and target.id == "metadata"
    ]
    return all(isinstance(value, ast.Dict) and None not in value.keys for value in values)


def take_finals(new_infos: Info | None, ended: Mapping[str, AgentId], env: str) -> EndAndBegin:
    """Find the last observations, and which infos belong to which episode.

    Each agent's last observation is in its own info, or by agent in the common one, under ``"final_observation"``,
    ``"final_obs"`` or ``"terminal_observation"``. Where a ``"final_info"`` stands beside it, that is the info of the
    last step and the rest is that of the reset; without one, all of it is of the episode that ended.

    Args:
        new_infos: The infos of that step; altered.
        ended: Name → the env's own name, of each agent that ended in that step.
        env: The env's name.

    Raises:
        ContractError: An observation is missing.
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
