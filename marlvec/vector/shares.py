"""Who steps which envs, where there are several workers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from marlvec.envs.spec import EnvSpec
from marlvec.errors import ArgumentError, ContractError
from marlvec.vector.cores import usable_cores

__all__ = ["Shares", "agree"]

_REMEMBERED = 64  # sets of envs

Part = tuple[int, NDArray[np.int64], bytes]
"""A worker, some of its envs, and their places in its share as int32s; no places where these are all, in order."""


class Shares:
    """Contiguous slices of envs, as even as can be: 16 envs on 5 workers are 4 + 3 + 3 + 3 + 3.

    Args:
        num_envs: N.
        num_workers: W; None: one per usable core, at most one per env.

    Raises:
        ArgumentError: More workers than envs, or none.

    Attributes:
        num_workers: W.
        starts: W + 1 indices: worker ``w`` has the envs from ``starts[w]`` to ``starts[w + 1] - 1``.
        slices: Per worker, the indices of its envs.
        whole: Per worker, its whole share.
        owner: (N,) int64, whose worker each env is.
    """

    def __init__(self, num_envs: int, num_workers: int | None) -> None:
        if num_workers is not None and not (
            isinstance(num_workers, (int, np.integer)) and 1 <= num_workers <= num_envs
        ):
            raise ArgumentError(f"num_workers must be an integer from 1 to num_envs={num_envs}, got {num_workers!r}")
        self.num_workers = num_workers or min(num_envs, usable_cores())
        share, rest = divmod(num_envs, self.num_workers)
        self.starts = [w * share + min(w, rest) for w in range(self.num_workers + 1)]
        everyone = np.arange(num_envs)
        everyone.flags.writeable = False  # parts of it are handed out with results
        self._places = everyone
        self.slices: list[NDArray[np.int64]] = [everyone[lo:hi] for lo, hi in pairwise(self.starts)]
        self.owner: NDArray[np.int64] = np.repeat(np.arange(self.num_workers), np.diff(self.starts))
        self.whole: list[Part] = [(w, ids, b"") for w, ids in enumerate(self.slices)]
        self._addressed: dict[bytes, list[Part]] = {}

    def split(self, env_ids: NDArray[np.int64]) -> list[tuple[int, NDArray[np.int64]]]:
        """Positions in ``env_ids`` of each worker's envs, for those workers that have any."""
        owners = self.owner[env_ids]
        first = int(owners[0]) if len(owners) else 0
        if (owners == first).all():
            return [(first, self._places[: len(owners)])] if len(owners) else []
        return [(w, np.flatnonzero(owners == w)) for w in sorted(set(owners.tolist()))]

    def addressed(self, env_ids: NDArray[np.int64]) -> list[Part]:
        """The parts of these envs that workers have. Sent to again and again are the same sets: they are remembered."""
        key = env_ids.tobytes()
        if (found := self._addressed.get(key)) is None:
            found = []
            for w, positions in self.split(env_ids):
                ids = env_ids[positions]
                ids.flags.writeable = False
                is_whole = np.array_equal(ids, self.slices[w])
                found.append((w, ids, b"" if is_whole else (ids - self.starts[w]).astype(np.int32).tobytes()))
            if len(self._addressed) >= _REMEMBERED:
                self._addressed.clear()
            self._addressed[key] = found
        return found


def agree(specs: Sequence[EnvSpec], starts: Sequence[int], mode: str) -> EnvSpec:
    """Find the spec that fits all workers.

    Args:
        specs: One per worker.
        starts: Index of each worker's first env, for the message.
        mode: ``"equal"`` or ``"compatible"``.

    Raises:
        ContractError: There is none; names the env and the field that differs.
    """
    common = specs[0]
    for spec, start in zip(specs[1:], starts[1:-1], strict=True):
        if differs := common.difference(spec, mode):
            raise ContractError(f"env {start}: its spaces differ from those of env 0: {differs}")
        if mode == "compatible":
            common = common.widened(spec)
    return common
