"""Dicts of agents, as PettingZoo and RLlib have them: places of agents, and actions as arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.envs.spec import EnvSpec
from marlvec.errors import ActionError
from marlvec.vector.validation.agent_dicts import lay_out
from marlvec.vector.vector_env import VectorEnv

__all__ = ["join_actions", "places_of"]


def places_of(spec: EnvSpec) -> dict[str, tuple[int, int]]:
    """Return each agent's group, and its index in that group."""
    return {spec.agents[a]: (g, j) for g, group in enumerate(spec.groups) for j, a in enumerate(group.agents)}


def join_actions(envs: VectorEnv, actions: Sequence[Mapping[str, Any]], acting_NA: NDArray[np.bool_]) -> Any:
    """Convert one dict of actions per env to the form of `VectorEnv.step`; the agents ``acting_NA`` must have one.

    ActionError names agent and, if there are several, env. Actions of other agents are ignored.
    """
    names, known = envs.agents, set(envs.agents)
    for i, (own, acting) in enumerate(zip(actions, acting_NA.tolist(), strict=True)):
        where = "actions" if envs.num_envs == 1 else f"actions of env {i}"
        if unknown := [name for name in own if name not in known]:
            raise ActionError(f"{where}: no agent {unknown[0]!r}; the agents are {list(names)}")
        if missing := [name for name in compress(names, acting) if name not in own]:
            raise ActionError(
                f"{where}: expected one for each agent that must act, {[*compress(names, acting)]}; "
                f"missing are {missing}"
            )

    def place(i: int, a: int) -> str:
        return f"action of agent {names[a]!r}" if envs.num_envs == 1 else f"action of env {i}, agent {names[a]!r}"

    return lay_out(envs.spec, envs.grouped, actions, acting_NA, place)
