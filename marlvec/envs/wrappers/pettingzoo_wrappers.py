"""The wrappers that derive from PettingZoo's: imported only where such an env is wrapped."""

from __future__ import annotations

from pettingzoo import AECEnv, ParallelEnv
from pettingzoo.utils import BaseParallelWrapper, BaseWrapper

from marlvec.envs.wrappers.seed_stream import ClearDeadStepRewards, SeedStream

__all__ = ["SEED_STREAMS", "AECClearDeadStepRewards"]


class _AECSeedStream(SeedStream, BaseWrapper):  # type: ignore[misc]  # PettingZoo has no types
    pass


class _ParallelSeedStream(SeedStream, BaseParallelWrapper):  # type: ignore[misc]  # likewise
    pass


class AECClearDeadStepRewards(ClearDeadStepRewards, BaseWrapper):  # type: ignore[misc]  # likewise
    """What `ClearDeadStepRewards` makes."""


SEED_STREAMS: dict[type, type[SeedStream]] = {AECEnv: _AECSeedStream, ParallelEnv: _ParallelSeedStream}
