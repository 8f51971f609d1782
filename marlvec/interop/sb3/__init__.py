"""Stable-Baselines3 with marlvec's envs."""

from marlvec.interop.sb3.decisions import only_decisions
from marlvec.interop.sb3.vec_env import SB3VecEnv

__all__ = ["SB3VecEnv", "only_decisions"]
