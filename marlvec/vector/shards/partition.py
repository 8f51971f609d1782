"""`Partition`: which worker has which envs; and the number of cores that this process may use."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from marlvec.envs.spec import EnvSpec
from marlvec.errors import ArgumentError, ContractError

__all__ = ["Partition", "agree_on_spec", "groups_of", "usable_cores"]

_REMEMBERED = 64  # cached sets of envs
Part = tuple[int, NDArray[np.int64], bytes]
"""A worker, some of its envs, and their local indices as int32s; empty bytes for all of its envs in order."""


class Partition:
    """Contiguous slices of envs of nearly equal size: 16 envs on 5 workers are 4 + 3 + 3 + 3 + 3.

    Attributes:
        starts: W + 1 indices: worker ``w`` has the envs from ``starts[w]`` to ``starts[w + 1] - 1``.
        owner: (N,) int64, the worker of each env.
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
        everyone.flags.writeable = False  # results contain views of it
        self._places = everyone
        self.slices: list[NDArray[np.int64]] = [everyone[lo:hi] for lo, hi in pairwise(self.starts)]
        self.owner: NDArray[np.int64] = np.repeat(np.arange(self.num_workers), np.diff(self.starts))
        self.full_parts: list[Part] = [(w, ids, b"") for w, ids in enumerate(self.slices)]
        self._parts_of: dict[bytes, list[Part]] = {}

    def split(self, env_ids: NDArray[np.int64]) -> list[tuple[int, NDArray[np.int64]]]:
        """Return (worker, positions of its envs in ``env_ids``) for each worker that has any of these envs."""
        owners = self.owner[env_ids]
        first = int(owners[0]) if len(owners) else 0
        if (owners == first).all():
            return [(first, self._places[: len(owners)])] if len(owners) else []
        return [(w, np.flatnonzero(owners == w)) for w in sorted(set(owners.tolist()))]

    def parts_of(self, env_ids: NDArray[np.int64]) -> list[Part]:
        """Return the part of each worker in these envs. Results are cached, since callers repeat the same sets."""
        key = env_ids.tobytes()
        if (found := self._parts_of.get(key)) is None:
            found = []
            for w, positions in self.split(env_ids):
                ids = env_ids[positions]
                ids.flags.writeable = False
                is_whole = np.array_equal(ids, self.slices[w])
                found.append((w, ids, b"" if is_whole else (ids - self.starts[w]).astype(np.int32).tobytes()))
            if len(self._parts_of) >= _REMEMBERED:
                self._parts_of.clear()
            self._parts_of[key] = found
        return found


def agree_on_spec(specs: Sequence[EnvSpec], starts: Sequence[int], mode: str) -> EnvSpec:
    """Return the common spec of all workers, whose first envs are ``starts``; ``mode`` as ``make(spaces=…)``."""
    common = specs[0]
    for spec, start in zip(specs[1:], starts[1:-1], strict=True):
        if differs := common.difference(spec, mode):
            raise ContractError(f"env {start}: its spaces differ from those of env 0: {differs}")
        if mode == "compatible":
            common = common.widened(spec)
    return common


def usable_cores() -> int:
    """Return the number of cores that this process may use, by CPU affinity and a container's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    granted = quota(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    return max(1, min(cores, math.ceil(granted))) if granted < cores else cores


def quota(own: Path, root: Path) -> float:
    """Return the CPU quota of Linux's control groups, in processor seconds per second; infinity if none is set."""
    # The smallest quota of the process's own group and its ancestors holds.
    shares: list[float] = []
    for folder, is_v1 in groups_of("cpu", own, root):
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if is_v1 else ("cpu.max",)
        with suppress(OSError, ValueError):  # not there, or the root, which has none
            parts = " ".join((folder / name).read_text(encoding="utf-8") for name in names).split()
            allowed, period = (math.inf if part == "max" else float(part) for part in parts)
            if allowed > 0:  # -1: no quota
                shares.append(allowed / period)
    return min(shares, default=math.inf)


def groups_of(controller: str, own: Path, root: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the control groups (man 7 cgroups) with a controller of this process, and whether they are of version 1.

    `own` is the file with this process's groups, ``/proc/self/cgroup``; `root` their mount point. In a container the
    mount point may be its own group, while the path is the one outside: such folders are missing.
    """
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            top = root / controller if controllers else root
            folder = top / path.strip("/")
            yield from ((group, bool(controllers)) for group in (folder, *folder.parents) if group.is_relative_to(top))
