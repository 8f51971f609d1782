"""The wrappers that derive from PettingZoo's: imported only where such an env is wrapped."""

from __future__ import annotations

from pettingzoo import AECEnv, ParallelEnv
from pettingzoo.utils import BaseParallelWrapper, BaseWrapper

from marlvec.envs.wrappers.seed_stream import ClearDeadStepRewards, SeedStream

__all__ = ["AECClearDeadStepRewards", "AECSeedStream", "ParallelSeedStream"]


class AECSeedStream(SeedStream, BaseWrapper, of=AECEnv):  # type: ignore[misc]  # PettingZoo has no types
    """What `SeedStream` makes of an AEC env."""


class ParallelSeedStream(SeedStream, BaseParallelWrapper, of=ParallelEnv):  # type: ignore[misc]  # likewise
    """What `SeedStream` makes of a Parallel env."""


class AECClearDeadStepRewards(ClearDeadStepRewards, BaseWrapper, of=AECEnv):  # type: ignore[misc]  # likewise
    """What `ClearDeadStepRewards` makes."""
