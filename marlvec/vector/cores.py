"""How many cores there are to work on."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["usable_cores"]


def usable_cores() -> int:
    """How many cores this process may use: those it may run on, or fewer if a container's quota of time is less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    granted = quota(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    return max(1, min(cores, math.ceil(granted))) if granted < cores else cores


def quota(own: Path, root: Path) -> float:
    """Seconds of processor time that Linux's control groups grant in a second; infinity where nobody says.

    Both versions of control groups are read (man 7 cgroups): ``cpu.max`` and ``cpu.cfs_quota_us``, of the process's own
    group and those around it, of which the strictest holds.

    Args:
        own: Names the groups this process is in: ``/proc/self/cgroup``.
        root: Where groups are mounted.
    """
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:  # no Linux
        return math.inf
    return min((share for line in lines for share in _shares(line, root)), default=math.inf)


def _shares(line: str, root: Path) -> Iterator[float]:
    """What is granted to one group, and to each around it: ``line`` is hierarchy:controllers:path."""
    _, controllers, path = line.split(":", 2)
    if controllers and "cpu" not in controllers.split(","):
        return
    top = root / "cpu" if controllers else root
    # A container may see its own group as the top, and the path it has outside of it: then that leads nowhere.
    for folder in {top, *(top / part for part in _ups(path.strip("/")))}:
        with suppress(OSError, ValueError):
            if controllers:
                parts = [(folder / f"cpu.cfs_{what}_us").read_text(encoding="utf-8") for what in ("quota", "period")]
            else:
                parts = (folder / "cpu.max").read_text(encoding="utf-8").split()
            allowed, period = (math.inf if part == "max" else float(part) for part in parts)
            if allowed > 0:  # -1: as much as it wants
                yield allowed / period


def _ups(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path.rpartition("/")[0]
