"""`check_replay`: checks that an env restored from a copy of its attributes replays exactly: `env_state="deepcopy"`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import numpy as np

from marlvec.envs.env import MultiAgentEnv
from marlvec.envs.spec import EnvSpec
from marlvec.errors import ArgumentError, ContractError, MarlvecError
from marlvec.spaces.equality import difference
from marlvec.vector.data.buffers import Buffers
from marlvec.vector.random_action import random_actions

__all__ = ["check_replay"]

_STEPS = 40  # steps that are taken twice; then a reset without a seed, and _AFTER more steps
_AFTER = 10
_SECONDS = 1.0  # after this time, fewer steps are taken
_ONLY = np.zeros(1, np.int64)
Call = tuple[str, dict[str, Any], Any]
"""(name of the call, row after it, infos)."""


def check_replay(env: MultiAgentEnv) -> None:
    """Take the same steps twice from one saved state of a new env; raise if they differ. The env stays unchanged."""
    before = env.get_state()
    player = _Player(env, env.spec())
    player.begin()
    for _ in range(3):
        player.step()
    saved = player.save()
    first = list(player.play(time.monotonic() + _SECONDS))
    try:
        player.restore(saved)
        again = list(player.play(None, len(first)))
        env.set_state(before)
    except Exception as error:
        reason = f"{error}" if isinstance(error, MarlvecError) else f"{type(error).__name__}: {error}"
        raise ArgumentError(
            f"env_state='deepcopy': {env.name} cannot be restored from a copy of its attributes: {reason}. "
            f"Give it get_state() and set_state(state)"
        ) from error
    for k, (one, other) in enumerate(zip(first, again, strict=True)):
        if differs := _difference(one, other):
            raise ArgumentError(
                f"env_state='deepcopy': {env.name}, restored from a copy of its attributes, does not replay: {differs} "
                f"differ after {k + 1} calls ({one[0]}). State outside its attributes (in a simulator written in C, in "
                f"Python's or numpy's global random stream) is not in the copy: give it get_state() and "
                f"set_state(state)"
            )


class _Player:
    """Plays one env with random actions, in the place of a shard."""

    def __init__(self, env: MultiAgentEnv, spec: EnvSpec) -> None:
        self._env, self._spec = env, spec
        self._buffers = Buffers(spec, 1)
        self._slot = self._buffers.slot(0)
        self._calls = 0
        self._ended: list[int] = []

    def begin(self) -> Any:
        """Reset with a seed, if the env takes one."""
        try:
            return self._reset(0)
        except ContractError:
            return self._reset(None)

    def save(self) -> Any:
        return self._env.get_state(), self._buffers.get_rows(_ONLY), self._calls, self._slot.done, list(self._ended)

    def restore(self, saved: Any) -> None:
        state, rows, self._calls, self._slot.done, ended = saved
        self._ended = list(ended)
        self._env.set_state(state)
        self._buffers.set_rows(_ONLY, rows, _ONLY)

    def play(self, until: float | None, calls: int = _STEPS + 1 + _AFTER) -> Iterator[Call]:
        """Step, and reset after each episode's end; then reset a running episode, and step on."""
        short = False
        for k in range(calls):
            short = short or (until is not None and time.monotonic() > until)
            is_reset = self._slot.done or k == _STEPS
            info = self._reset(None) if is_reset else self.step()
            yield "a reset" if is_reset else "a step", self._buffers.get_rows(_ONLY), deepcopy(info)
            if short and k >= _AFTER:
                return

    def _reset(self, seed: int | None) -> Any:
        self._buffers.clear_row(0)
        self._slot.done = self._slot.begun = False
        self._ended = []
        return self._env.reset(self._slot, seed=seed)

    def step(self) -> Any:
        buffers, slot = self._buffers, self._slot
        self._calls += 1
        rng = np.random.default_rng(self._calls)
        masks = buffers.masks_given(_ONLY)
        actions = random_actions(self._spec, rng, acting=buffers.acting, masks=masks, env_ids=_ONLY, grouped=True)
        for group, leaves in zip(self._spec.groups, buffers.actions, strict=True):
            for leaf, drawn in zip(leaves, group.action_tree.flatten(actions[group.name]), strict=True):
                leaf[...] = drawn
        buffers.reward[0] = 0
        buffers.events[0] = False
        for a in self._ended:
            slot.zero_obs(a)
            slot.clear_mask(a)
        info = self._env.step(slot)
        over = (buffers.terminated | buffers.truncated)[0]
        self._ended = np.flatnonzero(over).tolist()
        if slot.begun:
            slot.done = slot.begun = False
        return info


def _difference(one: Call, other: Call) -> str | None:
    """Return which results of two calls differ, or None."""
    if one[0] != other[0]:
        return "the ends of episodes"
    words = {"reward": "rewards", "flags": "flags", "obs": "observations", "final": "final observations"}
    for name, row in one[1].items():
        if difference(row, other[1].get(name), opaque=True):
            return words.get(name.partition("/")[0], f"the rows {name!r}")
    return "infos" if difference(one[2], other[2], opaque=True) else None
