"""PettingZoo's two APIs for marlvec's envs."""

from marlvec.interop.pettingzoo.aec import AECView
from marlvec.interop.pettingzoo.parallel import ParallelView

__all__ = ["ParallelView", "AECView"]
