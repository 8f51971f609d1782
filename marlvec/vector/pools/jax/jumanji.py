"""`JumanjiWorld`: Jumanji's multi-agent envs: ``make("jumanji/RobotWarehouse-v0", num_envs=1024)``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from copy import copy
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Space

from marlvec.errors import ArgumentError, ContractError
from marlvec.vector.pools.jax.world import JaxRows, JaxWorld
from marlvec.vector.pools.suites import array_space, import_suite, made_or_built

__all__ = ["JumanjiWorld"]

_ROWS = ("agents_view", "searcher_views")
"""Fields of observations that have a row for each agent."""
_NO_LIMIT = 2**30


class JumanjiWorld(JaxWorld):
    """A multi-agent env of Jumanji, ``jumanji.make(env_id, **kwargs)``: each row of its array of actions is an agent.

    An agent observes a dict of the env's fields: its own row of ``agents_view`` or ``searcher_views``, and each other
    field whole. ``action_mask`` becomes the action mask; an agent whose mask allows nothing (MMST) does not act. Each
    agent gets the reward of a team. An end that only the env's ``time_limit`` brings truncates, also where Jumanji
    calls it a termination. Jumanji's discounts of single agents are the info ``"discount"``, its extras are infos.

    Args:
        env_id: An id of Jumanji, or an env of Jumanji that is built already, also of a subclass of your own.
        kwargs: For ``jumanji.make``; none with a built env.

    Raises:
        UnknownEnvError: Jumanji has no such id.
        ArgumentError: An argument with a built env, or an env with a single agent.
        ContractError: Agents have unlike actions.
    """

    def __init__(self, env_id: Any, **kwargs: Any) -> None:
        self.name = f"jumanji/{env_id if isinstance(env_id, str) else type(env_id).__name__}"
        jumanji = import_suite("jumanji", f"env {self.name!r}", "jumanji")
        self._jax = jax = import_suite("jax", f"env {self.name!r}", "jumanji")
        known = sorted(jumanji.registered_environments())
        self.env = env = made_or_built(self.name, env_id, kwargs, known, jumanji.make)
        # MultiCVRP's vehicles are agents, too.
        if not hasattr(env, "num_agents") and type(env).__name__ != "MultiCVRP":
            raise ArgumentError(
                f"env {self.name!r}: expected an env with several agents, got one with a single agent; take one that "
                f"`marlvec envs jumanji` lists"
            )
        self._agent_num = agent_num = int(env.action_spec.shape[0])
        self.agents = tuple(f"agent_{a}" for a in range(agent_num))
        _, first = jax.eval_shape(env.reset, jax.eval_shape(lambda: jax.random.key(0)))
        seen = jax.eval_shape(self._observe, first.observation)
        mask = getattr(first.observation, "action_mask", None)
        choices = None if mask is None else int(mask.shape[1])
        self.observation_spaces = (_observation_space(seen),) * agent_num
        self.action_spaces = (_action_space(env.action_spec, choices, self.name),) * agent_num
        self.mask_sizes = (choices,) * agent_num
        # The same step without the limit says whether the episode ends by itself. What both compute, jax computes once.
        self._untimed = copy(env)
        if hasattr(env, "time_limit"):
            self._untimed.time_limit = _NO_LIMIT

    def reset(self, key: Any) -> tuple[Any, JaxRows]:
        state, timestep = self.env.reset(key)
        return state, self._rows(timestep)

    def step(self, key: Any, state: Any, actions: Any) -> tuple[Any, JaxRows]:
        jnp, shape = self._jax.numpy, (self._agent_num,)
        actions = actions.astype(self.env.action_spec.dtype)
        _, untimed = self._untimed.step(state, actions)
        state, timestep = self.env.step(state, actions)
        over, by_itself = timestep.last(), untimed.last() & (untimed.discount == 0).all()
        rows = self._rows(timestep)._replace(
            rewards=jnp.broadcast_to(timestep.reward, shape).astype(jnp.float32),
            terminated=jnp.broadcast_to(over & by_itself, shape),
            truncated=jnp.broadcast_to(over & ~by_itself, shape),
            infos=dict(timestep.extras or {}),
            agent_infos={"discount": timestep.discount} if timestep.discount.shape == shape else {},
        )
        return state, rows

    def _rows(self, timestep: Any) -> JaxRows:
        mask = getattr(timestep.observation, "action_mask", None)
        acting = None
        if mask is not None:
            can_act = mask.any(axis=1)
            acting, mask = can_act | ~can_act.any(), mask | ~can_act[:, None]
        return JaxRows(self._observe(timestep.observation), acting=acting, action_masks=mask)

    def _observe(self, observation: Any) -> dict[str, Any]:
        """Return the observations of all agents, by field: (A, …)."""
        return {name: self._rows_of(name, field) for name, field in _fields(observation) if name != "action_mask"}

    def _rows_of(self, name: str, field: Any) -> Any:
        jnp = self._jax.numpy
        if isinstance(field, (int, float)):  # a first step count
            field = jnp.asarray(field)
        if not hasattr(field, "shape"):
            return {inner: self._rows_of(inner, part) for inner, part in _fields(field)}
        if field.dtype == bool:
            field = field.astype(jnp.int8)
        return field if name in _ROWS else jnp.broadcast_to(field, (self._agent_num, *field.shape))


def _fields(record: Any) -> list[tuple[str, Any]]:
    """Return names and values of a named tuple or a dataclass, which may have slots."""
    names = record._fields if hasattr(record, "_fields") else [field.name for field in dataclasses.fields(record)]
    return [(name, getattr(record, name)) for name in names]


def _observation_space(seen: Mapping[str, Any]) -> Dict:
    """Return the space of one agent's part of the fields (A, …)."""
    return Dict(
        {
            name: _observation_space(field) if isinstance(field, Mapping) else array_space(field.shape[1:], field.dtype)
            for name, field in seen.items()
        }
    )


def _action_space(spec: Any, choices: int | None, name: str) -> Space[Any]:
    """Return the space of one agent's action, from the spec of all; `ContractError` if agents have unlike actions."""
    low, high = (np.broadcast_to(np.asarray(end), spec.shape) for end in (spec.minimum, spec.maximum))
    if (low == low[:1]).all() and (high == high[:1]).all():
        if np.dtype(spec.dtype).kind == "f":
            return Box(low[0], high[0], spec.shape[1:], np.dtype(spec.dtype).type)
        if len(spec.shape) == 1 and not low.any():
            # As many as the mask has: MultiCVRP declares one that it does not have.
            return Discrete(int(high[0]) + 1 if choices is None else choices)
    raise ContractError(f"{name}: action_spec: expected choices from 0 on, or floats, alike for all agents, got {spec}")
