"""`SlotEnv`: one slot of an external vectorizer as the env that a shard steps."""

from __future__ import annotations

from typing import Any

from marlvec.envs.env import MultiAgentEnv
from marlvec.envs.slot import Slot
from marlvec.envs.spec import EnvSpec, Info
from marlvec.external.exchange.row import ExternalRow

__all__ = ["SlotEnv"]


class SlotEnv(MultiAgentEnv):
    """Writes `row`, which comes from outside, into its slot. Its shard treats it as any other env."""

    row: ExternalRow

    def __init__(self, spec: EnvSpec) -> None:
        self.name, self.agents, self.metadata = spec.name, spec.agents, spec.metadata
        self.observation_spaces, self.action_spaces = spec.observation_spaces, spec.action_spaces
        self.mask_sizes = spec.mask_sizes
        self._acting: tuple[int, ...] = ()

    def reset(self, slot: Slot, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Info | None:
        self._acting = ()
        return self._write(slot)

    def step(self, slot: Slot) -> Info | None:
        for a in self._acting:
            slot.acting[a] = False
            slot.clear_mask(a)
        return self._write(slot)

    def _write(self, slot: Slot) -> Info | None:
        row = self.row
        for a, obs in row.obs.items():
            slot.alive[a] = slot.acting[a] = True
            slot.write_obs(a, obs)
        for a, mask in row.masks.items():
            slot.write_mask(a, mask)
        for a, reward in row.rewards.items():
            slot.reward[a] = reward
        for a, (obs, terminated, truncated) in row.ended.items():
            if obs is None:
                slot.final_missing[a] = True  # the row keeps the agent's last observation
            else:
                slot.write_obs(a, obs)
            slot.terminated[a], slot.truncated[a] = terminated, truncated
            slot.alive[a] = False
        self._acting = tuple(row.obs)
        slot.done = row.done
        infos, row.infos = row.infos, {}  # the row object lives until the next one comes
        return infos or None
