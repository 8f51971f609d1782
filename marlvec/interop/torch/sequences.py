"""`Padding`: the real steps of padded sequences (B, T, …); runs recurrent modules step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from marlvec.errors import ContractError
from marlvec.interop.torch.action_heads import Distribution
from marlvec.trees import Tree, map_tree, zip_trees

__all__ = ["PaddedDistribution", "Padding"]


class Padding:
    """Marks which of B × T steps are real: ``count`` steps, in the order of the rows before padding.

    ``seq_lens`` (B,) are the numbers of real steps at the start of each sequence, ``length`` is T.
    """

    def __init__(self, seq_lens: Any, length: int, device: torch.device) -> None:
        self._lens: NDArray[np.int64] = np.asarray(seq_lens, np.int64)
        self._length, self._device = length, device
        here = np.arange(length) < self._lens[:, None]
        self.mask = torch.as_tensor(here, device=device)
        self.count = int(here.sum())

    def place(self, i: int) -> str:
        starts = np.cumsum(self._lens) - self._lens
        sequence = int(np.searchsorted(starts + self._lens, i, side="right"))
        return f"step {i - int(starts[sequence])} of sequence {sequence}"

    def take(self, tree: Tree) -> Tree:
        """Return the real steps of tensors (B, T, …): (n, …)."""
        return map_tree(lambda leaf: leaf[self.mask], tree)

    def fill(self, tree: Tree) -> Tree:
        """Return tensors (n, …) as (B, T, …), with zeros in the padding."""

        def filled(leaf: Tensor) -> Tensor:
            whole = leaf.new_zeros((*self.mask.shape, *leaf.shape[1:]))
            whole[self.mask] = leaf
            return whole

        return map_tree(filled, tree)

    def unroll(self, step: Callable[[Any, Any], Mapping[str, Tree]], obs: Tree, state: Tree) -> dict[str, Tree]:
        """Call a recurrent module step by step, for the sequences that have this step; join its dicts to (n, …).

        ``step`` takes obs (k, …) and state (k, …), and returns a dict with ``state_out``; ``obs`` is (B, T, …),
        ``state``, the one before the first step, (B, …).
        """
        starts = np.cumsum(self._lens) - self._lens
        parts, places = [], []
        running = np.flatnonzero(self._lens > 0)
        state = self._rows(state, running)
        for t in range(max(1, int(self._lens.max(initial=0)))):  # at least once, for the columns of no rows
            index = torch.as_tensor(running, device=self._device)
            output = step(_at(obs, index, t), state)
            if "state_out" not in output:
                raise ContractError(f"recurrent module: expected 'state_out', got only {list(output)}")
            parts.append(output)
            places.append(starts[running] + t)
            goes_on = np.flatnonzero(self._lens[running] > t + 1)
            state, running = self._rows(output["state_out"], goes_on), running[goes_on]
        order = torch.as_tensor(np.argsort(np.concatenate(places)), device=self._device)
        return {
            name: zip_trees(lambda leaves: torch.cat(leaves)[order], [part[name] for part in parts])
            for name in parts[0]
        }

    def _rows(self, tree: Tree, rows: NDArray[np.int64]) -> Tree:
        index = torch.as_tensor(rows, device=self._device)
        return map_tree(lambda leaf: leaf if len(leaf) == len(index) else leaf[index], tree)


def _at(tree: Tree, index: Tensor, t: int) -> Tree:
    return map_tree(lambda leaf: leaf[index, t], tree)


class PaddedDistribution:
    """Distributions of actions (B, T, …): one per real step; all results have zeros in the padding."""

    def __init__(self, flat: Distribution, padding: Padding) -> None:
        self._flat, self._padding = flat, padding

    def sample(self, generator: torch.Generator) -> Tree:
        return self._padding.fill(self._flat.sample(generator))

    def mode(self) -> Tree:
        return self._padding.fill(self._flat.mode())

    def logp(self, actions: Tree) -> Tensor:
        filled: Tensor = self._padding.fill(self._flat.logp(self._padding.take(actions)))
        return filled

    def entropy(self) -> Tensor:
        filled: Tensor = self._padding.fill(self._flat.entropy())
        return filled
