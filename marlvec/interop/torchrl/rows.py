"""Rows of a tensordict kept as they were, or blanked, in partial steps and resets."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase

__all__ = ["blank_others", "with_old_rows"]


def with_old_rows(now: TensorDictBase, new_n: torch.Tensor, before: TensorDictBase) -> TensorDictBase:
    """What is so now in some rows, and in the others what was so before: zeros where there was nothing, as of rewards.

    Args:
        now: Of all n rows.
        new_n: (n,) bool, which rows are new.
        before: Likewise, before.
    """

    def merge(key: Any, tensor: torch.Tensor) -> torch.Tensor:
        old = before.get(key, None)
        return torch.where(_along(new_n, tensor), tensor, torch.zeros_like(tensor) if old is None else old)

    return now.named_apply(merge, nested_keys=True)


def blank_others(tensordict: TensorDictBase, rows_n: torch.Tensor, *, keep: TensorDictBase) -> None:
    """Put zeros into some rows of all tensors, those excepted that another tensordict has, too.

    Args:
        tensordict: Gets new tensors; the old ones stay as they are.
        rows_n: (n,) bool, which rows.
        keep: Names those that stay.
    """
    kept = set(keep.keys(True, True))
    for key in [key for key in tensordict.keys(True, True) if key not in kept]:
        tensor = tensordict.get(key)
        tensordict.set(key, tensor.masked_fill(_along(rows_n, tensor), 0))


def _along(rows_n: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return rows_n.reshape(-1, *[1] * (tensor.ndim - 1))
