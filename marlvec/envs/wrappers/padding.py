"""`PaddedEnv`: agents whose spaces differ in size as one group, by padding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.envs.env import MultiAgentEnv
from marlvec.envs.slot import Slot
from marlvec.envs.spec import EnvSpec, Info, refuse_masks
from marlvec.envs.wrappers.base import EnvWrapper
from marlvec.errors import ContractError
from marlvec.spaces.action_masks import count_choices, own_choices
from marlvec.spaces.padding import crops_of, pad_actions, pad_observations

__all__ = ["PaddedEnv", "padded_spec"]

BoolArray = NDArray[np.bool_]


class PaddedEnv(EnvWrapper):
    """An env whose agents have one observation space and one action space, each large enough for all of them.

    Smaller observations are padded with zeros. Discrete or MultiDiscrete action spaces of different sizes get an action
    mask, which forbids actions that an agent does not have, besides those that its own mask forbids. From an action in
    a Box or MultiBinary an agent gets its own first part. The env itself still has its own spaces, and writes straight
    into the padded rows. `ContractError` names a leaf for which there is no common space.
    """

    def __init__(self, env: MultiAgentEnv) -> None:
        super().__init__(env)
        spec = env.spec()
        agents = spec.agents
        padded = padded_spec(spec)
        self._own, self._padded = spec, padded
        self.observation_spaces = padded.observation_spaces
        self.action_spaces = padded.action_spaces
        self.mask_sizes = padded.mask_sizes
        self._obs_crops = [crops_of(own, self.observation_spaces[0]) for own in spec.observation_spaces]
        self._action_crops = [crops_of(own, self.action_spaces[0]) for own in spec.action_spaces]
        # The spec of the inner slot: padded spaces, so that leaves have the same order, and the env's own masks.
        self._shown = EnvSpec(self.name, agents, self.observation_spaces, self.action_spaces, spec.mask_sizes)
        self._outer: Slot | None = None
        self._inner: Slot | None = None
        self._scattered: list[tuple[BoolArray, BoolArray, BoolArray]] = []

    def spec(self) -> EnvSpec:
        return self._padded

    def reset(self, slot: Slot, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Info | None:
        inner = self._enter(slot)
        for _, _, mask in self._scattered:
            mask[...] = True
        return self._leave(slot, inner, self.env.reset(inner, seed=seed, options=options))

    def step(self, slot: Slot) -> Info | None:
        inner = self._enter(slot)
        return self._leave(slot, inner, self.env.step(inner))

    def cut_short(self, slot: Slot) -> None:
        inner = self._enter(slot)
        self.env.cut_short(inner)
        self._leave(slot, inner, None)

    def write_state(self, slot: Slot) -> None:
        self.env.write_state(self._enter(slot))

    def get_state(self) -> Any:
        """Return the env's own state; this wrapper's state is in the slot."""
        return self.env.get_state()

    def set_state(self, state: Any) -> None:
        self._outer = self._inner = None  # so that scattered masks are read from the row again
        self.env.set_state(state)

    def close(self) -> None:
        """Close the env and drop references to the buffers."""
        self._outer = self._inner = None
        self._scattered = []
        super().close()

    def _enter(self, slot: Slot) -> Slot:
        if self._inner is None or slot is not self._outer:
            self._outer, self._inner = slot, self._narrow(slot)
        self._inner.done = slot.done
        return self._inner

    def _leave(self, slot: Slot, inner: Slot, info: Info | None) -> Info | None:
        """Copy back everything that the inner slot does not share with the row."""
        slot.done, slot.begun, slot.final_info = inner.done, inner.begun, inner.final_info
        inner.begun, inner.final_info = False, None
        for row, places, mask in self._scattered:
            row[places] = mask
        if info:
            refuse_masks(self._shown, info)  # the padded spec has masks
        return info

    def _narrow(self, slot: Slot) -> Slot:
        masks: list[BoolArray | None] = []
        self._scattered = []
        for a, (own, padded) in enumerate(zip(self._own.action_spaces, self.action_spaces, strict=True)):
            row = slot.action_mask[a]
            size = count_choices(own)
            if row is None or own == padded or size is None:
                masks.append(row)
                continue
            places = own_choices(own, padded, stand_ins=False)
            if places[:size].all():
                masks.append(row[:size])
            else:  # a MultiDiscrete's dimensions: its choices are not contiguous in the padded mask
                mask = row[places].copy()
                masks.append(mask)
                self._scattered.append((row, places, mask))
        return slot.narrowed(self._shown, obs=self._obs_crops, actions=self._action_crops, action_mask=masks)


def padded_spec(spec: EnvSpec) -> EnvSpec:
    """Return the spec of an env whose agents are padded to one group."""
    agents = spec.agents
    return replace(
        spec,
        observation_spaces=(pad_observations(spec.observation_spaces, agents),) * len(agents),
        action_spaces=(pad_actions(spec.action_spaces, agents),) * len(agents),
        mask_sizes=(_mask_size(spec),) * len(agents),
        original_observation_spaces=spec.observation_spaces,
        original_action_spaces=spec.action_spaces,
    )


def _mask_size(spec: EnvSpec) -> int | None:
    """Return the mask length of all agents after padding, or None."""
    padded = pad_actions(spec.action_spaces, spec.agents)
    if all(own == padded for own in spec.action_spaces):
        sizes = set(spec.mask_sizes) - {None}
        if len(sizes) > 1:
            raise ContractError(f"pad=True: {spec.name} declares action masks of different sizes, {spec.mask_sizes}")
        return sizes.pop() if sizes else None
    for agent, own, size in zip(spec.agents, spec.action_spaces, spec.mask_sizes, strict=True):
        if size not in (None, count_choices(own)):
            raise ContractError(
                f"pad=True: agent {agent!r} declares an action mask of {size} entries over {own}, "
                f"expected {count_choices(own)}"
            )
    return count_choices(padded)
