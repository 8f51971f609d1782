"""`WorldEnv`: one `JaxWorld` as an env that writes into slots, so that `SlotPlayer` can check it."""

from __future__ import annotations

from typing import Any

import numpy as np

from marlvec.envs.env import MultiAgentEnv
from marlvec.envs.slot import Slot
from marlvec.vector.pools.jax.pool import JaxPool
from marlvec.vector.pools.jax.world import JaxWorld
from marlvec.vector.pools.pool import Leaves, PoolReply

__all__ = ["WorldEnv"]


class WorldEnv(MultiAgentEnv):
    """One world, compiled, which resets nothing by itself; `ContractError` if it breaks the protocol."""

    def __init__(self, world: JaxWorld) -> None:
        self.world = world
        self._pool = JaxPool(world, 1, autoreset_mode="disabled")
        spec = self._pool.spec
        self.name, self.agents, self.metadata = spec.name, spec.agents, spec.metadata
        self.observation_spaces, self.action_spaces = spec.observation_spaces, spec.action_spaces
        self.mask_sizes, self.state_space = spec.mask_sizes, spec.state_space
        self._groups = spec.groups
        self._one = np.zeros(1, np.int64)

    def reset(self, slot: Slot, *, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        self._pool.reset(self._one, [seed], [None])
        self._write(slot, self._pool.recv(), [True] * len(self.agents))

    def step(self, slot: Slot) -> None:
        given, actions = slot.read_actions(), []
        for group in self._groups:
            leaves = [np.zeros((1, len(group.agents), *leaf.shape), leaf.dtype) for leaf in group.action_tree.leaves]
            for j, a in enumerate(group.agents):
                if slot.acting[a]:
                    for target, part in zip(leaves, group.action_tree.flatten(given[a]), strict=True):
                        target[0, j] = part
            actions.append(leaves)
        self._step(slot, actions)

    def _step(self, slot: Slot, actions: Leaves) -> None:
        before = list(slot.alive)
        self._pool.send(self._one, actions, np.array(slot.acting)[None])
        reply = self._pool.recv()
        for a, was_alive in enumerate(before):
            if was_alive:
                slot.reward[a] = float(reply.reward[0, a])
                slot.terminated[a], slot.truncated[a] = bool(reply.terminated[0, a]), bool(reply.truncated[0, a])
        self._write(slot, reply, before)
        slot.done = not any(slot.alive)

    def _write(self, slot: Slot, reply: PoolReply, present: list[Any]) -> None:
        ended = (reply.terminated | reply.truncated)[0]
        for g, group in enumerate(self._groups):
            for j, a in enumerate(group.agents):
                if not present[a]:
                    continue
                slot.write_obs(a, group.observation_tree.unflatten([leaf[0, j] for leaf in reply.obs[g]]))
                slot.alive[a] = alive = not ended[a]
                slot.acting[a] = alive and (reply.acting is None or bool(reply.acting[0, a]))
                mask = None if reply.masks is None else reply.masks[g]
                if mask is not None:
                    slot.write_mask(a, mask[0, j])

    def write_state(self, slot: Slot) -> None:
        slot.write_state(self._pool.state()[0])

    def close(self) -> None:
        self._pool.close()
