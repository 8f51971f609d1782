"""Checks of the machine's limits: file descriptors, memory, processes, and nesting of vectorizers.

They are checked before any process starts, if they can be known. Otherwise an `OSError` for an exhausted resource
becomes a `ResourceError` with advice.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from marlvec.errors import ArgumentError, ResourceError
from marlvec.vector.data.pickling import importing
from marlvec.vector.shards.partition import groups_of

if sys.platform != "win32":
    import resource

__all__ = [
    "DEPTH",
    "HAS_WORKER_PROCESSES",
    "MANY_ENVS",
    "asked_for",
    "available_memory",
    "begin_worker",
    "check_depth",
    "check_descriptors",
    "check_memory",
    "check_not_importing",
    "check_num_envs",
    "depth",
    "memory_for",
    "refuse_worker_processes",
]

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
