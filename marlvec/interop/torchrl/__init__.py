"""TorchRL with marlvec's envs."""

from marlvec.interop.torchrl.env import TorchRLEnv

__all__ = ["TorchRLEnv"]
