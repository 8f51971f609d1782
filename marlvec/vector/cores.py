"""How many cores this process may use, which worker has which envs (`Partition`), and the machine's limits."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from marlvec.envs.spec import EnvSpec
from marlvec.errors import ArgumentError, ContractError, ResourceError
from marlvec.vector.failures import importing

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


if sys.platform != "win32":
    import resource


DEPTH = "MARLVEC_DEPTH"
"""Environment variable of workers: nesting depth of their vectorizer."""

HAS_WORKER_PROCESSES = hasattr(os, "fork")
"""Whether this system supports worker processes. Windows does not."""

MANY_ENVS = 100_000
"""Above this number of envs, `check_num_envs` is worth a call."""

_MAX_DEPTH = 5
_PER_WORKER = 3  # the parent's two descriptors of the channel, and the file for stack dumps
_BESIDES = 16  # the shared block, the fork server, and files that are open for a short time

_BYTES_PER_ENV = 200  # the least that one env takes, whatever it is: a recipe, and a row
_FEWER = "Use fewer envs, or smaller observations (uint8 instead of float32 for images)"

_imported_before: set[str] = set()

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
# Files of a memory cgroup with its limit and use, and what of its use can be freed.
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file")
_V2 = ("memory.max", "memory.current", "inactive_file", "active_file")


def refuse_worker_processes(what: str) -> NoReturn:
    """Raise that this system has no worker processes, which ``what`` needs, with the backends that run here."""
    system = "Windows" if sys.platform == "win32" else sys.platform
    raise ArgumentError(
        f"{what}: worker processes need fork(), which {system} does not have; use backend='thread' or "
        f"backend='native', or run this under WSL"
    )


def depth() -> int:
    """Return the nesting depth of this process: 0 in a program, 1 in its workers, 2 in workers of their envs."""
    text = os.environ.get(DEPTH, "")
    return int(text) if text.isdecimal() else 0


def check_depth() -> None:
    """Raise `ResourceError` in a worker at depth five: vectorizers inside of envs must not be nested without end."""
    if depth() >= _MAX_DEPTH:
        raise ResourceError(
            f"vectorizers with worker processes can be nested {_MAX_DEPTH} deep, and this process is a worker at that "
            f"depth: does an env build a vectorizer of itself? Inside of envs, use backend='sync'."
        )


def check_not_importing() -> None:
    """Raise `ResourceError` in a worker in the middle of an import."""
    # Each worker of that vectorizer would import the same module, and start its own workers, without end.
    if depth() and (names := importing() - _imported_before):
        raise ResourceError(
            f"a worker process imports {', '.join(map(repr, sorted(names)))}, which makes envs with worker processes "
            f"while it is imported: every worker would start workers. Make them below `if __name__ == '__main__':`, or "
            f"in a function that is called after the import."
        )


def begin_worker() -> None:
    """Note imports that were running in the parent at the fork: in this worker they never end."""
    _imported_before.update(importing())


def check_descriptors(num_workers: int) -> None:
    """Raise `ResourceError` if there are too few file descriptors for the workers, before the first one starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    there = _open_descriptors()
    needed = there + num_workers * _PER_WORKER + _BESIDES
    if needed > soft:
        raise _error(
            errno.EMFILE,
            f"{num_workers} workers need {_PER_WORKER} file descriptors each and {_BESIDES} in common, and {there} are "
            f"open: {needed}, but this process may have {soft}. "
            f"{_more_descriptors(hard, needed)}{_fewer_workers((soft - there - _BESIDES) // _PER_WORKER)}",
        )


def _open_descriptors() -> int:
    try:
        return len(os.listdir("/dev/fd"))  # noqa: PTH208  (only the number of names is needed)
    except OSError:  # no /proc, or no descriptor left for the listing
        return 3


def _more_descriptors(hard: int, needed: int) -> str:
    """Return the advice on the limit; this process can raise it to ``hard`` at most."""
    if hard == resource.RLIM_INFINITY:
        return "Raise the limit (`ulimit -n` or resource.setrlimit), "
    if hard >= needed:
        return f"Raise the limit (`ulimit -n` or resource.setrlimit, up to {hard}), "
    return f"The hard limit is {hard}: only an administrator, or the settings of a container, can raise it; "


def _fewer_workers(most: int) -> str:
    if most < 1:
        return "or close files, or use backend='sync', 'thread' or 'native': there is no room for a worker"
    return f"or use fewer workers: num_workers={most} at most"


def check_memory(size: int, what: str = "the envs' shared rows") -> None:
    """Raise `ResourceError` if ``size`` bytes cannot be allocated without the kernel killing a process."""
    there, where = available_memory()
    if there is not None and size > there:
        raise _error(errno.ENOMEM, f"{what} need {size:,} bytes of memory, but {where} has {there:,} left. {_FEWER}")


def check_num_envs(num_envs: int) -> None:
    """Raise `ResourceError` if even the smallest envs would need more memory than there is, for this many."""
    check_memory(num_envs * _BYTES_PER_ENV, f"num_envs={num_envs:,}: so many envs of any kind")


@contextlib.contextmanager
def memory_for(what: str, size: int) -> Iterator[None]:
    """Turn a `MemoryError` into a `ResourceError`; ``what`` needs at least ``size`` bytes."""
    try:
        yield
    except MemoryError as error:
        there, where = available_memory()
        left = "" if there is None else f"; {where} has {there:,} left"
        numpys = f" ({error})" if str(error) else ""
        raise _error(
            errno.ENOMEM, f"{what} need at least {size:,} bytes of memory, and cannot get them{numpys}{left}. {_FEWER}"
        ) from error


def available_memory() -> tuple[int | None, str]:
    """Return the bytes that can be allocated without a process being killed, or None, and what sets this bound."""
    # In a memory cgroup (a container) this is its limit less its use; cached files count as free, swap does not.
    bounds: list[tuple[int, str]] = []
    with contextlib.suppress(OSError, ValueError, KeyError):
        there = _table(_PROC / "meminfo")
        bounds.append((1024 * (there["MemAvailable:"] + there["SwapFree:"]), "this machine"))
    with contextlib.suppress(OSError, ValueError):
        if sys.platform != "win32" and (soft := resource.getrlimit(resource.RLIMIT_AS)[0]) != resource.RLIM_INFINITY:
            taken = int((_PROC / "self" / "statm").read_text().split()[0]) * resource.getpagesize()
            bounds.append((max(0, soft - taken), f"this process, within its limit of {soft:,} (`ulimit -v`),"))
    for folder, is_v1 in groups_of("memory", _PROC / "self" / "cgroup", _CGROUPS):
        limit, used, *cached = _V1 if is_v1 else _V2
        with contextlib.suppress(OSError, ValueError, KeyError):  # the root has no limit; "max" means none
            of = int((folder / limit).read_text())
            stat = _table(folder / "memory.stat")
            left = of - int((folder / used).read_text()) + sum(stat[name] for name in cached)
            bounds.append((max(0, left), f"its memory cgroup (limit {of:,}; a container's, or a job's)"))
    return min(bounds, default=(None, ""))


def _table(path: Path) -> dict[str, int]:
    """Parse a file of lines ``name number [unit]``."""
    return {words[0]: int(words[1]) for line in path.read_text().splitlines() if len(words := line.split()) > 1}


@contextlib.contextmanager
def asked_for(what: str) -> Iterator[None]:
    """Turn an `OSError` for an exhausted resource into a `ResourceError`; ``what`` is e.g. ``"a worker process"``."""
    try:
        yield
    except ResourceError:
        raise
    except OSError as error:
        if (advice := _advice(error.errno)) is None:
            raise
        raise _error(error.errno, f"could not get {what}: {error.strerror}. {advice}") from error


def _advice(number: int | None) -> str | None:
    match number:
        case errno.EMFILE:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            return f"This process may have {soft} files open. {_more_descriptors(hard, soft + 1)}or use fewer workers."
        case errno.ENFILE:
            return "All of the machine's file descriptors are in use (sysctl fs.file-max). Use fewer workers."
        case errno.EAGAIN:
            soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
            bound = "; only an administrator can raise it" if soft == hard else ""
            of_user = "" if soft == resource.RLIM_INFINITY else f" ({soft} for this user{bound})"
            return (
                f"The limit of processes is reached: see `ulimit -u`{of_user} and the limit of a container (pids.max). "
                f"Raise what you can, or use fewer workers: num_workers=…"
            )
        case errno.ENOMEM | errno.ENOSPC:
            return "There is not enough memory. Use fewer envs or workers, or smaller observations."
        case _:
            return None


def _error(number: int | None, text: str) -> ResourceError:
    error = ResourceError(text)
    error.errno = number
    return error
