"""`adapt`: detects the kind of env that a factory returned, and wraps it in the matching adapter."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import gymnasium
import numpy as np
from gymnasium.spaces import Space

from marlvec.arguments import check_choice, signature_of
from marlvec.envs.adapters.aec import AECAdapter
from marlvec.envs.adapters.base import Adapter, missing_hint
from marlvec.envs.adapters.dicts import ParallelAdapter, RLlibAdapter
from marlvec.envs.adapters.gymnasium import (
    AGENTS,
    GymnasiumAdapter,
    JointAdapter,
    MarlenvAdapter,
    has_joint_spaces,
    is_marlenv,
)
from marlvec.envs.env import MultiAgentEnv
from marlvec.errors import ArgumentError, ContractError


def adapt(env: Any, *, agents: str = "auto", lenient: bool = False, reward_weights: Any = None) -> MultiAgentEnv:
    """Wrap an env in the adapter for its API; a `MultiAgentEnv` is returned unchanged.

    The API is found by the env's base class, if its library is loaded; else by its attributes. If both are ambiguous (a
    dict env that could be PettingZoo's or RLlib's), return the adapter from your factory: it is passed through.

    Args:
        env: An env.
        agents: As in `marlvec.make`.
        lenient: As in `marlvec.make`. An env whose spaces are missing is reset once, without a seed, for they may exist
            only then.
        reward_weights: For rewards with one number per objective: (objectives,), or a dict of such lists by agent. The
            reward is the weighted sum.

    Raises:
        ContractError: The env has none of these APIs.
        ArgumentError: ``agents``, ``lenient`` or ``reward_weights`` does not fit the env.
    """
    if agents != "auto":
        check_choice("agents", agents, AGENTS)
    if isinstance(env, MultiAgentEnv):
        if agents != "auto":
            _refuse_agents(agents, f"{env.name} has an adapter already; write adapt(env, agents={agents!r}) there")
        if lenient:
            raise ArgumentError(
                f"lenient=True: expected an env without an adapter, and {env.name} has an adapter already; write "
                f"adapt(env, lenient=True) there"
            )
        if reward_weights is not None:
            raise ArgumentError(f"reward_weights: expected an env without an adapter, and {env.name} has one already")
        return env
    if env is None or isinstance(env, (type, gymnasium.vector.VectorEnv)):
        _refuse(env)
    adapter = next((adapter for matches, adapter in _KINDS if matches(env)), _refuse)
    if adapter is GymnasiumAdapter and has_joint_spaces(env, agents):
        adapter = JointAdapter
    elif agents != "auto" and adapter is not GymnasiumAdapter:
        _refuse_agents(agents, f"{type(env).__name__} names its agents itself")
    options = {"lenient": lenient} if adapter is ParallelAdapter else {}
    try:
        made = adapter(env, **options)
    except (ContractError, ArgumentError):
        if not lenient or not _has_methods(env, "reset", "step"):
            raise
        env.reset()  # some make their spaces there
        made = adapter(env, **options)
    made.is_lenient = lenient
    if reward_weights is not None:
        made.reward_weights, made.plain_rewards = _weights_of(reward_weights, made), frozenset()
    return made


def _weights_of(weights: Any, adapter: Adapter) -> dict[Any, Any]:
    """Return an array of weights for each agent."""
    table = weights if isinstance(weights, Mapping) else dict.fromkeys(adapter.ids, weights)
    try:
        found = {agent: np.asarray(table[agent], np.float64) for agent in adapter.ids}
        if all(one.ndim == 1 and one.size and np.isfinite(one).all() for one in found.values()):
            return found
    except (KeyError, TypeError, ValueError):
        pass
    raise ArgumentError(
        f"reward_weights: expected a list of finite numbers, one for each objective, or a dict of such lists by agent, "
        f"got {weights!r}"
    )


def _derives_from(env: Any, name: str) -> bool:
    """Return whether an env is an instance of PettingZoo's base class ``name``; does not import PettingZoo."""
    pettingzoo = sys.modules.get("pettingzoo.utils.env")
    return pettingzoo is not None and isinstance(env, getattr(pettingzoo, name))


def _derives_from_rllib(env: Any) -> bool:
    inner = env.unwrapped if isinstance(env, gymnasium.Env) else env
    return any(base.__name__ == "MultiAgentEnv" for base in type(inner).__mro__)


def _has_methods(env: Any, *names: str) -> bool:
    found = [getattr(env, name, None) for name in names]
    return all(callable(method) and not isinstance(method, Space) for method in found)


def _has_spaces(env: Any) -> bool:
    return all(isinstance(getattr(env, f"{kind}_space", None), Space) for kind in ("observation", "action"))


def _is_functional(env: Any) -> bool:
    """Return whether ``step`` takes the env's state, and ``reset`` a random key."""
    try:
        reset, step = (
            [p.name for p in signature_of(getattr(env, name)).parameters.values() if p.default is p.empty]
            for name in ("reset", "step")
        )
    except (AttributeError, TypeError, ValueError):
        return False
    return bool({"key", "rng", "rng_key"} & set(reset)) and len(step) > 1 and bool({"key", "state"} & set(step))


def _refuse_functional(env: Any) -> NoReturn:
    name = type(env).__name__
    raise ContractError(
        f"{name}.step(): expected a method that takes actions, got one that takes the state, too: {name} is a "
        f"functional JAX env. JaxMARL's are make('jaxmarl/…'), Pgx's make('pgx/…'), Jumanji's make('jumanji/…'); of "
        f"another suite, or your own, derive from marlvec.JaxWorld and pass the class, or backend='pool'"
    )


def _refuse_agents(agents: str, why: str) -> NoReturn:
    raise ArgumentError(f"agents={agents!r}: expected a Gymnasium env without an adapter, and {why}")


def _refuse(env: Any) -> NoReturn:
    if env is None:
        got = "None (does the factory return its env?)"
    elif isinstance(env, type):
        got = f"the class {env.__name__} (expected an instance)"
    elif isinstance(env, gymnasium.vector.VectorEnv):
        got = f"{type(env).__name__}, which is many envs already"
    else:
        got = f"an object of type {type(env).__module__}.{type(env).__qualname__}"
        if _has_methods(env, "reset", "step"):
            hint = missing_hint("observation_spaces = {agent: space, …} and self.action_spaces")
            got += f", which has neither possible_agents nor observation_spaces{hint}"
    raise ContractError(
        "expected an env in one of five forms: "
        "PettingZoo Parallel (possible_agents, observation_space(agent), reset, step(dict)); "
        "PettingZoo AEC (agent_selection, observe, last, step(action)); "
        "Gymnasium (observation_space, action_space, reset, step(action)), of one agent or several; "
        "RLlib-style (observation_spaces or get_observation_space(agent), step(dict) with '__all__'); "
        "marlenv's MARLEnv; "
        f"or a marlvec.envs MultiAgentEnv. Got {got}"
    )


_KEYED = ("possible_agents", "_agent_ids", "get_agent_ids", "get_observation_space", "observation_spaces")
_KINDS: Sequence[tuple[Callable[[Any], bool], Callable[[Any], Adapter]]] = (
    # By base class. RLlib's derives from gymnasium.Env, and JaxMARL's has the same name as RLlib's.
    (lambda env: _derives_from(env, "ParallelEnv"), ParallelAdapter),
    (lambda env: _derives_from(env, "AECEnv"), AECAdapter),
    (lambda env: not isinstance(env, gymnasium.Env) and _is_functional(env), _refuse_functional),
    (_derives_from_rllib, RLlibAdapter),
    (lambda env: isinstance(env, gymnasium.Env), GymnasiumAdapter),
    (is_marlenv, MarlenvAdapter),
    # By attributes.
    (lambda env: not _has_methods(env, "reset", "step"), _refuse),
    (lambda env: _has_methods(env, "last", "observe", "agent_iter"), AECAdapter),
    (lambda env: _has_methods(env, "observation_space") and hasattr(env, "possible_agents"), ParallelAdapter),
    (lambda env: any(hasattr(env, name) for name in _KEYED), RLlibAdapter),
    (_has_spaces, GymnasiumAdapter),
    # One space per agent, and no list of the agents: the adapter's error names the missing attribute.
    (lambda env: _has_methods(env, "observation_space", "action_space"), ParallelAdapter),
)
"""Tests for kinds of envs, and their adapters; the first that matches is used."""
