"""Random actions for all agents of many envs, within action masks, in the form that `step` takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.envs.spec import AgentGroup, EnvSpec
from marlvec.sampling import SpaceSampler

__all__ = ["random_actions"]

BoolArray = NDArray[np.bool_]


def random_actions(
    spec: EnvSpec,
    rng: np.random.Generator,
    *,
    acting: BoolArray,
    masks: Sequence[BoolArray | None],
    env_ids: NDArray[np.int64],
    grouped: bool,
) -> Any:
    """Draw one action per agent, uniformly over the actions that its space and its mask allow, as `step` takes them.

    `acting` (n, A) bool, `masks` per group (n, A_g, k) bool or None. Agents that are not acting get a member of their
    space, whatever their mask. The result depends on the arguments alone, so that all backends draw alike.
    """
    drawn = {
        group.name: _draw(spec, group, rng, acting[:, list(group.agents)], mask, env_ids)
        for group, mask in zip(spec.groups, masks, strict=True)
    }
    return drawn if grouped else drawn[spec.groups[0].name]


def _draw(
    spec: EnvSpec,
    group: AgentGroup,
    rng: np.random.Generator,
    acting: BoolArray,
    mask: BoolArray | None,
    env_ids: NDArray[np.int64],
) -> Any:
    """Draw actions of one group: (n, A_g, …) or a tree of such arrays."""
    n, size = acting.shape

    def where(row: int) -> str:
        i, j = divmod(row, size)
        return f"env {env_ids[i]}, agent {spec.agents[group.agents[j]]!r}"

    if mask is not None and mask.all():
        mask = None  # drawing without a mask is much quicker
    if mask is not None:
        own = [spec.allowed[a] for a in group.agents]  # with padding, not all agents have all choices
        free = np.stack([np.ones(mask.shape[2], np.bool_) if part is None else part for part in own])
        mask = np.where(acting[..., None], mask, free).reshape(n * size, mask.shape[2])
    tree = group.action_tree
    rows = SpaceSampler(tree).sample(rng, n * size, mask, where)
    return tree.unflatten([leaf.reshape(n, size, *leaf.shape[1:]) for leaf in tree.flatten(rows)])
