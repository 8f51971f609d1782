"""Wrappers that derive from PettingZoo's; imported only when a PettingZoo env is wrapped."""

from __future__ import annotations

from pettingzoo import AECEnv, ParallelEnv
from pettingzoo.utils import BaseParallelWrapper, BaseWrapper

from marlvec.envs.wrappers import ClearDeadStepRewards, SeedStream


class AECSeedStream(SeedStream, BaseWrapper, of=AECEnv):  # type: ignore[misc]  # PettingZoo has no types
    """`SeedStream` for an AEC env."""


class ParallelSeedStream(SeedStream, BaseParallelWrapper, of=ParallelEnv):  # type: ignore[misc]  # no types
    """`SeedStream` for a Parallel env."""


class AECClearDeadStepRewards(ClearDeadStepRewards, BaseWrapper, of=AECEnv):  # type: ignore[misc]  # no types
    """`ClearDeadStepRewards` for an AEC env."""
