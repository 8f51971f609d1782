"""Checks of what the machine has: file descriptors, memory, processes, and how deep vectorizers are nested.

Where it can be known beforehand, nothing is begun that could not be finished. Where not, an `OSError` that says that
something ran out becomes a `ResourceError` that says what to do.
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

if sys.platform != "win32":
    import resource

__all__ = [
    "DEPTH",
    "HAS_WORKER_PROCESSES",
    "asked_for",
    "available_memory",
    "begin_worker",
    "check_depth",
    "check_descriptors",
    "check_memory",
    "check_not_importing",
    "depth",
    "refuse_worker_processes",
]

DEPTH = "MARLVEC_DEPTH"
"""Environment variable of workers: how many vectorizers they are inside of."""

HAS_WORKER_PROCESSES = hasattr(os, "fork")
"""Whether this system has what worker processes need. Windows has not."""

_MAX_DEPTH = 5
_PER_WORKER = 3  # both ends of its channel that are ours, and the file of its stacks
_BESIDES = 16  # the shared block, the fork server, and what is open for a moment only

_imported_before: set[str] = set()

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


def refuse_worker_processes(what: str) -> NoReturn:
    """Say that this system has no worker processes, and what runs here.

    Args:
        what: Who asks for them.
    """
    system = "Windows" if sys.platform == "win32" else sys.platform
    raise ArgumentError(
        f"{what}: worker processes need fork(), which {system} has not; use backend='thread' or backend='native', or "
        f"run this under WSL"
    )


def depth() -> int:
    """How many vectorizers this process is inside of: 0 in a program, 1 in its workers, 2 in workers of their envs."""
    text = os.environ.get(DEPTH, "")
    return int(text) if text.isdecimal() else 0


def check_depth() -> None:
    """See that envs which start vectorizers which start envs come to an end.

    Raises:
        ResourceError: This is a worker inside of five vectorizers, and wants workers of its own.
    """
    if depth() >= _MAX_DEPTH:
        raise ResourceError(
            f"vectorizers with worker processes can be nested {_MAX_DEPTH} deep, and this process is a worker at that "
            f"depth: does an env build a vectorizer of itself? Inside of envs, use backend='sync'."
        )


def check_not_importing() -> None:
    """Check that this is no worker in the middle of an import.

    Each worker of that vectorizer would import the same module, and make workers of its own, without end.

    Raises:
        ResourceError: It is; names the modules.
    """
    if depth() and (names := importing() - _imported_before):
        raise ResourceError(
            f"a worker process imports {', '.join(map(repr, sorted(names)))}, which makes envs with worker processes "
            f"while it is imported: every worker would start workers. Make them below `if __name__ == '__main__':`, or "
            f"in a function that is called after the import."
        )


def begin_worker() -> None:
    """Note the imports that a forked worker has from its parent, which will never end here."""
    _imported_before.update(importing())


def check_descriptors(num_workers: int) -> None:
    """See that so many workers can be started, before the first one is.

    Raises:
        ResourceError: This process may not have as many files open.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    there = _open_descriptors()
    needed = there + num_workers * _PER_WORKER + _BESIDES
    if needed > soft:
        raise _error(
            errno.EMFILE,
            f"{num_workers} workers need {_PER_WORKER} file descriptors each and {_BESIDES} besides, and {there} are "
            f"open: {needed}, but this process may have {soft}. {_more_descriptors(hard)}, or ask for fewer with "
            f"num_workers=…",
        )


def _open_descriptors() -> int:
    try:
        return len(os.listdir("/dev/fd"))  # noqa: PTH208  (one name each is all that is wanted)
    except OSError:  # no /proc here, or no descriptor left to list it with
        return 3


def _more_descriptors(hard: int) -> str:
    up_to = "" if hard == resource.RLIM_INFINITY else f", up to {hard}"
    return f"Raise the limit (`ulimit -n` or resource.setrlimit{up_to})"


def check_memory(size: int) -> None:
    """See that so many bytes can be taken without a process being killed for it.

    Raises:
        ResourceError: They cannot.
    """
    there, where = available_memory()
    if there is not None and size > there:
        raise _error(
            errno.ENOMEM,
            f"the envs' shared rows need {size:,} bytes of memory, but {where} has {there:,} left. Use fewer envs, or "
            f"smaller observations (uint8 instead of float32 for images)",
        )


def available_memory() -> tuple[int | None, str]:
    """How many bytes can be had without a process being killed, and what sets that bound; None where it is not known.

    Of a memory cgroup (a container) this is what its limit leaves, where the kernel may give up cached files but
    nothing is swapped out.
    """
    bounds: list[tuple[int, str]] = []
    with contextlib.suppress(OSError, ValueError, KeyError):
        there = _table(_PROC / "meminfo")
        bounds.append((1024 * (there["MemAvailable:"] + there["SwapFree:"]), "this machine"))
    with contextlib.suppress(OSError):
        for line in (_PROC / "self" / "cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file")
                bounds += _cgroup_bounds(_CGROUPS / "memory", path, *names)
            elif number == "0":
                bounds += _cgroup_bounds(_CGROUPS, path, "memory.max", "memory.current", "inactive_file", "active_file")
    return min(bounds, default=(None, ""))


def _cgroup_bounds(root: Path, path: str, limit: str, used: str, *cached: str) -> list[tuple[int, str]]:
    """What a cgroup and those above it have left. Inside a container, its own may show as the root."""
    bounds = []
    folder = root / path.strip("/")
    while True:
        with contextlib.suppress(OSError, ValueError, KeyError):  # the root has no limit; "max" is none
            of = int((folder / limit).read_text())
            stat = _table(folder / "memory.stat")
            left = of - int((folder / used).read_text()) + sum(stat[name] for name in cached)
            bounds.append((max(0, left), f"its memory cgroup (limit {of:,}; a container's, or a job's)"))
        if folder == root:
            return bounds
        folder = folder.parent


def _table(path: Path) -> dict[str, int]:
    """A file of lines ``name number [unit]``."""
    return {words[0]: int(words[1]) for line in path.read_text().splitlines() if len(words := line.split()) > 1}


@contextlib.contextmanager
def asked_for(what: str) -> Iterator[None]:
    """Turn an `OSError` which says that the machine has not enough of something into a `ResourceError`.

    Args:
        what: What it was wanted for, e.g. ``"a worker process"``.
    """
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
            return f"This process may have {soft} files open. {_more_descriptors(hard)}, or use fewer workers."
        case errno.ENFILE:
            return "All of the machine's file descriptors are in use (sysctl fs.file-max). Use fewer workers."
        case errno.EAGAIN:
            soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
            of_user = "" if soft == resource.RLIM_INFINITY else f" ({soft} for this user)"
            return (
                f"There may be no more processes: see `ulimit -u`{of_user} and the limit of a container (pids.max). "
                f"Raise it, or use fewer workers: num_workers=…"
            )
        case errno.ENOMEM | errno.ENOSPC:
            return "There is not enough memory. Use fewer envs or workers, or smaller observations."
        case _:
            return None


def _error(number: int | None, text: str) -> ResourceError:
    error = ResourceError(text)
    error.errno = number
    return error
