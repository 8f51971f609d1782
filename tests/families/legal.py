"""Random actions that are allowed, from what a vectorizer says in its infos."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Discrete
from numpy.typing import NDArray

from marlvec import VectorEnv

__all__ = ["legal_actions"]


def legal_actions(venv: VectorEnv, infos: dict[str, Any], rng: np.random.Generator) -> list[NDArray[Any]]:
    """One array (N, A_g, ...) per group.

    Agents that act get an action their mask allows; where actions are Discrete, all others get one that their space
    does not have, for it must reach nobody.
    """
    out = []
    masks = infos.get("action_mask")
    for group in venv.spec.groups:
        space = venv.agent_action_space(group.agents[0])
        acting = infos["acting"][:, list(group.agents)]
        mask = masks.get(group.name) if isinstance(masks, dict) else masks
        if isinstance(space, Discrete):
            size = int(space.n)
            allowed = np.ones((*acting.shape, size), bool) if mask is None else mask
            drawn = np.where(allowed, rng.random(allowed.shape), -1.0).argmax(axis=-1)  # the first among equals
            out.append((np.where(acting, drawn, size) + space.start).astype(space.dtype))
        else:
            space.seed(int(rng.integers(2**31)))
            samples = [[space.sample() for _ in group.agents] for _ in range(venv.num_envs)]
            out.append(np.array(samples, space.dtype))
    return out
