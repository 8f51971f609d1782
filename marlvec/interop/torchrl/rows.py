"""Keeping old rows of a tensordict, or zeroing them, in partial steps and resets."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase

__all__ = ["blank_others", "with_old_rows"]


def with_old_rows(now: TensorDictBase, new_n: torch.Tensor, before: TensorDictBase) -> TensorDictBase:
    """Return new values in the rows ``new_n``, and old ones in the others; zeros if there are none, e.g. of rewards."""

    def merge(key: Any, tensor: torch.Tensor) -> torch.Tensor:
        old = before.get(key, None)
        return torch.where(_along(new_n, tensor), tensor, torch.zeros_like(tensor) if old is None else old)

    return now.named_apply(merge, nested_keys=True)


def blank_others(tensordict: TensorDictBase, rows_n: torch.Tensor, *, keep: TensorDictBase) -> None:
    """Zero some rows of all tensors, except of keys in ``keep``; old tensors are unchanged."""
    kept = set(keep.keys(True, True))
    for key in [key for key in tensordict.keys(True, True) if key not in kept]:
        tensor = tensordict.get(key)
        tensordict.set(key, tensor.masked_fill(_along(rows_n, tensor), 0))


def _along(rows_n: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return rows_n.reshape(-1, *[1] * (tensor.ndim - 1))
