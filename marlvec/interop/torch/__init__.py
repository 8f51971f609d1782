"""PyTorch policies."""

from marlvec.interop.torch.policy import TorchPolicy

__all__ = ["TorchPolicy"]
