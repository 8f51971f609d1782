"""TorchRL over marlvec's envs."""

from marlvec.interop.torchrl.env import MarlvecEnv

__all__ = ["MarlvecEnv"]
